"""The files of Janus: every published name has its place, and every way in which they lie about loads or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from speculative_ar.model_loaders.detect import family_of
from speculative_ar.model_loaders.janus import JanusNetwork
from speculative_ar.model_loaders.janus_files import (
    SKIPPED_OF_VQ,
    key_map,
    layout_of,
    read_config,
    read_size,
    vq_sources,
)
from speculative_ar.model_loaders.vq import VQConfig, VQDecoder
from speculative_ar.model_loaders.weights import check_fit, needed
from tests.model_loaders import chameleon
from tests.model_loaders.chameleon import LUMINA, config_of, names_read, write
from tests.model_loaders.janus import GOLDEN, OFFICIAL, SIZE, TRANSFORMERS, Weights, load, weights_of
from tests.model_loaders.manifests import manifest, shapes_of
from tests.model_loaders.test_reading import Marked

SIZES = {"1b": (24, 16, 2048, 5632, 102400), "7b": (30, 32, 4096, 11008, 102400)}
LAYOUTS = pytest.mark.parametrize("folder", [OFFICIAL, TRANSFORMERS], ids=["official", "transformers"])
UNDERSTANDING = ("vision_model.", "aligner.", "model.vision_model.", "model.aligner.")
ABSMAX = "language_model.model.layers.0.mlp.up_proj.weight.absmax"  # what bitsandbytes adds when it quantises
TEXT_HEAD = ("language_model.lm_head.", "lm_head.")


def refusal(path: Path, **more: Any) -> str:
    return chameleon.refusal(path, **{"overrides": SIZE, **more})


def one_file(folder: Path, weights: Weights, name: str = "model.safetensors") -> Path:
    """The official model with these weights, as one file in a new folder."""
    return write(folder, weights, config_of(OFFICIAL), name)


def same_weights(model: Any, other: Any) -> bool:
    ours, theirs = model.network.state_dict(), other.network.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def official() -> Any:
    return load(OFFICIAL)


@pytest.mark.parametrize("layout", ["", "_hf"])
@pytest.mark.parametrize("size", SIZES)
def test_every_published_name_is_taken_or_on_the_list_of_the_skipped(size: str, layout: str) -> None:
    shapes = shapes_of(f"janus_pro_{size}{layout}")
    names = layout_of(shapes)
    sources = key_map(shapes, names, size)
    config = read_config(shapes, sources, published_config(size), None, size)
    network = JanusNetwork(config, nn, device="meta")
    check_fit(size, {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}, shapes, sources)
    of_vq = vq_sources(shapes, names.vq)
    vq_config = VQConfig.of_decoder({name: shapes[parts[0]] for name, parts in of_vq.items()})
    vq = VQDecoder(vq_config, device="meta")
    check_fit("VQ", {name: tuple(tensor.shape) for name, tensor in vq.state_dict().items()}, shapes, of_vq)
    taken = {name for parts in (*sources.values(), *of_vq.values()) for name in parts}
    skipped = (*names.skipped, *(names.vq + part for part in SKIPPED_OF_VQ))
    assert set(needed(shapes)) - taken == {name for name in needed(shapes) if name.startswith(skipped)}
    assert set(shapes) - set(needed(shapes)) <= {"gen_vision_model.quantize.codebook_used"}
    transformer = config.transformer
    assert (*SIZES[size],) == (
        transformer.layers,
        transformer.heads,
        transformer.dim,
        transformer.ffn_dim,
        transformer.vocabulary,
    )
    assert (config.codes, config.code_channels, vq_config.factor) == (16384, 8, 16)
    assert (transformer.norm_eps, transformer.rope_base, transformer.rope_pairing) == (1e-6, 1e4, "halves")
    family = family_of(shapes)
    assert family is not None and family.title == "Janus"


def published_config(size: str) -> dict[str, Any]:
    return manifest(f"janus_pro_{size}")["_meta"]["config"]


def test_what_the_published_configs_say_of_heads() -> None:
    assert published_config("1b")["language_config"]["num_attention_heads"] == 16
    assert "num_attention_heads" not in published_config("7b")["language_config"]


@pytest.mark.parametrize("size", SIZES)
def test_without_a_config_the_published_sizes_tell_the_heads(size: str) -> None:
    shapes = shapes_of(f"janus_pro_{size}")
    config = read_config(shapes, key_map(shapes, layout_of(shapes), size), {}, None, size)
    assert config.transformer.heads == SIZES[size][1]
    assert (config.transformer.norm_eps, config.transformer.rope_base) == (1e-6, 1e4)


def test_without_a_config_other_sizes_are_refused(tmp_path: Path, official: Any) -> None:
    folder = write(tmp_path / "janus", weights_of(OFFICIAL), {})
    (folder / "config.json").unlink()
    assert "no config.json beside it, and nothing else tells how many heads its 2 layers of 64" in refusal(folder)
    assert same_weights(load(folder, overrides={**SIZE, "heads": 4}), official)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    assert "64 channels wide, which do not divide into 5 heads" in refusal(OFFICIAL, overrides={**SIZE, "heads": 5})


@pytest.mark.parametrize(
    "language, base",
    [({"rope_theta": 5e5}, 5e5), ({"rope_parameters": {"rope_theta": 3e5}}, 3e5), ({"rope_parameters": None}, 1e4)],
)
@pytest.mark.parametrize("section", ["language_config", "text_config"])
def test_what_the_config_says_of_the_language_model_counts(
    tmp_path: Path, section: str, language: dict[str, Any], base: float
) -> None:
    config = {section: {"num_attention_heads": 8, "rms_norm_eps": 1e-3, **language}}
    model = load(write(tmp_path / "janus", weights_of(OFFICIAL), config))
    read = model.network.config
    assert (read.heads, read.norm_eps, read.rope_base) == (8, 1e-3, base)


@pytest.mark.parametrize("size", SIZES)
def test_published_models_draw_576_codes(size: str) -> None:
    assert read_size(None, published_config(size)) == read_size(None, {}) == 24 * 16


def test_the_size_stands_in_the_config_of_either_layout_or_is_stated() -> None:
    assert load(TRANSFORMERS, overrides={}).size == 64
    assert load(OFFICIAL, overrides={}).size == 32
    assert load(OFFICIAL, overrides=SIZE).size == 64
    for size in (24, -16):
        assert f"The size {size} is none that Janus draws" in refusal(OFFICIAL, overrides={"size": size})


@LAYOUTS
def test_only_what_painting_needs_is_read(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    names = names_read(monkeypatch)
    load(folder)
    skipped = (*UNDERSTANDING, *TEXT_HEAD)
    assert names and not [name for name in names if name.startswith(skipped)]
    assert not [name for name in names if ".encoder." in name or ".quant_conv." in name]
    names.clear()
    assert load(folder, with_vq=False).vq is None
    assert not [name for name in names if name.startswith(layout_of(weights_of(folder)).vq)]


def test_a_model_without_its_understanding_loads(tmp_path: Path, official: Any) -> None:
    skipped = (*UNDERSTANDING, *TEXT_HEAD)
    weights = {name: tensor for name, tensor in weights_of(OFFICIAL).items() if not name.startswith(skipped)}
    assert same_weights(load(one_file(tmp_path / "janus", weights)), official)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "janus_pro.safetensors"])
def test_one_file_holds_the_same_as_shards(tmp_path: Path, official: Any, name: str) -> None:
    folder = one_file(tmp_path / "janus", weights_of(OFFICIAL))
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
        torch.save(weights_of(OFFICIAL), folder / name)
    else:
        (folder / "model.safetensors").rename(folder / name)
    for path in (folder, folder / name):
        assert same_weights(load(path), official)


def test_every_file_of_a_sharded_set_stands_for_it(official: Any) -> None:
    for name in ("pytorch_model.bin.index.json", "pytorch_model-00002-of-00002.bin"):
        assert same_weights(load(OFFICIAL / name), official)


def test_it_is_no_matter_which_weight_lies_in_which_shard(tmp_path: Path, official: Any) -> None:
    folder = write(tmp_path / "janus", {}, config_of(OFFICIAL))
    (folder / "model.safetensors").unlink()
    weights = weights_of(OFFICIAL)
    places = {name: f"model-{number % 3 + 1:05d}-of-00003.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert same_weights(load(folder), official)


def test_of_both_kinds_of_shards_the_safetensors_are_taken(tmp_path: Path) -> None:
    folder = shutil.copytree(OFFICIAL, tmp_path / "janus")
    weights = weights_of(OFFICIAL)
    weights["language_model.model.norm.weight"] = torch.full((64,), 7.0, dtype=torch.bfloat16)
    halves = {"model-00001-of-00002.safetensors": "language_model.", "model-00002-of-00002.safetensors": ""}
    places: dict[str, str] = {}
    for file, prefix in halves.items():
        part = {name: tensor for name, tensor in weights.items() if name.startswith(prefix) and name not in places}
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert load(folder).network.norm.weight[0] == 7.0


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(OFFICIAL, tmp_path / "janus")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    for path in (folder, folder / "pytorch_model.bin.index.json", folder / "pytorch_model-00001-of-00002.bin"):
        assert "pytorch_model-00002-of-00002.bin is missing" in refusal(path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", [None, torch.float16, torch.bfloat16, torch.float32])
def test_precision(tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None) -> None:
    weights = {name: tensor.to(stored) for name, tensor in weights_of(OFFICIAL).items()}
    model = load(one_file(tmp_path / "janus", weights), dtype=asked)
    assert {weight.dtype for weight in model.network.parameters()} == {model.dtype} == {asked or stored}
    assert {weight.dtype for weight in model.vq.parameters()} == {torch.float32}
    session = model.session(model.condition([256, 72, 258], 257), 1, True, 4)
    logits = session.forward(torch.zeros(1, 4, dtype=torch.long), torch.tensor([-1]))
    assert logits.dtype == torch.float32 and logits.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq",
        "language_model.model.layers.0._extra_state",
        "gen_vision_model.quantize.codebook_used",
        "num_batches_tracked",
        "loss.discriminator.weight",
    ],
)
def test_leftovers_of_training_are_ignored(tmp_path: Path, official: Any, name: str) -> None:
    weights = {**weights_of(OFFICIAL), name: torch.zeros(4)}
    assert same_weights(load(one_file(tmp_path / "janus", weights)), official)


@pytest.mark.parametrize(
    "name",
    ["lora.weight", "model.norm.weight", "language_model.adapter.weight", "gen_head.third.weight"],
)
def test_an_unknown_weight_is_refused(tmp_path: Path, name: str) -> None:
    weights = {**weights_of(OFFICIAL), name: torch.zeros(4)}
    assert "unknown; give an unchanged checkpoint" in refusal(one_file(tmp_path / "janus", weights))


def test_packed_four_bit_weights_are_refused(tmp_path: Path) -> None:
    weights = {**weights_of(OFFICIAL), ABSMAX: torch.zeros(4)}
    assert "is quantised by bitsandbytes" in refusal(one_file(tmp_path / "janus", weights))


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.model.layers.0.mlp.gate_proj.weight",
        "gen_embed.weight",
        "gen_aligner.layers.2.bias",
        "gen_head.output_mlp_projector.bias",
    ],
)
def test_a_missing_weight(tmp_path: Path, name: str) -> None:
    weights = weights_of(OFFICIAL)
    del weights[name]
    sentence = refusal(one_file(tmp_path / "janus", weights))
    assert "is incomplete" in sentence or "is damaged" in sentence


def without(weights: Weights, beginning: str) -> Weights:
    return {name: tensor for name, tensor in weights.items() if not name.startswith(beginning)}


@pytest.mark.parametrize("lost", ["", "quantize.embedding.weight", "decoder.conv_in.weight", "decoder.conv_blocks."])
def test_a_missing_vq(tmp_path: Path, official: Any, lost: str) -> None:
    weights = without(weights_of(OFFICIAL), f"gen_vision_model.{lost}")
    folder = one_file(tmp_path / "janus", weights)
    sentence = refusal(folder)
    assert "the VQ that turns its codes into pictures, gen_vision_model.*, is missing" in sentence
    assert same_weights(load(folder, with_vq=False), official)  # a draft model needs none
    assert load(folder, vq_path=OFFICIAL).vq is not None


@pytest.mark.parametrize("lost", ["post_quant_conv.bias", "decoder.mid.1.q.weight", "decoder.norm_out.weight"])
def test_a_vq_with_a_hole(tmp_path: Path, lost: str) -> None:
    weights = without(weights_of(OFFICIAL), f"gen_vision_model.{lost}")
    assert f"{lost} is missing" in refusal(one_file(tmp_path / "janus", weights))


def test_another_vq_may_be_chosen(tmp_path: Path, official: Any) -> None:
    changed = {name: tensor.float() for name, tensor in weights_of(OFFICIAL).items()}
    changed["gen_vision_model.post_quant_conv.bias"].fill_(7.0)
    alone = {
        name.removeprefix("gen_vision_model."): tensor
        for name, tensor in changed.items()
        if name.startswith("gen_vision_model.")
    }
    torch.save({"model": alone}, tmp_path / "vq_ds16_t2i.pt")
    for path in (one_file(tmp_path / "janus", changed), tmp_path / "vq_ds16_t2i.pt"):
        assert load(TRANSFORMERS, vq_path=path).vq.post_quant_conv.bias[0] == 7.0


def test_a_vq_of_another_kind_is_refused() -> None:
    assert "makes 8 pixels of a code and Janus was trained with 16" in refusal(
        OFFICIAL, vq_path=GOLDEN / "llamagen" / "vq_tiny.pt"
    )
    sentence = refusal(OFFICIAL, vq_path=LUMINA / "chameleon" / "tokenizer" / "vqgan.ckpt")
    assert "is something else, not the VQ tokenizer" in sentence and "deepseek-ai/Janus-Pro-1B" in sentence


@pytest.mark.parametrize("name", ["c2i_B_256.safetensors", "Emu3-Gen.safetensors", "vq_ds16_c2i.safetensors"])
@LAYOUTS
def test_detection_ignores_names(tmp_path: Path, folder: Path, name: str) -> None:
    copy = write(tmp_path / "Lumina-mGPT-7B-768", weights_of(folder), config_of(folder), name)
    assert load(copy).family == "janus"
    assert load(copy / name).vocabulary == 256


def test_the_prefixes_of_distributed_training_are_no_matter(tmp_path: Path, official: Any) -> None:
    weights = {f"module.{name}": tensor for name, tensor in weights_of(OFFICIAL).items()}
    assert same_weights(load(one_file(tmp_path / "janus", weights)), official)


@LAYOUTS
def test_every_weight_sits_on_a_leaf_made_by_operations(folder: Path) -> None:
    model = load(folder, operations=Marked)
    kinds = (Marked.Linear, Marked.Embedding, Marked.RMSNorm, Marked.GroupNorm, Marked.Conv2d)
    for network in (model.network, model.vq):
        assert not list(network.buffers())
        for module in network.modules():
            if list(module.parameters(recurse=False)):
                assert isinstance(module, kinds) and not list(module.children())
        assert not any(parameter.requires_grad or parameter.is_meta for parameter in network.parameters())
