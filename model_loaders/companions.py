"""Finding and loading what a checkpoint needs beside itself: the VQ tokenizer and the text encoder's folder.

The KL VAE, a VQ's counterpart for continuous models, is found by the same means in kl_vae_files.py.
"""

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
from .kl_vae import is_kl_vae
from .vq import VQConfig, VQTokenizer
from .weights import fill, needed

_LOG = logging.getLogger(__name__)
_CODE_BOOK = "quantize.embedding.weight"
# Where published code looks for the picture tokenizers of Chameleon and of Emu3, seen from the model's folder.
CHAMELEON_VQ_FOLDERS = (".", "chameleon/tokenizer", "../chameleon/tokenizer")
EMU3_VQ_FOLDERS = (".", "Emu3-VisionTokenizer", "../Emu3-VisionTokenizer")
KL_VAE_FOLDERS = (".", "vae", "../vae", "../../vae")  # MAR's code: pretrained_models/mar/mar_base and .../vae
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
        checkpoint = _vq_at(named_companion(model, named, "VQ"), source)
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


def is_model(shapes: Shapes) -> bool:
    """Whether a whole model is among these weights, be it one of tokens or of continuous ones."""
    return any(part in name for name in shapes for part in ("tok_embeddings", "embed_tokens", "encoder_blocks."))


def _warn_of_foreign(model: Checkpoint, source: VQSource, vq: Path) -> None:
    """Nothing but the name tells one fine-tune from another, and names may mislead: hence no refusal."""
    if source.foreign and source.foreign in re.split("[^a-z0-9]+", vq.stem.lower()):
        _LOG.warning(
            "%s takes the VQ %s, but was trained with %s; put that file, from %s, into %s or choose it as the VQ.",
            *(model.path.name, vq, source.file, source.repository, model.folder),
        )


def named_companion(model: Checkpoint, name: str, kind: str) -> Path:
    """The file that a model's metadata name; raises CheckpointError where it is gone."""
    path = model.folder / name
    if not path.is_file():
        raise CheckpointError(
            f"{model.path.name} needs its {kind} {name}, which is not in {model.folder}; put it back there."
        )
    return path


def _vq_at(path: Path, source: VQSource) -> Checkpoint:
    for files in file_sets(path):
        checkpoint = Checkpoint(files)
        if source.matches(checkpoint.shapes):
            return checkpoint
    kind = "a model" if is_model(checkpoint.shapes) else "something else"
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
    def fits(checkpoint: Checkpoint) -> bool:
        return source.matches(checkpoint.shapes) and _codes(checkpoint) == source.codes

    return companion_in(folder, model, source.file, fits, "VQ tokenizers")


def companion_in(
    folder: Path, model: Checkpoint, published: str, fits: Callable[[Checkpoint], bool], kinds: str
) -> Checkpoint | None:
    """What fits a model in a folder: the file with the published name (its suffix aside), else the only one."""
    stem = published.rpartition(".")[0]
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: (file.stem != stem, file.name)):
        if file in model.files:
            continue
        try:
            checkpoint = _glance(file, whole=file.stem == stem)
        except CheckpointError:
            if file.stem == stem:
                raise
            continue  # another file's damage is no obstacle
        if checkpoint and fits(checkpoint):
            if file.stem == stem:
                return checkpoint
            found.append(checkpoint)
    if len(found) > 1:
        names = ", ".join(checkpoint.path.name for checkpoint in found)
        raise CheckpointError(f"{folder} holds several {kinds} ({names}); choose the one for {model.path.name}.")
    return found[0] if found else None


def _glance(file: Path, whole: bool = False) -> Checkpoint | None:
    """A weight file's names and shapes, or None for what is no weight file or may not be, but has to be, read whole."""
    return Checkpoint([file]) if is_weight_file(file) and (whole or reads_lazily(file)) else None


def vq_candidates(path: Path) -> list[Path]:
    """The files near the checkpoint at a path among which its VQ or VAE is found, without reading a tensor.

    The one that its metadata name, else every VQ and VAE of any family: a model more or less there changes nothing. Of
    files that would have to be read whole those count whose name says what they are.
    """
    folder = path if path.is_dir() else path.parent
    named, found = [], []
    places = [folder / place for place in dict.fromkeys((*CHAMELEON_VQ_FOLDERS, *EMU3_VQ_FOLDERS, *KL_VAE_FOLDERS))]
    files = (file for place in places if place.is_dir() for file in sorted(place.iterdir()))
    for file in filter(is_weight_file, files):
        try:
            checkpoint = _glance(file)
        except CheckpointError:
            continue  # load says what is wrong with it, where it matters
        if checkpoint is None:
            found += [file] if re.search("vq|vae|kl16", file.stem.lower()) else []
            continue
        if path in (file, folder):
            named += [folder / checkpoint.metadata[key] for key in ("vq", "vae") if key in checkpoint.metadata]
        if _is_picture_decoder(checkpoint.shapes):
            found.append(file)
    return [file for file in named or found if file.is_file()]


def _is_picture_decoder(shapes: Shapes) -> bool:
    """Whether these are the weights of a VQ or a VAE of any family, and of no model that holds one."""
    holds_vq = any(name.endswith(_CODE_BOOK) for name in shapes)
    return (holds_vq or is_kl_vae(shapes)) and not is_model(shapes)


def find_text_encoder(folder: Path) -> Path | None:
    """The text encoder's folder near a checkpoint, or None."""
    candidates = (folder / name for name in TEXT_ENCODER_FOLDERS)
    return next((path for path in candidates if (path / "config.json").is_file()), None)
