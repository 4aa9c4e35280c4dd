"""The pack's socket types and the small helpers that every schema shares."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

CATEGORY = "Speculative AR"

Model = io.Custom("SPECAR_MODEL")
DraftModel = io.Custom("SPECAR_DRAFT")
Conditioning = io.Custom("SPECAR_CONDITIONING")
Options = io.Custom("SPECAR_OPTIONS")
Tokens = io.Custom("SPECAR_TOKENS")
Statistics = io.Custom("SPECAR_STATISTICS")


def annotated(widget: io.WidgetInput, **extra: Any) -> io.WidgetInput:
    """Sends further keys of a widget to the page; set after construction, which every core since 0.3.75 accepts."""
    widget.extra_dict = {**widget.extra_dict, **extra}
    return widget


def advanced(widget: io.WidgetInput) -> io.WidgetInput:
    """Marks a widget as one that most people leave alone; pages that know the mark fold it away."""
    return annotated(widget, advanced=True)


def not_listed(name: str, value: object, accepted: list[str]) -> str | None:
    """A sentence when a dropdown holds a value that it does not offer; cores before 0.8.0 do not check.

    None is a value that comes over a wire: it is known only when the node runs.
    """
    if value is None or value in accepted:
        return None
    return f"{name} is {value!r}, which is not one of its choices: {', '.join(accepted)}."
