"""Finding and loading what a checkpoint needs beside itself: the VQ tokenizer and the text encoder's folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint_files import Checkpoint, file_sets, is_weight_file, reads_lazily
from .errors import CheckpointError
from .vq import VQConfig, VQTokenizer
from .weights import fill, needed

_LOG = logging.getLogger(__name__)
_CODE_BOOK = "quantize.embedding.weight"
# Where published code looks for the picture tokenizers of Chameleon and of Emu3, seen from the model's folder.
CHAMELEON_VQ_FOLDERS = (".", "chameleon/tokenizer", "../chameleon/tokenizer")
EMU3_VQ_FOLDERS = (".", "Emu3-VisionTokenizer", "../Emu3-VisionTokenizer")
TEXT_ENCODER_FOLDERS = ("flan-t5-xl", "t5-ckpt/flan-t5-xl", "t5-ckpt", "text_encoder")

Shapes = Mapping[str, tuple[int, ...]]


def is_vq(shapes: Shapes) -> bool:
    """Whether these are the weights of LlamaGen's VQ tokenizer."""
    return "quantize.embedding.weight" in shapes and any(name.startswith("decoder.conv_blocks.") for name in shapes)


@dataclass(frozen=True)
class VQSource:
    """Where a family's VQ is published, how many codes it must have, and how it is known and found.

    foreign: a word in the names of files that hold the same weights trained for another family; "" where none do.
    matches: whether weights of these names and shapes are it. folders: where it may lie, seen from the model's folder.
    """

    repository: str
    file: str
    codes: int
    foreign: str = ""
    matches: Callable[[Shapes], bool] = is_vq
    folders: tuple[str, ...] = (".",)


def load_vq(
    model: Checkpoint, source: VQSource, vq_path: Path | None, device: torch.device, operations: Any
) -> VQTokenizer:
    """LlamaGen's VQ for a model, in float32: half precision saves little there and overflows on some devices."""
    checkpoint = find_vq(model, source, vq_path)
    vq = VQTokenizer(VQConfig.from_state_dict(checkpoint.shapes), operations, device="meta")
    fill(vq, checkpoint, {name: [name] for name in needed(checkpoint.shapes)}, device, torch.float32)
    return vq


def find_vq(model: Checkpoint, source: VQSource, vq_path: Path | None) -> Checkpoint:
    """Where a model's VQ lies: at vq_path, else in the file that its metadata name, else in one of source.folders."""
    named = model.metadata.get("vq")
    if vq_path is None and named:
        checkpoint = _vq_at(_named(model, named), source)
    else:
        checkpoint = _vq_beside(model, source) if vq_path is None else _vq_at(vq_path, source)
        _warn_of_foreign(model, source, checkpoint.path)
    codes = _codes(checkpoint)
    if codes != source.codes:
        raise CheckpointError(
            f"The VQ {checkpoint.path} has {codes} codes and the model {model.path.name} {source.codes}; choose the VQ "
            f"that the model was trained with ({source.file} from {source.repository})."
        )
    return checkpoint


def _codes(vq: Checkpoint) -> int:
    return next(shape[0] for name, shape in vq.shapes.items() if name.endswith(_CODE_BOOK))


def _is_model(shapes: Shapes) -> bool:
    return any("tok_embeddings" in name or "embed_tokens" in name for name in shapes)


def _warn_of_foreign(model: Checkpoint, source: VQSource, vq: Path) -> None:
    """Nothing but the name tells one fine-tune from another, and names may mislead: hence no refusal."""
    if source.foreign and source.foreign in re.split("[^a-z0-9]+", vq.stem.lower()):
        _LOG.warning(
            "%s takes the VQ %s, but was trained with %s; put that file, from %s, into %s or choose it as the VQ.",
            *(model.path.name, vq, source.file, source.repository, model.folder),
        )


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
        if source.matches(checkpoint.shapes):
            return checkpoint
    kind = "a model" if _is_model(checkpoint.shapes) else "something else"
    raise CheckpointError(
        f"{path} is {kind}, not the VQ tokenizer that turns codes into pictures; choose {source.file} from "
        f"{source.repository}."
    )


def _vq_beside(model: Checkpoint, source: VQSource) -> Checkpoint:
    for place in source.folders:
        folder = model.folder / place
        if folder.is_dir() and (found := _vq_in(folder, model, source)):
            return found
    raise CheckpointError(
        f"{model.path.name} comes without the VQ tokenizer that turns its codes into pictures; put {source.file} from "
        f"{source.repository} into {model.folder}, or choose it as the VQ."
    )


def _vq_in(folder: Path, model: Checkpoint, source: VQSource) -> Checkpoint | None:
    """The VQ in a folder: the one with the published name, else the only one with as many codes."""
    published = source.file.rpartition(".")[0]
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: (file.stem != published, file.name)):
        if file in model.files:
            continue
        try:
            checkpoint = _glance(file, whole=file.stem == published)
        except CheckpointError:
            if file.stem == published:
                raise
            continue  # another file's damage is no obstacle
        if checkpoint and source.matches(checkpoint.shapes) and _codes(checkpoint) == source.codes:
            if file.stem == published:
                return checkpoint
            found.append(checkpoint)
    if len(found) > 1:
        names = ", ".join(checkpoint.path.name for checkpoint in found)
        raise CheckpointError(f"{folder} holds several VQ tokenizers ({names}); choose the one for {model.path.name}.")
    return found[0] if found else None


def _glance(file: Path, whole: bool = False) -> Checkpoint | None:
    """A weight file's names and shapes, or None for what is no weight file or may not be, but has to be, read whole."""
    return Checkpoint([file]) if is_weight_file(file) and (whole or reads_lazily(file)) else None


def vq_candidates(path: Path) -> list[Path]:
    """The files near the checkpoint at a path among which find_vq finds its VQ, without reading a tensor.

    The one that its metadata name, else every VQ of any family: a model more or less there changes nothing. Of files
    that would have to be read whole those count whose name says VQ.
    """
    folder = path if path.is_dir() else path.parent
    named, found = [], []
    places = [folder / place for place in dict.fromkeys((*CHAMELEON_VQ_FOLDERS, *EMU3_VQ_FOLDERS))]
    files = (file for place in places if place.is_dir() for file in sorted(place.iterdir()))
    for file in filter(is_weight_file, files):
        try:
            checkpoint = _glance(file)
        except CheckpointError:
            continue  # load says what is wrong with it, where it matters
        if checkpoint is None:
            found += [file] if "vq" in file.stem.lower() else []
            continue
        if path in (file, folder) and "vq" in checkpoint.metadata:
            named.append(folder / checkpoint.metadata["vq"])
        if any(name.endswith(_CODE_BOOK) for name in checkpoint.shapes) and not _is_model(checkpoint.shapes):
            found.append(file)
    return [file for file in named or found if file.is_file()]


def find_text_encoder(folder: Path) -> Path | None:
    """The text encoder's folder near a checkpoint, or None."""
    candidates = (folder / name for name in TEXT_ENCODER_FOLDERS)
    return next((path for path in candidates if (path / "config.json").is_file()), None)
