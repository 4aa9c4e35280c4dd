"""From LlamaGen's files to a LlamaGen model: names, sizes, and what no file says (heads and grid)."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .checkpoint_files import Checkpoint
from .companions import VQSource, find_text_encoder, load_vq
from .errors import CheckpointError
from .llamagen import PIXELS_PER_CODE, LlamaGen, LlamaGenConfig, LlamaGenNetwork
from .options import LoadOptions
from .text_encoder import REPOSITORY as TEXT_ENCODER_REPOSITORY
from .text_encoder import TextEncoder, load_text_encoder
from .transformer import TransformerConfig
from .weights import fill, needed

_LOG = logging.getLogger(__name__)
# Repository, file, and the word in the names of the other fine-tune's files: their weights look the same.
C2I_VQ = ("FoundationVision/LlamaGen", "vq_ds16_c2i.pt", "t2i")
T2I_VQ = ("peizesun/llamagen_t2i", "vq_ds16_t2i.pt", "c2i")
_TYPICAL_HEAD_DIM = 64
_HEADS_OF_WIDTH = {3200: 32, 4096: 32}
_DEFAULT_GRID = 16

# The re-packed safetensors in circulation name things as transformers' Llama does; rotary channels are not permuted.
_RENAMES = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"\.self_attn\.[qkv]_proj\.", ".attention.wqkv."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.mlp\.(?:gate|up)_proj\.", ".feed_forward.w13."),
    (r"\.feed_forward\.w[13]\.", ".feed_forward.w13."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.uncond_embedding$", ".uncond_embedding.weight"),
)
_FUSED_PLACES = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1, ".w1.": 0, ".w3.": 1}

Shapes = Mapping[str, tuple[int, ...]]


def is_c2i(shapes: Shapes) -> bool:
    """Whether these are the weights of a class-conditional LlamaGen."""
    return _has(shapes, "cls_embedding.embedding_table.weight") and _has_llamagen_attention(shapes)


def is_t2i(shapes: Shapes) -> bool:
    """Whether these are the weights of a text-conditional LlamaGen."""
    return _has(shapes, "cls_embedding.cap_proj.fc1.weight") and _has_llamagen_attention(shapes)


def _has(shapes: Shapes, name: str) -> bool:
    return name in shapes or f"model.{name}" in shapes


def _has_llamagen_attention(shapes: Shapes) -> bool:
    return _has(shapes, "layers.0.attention.wqkv.weight") or _has(shapes, "layers.0.self_attn.q_proj.weight")


def key_map(names: Iterable[str], title: str) -> dict[str, list[str]]:
    """Network name -> names in the file, several where the network fuses what the file stores apart.

    Raises CheckpointError where two names stand for the same rows.
    """
    sources: dict[str, list[str]] = {}
    for name in needed(names):
        target = name
        for pattern, replacement in _RENAMES:
            target = re.sub(pattern, replacement, target)
        sources.setdefault(target, []).append(name)
    for parts in sources.values():
        parts.sort(key=_place)
        for first, second in itertools.pairwise(parts):
            if _place(first) == _place(second):
                raise CheckpointError(
                    f"{title} holds one weight twice, as {first} and {second}; give an unchanged checkpoint."
                )
    return sources


def _place(name: str) -> int:
    """Which part of a fused weight a name stands for; 0 also for a weight that is whole."""
    return next((place for infix, place in _FUSED_PLACES.items() if infix in name), 0)


def read_config(
    shapes: Shapes, sources: Mapping[str, list[str]], stated: Mapping[str, Any], title: str
) -> LlamaGenConfig:
    """The sizes, from shapes alone but for the heads: stated["heads"], else by the width as published."""

    def size(name: str) -> tuple[int, ...]:
        if name not in sources:
            raise CheckpointError(f"{title} is incomplete: {name} is missing; download it again.")
        return shapes[sources[name][0]]

    vocabulary, dim = size("tok_embeddings.weight")
    layers = {name.split(".")[1] for name in sources if name.startswith("layers.")}
    transformer = TransformerConfig(
        layers=len(layers),
        heads=_heads(dim, stated.get("heads"), title),
        dim=dim,
        ffn_dim=size("layers.0.feed_forward.w13.weight")[0],
        vocabulary=vocabulary,
    )
    table = "cls_embedding.embedding_table.weight"
    if table in sources:
        return LlamaGenConfig(transformer, classes=size(table)[0] - 1)
    length, channels = size("cls_embedding.uncond_embedding.weight")
    return LlamaGenConfig(transformer, caption_length=length, caption_dim=channels)


def _heads(dim: int, stated: int | None, title: str) -> int:
    heads = stated or _HEADS_OF_WIDTH.get(dim) or dim // _TYPICAL_HEAD_DIM
    # A head's channels split into pairs that turn by row and pairs that turn by column.
    if not heads or dim % (4 * heads):
        given = f"{stated} heads do" if stated else "the usual 64 channels a head do"
        raise CheckpointError(
            f"{title} is {dim} channels wide, which {given} not divide into heads; state the number of heads as "
            "`heads` in its metadata or in the overrides."
        )
    return heads


def read_grid(stated: Any, title: str, text_model: bool) -> tuple[int, int]:
    """Rows and columns of codes: as stated, else by the picture size in the title, else 16 x 16.

    The weights of all sizes have the same shapes, so a file's title is the only hint that it carries.
    """
    if stated:
        rows, columns = stated
        return int(rows), int(columns)
    if text_model and re.search(r"stage[-_]?2|t2i-2$", title.lower()):
        return 32, 32
    pixels = re.search(r"(?<!\d)(256|384|512)(?!\d)", title)
    if pixels is None:
        _LOG.warning(
            "Nothing tells which picture size %s was trained for: it will draw 256 x 256 pixels; state the picture "
            "size if that is not it.",
            title,
        )
    side = int(pixels[1]) // PIXELS_PER_CODE if pixels else _DEFAULT_GRID
    return side, side


def _stated(checkpoint: Checkpoint, overrides: Mapping[str, Any], title: str) -> dict[str, Any]:
    """What the metadata and the user state; raises CheckpointError where the user contradicts the file's own grid."""
    side = overrides.get("size", 0) // PIXELS_PER_CODE
    stated = {**checkpoint.metadata, **({"grid": (side, side)} if side else {}), **overrides}
    own = checkpoint.metadata.get("grid")
    if own and list(own) != list(stated["grid"]):
        raise CheckpointError(
            f"{title} was made for {_times(own)} codes, as its file says, and cannot draw {_times(stated['grid'])}; "
            "leave the picture size at 0."
        )
    return stated


def _times(grid: Iterable[int]) -> str:
    return " x ".join(map(str, grid))


def load_llamagen(checkpoint: Checkpoint, options: LoadOptions) -> LlamaGen:
    """Builds the network without memory, fills it tensor by tensor, and adds VQ and text encoder."""
    title = checkpoint.title
    stated = _stated(checkpoint, options.overrides, title)
    sources = key_map(checkpoint.shapes, str(checkpoint.path))
    config = read_config(checkpoint.shapes, sources, stated, str(checkpoint.path))
    dtype = options.dtype or checkpoint.tensor(sources["tok_embeddings.weight"][0]).dtype
    network = LlamaGenNetwork(config, options.operations, device="meta")
    fill(network, checkpoint, sources, options.device, dtype, storage=options.storage, on_progress=options.on_progress)
    text_model = not config.classes
    repository, file, foreign = T2I_VQ if text_model else C2I_VQ
    source = VQSource(repository, file, config.transformer.vocabulary, foreign)
    vq = text_encoder = None
    if options.with_vq:
        vq = load_vq(checkpoint, source, options.vq_path, options.device, options.operations)
        text_encoder = _text_encoder(checkpoint, config, options, dtype) if text_model else None
    return LlamaGen(
        config,
        network,
        name=stated.get("name", title),
        grid=read_grid(stated.get("grid"), title, text_model),
        labels=stated.get("labels", ()),
        device=options.device,
        dtype=dtype,
        vq=vq,
        text_encoder=text_encoder,
    )


def _text_encoder(
    checkpoint: Checkpoint, config: LlamaGenConfig, options: LoadOptions, dtype: torch.dtype
) -> TextEncoder | None:
    folder = options.text_encoder_path or find_text_encoder(checkpoint.folder)
    if folder is None:
        return None
    # T5 overflows in float16; bfloat16 is what the released models were trained with.
    encoder = load_text_encoder(folder, options.device, torch.float32 if dtype == torch.float32 else torch.bfloat16)
    if encoder.width != config.caption_dim:
        raise CheckpointError(
            f"The text encoder {folder} gives {encoder.width} channels and {checkpoint.path.name} takes "
            f"{config.caption_dim}; choose a copy of {TEXT_ENCODER_REPOSITORY}."
        )
    return encoder
