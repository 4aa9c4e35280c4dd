"""Finding and loading what a checkpoint needs beside itself: the VQ tokenizer and the text encoder's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint_files import Checkpoint, file_sets, is_weight_file, reads_lazily
from .errors import CheckpointError
from .vq import VQConfig, VQTokenizer
from .weights import fill, needed

TEXT_ENCODER_FOLDERS = ("flan-t5-xl", "t5-ckpt/flan-t5-xl", "t5-ckpt", "text_encoder")


@dataclass(frozen=True)
class VQSource:
    """Where a family's VQ is published, and how many codes it must have."""

    repository: str
    file: str
    codes: int


def is_vq(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether these are the weights of LlamaGen's VQ tokenizer."""
    return "quantize.embedding.weight" in shapes and any(name.startswith("decoder.conv_blocks.") for name in shapes)


def load_vq(
    model: Checkpoint, source: VQSource, vq_path: Path | None, device: torch.device, operations: Any
) -> VQTokenizer:
    """The VQ tokenizer of a model, in float32: half precision saves little there and overflows on some devices.

    Taken from vq_path, else from the file that the model's metadata name, else from the model's own folder.
    """
    named = model.metadata.get("vq")
    if vq_path is not None:
        checkpoint = _vq_at(vq_path, source)
    elif named:
        checkpoint = _vq_at(_named(model, named), source)
    else:
        checkpoint = _vq_beside(model, source)
    codes = checkpoint.shapes["quantize.embedding.weight"][0]
    if codes != source.codes:
        raise CheckpointError(
            f"The VQ {checkpoint.path} has {codes} codes and the model {model.path.name} {source.codes}; choose the VQ "
            f"that the model was trained with ({source.file} from {source.repository})."
        )
    vq = VQTokenizer(VQConfig.from_state_dict(checkpoint.shapes), operations, device="meta")
    fill(vq, checkpoint, {name: [name] for name in needed(checkpoint.shapes)}, device, torch.float32)
    return vq


def _named(model: Checkpoint, name: str) -> Path:
    path = model.folder / name
    if not path.is_file():
        raise CheckpointError(
            f"{model.path.name} needs its VQ {name}, which is not in {model.folder}; put it back there."
        )
    return path


def _vq_at(path: Path, source: VQSource) -> Checkpoint:
    for files in file_sets(path):
        checkpoint = Checkpoint(files)
        if is_vq(checkpoint.shapes):
            return checkpoint
    is_model = any("tok_embeddings" in name or "embed_tokens" in name for name in checkpoint.shapes)
    raise CheckpointError(
        f"{path} is {'a model' if is_model else 'something else'}, not the VQ tokenizer that turns codes into "
        f"pictures; choose {source.file} from {source.repository}."
    )


def _vq_beside(model: Checkpoint, source: VQSource) -> Checkpoint:
    """The VQ in the model's folder: the one with the published name, else the only one with as many codes."""
    published = source.file.rpartition(".")[0]
    found = []
    for file in sorted(model.folder.iterdir(), key=lambda file: (file.stem != published, file.name)):
        if file in model.files or not is_weight_file(file) or not reads_lazily(file):
            continue
        try:
            checkpoint = Checkpoint([file])
        except CheckpointError:
            if file.stem == published:
                raise
            continue  # another file's damage is no obstacle
        if is_vq(checkpoint.shapes) and checkpoint.shapes["quantize.embedding.weight"][0] == source.codes:
            if file.stem == published:
                return checkpoint
            found.append(checkpoint)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(checkpoint.path.name for checkpoint in found)
        raise CheckpointError(
            f"{model.folder} holds several VQ tokenizers ({names}); choose the one for {model.path.name}."
        )
    raise CheckpointError(
        f"{model.path.name} comes without the VQ tokenizer that turns its codes into pictures; put {source.file} from "
        f"{source.repository} into {model.folder}, or choose it as the VQ."
    )


def find_text_encoder(folder: Path) -> Path | None:
    """The text encoder's folder near a checkpoint, or None."""
    candidates = (folder / name for name in TEXT_ENCODER_FOLDERS)
    return next((path for path in candidates if (path / "config.json").is_file()), None)
