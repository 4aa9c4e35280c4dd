"""Text to token ids, for the models that read a prompt as tokens of their own vocabulary.

The tokenizer is the file that the model's repository ships; nothing is fetched and no code beside it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json",)


class TextTokenizer:
    """A tokenizer of the `tokenizers` package, which every transformers brings along."""

    def __init__(self, tokenizer: Any) -> None:
        # A file saved by a training script may cut or pad every text to that training's length.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @staticmethod
    def load(path: Path) -> TextTokenizer:
        """Reads a tokenizer.json; raises CheckpointError for what is none."""
        from tokenizers import Tokenizer

        try:
            return TextTokenizer(Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises nothing finer
            raise CheckpointError(f"{path} cannot be read as a tokenizer ({error}); download it again.") from error

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Special tokens count where the text spells them; none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def id(self, token: str) -> int | None:
        """The id of a token by its exact spelling, or None."""
        return self._tokenizer.token_to_id(token)


def find_tokenizer(checkpoint_folder: Path, chosen: Path | None, names: Sequence[str] = TOKENIZER_FILES) -> Path | None:
    """The tokenizer's file: the chosen one, else one of these names (the first that is there) near the checkpoint.

    chosen may be a folder with such a file; raises CheckpointError where it holds none or is missing.
    """
    if chosen is not None and chosen.is_file():
        return chosen
    folder = checkpoint_folder if chosen is None else chosen
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None and chosen is not None:
        raise CheckpointError(
            f"{chosen} holds no tokenizer; choose a folder with {' or '.join(names)} in it, or that file itself."
        )
    return found


def missing_tokenizer(model: str, file: str, repository: str, folder: Path) -> ValueError:
    """What `prompt` raises for a model that was loaded without its tokenizer."""
    return ValueError(
        f"{model} needs its tokenizer to read a prompt; put {file} from {repository} into {folder}, or choose a copy "
        "as the text encoder in the loader."
    )
