"""The tiny MAR pair of the goldens, as models; the target's weights are those inside the tiny Harmon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculative_ar import model_loaders

GOLDEN = Path(__file__).parents[1] / "golden" / "continuous"
VAE = GOLDEN / "kl16_vae" / "kl16.ckpt"
HEADS = {"heads": 4}
Weights = dict[str, Tensor]


def mar_weights() -> Weights:
    """The target's, under MAR's own names."""
    harmon = torch.load(GOLDEN / "harmon" / "harmon_tiny.pth", weights_only=True)
    return {name.removeprefix("mar."): value for name, value in harmon.items() if name.startswith("mar.")}


def load_mar(folder: Path, **more: Any) -> Any:
    """The target from a flat safetensors file in a folder, which is the mirror's layout."""
    save_file({name: value.contiguous() for name, value in mar_weights().items()}, folder / "mar.safetensors")
    return model_loaders.load(folder / "mar.safetensors", overrides=HEADS, **{"vq_path": VAE, **more})


def load_draft(**more: Any) -> Any:
    """The draft model from the trainer's file."""
    path = GOLDEN / "mar_draft" / "checkpoint-last.pth"
    return model_loaders.load(path, overrides=HEADS, **{"with_vq": False, **more})
