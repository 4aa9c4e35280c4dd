"""The tiny Janus of the goldens in both layouts, a tokenizer for it, and ways to write it anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, processors
from torch import Tensor

from speculative_ar import model_loaders

GOLDEN = Path(__file__).parents[1] / "golden"
OFFICIAL, TRANSFORMERS = GOLDEN / "janus_official", GOLDEN / "janus_hf"
SIZE = {"size": 64}  # the official fixture's config.json speaks of 32 x 32 pixels, and its goldens are 64 x 64
BEGIN, PAD, IMAGE_BEGIN, USER, ASSISTANT = range(256, 261)
SPECIAL = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5c\u2581pad\u2581\uff5c>", "<begin_of_image>")
ROLES = ("<|User|>", "<|Assistant|>")
LOGITS, PICTURES = 2e-4, 2e-3
Weights = dict[str, Tensor]


def load(path: Path, **more: Any) -> Any:
    return model_loaders.load(path, **{"dtype": torch.float32, "overrides": SIZE, **more})


def weights_of(folder: Path) -> Weights:
    if folder == TRANSFORMERS:
        return load_file(folder / "model.safetensors")
    files = sorted(folder.glob("*.bin"))
    return {name: tensor for file in files for name, tensor in torch.load(file, weights_only=True).items()}


def spelt(text: str) -> list[int]:
    """The fixture's ids of a text without special tokens: one for each character, as in the goldens."""
    return [ord(letter) for letter in text]


def write_tokenizer(folder: Path, tokens: tuple[str, ...] = (*SPECIAL, *ROLES)) -> Path:
    """A tokenizer.json that spells with single letters and, like the published one, puts its first token in front."""
    tokenizer = Tokenizer(models.BPE({chr(number): number for number in range(BEGIN)}, []))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[0]} $A", special_tokens=[(tokens[0], BEGIN)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
