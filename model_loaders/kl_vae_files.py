"""Finding and loading the KL VAE that turns a continuous model's latents into pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .checkpoint_files import Checkpoint, file_sets
from .companions import KL_VAE_FOLDERS, companion_in, is_model, named_companion
from .errors import CheckpointError
from .kl_vae import INSIDE, LATENT_CHANNELS, KLConfig, KLDecoder, is_kl_vae
from .vq import taming_sources
from .weights import fill

FILE = "kl16.ckpt"
_PUBLISHED = f"{FILE} from wusize/harmon, or by the download script of LTH14/mar,"
Shapes = Mapping[str, tuple[int, ...]]
# The half that reads pictures, and the discriminator that training leaves.
SKIPPED = ("encoder.", "quant_conv.", "loss.")


def load_kl_vae(model: Checkpoint, vae_path: Path | None, device: torch.device, operations: Any) -> KLDecoder:
    """A model's VAE, in float32: half precision saves little there and overflows on some devices."""
    checkpoint = find_kl_vae(model, vae_path)
    shapes = decoding_shapes(checkpoint.shapes)
    vae = KLDecoder(KLConfig.from_state_dict(shapes), operations, device="meta")
    prefix = _prefix(checkpoint.shapes)
    sources = {own: [prefix + name] for own, name in published_names(shapes).items()}
    fill(vae, checkpoint, sources, device, torch.float32)
    return vae


def decoding_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """What a KL VAE's weights hold beside SKIPPED, by their published names; what else a model's file holds is left."""
    prefix = _prefix(shapes)
    own = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    return {name: shape for name, shape in own.items() if not name.startswith(SKIPPED)}


def published_names(names: Iterable[str]) -> dict[str, str]:
    """A KLDecoder's names -> those given; unknown ones stay what they are, so that `fill` refuses them."""
    names = list(names)
    known = {own: name for own, (name,) in taming_sources(names).items()}
    return known | {name: name for name in names if name not in known.values()}


def _prefix(shapes: Shapes) -> str:
    return INSIDE if f"{INSIDE}post_quant_conv.weight" in shapes else ""


def find_kl_vae(model: Checkpoint, vae_path: Path | None) -> Checkpoint:
    """Where a model's VAE lies: at vae_path, else where its metadata say, else in its own file, else near it."""
    named = model.metadata.get("vae")
    if vae_path is None and named:
        checkpoint = _at(named_companion(model, named, "VAE"))
    elif vae_path is None:
        checkpoint = model if is_kl_vae(model.shapes) else _near(model)
    else:
        checkpoint = _at(vae_path)
    if (channels := _channels(checkpoint)) != LATENT_CHANNELS:
        raise CheckpointError(
            f"The VAE {checkpoint.path} decodes latents of {channels} channels, those of {model.path.name} have "
            f"{LATENT_CHANNELS}; choose {_PUBLISHED} instead."
        )
    return checkpoint


def _channels(vae: Checkpoint) -> int:
    return decoding_shapes(vae.shapes)["post_quant_conv.weight"][1]


def _at(path: Path) -> Checkpoint:
    for files in file_sets(path):
        checkpoint = Checkpoint(files)
        if is_kl_vae(checkpoint.shapes):
            return checkpoint
    kind = "a model" if is_model(checkpoint.shapes) else "something else"
    raise CheckpointError(
        f"{path} is {kind}, not the VAE that turns latents into pictures; choose {_PUBLISHED} instead."
    )


def _near(model: Checkpoint) -> Checkpoint:
    def fits(checkpoint: Checkpoint) -> bool:
        return is_kl_vae(checkpoint.shapes) and _channels(checkpoint) == LATENT_CHANNELS

    for place in KL_VAE_FOLDERS:
        folder = model.folder / place
        if folder.is_dir() and (found := companion_in(folder, model, FILE, fits, "VAEs")):
            return found
    raise CheckpointError(
        f"{model.path.name} comes without the VAE that turns its latents into pictures; put {_PUBLISHED} into "
        f"{model.folder}, or choose it as the VQ."
    )
