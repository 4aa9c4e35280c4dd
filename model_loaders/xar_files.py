"""From xAR's files to an xAR model: names, sizes, and what no file says (heads, steps)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..decoders.interface import LatentLayout
from .checkpoint_files import Checkpoint
from .errors import CheckpointError
from .kl_vae import INSIDE, LATENT_CHANNELS
from .kl_vae_files import load_kl_vae
from .mar_files import count, read_heads
from .options import LoadOptions
from .weights import fill
from .xar import CELLS, XAR, XARConfig, XARNetwork

_RENAMES = {
    "encoder_pos_embed_learned": "encoder_positions.weight",
    "decoder_pos_embed_learned": "decoder_positions.weight",
}
_COMPUTED = re.compile(r"^mask$|\.rope\.freqs")  # tables that follow from the sizes
STEPS_OF_WIDTH = {768: 40}  # the smallest model's; the others', and those of models that the authors did not make: 50
STEPS = 50

Shapes = Mapping[str, tuple[int, ...]]


def is_xar(shapes: Shapes) -> bool:
    """Whether these are the weights of an xAR."""
    return "pred.weight" in shapes and "encoder_blocks.0.ada_lin.1.weight" in shapes


def key_map(names: Iterable[str]) -> dict[str, list[str]]:
    """Network name -> name in the file."""
    own = (name for name in names if not _COMPUTED.search(name) and not name.startswith(INSIDE))
    return {_RENAMES.get(name, name): [name] for name in own}


def reshapes() -> dict[str, Callable[[Tensor], Tensor]]:
    """What is done to the tables that the files keep with a leading axis of size 1."""
    return {name: lambda tensor: tensor.flatten(0, -2) for name in _RENAMES.values()}


def read_config(shapes: Shapes, stated: Mapping[str, Any], title: str) -> XARConfig:
    """The sizes, from the shapes of the weights."""
    for name in ("z_proj.weight", "encoder_pos_embed_learned", "class_emb.weight", "encoder_blocks.0.mlp.fc1_g.weight"):
        if name not in shapes:
            raise CheckpointError(f"{title} is incomplete: {name} is missing; download it again.")
    width, rows = shapes["z_proj.weight"][0], shapes["encoder_pos_embed_learned"][1]
    side = math.isqrt(rows) // CELLS
    if (CELLS * side) ** 2 != rows:
        raise CheckpointError(
            f"{title} is damaged: {rows} positions make no square of {CELLS} x {CELLS} cells; download it again."
        )
    return XARConfig(
        width=width,
        depth=count(shapes, r"encoder_blocks\.(\d+)\."),
        decoder_depth=count(shapes, r"decoder_blocks\.(\d+)\."),
        heads=read_heads(width, stated.get("heads"), title),
        mlp_width=shapes["encoder_blocks.0.mlp.fc1_g.weight"][0],
        side=side,
        classes=shapes["class_emb.weight"][0] - 1,
    )


def load_xar(checkpoint: Checkpoint, options: LoadOptions) -> XAR:
    """Builds the network without memory, fills it tensor by tensor, and adds the VAE."""
    stated = {**checkpoint.metadata, **options.overrides}
    config = read_config(checkpoint.shapes, stated, str(checkpoint.path))
    dtype = options.dtype or checkpoint.tensor("z_proj.weight").dtype
    network = XARNetwork(config, options.operations, device=torch.device("meta"))
    fill(
        network,
        checkpoint,
        key_map(checkpoint.shapes),
        options.device,
        dtype,
        reshapes(),
        storage=options.storage,
        on_progress=options.on_progress,
    )
    vae = load_kl_vae(checkpoint, options.vq_path, options.device, options.operations) if options.with_vq else None
    layout = LatentLayout(
        (1, CELLS, CELLS),
        LATENT_CHANNELS * config.cell,
        iterations=CELLS**2,
        guidance_schedule="linear-from-one",
        in_order=True,
    )
    return XAR(
        network,
        name=stated.get("name", checkpoint.title),
        layout=layout,
        classes=config.classes,
        labels=stated.get("labels", ()),
        width=config.width,
        diffusion_steps=stated.get("diffusion_steps", STEPS_OF_WIDTH.get(config.width, STEPS)),
        device=options.device,
        dtype=dtype,
        vae=vae,
    )
