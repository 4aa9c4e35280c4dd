"""Classes of class-conditional models, by number or by name, and what is said where there is no such class."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClassCondition:
    """A class of a class-conditional model; name is empty where the model ships no names."""

    label: int
    name: str = ""

    @property
    def text(self) -> str:
        """The class in words, for the statistics."""
        return f"class {self.label}" + (f" ({self.name})" if self.name else "")


class ClassLabels:
    """The class-conditional side of a model. classes: how many there are; labels: names of the first of them."""

    name: str
    classes: int
    labels: Sequence[str]

    def class_label(self, label: int | str) -> ClassCondition:
        """A class by number (an int or its digits) or by name in any case; raises ValueError for what is no class."""
        text = str(label).strip()
        if text.removeprefix("-").isdecimal():
            return self._numbered_class(int(text))
        names = {name.lower(): index for index, name in reversed(list(enumerate(self.labels)))}
        if text.lower() in names:
            index = names[text.lower()]
            return ClassCondition(index, self.labels[index])
        raise ValueError(self._unknown_name(text, names))

    def _takes(self, accepted: str, given: str) -> ValueError:
        return ValueError(f"{self.name} takes {accepted}, not {given}; connect {accepted}.")

    def _numbered_class(self, index: int) -> ClassCondition:
        if not 0 <= index < self.classes:
            raise ValueError(
                f"Class {index} is out of range; {self.name} has the classes 0 to {self.classes - 1}; choose one."
            )
        return ClassCondition(index, self.labels[index] if index < len(self.labels) else "")

    def _unknown_name(self, text: str, names: dict[str, int]) -> str:
        accepted = f"a number from 0 to {self.classes - 1}"
        if not names:
            return f"'{text}' is no class: {self.name} ships no class names; give {accepted}."
        near = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.5)
        offered = ", ".join(self.labels[names[name]] for name in near or list(names)[::-1][:3])
        kind = "nearest" if near else "some"
        return f"'{text}' is no class of {self.name}; {kind} are: {offered}. Give a name or {accepted}."
