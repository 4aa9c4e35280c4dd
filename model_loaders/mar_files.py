"""From MAR's files to a MAR model: names, sizes, and what no file says (heads)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..decoders.interface import LatentLayout
from .checkpoint_files import Checkpoint
from .diffusion_head import HeadConfig
from .errors import CheckpointError
from .kl_vae import INSIDE
from .kl_vae_files import load_kl_vae
from .mar import MAR, MARConfig, MARNetwork
from .options import LoadOptions
from .weights import fill

HEADS_OF_WIDTH = {768: 12, 1024: 16, 1280: 16}
DIFFUSION_STEPS, RESPACING, ITERATIONS, GUIDANCE_SCHEDULE = 100, "even", 64, "linear"

_RENAMES = {
    "fake_latent": "fake_latent.weight",
    "mask_token": "mask_token.weight",
    "encoder_pos_embed_learned": "encoder_positions.weight",
    "decoder_pos_embed_learned": "decoder_positions.weight",
    "diffusion_pos_embed_learned": "head_positions.weight",
}
_HEAD = re.compile(r"^diffloss\.net\.")
HEAD = "head."

Shapes = Mapping[str, tuple[int, ...]]


def is_mar(shapes: Shapes) -> bool:
    """Whether these are the weights of a class-conditional MAR."""
    return "class_emb.weight" in shapes and "diffloss.net.input_proj.weight" in shapes


def key_map(names: Iterable[str]) -> dict[str, list[str]]:
    """Network name -> name in the file. A VAE that lies in the same file is none of the network's."""
    own = (name for name in names if not name.startswith(INSIDE))
    return {_RENAMES.get(name) or _HEAD.sub(HEAD, name): [name] for name in own}


def reshapes() -> dict[str, Callable[[Tensor], Tensor]]:
    """What is done to the weights that the files keep with a leading axis or two of size 1."""
    return {name: lambda tensor: tensor.flatten(0, -2) for name in _RENAMES.values()}


def read_config(shapes: Shapes, stated: Mapping[str, Any], title: str) -> MARConfig:
    """The sizes, from the shapes of the weights under their published names."""
    for name in ("z_proj.weight", "diffusion_pos_embed_learned", "encoder_pos_embed_learned", "decoder_embed.weight"):
        if name not in shapes:
            raise CheckpointError(f"{title} is incomplete: {name} is missing; download it again.")
    width, channels = shapes["z_proj.weight"]
    positions = shapes["diffusion_pos_embed_learned"][1]
    head_width, _ = shapes["diffloss.net.input_proj.weight"]
    return MARConfig(
        width=width,
        depth=count(shapes, r"encoder_blocks\.(\d+)\."),
        decoder_depth=count(shapes, r"decoder_blocks\.(\d+)\."),
        heads=read_heads(width, stated.get("heads"), title),
        buffer=shapes["encoder_pos_embed_learned"][1] - positions,
        positions=positions,
        classes=shapes["class_emb.weight"][0] if "class_emb.weight" in shapes else 0,
        mlp_width=shapes.get("encoder_blocks.0.mlp.fc1.weight", (4 * width,))[0],
        head=HeadConfig(channels, width, head_width, count(shapes, r"diffloss\.net\.res_blocks\.(\d+)\.")),
    )


def count(names: Iterable[str], pattern: str) -> int:
    """How many different numbers the names have where the pattern has its group."""
    return len({found[1] for name in names if (found := re.match(pattern, name))})


def read_heads(width: int, stated: int | None, title: str) -> int:
    """Attention heads: as stated, else those of the published widths; raises CheckpointError where neither tells."""
    heads = stated or HEADS_OF_WIDTH.get(width)
    if not heads or width % heads:
        known = ", ".join(map(str, HEADS_OF_WIDTH))
        given = f"{stated} heads do not divide" if stated else f"only widths of {known} tell their heads"
        raise CheckpointError(
            f"{title} is {width} channels wide, and {given}; state the number of heads as `heads` in its metadata or "
            "in the overrides."
        )
    return heads


def read_grid(positions: int, stated: Any, title: str) -> tuple[int, int]:
    """Rows and columns of tokens: as stated, else a square."""
    rows, columns = stated or (math.isqrt(positions),) * 2
    if rows * columns != positions:
        raise CheckpointError(
            f"{title} makes {positions} tokens, which are no {rows} x {columns}; state its `grid` of rows and columns "
            "in its metadata or in the overrides."
        )
    return int(rows), int(columns)


def load_mar(checkpoint: Checkpoint, options: LoadOptions) -> MAR:
    """Builds the network without memory, fills it tensor by tensor, and adds the VAE."""
    title, stated = checkpoint.title, {**checkpoint.metadata, **options.overrides}
    config = read_config(checkpoint.shapes, stated, str(checkpoint.path))
    grid = read_grid(config.positions, stated.get("grid"), str(checkpoint.path))
    dtype = options.dtype or checkpoint.tensor("z_proj.weight").dtype
    network = MARNetwork(config, options.operations, device=torch.device("meta"))
    fill(
        network,
        checkpoint,
        key_map(checkpoint.shapes),
        options.device,
        dtype,
        reshapes(),
        storage=options.storage,
        precise=HEAD,
        on_progress=options.on_progress,
    )
    vae = load_kl_vae(checkpoint, options.vq_path, options.device, options.operations) if options.with_vq else None
    return MAR(
        network,
        name=stated.get("name", title),
        layout=LatentLayout(
            (1, *grid),
            config.channels,
            iterations=min(stated.get("iterations", ITERATIONS), config.positions),
            guidance_schedule=stated.get("guidance_schedule", GUIDANCE_SCHEDULE),
        ),
        classes=config.classes,
        labels=stated.get("labels", ()),
        width=config.width,
        diffusion_steps=stated.get("diffusion_steps", DIFFUSION_STEPS),
        respacing=stated.get("respacing", RESPACING),
        device=options.device,
        dtype=dtype,
        vae=vae,
    )
