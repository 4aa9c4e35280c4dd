"""Which family a checkpoint belongs to, by the names and shapes of its weights; never by the name of its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chameleon_files import is_anole, is_chameleon_vq, is_lumina, load_anole, load_lumina
from .checkpoint_files import Checkpoint, file_sets
from .companions import is_vq
from .emu3_files import is_emu3, is_emu3_vq, load_emu3
from .errors import CheckpointError
from .harmon_files import is_harmon, load_harmon
from .janus_files import is_janus, load_janus
from .kl_vae import is_kl_vae
from .llamagen_files import is_c2i, is_t2i, load_llamagen
from .mar_files import is_mar, load_mar
from .options import LoadOptions
from .xar_files import is_xar, load_xar

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint: how it is called, how it is known, how it is loaded."""

    title: str
    matches: Callable[[Shapes], bool]
    load: Callable[[Checkpoint, LoadOptions], Any]


FAMILIES = (
    Family("Janus", is_janus, load_janus),
    Family("LlamaGen, class-conditional", is_c2i, load_llamagen),
    Family("LlamaGen, text-conditional", is_t2i, load_llamagen),
    Family("Anole", is_anole, load_anole),
    Family("Lumina-mGPT", is_lumina, load_lumina),
    Family("Emu3", is_emu3, load_emu3),
    Family("Harmon", is_harmon, load_harmon),
    Family("MAR", is_mar, load_mar),
    Family("xAR", is_xar, load_xar),
)
VQS = (is_vq, is_chameleon_vq, is_emu3_vq)


def family_of(shapes: Shapes) -> Family | None:
    """The first family whose weights these are."""
    return next((family for family in FAMILIES if family.matches(shapes)), None)


def find_model(path: Path) -> tuple[Family, Checkpoint]:
    """The one model at a path, be it a file, an index, a shard or a folder; raises CheckpointError otherwise."""
    found: list[tuple[Family, Checkpoint]] = []
    others: list[Checkpoint] = []
    refused: list[CheckpointError] = []
    for files in file_sets(path):
        try:
            checkpoint = Checkpoint(files)
        except CheckpointError as error:
            refused.append(error)
            continue
        if family := family_of(checkpoint.shapes):
            found.append((family, checkpoint))
        else:
            others.append(checkpoint)
    if len(found) == 1:
        _refuse_quantised(found[0][1])
        return found[0]
    if found:
        names = ", ".join(checkpoint.path.name for _, checkpoint in found)
        raise CheckpointError(f"{path} holds several models ({names}); choose one of these files.")
    if refused:
        raise refused[0]
    raise _no_model(path, others)


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    if any(name.endswith((".absmax", ".SCB")) for name in checkpoint.shapes):
        raise CheckpointError(
            f"{checkpoint.path} is quantised by bitsandbytes, whose packed weights are not supported; give the "
            "checkpoint that it was made from."
        )


def _no_model(path: Path, others: list[Checkpoint]) -> CheckpointError:
    if any(matches(checkpoint.shapes) for checkpoint in others for matches in VQS):
        return CheckpointError(
            f"{path} is a VQ tokenizer, which turns codes into pictures, not a model that makes codes; choose it "
            "as the VQ and a model, such as c2i_B_256.pt from FoundationVision/LlamaGen, as the checkpoint."
        )
    if any(is_kl_vae(checkpoint.shapes) for checkpoint in others):
        return CheckpointError(
            f"{path} is a VAE, which turns latents into pictures, not a model that makes latents; choose it as the VQ "
            "and a model, such as checkpoint-last.pth from LTH14/mar, as the checkpoint."
        )
    titles = "; ".join(family.title for family in FAMILIES)
    first = ", ".join(list(others[0].shapes)[:3])
    return CheckpointError(f"{path} is of no supported family (its weights begin with {first}); supported: {titles}.")
