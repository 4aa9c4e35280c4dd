"""The tiny Janus of the goldens in both layouts, a tokenizer for it, and ways to write it anew.

Both layouts hold the same numbers, so that only the official one is kept with them.
"""

from __future__ import annotations

import atexit
import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, processors
from torch import Tensor

from speculative_ar import model_loaders

GOLDEN = Path(__file__).parents[1] / "golden"
OFFICIAL = GOLDEN / "janus_official"
SIZE = {"size": 64}  # the official fixture's config.json speaks of 32 x 32 pixels, and its goldens are 64 x 64
BEGIN, PAD, IMAGE_BEGIN, USER, ASSISTANT = range(256, 261)
SPECIAL = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5c\u2581pad\u2581\uff5c>", "<begin_of_image>")
ROLES = ("<|User|>", "<|Assistant|>")
LOGITS, PICTURES = 2e-4, 2e-3
Weights = dict[str, Tensor]


def _written_for_transformers() -> Path:
    """The transformers layout in a folder of its own: names.json.gz tells each weight's official name and its shape."""
    folder = Path(tempfile.mkdtemp(prefix="janus-hf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(GOLDEN / "janus_hf", folder, dirs_exist_ok=True)
    names = json.loads(gzip.decompress((folder / "names.json.gz").read_bytes()))
    own = _official()
    weights = {
        name: torch.zeros(shape, dtype=torch.bfloat16) if official is None else own[official].reshape(shape).clone()
        for name, (official, shape) in names.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _official() -> Weights:
    """Weights that no loader reads are stored as one zero each."""
    shards = (torch.load(file, weights_only=True) for file in sorted(OFFICIAL.glob("*.bin")))
    return {name: tensor.contiguous() for shard in shards for name, tensor in shard.items()}


TRANSFORMERS = _written_for_transformers()


def load(path: Path, **more: Any) -> Any:
    return model_loaders.load(path, **{"dtype": torch.float32, "overrides": SIZE, **more})


def weights_of(folder: Path) -> Weights:
    if folder == TRANSFORMERS:
        return load_file(folder / "model.safetensors")
    return _official()


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
