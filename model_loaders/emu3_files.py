"""From the files of Emu3 to its model: names in both layouts, sizes, token ids, vision tokenizer and vocabulary."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .checkpoint_files import Checkpoint
from .companions import EMU3_VQ_FOLDERS, VQSource, find_vq
from .emu3 import BEGIN, IMAGE, IMAGE_BEGIN, PIXELS_PER_CODE, QUALITY, REPOSITORY, Emu3, Emu3Network, TokenIds
from .emu3_tokenizer import FILE as TOKENIZER_FILE
from .emu3_tokenizer import load_tokenizer
from .emu3_vq import TELLS_SIZES, Emu3VQ, Emu3VQConfig, vq_reshapes, vq_sources
from .errors import CheckpointError
from .llamagen_files import key_map as llama_sources
from .options import LoadOptions
from .text_tokenizer import TextTokenizer, find_tokenizer
from .transformer import TransformerConfig
from .weights import fill, needed

_LOG = logging.getLogger(__name__)
Shapes = Mapping[str, tuple[int, ...]]

# What stands before the language model's names and before the VQ's: nothing in the official layout, which has the VQ in
# a repository of its own; in transformers' layout today, and in uploads from before its version 4.52.
_LANGUAGE = re.compile(r"^(?:model\.)?(?:text_model\.)?(?:model\.)?")
_VQ = re.compile(r"^(?:model\.)?vqmodel\.")
_VQ_PREFIXES = ("", "model.vqmodel.", "vqmodel.")

_ROWS, _ROWS_OF_EMU3_5 = 184_622, 282_926
_CODES = 32_768
_HEADS_WITHOUT_CONFIG = {4096: 32}
_AREA = 720 * 720
_POSITIONS_OF_CHAT = 131_072
# Part -> token, name in the official config.json, id in the published vocabulary.
_TOKENS = {
    "begin": (BEGIN, "bos_token_id", 151_849),
    "image_begin": (IMAGE_BEGIN, "boi_token_id", 151_852),
    "image": (IMAGE, "img_token_id", 151_851),
    "row_end": ("<|extra_200|>", "eol_token_id", 151_846),
    "frame_end": ("<|extra_201|>", "eof_token_id", 151_847),
    "image_end": ("<|image end|>", "eoi_token_id", 151_853),
    "end": ("<|extra_204|>", "eos_token_id", 151_850),
}
_FIRST_CODE = "<|visual token 000000|>"


def is_emu3(shapes: Shapes) -> bool:
    """Whether these may be the weights of Emu3, in either layout.

    The official layout is that of every Llama with shared key heads, and Emu3.5's is its kin: `load` refuses those.
    """
    if any("text_model." in name for name in shapes) and any(_VQ.match(name) for name in shapes):
        return True
    attention = "model.layers.0.self_attn."
    query, key = (shapes.get(f"{attention}{side}_proj.weight", (0,)) for side in "qk")
    plain = f"{attention}q_norm.weight" not in shapes and f"{attention}q_proj.bias" not in shapes
    return _is_emu3_5(shapes) or (plain and 0 < key[0] < query[0])


def _is_emu3_5(shapes: Shapes) -> bool:
    return shapes.get("model.embed_tokens.weight", (0,))[0] == _ROWS_OF_EMU3_5


def is_emu3_vq(shapes: Shapes) -> bool:
    """Whether Emu3's vision tokenizer is among these weights, be it a file of its own or inside Emu3."""
    return _vq_prefix(shapes) is not None


def _vq_prefix(shapes: Shapes) -> str | None:
    """What the names of the VQ among these weights begin with; None where there is none."""
    return next((prefix for prefix in _VQ_PREFIXES if vq_sources(shapes, prefix).keys() >= set(TELLS_SIZES)), None)


def _language_names(names: Iterable[str]) -> dict[str, str]:
    """The language model's names without what its layout puts before them -> names in the file."""
    return {_LANGUAGE.sub("", name): name for name in needed(names) if not _VQ.match(name)}


def key_map(names: Iterable[str], title: str) -> dict[str, list[str]]:
    """Network name -> names in the file. The VQ inside transformers' layout is left out: `vq_sources` reads it."""
    own = _language_names(names)
    return {target: [own[part] for part in parts] for target, parts in llama_sources(own, title).items()}


def read_ids(config: Mapping[str, Any], rows: int, title: str) -> TokenIds:
    """The token ids as config.json tells, by name in transformers' layout; as published where it tells nothing."""
    vocabulary = config.get("vocabulary_map") or {}
    ids = {}
    for part, (token, key, published) in _TOKENS.items():
        number = vocabulary.get(token, config.get(key, published if rows == _ROWS else None))
        if number is None:
            raise CheckpointError(
                f"{title} is a language model of which nothing tells how it paints: its config.json has no {key}; give "
                f"{REPOSITORY}, with the config.json published with it."
            )
        ids[part] = number
    return TokenIds(**ids, first_code=vocabulary.get(_FIRST_CODE, ids["image_end"] + 1))


def read_config(
    shapes: Shapes, sources: Mapping[str, list[str]], text: Mapping[str, Any], heads: int | None, title: str
) -> TransformerConfig:
    """The sizes from shapes, the rest from `text`, what config.json says of the language model, or as published.

    heads: what the user states; None takes config.json's.
    """

    def size(name: str) -> tuple[int, ...]:
        if name not in sources:
            raise CheckpointError(f"{title} is incomplete: {name} is missing; download it again.")
        return shapes[sources[name][0]]

    vocabulary, dim = size("tok_embeddings.weight")
    size("layers.0.attention.wqkv.weight")
    key_rows = shapes[sources["layers.0.attention.wqkv.weight"][-1]][0]
    heads = heads or text.get("num_attention_heads") or _HEADS_WITHOUT_CONFIG.get(dim)
    if heads is None or dim % (2 * heads) or key_rows % (dim // heads):
        given = "tells no number of heads" if heads is None else f"tells {heads} heads, which do not divide that"
        raise CheckpointError(
            f"{title} is {dim} channels wide, with {key_rows} for its keys, and its config.json {given}; take the "
            "config.json that was published with these weights."
        )
    return TransformerConfig(
        layers=len({name.split(".")[1] for name in sources if name.startswith("layers.")}),
        heads=heads,
        dim=dim,
        ffn_dim=size("layers.0.feed_forward.w13.weight")[0],
        vocabulary=vocabulary,
        norm_eps=text.get("rms_norm_eps", 1e-5),
        rope_base={"rope_theta": 1e6, **(text.get("rope_parameters") or {}), **text}["rope_theta"],
        kv_heads=key_rows // (dim // heads),
        rope_pairing="halves",
    )


def load_emu3(checkpoint: Checkpoint, options: LoadOptions) -> Emu3:
    """Builds the network without memory, fills it tensor by tensor, and adds VQ and tokenizer.

    Metadata and overrides may state `heads`, `size` (the side of a square picture, in pixels) and `quality` (the words
    that follow every prompt, "" for none), each in place of what the files tell or of Emu3's own.
    """
    title, config = str(checkpoint.path), checkpoint.config()
    if _is_emu3_5(checkpoint.shapes):
        raise CheckpointError(
            f"{title} is Emu3.5, whose network and vision tokenizer are others and not supported; give {REPOSITORY}."
        )
    stated = {**checkpoint.metadata, **options.overrides}
    text = {**config, **config.get("text_config", {})}
    sources = key_map(checkpoint.shapes, title)
    transformer = read_config(checkpoint.shapes, sources, text, stated.get("heads"), title)
    ids = read_ids({**text, **config}, transformer.vocabulary, title)
    codes = min(transformer.vocabulary - ids.first_code, _CODES)  # what is behind them is padding
    dtype = options.dtype or checkpoint.tensor(sources["tok_embeddings.weight"][0]).dtype
    # Before the network, whose reading takes minutes: what is missing is said at once.
    tokenizer = _tokenizer(checkpoint, ids, options) if options.with_vq else None
    vq = load_vq(checkpoint, codes, options) if options.with_vq else None
    network = Emu3Network(transformer, ids, codes, options.operations, device="meta")
    fill(
        network,
        checkpoint,
        sources,
        options.device,
        dtype,
        reshapes(ids, codes),
        storage=options.storage,
        on_progress=options.on_progress,
    )
    _warn_of_chat(checkpoint, text)
    return Emu3(
        network,
        name=stated.get("name", checkpoint.title),
        area=stated["size"] ** 2 if "size" in stated else config.get("image_area", _AREA),
        folder=checkpoint.folder,
        quality=stated.get("quality", QUALITY),
        tokenizer=tokenizer,
        vq=vq,
        device=options.device,
        dtype=dtype,
    )


def _warn_of_chat(checkpoint: Checkpoint, text: Mapping[str, Any]) -> None:
    """Emu3-Chat's weights have the same names and shapes and do paint; Emu3-Stage1's as well, at 512 x 512 pixels."""
    if text.get("max_position_embeddings") == _POSITIONS_OF_CHAT:
        _LOG.warning(
            "By its config.json %s is Emu3-Chat, which was trained to talk about pictures, not to paint them; take %s.",
            *(checkpoint.title, REPOSITORY),
        )


def reshapes(ids: TokenIds, codes: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is done to tensors on their way in: of the head, the rows of the codes are picked."""
    return {"output.weight": lambda head: head[ids.first_code : ids.first_code + codes]}


def _tokenizer(checkpoint: Checkpoint, ids: TokenIds, options: LoadOptions) -> TextTokenizer | None:
    path = find_tokenizer(checkpoint.folder, options.text_encoder_path, (TOKENIZER_FILE, "tokenizer.json"))
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer.id(BEGIN) != ids.begin:
        raise CheckpointError(
            f"{path} is not the tokenizer of {checkpoint.path}: its {BEGIN} has the id {tokenizer.id(BEGIN)} and must "
            f"have {ids.begin}; give {TOKENIZER_FILE} from {REPOSITORY}."
        )
    return tokenizer


def load_vq(checkpoint: Checkpoint, codes: int, options: LoadOptions) -> Emu3VQ:
    """The vision tokenizer's decoding half in float32: the model's own where it has one and no other is given."""
    source = VQSource(
        "BAAI/Emu3-VisionTokenizer",
        "model.safetensors",
        codes,
        matches=is_emu3_vq,
        folders=EMU3_VQ_FOLDERS,
    )
    inside = options.vq_path is None and is_emu3_vq(checkpoint.shapes)
    held = checkpoint if inside else find_vq(checkpoint, source, options.vq_path)
    sources = vq_sources(held.shapes, _vq_prefix(held.shapes) or "")
    config = Emu3VQConfig.of_decoder({name: held.shapes[parts[0]] for name, parts in sources.items()})
    if (config.codebook_size, config.factor) != (codes, PIXELS_PER_CODE):
        raise CheckpointError(
            f"The VQ in {held.path} has {config.codebook_size} codes of {config.factor} pixels and the model {codes} "
            f"of {PIXELS_PER_CODE}; choose {source.file} from {source.repository} as the VQ."
        )
    vq = Emu3VQ(config, options.operations, device="meta")
    fill(vq, held, sources, options.device, torch.float32, vq_reshapes(sources))
    return vq
