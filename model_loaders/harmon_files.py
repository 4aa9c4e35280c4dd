"""From Harmon's files, in both layouts, to a Harmon model: names, sizes, VAE and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import mar_files
from .checkpoint_files import Checkpoint
from .errors import CheckpointError
from .harmon import TOKENIZER_REPOSITORY, TURN, Harmon, HarmonConfig, HarmonNetwork
from .kl_vae import INSIDE
from .kl_vae_files import load_kl_vae
from .llamagen_files import key_map as llama_sources
from .options import LoadOptions
from .text_tokenizer import TextTokenizer, find_tokenizer
from .transformer import TransformerConfig
from .weights import fill, needed

LANGUAGE, MAR = "llm.", "mar."
_SKIPPED = (INSIDE, "llm.lm_head.", "mar.class_emb.")  # Harmon's buffer never repeats a class, and it writes no text
_HEADS_OF_WIDTH = {896: 14, 1536: 12}  # Qwen2.5's 0.5B and 1.5B
_ITERATIONS, _DIFFUSION_STEPS, _TOKEN_PIXELS = 64, 100, 16

Shapes = Mapping[str, tuple[int, ...]]


def is_harmon(shapes: Shapes) -> bool:
    """Whether these are the weights of a Harmon, with or without its VAE."""
    return "llm.model.embed_tokens.weight" in shapes and "mar.diffloss.net.input_proj.weight" in shapes


def key_map(names: Iterable[str], title: str) -> dict[str, list[str]]:
    """Network name -> names in the file. A name of neither part stands for itself, so that `fill` refuses it."""
    own = [name for name in needed(names) if not name.startswith(_SKIPPED)]
    sources = {name: [name] for name in own if not name.startswith((LANGUAGE, MAR))}
    for prefix, mapped in ((LANGUAGE, lambda part: llama_sources(part, title)), (MAR, mar_files.key_map)):
        part = [name.removeprefix(prefix) for name in own if name.startswith(prefix)]
        for target, parts in mapped(part).items():
            sources[prefix + target] = [prefix + name for name in parts]
    return sources


def reshapes() -> dict[str, Callable[[Tensor], Tensor]]:
    """See mar_files.reshapes."""
    return {MAR + name: change for name, change in mar_files.reshapes().items()}


def read_config(
    shapes: Shapes, sources: Mapping[str, list[str]], stated: Mapping[str, Any], title: str
) -> HarmonConfig:
    """The sizes, from the shapes of the weights; `heads` (MAR's) and `language_heads` may be stated."""
    mar_shapes = {name.removeprefix(MAR): shape for name, shape in shapes.items() if name.startswith(MAR)}
    mar_shapes.pop("class_emb.weight", None)
    for name in ("llm.layers.0.attention.wqkv.weight", "llm.layers.0.feed_forward.w13.weight", "proj_in.0.weight"):
        if name not in sources:
            raise CheckpointError(f"{title} is incomplete: {name} is missing; download it again.")
    vocabulary, dim = shapes["llm.model.embed_tokens.weight"]
    heads = stated.get("language_heads") or _HEADS_OF_WIDTH.get(dim)
    if not heads or dim % (2 * heads):
        raise CheckpointError(
            f"The language model of {title} is {dim} channels wide, of which it is not known how many heads they make; "
            "state `language_heads` in its metadata or in the overrides."
        )
    language = TransformerConfig(
        layers=mar_files.count(sources, r"llm\.layers\.(\d+)\."),
        heads=heads,
        dim=dim,
        ffn_dim=shapes[sources["llm.layers.0.feed_forward.w13.weight"][0]][0],
        vocabulary=vocabulary,
        norm_eps=1e-6,
        rope_base=1e6,
        kv_heads=shapes[sources["llm.layers.0.attention.wqkv.weight"][-1]][0] // (dim // heads),
        rope_pairing="halves",
        qkv_bias=True,
    )
    return HarmonConfig(language, mar_files.read_config(mar_shapes, stated, title))


def load_harmon(checkpoint: Checkpoint, options: LoadOptions) -> Harmon:
    """Builds the network without memory, fills it tensor by tensor, and adds VAE and tokenizer.

    Metadata and overrides may state `heads` and `language_heads`, and `size`, the side of the picture in pixels where
    none is asked for; 512 as in Harmon's own code, for which the position tables are stretched.
    """
    title, stated = str(checkpoint.path), {**checkpoint.metadata, **options.overrides}
    sources = key_map(checkpoint.shapes, title)
    config = read_config(checkpoint.shapes, sources, stated, title)
    native, _ = mar_files.read_grid(config.mar.positions, None, title)
    dtype = options.dtype or checkpoint.tensor("mar.z_proj.weight").dtype
    # What may be refused comes before what takes minutes to read.
    vae = load_kl_vae(checkpoint, options.vq_path, options.device, options.operations) if options.with_vq else None
    tokenizer = _tokenizer(checkpoint, config, options) if options.with_vq else None
    token_pixels = _TOKEN_PIXELS if vae is None else vae.config.factor
    network = HarmonNetwork(config, options.operations, device=torch.device("meta"))
    fill(
        network,
        checkpoint,
        sources,
        options.device,
        dtype,
        reshapes(),
        storage=options.storage,
        precise=MAR + mar_files.HEAD,
        on_progress=options.on_progress,
    )
    return Harmon(
        network,
        name=stated.get("name", checkpoint.title),
        native=native,
        side=_side(stated.get("size"), native, token_pixels, title),
        token_pixels=token_pixels,
        iterations=stated.get("iterations", _ITERATIONS),
        diffusion_steps=stated.get("diffusion_steps", _DIFFUSION_STEPS),
        respacing=stated.get("respacing", mar_files.RESPACING),
        folder=checkpoint.folder,
        tokenizer=tokenizer,
        device=options.device,
        dtype=dtype,
        vae=vae,
    )


def _side(size: int | None, native: int, token_pixels: int, title: str) -> int:
    """Tokens along the picture that is drawn where no size is asked for."""
    if size is None:
        return 2 * native
    if size % token_pixels or not native <= size // token_pixels <= 2 * native:
        raise CheckpointError(
            f"The size {size} is none that {title} draws; state a multiple of {token_pixels} from "
            f"{native * token_pixels} to {2 * native * token_pixels} pixels."
        )
    return size // token_pixels


def _tokenizer(checkpoint: Checkpoint, config: HarmonConfig, options: LoadOptions) -> TextTokenizer | None:
    path = find_tokenizer(checkpoint.folder, options.text_encoder_path)
    if path is None:
        return None
    tokenizer = TextTokenizer.load(path)
    if (tokenizer.id(TURN) or config.language.vocabulary) >= config.language.vocabulary:
        raise CheckpointError(
            f"{path} is not the tokenizer of {checkpoint.path}, it lacks {TURN}; give tokenizer.json from "
            f"{TOKENIZER_REPOSITORY}."
        )
    return tokenizer
