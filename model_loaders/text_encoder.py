"""FLAN-T5 as LlamaGen's text encoder: prompt cleaning, tokenizer and encoder from a local folder.

`transformers` is imported only when a text encoder is loaded; nothing is ever fetched and no code of the folder runs.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError

REPOSITORY = "google/flan-t5-xl"
_ADDRESS = re.compile(r"(?:https?://|www\.)\S+")
_TAG = re.compile(r"</?[a-z][^<>]*>")


def clean_prompt(text: str) -> str:
    """The text as the text-to-image models saw it in training: lower case, no mark-up, no addresses, single spaces."""
    text = html.unescape(html.unescape(text)).lower()
    return " ".join(_TAG.sub(" ", _ADDRESS.sub(" ", text)).split())


class TextEncoder(nn.Module):
    """A T5 encoder with its tokenizer. The encoder is a class of transformers: place it as a whole, never in parts."""

    def __init__(self, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.encoder, self.tokenizer = encoder, tokenizer

    @property
    def width(self) -> int:
        """Channels of the features."""
        return self.encoder.config.d_model  # type: ignore[return-value, union-attr]

    def encode(self, text: str, length: int) -> tuple[Tensor, Tensor]:
        """A prompt -> features [length, width] on the encoder's device, and which rows are text: bool [length].

        The text stands at the left, the padding after it; what exceeds `length` tokens is cut off.
        """
        batch = self.tokenizer(
            clean_prompt(text), max_length=length, padding="max_length", truncation=True, return_tensors="pt"
        )
        device = next(self.encoder.parameters()).device
        ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
        return self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state[0], mask[0].bool()


def load_text_encoder(folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Loads tokenizer and encoder from a folder in the Hugging Face layout."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no text encoder, it has no config.json; give a copy of {REPOSITORY}.")
    try:
        import transformers
        from transformers import AutoTokenizer, T5EncoderModel
    except (ImportError, RuntimeError) as error:  # transformers 4 turns a broken import into a RuntimeError
        raise CheckpointError(
            f"Text prompts need the package transformers, 4.50 or newer, which cannot be imported: {_first_line(error)}"
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    precision = {"dtype" if version >= (4, 56) else "torch_dtype": dtype}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        encoder = T5EncoderModel.from_pretrained(folder, local_files_only=True, **precision)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"{folder} is no complete copy of {REPOSITORY}; download it again ({_first_line(error)})."
        ) from error
    encoder.requires_grad_(False).eval()
    return TextEncoder(encoder.to(device), tokenizer)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
