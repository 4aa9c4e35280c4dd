"""Checkpoints in LlamaGen's layout with random weights: small enough to decode in a second, real to every loader."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from speculative_ar.model_loaders.llamagen import LlamaGenConfig, LlamaGenNetwork
from speculative_ar.model_loaders.transformer import TransformerConfig
from speculative_ar.model_loaders.vq import VQConfig, VQTokenizer

LABELS = ["star", "house", "tree", "red heart"]
DIM, HEADS = 64, 2


def write_model(
    path: Path, *, codes: int = 96, grid: tuple[int, int] = (16, 16), layers: int = 2, seed: int = 0
) -> Path:
    """A class-conditional model named after its file, whose VQ is `vq-<codes>.safetensors` beside it."""
    torch.manual_seed(seed)
    transformer = TransformerConfig(layers, HEADS, DIM, 2 * DIM, codes)
    network = LlamaGenNetwork(LlamaGenConfig(transformer, classes=len(LABELS)))
    # Sharper than freshly initialised weights, so that drafts are worth checking.
    weights = {key: value * 3 if key == "output.weight" else value for key, value in network.state_dict().items()}
    metadata = {"heads": HEADS, "grid": grid, "labels": LABELS, "name": path.stem, "vq": f"vq-{codes}.safetensors"}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path, metadata={key: json.dumps(value) for key, value in metadata.items()})
    return path


def write_vq(folder: Path, *, codes: int = 96) -> Path:
    """The tokenizer of the models of as many codes: 4 pixels a code."""
    torch.manual_seed(1)
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
