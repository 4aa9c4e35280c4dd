"""Checkpoints in LlamaGen's layout with random weights: small enough to decode in a second, real to every loader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculative_ar.model_loaders.llamagen import LlamaGenConfig, LlamaGenNetwork
from speculative_ar.model_loaders.transformer import TransformerConfig
from speculative_ar.model_loaders.vq import VQConfig, VQTokenizer

LABELS = ["star", "house", "tree", "red heart"]
DIM, HEADS, CAPTION_LENGTH = 64, 2, 12


def write_model(
    path: Path,
    *,
    codes: int = 96,
    grid: tuple[int, int] | None = (16, 16),
    layers: int = 2,
    seed: int = 0,
    named_vq: bool = True,
    caption_dim: int = 0,
) -> Path:
    """A model named after its file, whose VQ is `vq-<codes>.safetensors` beside it.

    grid: None leaves it unsaid, as official files do. named_vq=False leaves the VQ to be found. caption_dim: a model of
    captions of that many channels; 0 makes one of classes.
    """
    torch.manual_seed(seed)
    transformer = TransformerConfig(layers, HEADS, DIM, 2 * DIM, codes)
    captions = {"caption_length": CAPTION_LENGTH, "caption_dim": caption_dim}
    network = LlamaGenNetwork(LlamaGenConfig(transformer, **captions if caption_dim else {"classes": len(LABELS)}))
    # Sharper than freshly initialised weights, so that drafts are worth checking.
    weights = dict(unfused(network.state_dict()))
    weights["output.weight"] = weights["output.weight"] * 3
    metadata: dict[str, Any] = {"heads": HEADS, "labels": LABELS, "name": path.stem}
    metadata |= {"grid": grid} if grid else {}
    metadata |= {"vq": f"vq-{codes}.safetensors"} if named_vq else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path, metadata={key: json.dumps(value) for key, value in metadata.items()})
    return path


def unfused(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The network's weights as LlamaGen's files name them, where w1 and w3 are apart."""
    for name, tensor in weights.items():
        if ".w13." in name:
            for part, rows in zip(("w1", "w3"), tensor.chunk(2), strict=True):
                yield name.replace("w13", part), rows.clone()
        else:
            yield name.removesuffix(".weight") if name.endswith("uncond_embedding.weight") else name, tensor


def write_vq(folder: Path, *, codes: int = 96, seed: int = 1) -> Path:
    """The tokenizer of the models of as many codes: 4 pixels a code."""
    torch.manual_seed(seed)
    config = VQConfig(codes, 8, 32, 32, (32, 32, 32), (32, 32, 32), encoder_blocks=1, decoder_blocks=1)
    path = folder / f"vq-{codes}.safetensors"
    save_file(VQTokenizer(config).state_dict(), path)
    return path


def write_family(folder: Path) -> None:
    """A target, a draft for it, and two drafts that do not fit."""
    write_model(folder / "tiny.safetensors")
    write_model(folder / "tiny-draft.safetensors", layers=1, seed=2)
    write_model(folder / "other-codes.safetensors", codes=64)
    write_model(folder / "other-grid.safetensors", grid=(8, 8))
    write_vq(folder)
    write_vq(folder, codes=64)
