"""From the files of Janus and Janus-Pro to their model: names in both layouts, sizes, VQ and prompt tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint_files import Checkpoint
from .companions import VQSource, find_vq
from .errors import CheckpointError
from .janus import IMAGE_BEGIN, PIXELS_PER_CODE, TOKENIZER_REPOSITORY, Janus, JanusConfig, JanusNetwork, PromptTokens
from .llamagen_files import key_map as llama_sources
from .options import LoadOptions
from .text_tokenizer import TextTokenizer, find_tokenizer
from .transformer import TransformerConfig
from .vq import VQConfig, VQDecoder
from .weights import fill, needed

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """How a publisher names the weights.

    language, vq: what stands before the names of the language model and of the VQ. image_side: network name -> name in
    the file, without .weight and .bias. skipped: what the names begin with that painting does not need.
    """

    language: str
    vq: str
    image_side: Mapping[str, str]
    skipped: tuple[str, ...]

    @property
    def head(self) -> str:
        """The weight by which the layout is known."""
        return f"{self.image_side['gen_head.2']}.weight"


# The understanding of pictures, and the head that writes text.
OFFICIAL = Layout(
    language="language_model.",
    vq="gen_vision_model.",
    image_side={
        "gen_embed": "gen_embed",
        "gen_aligner.0": "gen_aligner.layers.0",
        "gen_aligner.2": "gen_aligner.layers.2",
        "gen_head.0": "gen_head.output_mlp_projector",
        "gen_head.2": "gen_head.vision_head",
    },
    skipped=("vision_model.", "aligner.", "language_model.lm_head."),
)
TRANSFORMERS = Layout(
    language="model.language_model.",
    vq="model.vqmodel.",
    image_side={
        "gen_embed": "model.generation_embeddings",
        "gen_aligner.0": "model.generation_aligner.fc1",
        "gen_aligner.2": "model.generation_aligner.hidden_layers.0",
        "gen_head.0": "model.generation_head.proj_out",
        "gen_head.2": "model.generation_head.vision_head",
    },
    skipped=("model.vision_model.", "model.aligner.", "lm_head."),
)
# The half of the VQ that turns pictures into codes.
SKIPPED_OF_VQ = ("encoder.", "quant_conv.")
_VQ_RENAMES_OF_TRANSFORMERS = {
    ".up.": ".conv_blocks.",
    ".block.": ".res.",
    ".mid.block_1.": ".mid.0.",
    ".mid.attn_1.": ".mid.1.",
    ".mid.block_2.": ".mid.2.",
}
_VQ_TELLS_SIZES = ("quantize.embedding.weight", "decoder.conv_in.weight", "decoder.conv_blocks.0.res.0.conv1.weight")

_HEADS_WITHOUT_CONFIG = {(24, 2048): 16, (30, 4096): 32}  # (layers, width) of 1B and 1.3B, and of 7B
# Janus's config.json leaves out what transformers' Llama has by default.
_LLAMA = {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
_SIZE = 384
_BEGIN, _PAD = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5c\u2581pad\u2581\uff5c>"
_ROLES, _PLAIN_ROLES = ("<|User|>", "<|Assistant|>"), ("User", "Assistant")


def is_janus(shapes: Shapes) -> bool:
    """Whether these are the weights of Janus or Janus-Pro, in either layout."""
    return OFFICIAL.head in shapes or TRANSFORMERS.head in shapes


def layout_of(shapes: Shapes) -> Layout:
    """The layout of a Janus's weights."""
    return OFFICIAL if OFFICIAL.head in shapes else TRANSFORMERS


def holds_vq(shapes: Shapes) -> bool:
    """Whether a VQ for Janus is among these weights: Janus's own, in either layout, or a file of LlamaGen's."""
    return _vq_prefix(shapes) is not None


def _vq_prefix(shapes: Shapes) -> str | None:
    """What the names of the VQ among these weights begin with; None where there is none."""
    prefixes = (OFFICIAL.vq, TRANSFORMERS.vq, "")
    return next((prefix for prefix in prefixes if vq_sources(shapes, prefix).keys() >= set(_VQ_TELLS_SIZES)), None)


def key_map(names: Iterable[str], layout: Layout, title: str) -> dict[str, list[str]]:
    """Network name -> names in the file, but for the skipped and the VQ's, which `vq_sources` tells.

    A name that is none of the layout's stands for itself, so that `fill` refuses it.
    """
    image_side = {theirs: ours for ours, theirs in layout.image_side.items()}
    sources: dict[str, list[str]] = {}
    language = []
    for name in needed(names):
        module, _, kind = name.rpartition(".")
        if name.startswith(layout.language) and not name.startswith(layout.skipped):
            language.append(name.removeprefix(layout.language))
        elif not name.startswith((*layout.skipped, layout.vq)):
            sources[f"{image_side.get(module, module)}.{kind}"] = [name]
    for target, parts in llama_sources(language, title).items():
        sources[target] = [layout.language + part for part in parts]
    return sources


def vq_sources(names: Iterable[str], prefix: str) -> dict[str, list[str]]:
    """Name in a VQDecoder -> name in the file, where the VQ's names begin with prefix."""
    renames = _VQ_RENAMES_OF_TRANSFORMERS if prefix == TRANSFORMERS.vq else {}
    sources = {}
    for name in needed(names):
        own = name.removeprefix(prefix)
        if name.startswith(prefix) and not own.startswith(SKIPPED_OF_VQ):
            for theirs, ours in renames.items():
                own = own.replace(theirs, ours)
            sources[own] = [name]
    return sources


def read_config(
    shapes: Shapes, sources: Mapping[str, list[str]], config: Mapping[str, Any], heads: int | None, title: str
) -> JanusConfig:
    """The sizes from shapes, the rest from config.json. heads: what the user states; None takes config.json's."""

    def size(name: str) -> tuple[int, ...]:
        if name not in sources:
            raise CheckpointError(f"{title} is incomplete: {name} is missing; download it again.")
        return shapes[sources[name][0]]

    vocabulary, dim = size("tok_embeddings.weight")
    codes, channels = size("gen_embed.weight")
    layers = len({name.split(".")[1] for name in sources if name.startswith("layers.")})
    given = config.get("language_config", config.get("text_config"))
    heads = heads or _heads(layers, dim, given, title)
    if dim % (2 * heads):
        raise CheckpointError(
            f"{title} is {dim} channels wide, which do not divide into {heads} heads; take the config.json that was "
            "published with these weights."
        )
    language = {**_LLAMA, **(given or {})}
    transformer = TransformerConfig(
        layers=layers,
        heads=heads,
        dim=dim,
        ffn_dim=size("layers.0.feed_forward.w13.weight")[0],
        vocabulary=vocabulary,
        norm_eps=language["rms_norm_eps"],
        rope_base={**language, **(language.get("rope_parameters") or {})}["rope_theta"],
        rope_pairing="halves",
    )
    return JanusConfig(transformer, codes, channels)


def _heads(layers: int, dim: int, given: Mapping[str, Any] | None, title: str) -> int:
    if given is not None:
        return {**_LLAMA, **given}["num_attention_heads"]
    if (layers, dim) not in _HEADS_WITHOUT_CONFIG:
        raise CheckpointError(
            f"{title} has no config.json beside it, and nothing else tells how many heads its {layers} layers of {dim} "
            "channels have; put the config.json of its repository there."
        )
    return _HEADS_WITHOUT_CONFIG[layers, dim]


def read_size(stated: int | None, config: Mapping[str, Any]) -> int:
    """The side of the picture: as stated, else what config.json says of the pictures that the model reads, else 384.

    Janus paints in the size in which it reads. transformers' layout counts its codes from that as well.
    """
    vision = config.get("vision_config", {})
    size = stated or {"image_size": _SIZE, **vision, **vision.get("params", {})}["image_size"]
    if size % PIXELS_PER_CODE or size < PIXELS_PER_CODE:
        raise CheckpointError(
            f"The size {size} is none that Janus draws; state a multiple of {PIXELS_PER_CODE} pixels, which is {_SIZE} "
            "for all published models."
        )
    return size


def read_tokens(path: Path, roles: Sequence[str] | None, titles: Iterable[str]) -> PromptTokens:
    """The tokenizer at a path with the ids that a prompt needs, by their names; roles: as the user states them.

    The pad is the one that Janus's own code takes, whatever id another config.json gives. Janus-1.3B was trained with
    plain words for the roles. A tokenizer without Janus-Pro's role tokens gives it away, else only its name does.
    """
    tokenizer = TextTokenizer.load(path)
    begin, pad, image_begin = (tokenizer.id(token) for token in (_BEGIN, _PAD, IMAGE_BEGIN))
    if begin is None or pad is None or image_begin is None:
        raise CheckpointError(
            f"{path} is no tokenizer of Janus, it lacks the tokens that stand around a prompt, such as {IMAGE_BEGIN}; "
            f"give tokenizer.json from {TOKENIZER_REPOSITORY}."
        )
    plain = tokenizer.id(_ROLES[0]) is None or any(re.search(r"janus[-_ ]?1\.3b", title.lower()) for title in titles)
    user, assistant = roles or (_PLAIN_ROLES if plain else _ROLES)
    return PromptTokens(tokenizer, begin, pad, image_begin, (user, assistant))


def load_janus(checkpoint: Checkpoint, options: LoadOptions) -> Janus:
    """Builds the network without memory, fills it tensor by tensor, and adds VQ and prompt tokens.

    Metadata and overrides may state `heads`, `size` (the picture's side in pixels) and `roles` (the words for user and
    assistant), each in place of what the files tell.
    """
    layout, config, title = layout_of(checkpoint.shapes), checkpoint.config(), str(checkpoint.path)
    stated = {**checkpoint.metadata, **options.overrides}
    sources = key_map(checkpoint.shapes, layout, title)
    janus = read_config(checkpoint.shapes, sources, config, stated.get("heads"), title)
    dtype = options.dtype or checkpoint.tensor(sources["tok_embeddings.weight"][0]).dtype
    size = read_size(stated.get("size"), config)
    # What may be refused comes before what takes minutes to read.
    tokens = _tokens(checkpoint, config, stated, options) if options.with_vq else None
    vq = load_vq(checkpoint, janus.codes, options) if options.with_vq else None
    network = JanusNetwork(janus, options.operations, device="meta")
    fill(network, checkpoint, sources, options.device, dtype, storage=options.storage, on_progress=options.on_progress)
    return Janus(
        network,
        vocabulary=janus.codes,
        name=stated.get("name", checkpoint.title),
        size=size,
        folder=checkpoint.folder,
        tokens=tokens,
        vq=vq,
        device=options.device,
        dtype=dtype,
    )


def _tokens(
    checkpoint: Checkpoint, config: Mapping[str, Any], stated: Mapping[str, Any], options: LoadOptions
) -> PromptTokens | None:
    path = find_tokenizer(checkpoint.folder, options.text_encoder_path)
    titles = (checkpoint.title, str(config.get("_name_or_path", "")))
    return None if path is None else read_tokens(path, stated.get("roles"), titles)


def load_vq(checkpoint: Checkpoint, codes: int, options: LoadOptions) -> VQDecoder:
    """The decoding half of the VQ, in float32: the model's own unless another is given."""
    if options.vq_path is None:
        held = checkpoint
    else:
        source = VQSource("deepseek-ai/Janus-Pro-1B", "pytorch_model.bin", codes, matches=holds_vq)
        held = find_vq(checkpoint, source, options.vq_path)
    prefix = _vq_prefix(held.shapes)
    if prefix is None:
        raise CheckpointError(
            f"{checkpoint.path} is incomplete: the VQ that turns its codes into pictures, "
            f"{layout_of(checkpoint.shapes).vq}*, is missing; download it again, or choose a VQ."
        )
    sources = vq_sources(held.shapes, prefix)
    config = VQConfig.of_decoder({name: held.shapes[parts[0]] for name, parts in sources.items()})
    if config.factor != PIXELS_PER_CODE:
        raise CheckpointError(
            f"The VQ {held.path} makes {config.factor} pixels of a code and Janus was trained with {PIXELS_PER_CODE}; "
            "choose another, or none to take the model's own."
        )
    vq = VQDecoder(config, options.operations, device="meta")
    fill(vq, held, sources, options.device, torch.float32)
    return vq
