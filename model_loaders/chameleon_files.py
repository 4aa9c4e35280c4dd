"""From the files of Lumina-mGPT and Anole to their models: names, sizes, token ids, VQ and tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .chameleon import CODES, PIXELS_PER_UNIT, Anole, ChameleonNetwork, Lumina, TokenIds
from .checkpoint_files import Checkpoint, read_json
from .companions import CHAMELEON_VQ_FOLDERS, VQSource, find_vq
from .errors import CheckpointError
from .llamagen_files import key_map as llama_sources
from .options import LoadOptions
from .text_tokenizer import TextTokenizer, find_tokenizer
from .transformer import TransformerConfig
from .vq import VQConfig, VQDecoder, taming_sources
from .weights import fill

_LOG = logging.getLogger(__name__)
Shapes = Mapping[str, tuple[int, ...]]

_FIRST_Q_NORM = "model.layers.0.self_attn.q_norm.weight"
_TELLS_SIZES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.norm.weight",
)
_VQ_INSIDE = "model.vqmodel."
_CODE_BOOK = "quantize.embedding.weight"
_ROWS_OF_LUMINA_2 = 171_000
_DIM_OF_34B = 8192
_DEFAULT_SIZE = 768
_ANOLE_SIZE = 512
_LARGEST_SIZE = 1024
_MOST_UNITS = 2 * _LARGEST_SIZE // PIXELS_PER_UNIT  # along the long side at the ratio 4


def is_lumina(shapes: Shapes) -> bool:
    """Whether these are the weights of Lumina-mGPT, or of its kin without a picture decoder, which `load` refuses."""
    return _is_chameleon(shapes) and not _holds_vq(shapes)


def is_anole(shapes: Shapes) -> bool:
    """Whether these are the weights of Anole; Meta's own layout of it, which `load` refuses, counts as well."""
    return _is_metas_layout(shapes) or (_is_chameleon(shapes) and _holds_vq(shapes))


def _is_chameleon(shapes: Shapes) -> bool:
    return len(shapes.get(_FIRST_Q_NORM, ())) == 2


def _is_metas_layout(shapes: Shapes) -> bool:
    return "layers.0.attention.wqkv.weight" in shapes and "layers.0.attention.q_normalization.weight" in shapes


def _holds_vq(shapes: Shapes) -> bool:
    return any(name.startswith(f"{_VQ_INSIDE}decoder.") for name in shapes)


def is_chameleon_vq(shapes: Shapes) -> bool:
    """Whether Chameleon's VQGAN is among these weights, be it a file of its own or inside Anole."""
    prefix = _vq_prefix(shapes)
    return f"{prefix}decoder.up.0.block.0.norm1.weight" in shapes and f"{prefix}{_CODE_BOOK}" in shapes


def _vq_prefix(shapes: Shapes) -> str:
    return next((name.removesuffix(_CODE_BOOK) for name in shapes if name.endswith(_CODE_BOOK)), "")


VQ = VQSource(
    "GAIR/Anole-7b-v0.1 (folder tokenizer, as in Meta's Chameleon release)",
    "vqgan.ckpt",
    CODES,
    matches=is_chameleon_vq,
    folders=CHAMELEON_VQ_FOLDERS,
)


def load_lumina(checkpoint: Checkpoint, options: LoadOptions) -> Lumina:
    """Builds the network without memory, fills it tensor by tensor, and adds VQ and tokenizer."""
    config, stated = checkpoint.config(), {**checkpoint.metadata, **options.overrides}
    _require_sizes(checkpoint)
    _refuse_kin(checkpoint, config)
    ids = read_ids(_vocabulary(checkpoint.folder, config))
    network = load_network(checkpoint, config, options, ids.codes, (ids.row_end, ids.image_end))
    size = read_size(stated.get("size"), (checkpoint.title, str(config.get("_name_or_path", ""))))
    return Lumina(network, ids=ids, size=size, **_surroundings(checkpoint, stated, options))


def load_anole(checkpoint: Checkpoint, options: LoadOptions) -> Anole:
    """As load_lumina. The VQ is the model's own unless another is given."""
    if _is_metas_layout(checkpoint.shapes):
        raise CheckpointError(
            f"{checkpoint.path} is Anole or Chameleon in Meta's own layout, which is not supported; give "
            "leloy/Anole-7b-v0.1-hf, the same model as transformers stores it."
        )
    config, stated = checkpoint.config(), {**checkpoint.metadata, **options.overrides}
    _require_sizes(checkpoint)
    ids = read_ids(_vocabulary(checkpoint.folder, config))
    network = load_network(checkpoint, config, options, ids.codes, ())
    size = stated.get("size") or config.get("vq_config", {}).get("resolution", _ANOLE_SIZE)
    return Anole(network, ids=ids, size=size, **_surroundings(checkpoint, stated, options))


def _require_sizes(checkpoint: Checkpoint) -> None:
    for name in _TELLS_SIZES:
        if name not in checkpoint.shapes:
            raise CheckpointError(f"{checkpoint.path} is incomplete: {name} is missing; download it again.")


def _refuse_kin(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for what Lumina-mGPT's weights look like and are not."""
    path, shapes = checkpoint.path, checkpoint.shapes
    if any(name.startswith(_VQ_INSIDE) for name in shapes) or config.get("mask_image_logits"):
        raise CheckpointError(
            f"{path} is Meta's Chameleon, which reads pictures but was released with painting disabled and without the "
            "decoder for it; give leloy/Anole-7b-v0.1-hf or Alpha-VLLM/Lumina-mGPT-7B-768, which learnt to paint."
        )
    if shapes["model.embed_tokens.weight"][0] > _ROWS_OF_LUMINA_2:
        raise CheckpointError(
            f"{path} is Lumina-mGPT 2.0, whose vocabulary and VQ are others and not supported; give the first "
            "generation, such as Alpha-VLLM/Lumina-mGPT-7B-768."
        )


def _surroundings(checkpoint: Checkpoint, stated: Mapping[str, Any], options: LoadOptions) -> dict[str, Any]:
    """What a model has beside its network."""
    tokenizer = find_tokenizer(checkpoint.folder, options.text_encoder_path) if options.with_vq else None
    return {
        "name": stated.get("name", checkpoint.title),
        "device": options.device,
        "dtype": _dtype(checkpoint, options),
        "vq": load_vq(checkpoint, options) if options.with_vq else None,
        "folder": checkpoint.folder,
        "tokenizer": None if tokenizer is None else TextTokenizer.load(tokenizer),
    }


def _dtype(checkpoint: Checkpoint, options: LoadOptions) -> torch.dtype:
    return options.dtype or checkpoint.tensor("model.norm.weight").dtype


def read_size(stated: int | None, titles: Iterable[str]) -> int:
    """The side of the square picture that a Lumina-mGPT was trained on: as stated, else as its title says, else 768.

    The weights of all sizes have the same shapes and the same config.json, so their names are the only hint.
    """
    if stated is not None:
        if stated % PIXELS_PER_UNIT or not 0 < stated <= _LARGEST_SIZE:
            raise CheckpointError(
                f"The size {stated} is none that Lumina-mGPT is trained on; state 512, 768 or 1024 pixels."
            )
        return stated
    for title in titles:
        if pixels := re.search(r"(?<![0-9a-z])(512|768|1024)(?:px)?(?![0-9a-z])", title.lower()):
            return int(pixels[1])
    _LOG.warning(
        "Nothing tells which picture size %s was trained for: %d x %d pixels are taken; put 512, 768 or 1024 into the "
        "name of its file or folder if that is not it.",
        *(next(iter(titles)), _DEFAULT_SIZE, _DEFAULT_SIZE),
    )
    return _DEFAULT_SIZE


def _vocabulary(folder: Path, config: Mapping[str, Any]) -> Mapping[str, int]:
    """Token -> id from config.json, else from Meta's text_tokenizer.json; empty where neither tells."""
    if "vocabulary_map" in config:
        return config["vocabulary_map"]
    files = (folder / place / "text_tokenizer.json" for place in CHAMELEON_VQ_FOLDERS)
    file = next((file for file in files if file.is_file()), None)
    return {} if file is None else read_json(file).get("model", {}).get("vocab", {})


def read_ids(vocabulary: Mapping[str, int]) -> TokenIds:
    """The ids by their tokens' names, or those of Chameleon's published vocabulary where it is not at hand."""

    def reserved(number: int) -> int:
        return vocabulary.get(f"<reserved{number:05d}>", number + 4)

    ids = dict(_codes(vocabulary)) or {code: code + 4 for code in range(CODES)}
    if sorted(ids) != list(range(CODES)):
        raise CheckpointError(
            f"The vocabulary names {len(ids)} image codes and must name {CODES}; download config.json again."
        )
    return TokenIds(
        codes=tuple(ids[code] for code in range(CODES)),
        units=tuple(reserved(8800 + count) for count in range(_MOST_UNITS + 1)),
        end_of_turn=reserved(8706),
        image_begin=vocabulary.get("<racm3:break>", 8197),
        image_end=vocabulary.get("<eoss>", 8196),
        row_end=reserved(8799),
    )


def _codes(vocabulary: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(code, id) of every image token: its name spells the code with the letters A to J as digits."""
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    for token, number in vocabulary.items():
        if spelt := re.fullmatch("IMGIMG([A-J]+)Z", token):
            yield int(spelt[1].translate(digits)), number


def load_network(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    options: LoadOptions,
    codes: Sequence[int],
    structure: Sequence[int],
) -> ChameleonNetwork:
    """The transformer with its weights; codes, structure: the ids of the codes and of the structure behind them.

    Raises CheckpointError where the weights do not fit.
    """
    sources = key_map(checkpoint.shapes, str(checkpoint.path))
    transformer = read_config(checkpoint.shapes, config)
    network = ChameleonNetwork(transformer, len(structure), options.operations, device="meta")
    reshape = reshapes(transformer, codes, structure)
    dtype = _dtype(checkpoint, options)
    fill(
        network,
        checkpoint,
        sources,
        options.device,
        dtype,
        reshape,
        storage=options.storage,
        on_progress=options.on_progress,
    )
    return network


def key_map(names: Iterable[str], title: str) -> dict[str, list[str]]:
    """Network name -> names in the file. The VQ inside Anole is left out: `vq_sources` takes what is needed of it."""
    sources = {
        re.sub(r"\.self_attn\.([qk])_norm\.", r".attention.\1_norm.", name): parts
        for name, parts in llama_sources((name for name in names if not name.startswith(_VQ_INSIDE)), title).items()
    }
    return {**sources, "picture_embeddings.weight": sources["tok_embeddings.weight"]}


def read_config(shapes: Shapes, config: Mapping[str, Any]) -> TransformerConfig:
    """The sizes from shapes, the rest from config.json or as published."""
    vocabulary, dim = shapes["model.embed_tokens.weight"]
    head_dim = shapes[_FIRST_Q_NORM][1]
    return TransformerConfig(
        layers=len({name.split(".")[2] for name in shapes if name.startswith("model.layers.")}),
        heads=dim // head_dim,
        dim=dim,
        ffn_dim=shapes["model.layers.0.mlp.gate_proj.weight"][0],
        vocabulary=vocabulary,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        rope_base={"rope_theta": 1e4, **(config.get("rope_parameters") or {}), **config}["rope_theta"],
        kv_heads=shapes["model.layers.0.self_attn.k_proj.weight"][0] // head_dim,
        rope_pairing="halves",
        qk_norm=True,
        norm_after=config.get("swin_norm", dim == _DIM_OF_34B),
    )


def reshapes(
    config: TransformerConfig, codes: Sequence[int], structure: Sequence[int]
) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is done to tensors on their way in: rows of the codes picked, rows of q_norm and k_norm given to heads."""
    result = {
        "output.weight": _rows(codes),
        "picture_embeddings.weight": _rows([*codes, *structure]),
    }
    for layer in range(config.layers):
        for side, heads in (("q", config.heads), ("k", config.cached_heads)):
            for kind in ("weight", "bias"):
                result[f"layers.{layer}.attention.{side}_norm.{kind}"] = _for_heads(heads)
    return result


def _rows(ids: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return lambda table: table[torch.tensor(ids)]


def _for_heads(heads: int) -> Callable[[Tensor], Tensor]:
    """A row of scales for every run of heads -> the scales of all heads in a line."""
    return lambda rows: rows.repeat_interleave(heads // len(rows), dim=0).flatten()


def load_vq(checkpoint: Checkpoint, options: LoadOptions) -> VQDecoder:
    """The VQ's decoding half in float32, from the model itself where it holds one and no other is given."""
    inside = options.vq_path is None and is_chameleon_vq(checkpoint.shapes)
    held = checkpoint if inside else find_vq(checkpoint, VQ, options.vq_path)
    sources = vq_sources(held.shapes)
    config = VQConfig.of_decoder({name: held.shapes[parts[0]] for name, parts in sources.items()}, normalised=False)
    vq = VQDecoder(config, options.operations, device="meta")
    fill(vq, held, sources, options.device, torch.float32)
    return vq


def vq_sources(shapes: Shapes) -> dict[str, list[str]]:
    """Name in a VQDecoder -> name in the file, under whatever prefix the VQ has there."""
    prefix = _vq_prefix(shapes)
    own = (name.removeprefix(prefix) for name in shapes if name.startswith(prefix))
    return {name: [prefix + part for part in parts] for name, parts in taming_sources(own).items()}
