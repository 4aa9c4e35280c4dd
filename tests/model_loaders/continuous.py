"""The tiny continuous models of the goldens, as models and as files; MAR's weights are those inside the tiny Harmon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor

from speculative_ar import model_loaders

GOLDEN = Path(__file__).parents[1] / "golden" / "continuous"
VAE = GOLDEN / "kl16_vae" / "kl16.ckpt"
HARMON = GOLDEN / "harmon" / "harmon_tiny.pth"
HEADS = {"heads": 4}
HARMON_HEADS = {"heads": 4, "language_heads": 4}
Weights = dict[str, Tensor]


def mar_weights() -> Weights:
    """The target's, under MAR's own names."""
    harmon = torch.load(HARMON, weights_only=True)
    return {name.removeprefix("mar."): value for name, value in harmon.items() if name.startswith("mar.")}


def save(path: Path, weights: Weights, **stated: Any) -> None:
    """A flat safetensors file that states things in its metadata."""
    metadata = {key: json.dumps(value) for key, value in stated.items()}
    save_file({name: value.clone() for name, value in weights.items()}, path, metadata=metadata)


def load_mar(folder: Path, **more: Any) -> Any:
    """The target from a flat safetensors file in a folder, which is the mirror's layout."""
    save(folder / "mar.safetensors", mar_weights())
    return model_loaders.load(folder / "mar.safetensors", overrides=HEADS, **{"vq_path": VAE, **more})


def load_draft(**more: Any) -> Any:
    """The draft model from the trainer's file."""
    path = GOLDEN / "mar_draft" / "checkpoint-last.pth"
    return model_loaders.load(path, overrides=HEADS, **{"with_vq": False, **more})


def save_harmon(folder: Path, **stated: Any) -> Path:
    """As in wusize/Harmon-0_5B: safetensors with the VAE inside and the text head as a tensor of its own."""
    vae = torch.load(VAE, weights_only=True)
    weights = torch.load(HARMON, weights_only=True)
    weights |= {f"vae.{name}": value for name, value in vae.get("model", vae).items()}
    save(folder / "model.safetensors", weights, **stated)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Every letter a token, and the marks of a turn."""
    letters = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
