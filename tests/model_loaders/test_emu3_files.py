"""All the ways in which Emu3's files and companions lie about, and what is refused of them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speculative_ar.model_loaders import CheckpointError
from speculative_ar.model_loaders.detect import family_of
from speculative_ar.model_loaders.emu3 import Emu3Network
from speculative_ar.model_loaders.emu3_files import is_emu3_vq, key_map, read_config, read_ids, reshapes
from speculative_ar.model_loaders.emu3_vq import Emu3VQ, Emu3VQConfig, vq_reshapes, vq_sources
from speculative_ar.model_loaders.weights import check_fit
from tests.model_loaders.chameleon import ANOLE, LUMINA, config_of, names_read, weights_of, write
from tests.model_loaders.emu3 import (
    GEN,
    VQ,
    Weights,
    as_transformers_has_it,
    downloaded,
    in_transformers,
    load,
    transformers_config,
    vq_weights,
    write_in_transformers_layout,
    write_tokenizer_json,
    write_with_official_vocabulary,
)
from tests.model_loaders.manifests import shapes_of
from tests.model_loaders.test_reading import Marked


def refusal(path: Path, **more: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, **more)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def same_weights(network: nn.Module, other: nn.Module) -> bool:
    pairs = zip(network.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.fixture(scope="module")
def emu3() -> Any:
    return load(GEN)


# The released files at full size


@pytest.mark.parametrize("manifest", ["emu3_gen", "emu3_gen_hf"])
def test_every_name_of_the_released_model_is_taken(manifest: str) -> None:
    shapes = shapes_of(manifest)
    sources = key_map(shapes, manifest)
    config = read_config(shapes, sources, {}, None, manifest)
    ids = read_ids({}, config.vocabulary, manifest)
    network = Emu3Network(config, ids, 32768, device="meta")
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    check_fit(manifest, expected, shapes, sources, reshapes(ids, 32768))
    left = set(shapes) - {name for parts in sources.values() for name in parts}
    assert all(name.startswith("model.vqmodel.") for name in left) and len(shapes) - len(left) == 291
    assert expected["output.weight"] == (32768, 4096)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (32, 32, 8, 128)
    assert (config.dim, config.ffn_dim, config.vocabulary) == (4096, 14336, 184622)
    assert (config.rope_base, config.rope_pairing, config.norm_eps, config.qk_norm) == (1e6, "halves", 1e-5, False)
    family = family_of(shapes)
    assert family is not None and family.title == "Emu3"


@pytest.mark.parametrize("manifest, prefix", [("emu3_visionvq", ""), ("emu3_gen_hf", "model.vqmodel.")])
def test_of_the_released_vq_all_but_the_encoder_is_taken(manifest: str, prefix: str) -> None:
    shapes = shapes_of(manifest)
    assert is_emu3_vq(shapes)
    sources = vq_sources(shapes, prefix)
    config = Emu3VQConfig.of_decoder({name: shapes[parts[0]] for name, parts in sources.items()})
    expected = {name: tuple(tensor.shape) for name, tensor in Emu3VQ(config, device="meta").state_dict().items()}
    check_fit(manifest, expected, shapes, sources, vq_reshapes(sources))
    taken = {name for parts in sources.values() for name in parts}
    left = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix) and name not in taken]
    assert all(name.startswith(("encoder.", "quant_conv.")) or name.endswith("num_batches_tracked") for name in left)
    assert (config.codebook_size, config.channels, config.factor) == (32768, 4, 8)
    assert (config.widths, config.blocks, config.attending) == ((256, 512, 512, 1024), 3, (3,))


def test_the_vq_alone_is_no_model() -> None:
    assert family_of(shapes_of("emu3_visionvq")) is None
    assert "is a VQ tokenizer" in refusal(VQ)


def test_the_tests_write_transformers_layout_as_it_is() -> None:
    official = {**shapes_of("emu3_gen"), **shapes_of("emu3_visionvq")}
    assert set(in_transformers(official).values()) == set(shapes_of("emu3_gen_hf"))


def test_ids_as_published() -> None:
    ids = read_ids({}, 184622, "Emu3-Gen")
    assert (ids.begin, ids.image_begin, ids.image, ids.first_code) == (151849, 151852, 151851, 151854)
    assert ids.structure == (151846, 151847, 151853, 151850)


def test_config_json_tells_ids_by_their_keys_or_in_a_vocabulary() -> None:
    official, transformers = (read_ids(config, 521, "tiny") for config in (config_of(GEN), transformers_config()))
    assert official == transformers and official.first_code == 265 and official.structure == (257, 258, 264, 261)


@pytest.mark.parametrize("text", [{"rope_theta": 5e2}, {"rope_parameters": {"rope_theta": 5e2}}])
def test_config_json_tells_what_shapes_do_not(text: dict[str, Any]) -> None:
    shapes = shapes_of("emu3_gen")
    told = {"num_attention_heads": 64, "rms_norm_eps": 1e-6, **text}
    config = read_config(shapes, key_map(shapes, ""), told, None, "")
    assert (config.heads, config.kv_heads, config.norm_eps, config.rope_base) == (64, 16, 1e-6, 500.0)


# The layouts


def test_detection_ignores_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "Lumina-mGPT-7B-768", weights_of(GEN), config_of(GEN), "vq_anole.safetensors")
    shutil.copy(VQ / "model.safetensors", folder / "Emu3-Gen.safetensors")
    model = load(folder)  # the only model in the folder, and the only VQ beside it
    assert model.family == "emu3" and model.vq is not None


@pytest.mark.parametrize("older", [False, True])
def test_transformers_layout_is_the_same_model(tmp_path: Path, emu3: Any, older: bool) -> None:
    model = load(write_in_transformers_layout(tmp_path / "emu3", older))
    assert same_weights(model.network, emu3.network) and same_weights(model.vq, emu3.vq)


def test_config_json_of_transformers_may_leave_out_what_is_usual(tmp_path: Path) -> None:
    """It holds what differs from its class alone; the usual heads go with the usual width."""
    shapes = shapes_of("emu3_gen_hf")
    assert read_config(shapes, key_map(shapes, ""), {}, None, "").heads == 32
    config = transformers_config()
    del config["text_config"]["num_attention_heads"]
    folder = write(tmp_path / "emu3", as_transformers_has_it(), config)
    assert "is 64 channels wide, with 32 for its keys, and its config.json tells no number" in refusal(folder)
    assert load(folder, overrides={"heads": 4}).network.config.kv_heads == 2


def test_weights_are_cast_one_by_one_and_the_vq_stays_exact(emu3: Any) -> None:
    model = load(GEN, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.network.parameters()} == {torch.bfloat16}
    assert torch.equal(
        model.network.layers[0].attention.wqkv.weight, emu3.network.layers[0].attention.wqkv.weight.bfloat16()
    )
    assert {weight.dtype for weight in model.vq.parameters()} == {torch.float32}
    assert load(GEN, dtype=None).dtype == torch.float32  # the file's own


def test_of_the_head_the_rows_of_the_codes_are_kept(emu3: Any) -> None:
    weight = emu3.network.output.weight
    assert torch.equal(weight, weights_of(GEN)["lm_head.weight"][265:])
    assert weight.untyped_storage().nbytes() == weight.nbytes


def test_rows_of_padding_behind_the_codes_are_none(tmp_path: Path) -> None:
    """A published vocabulary that was made a round number long."""
    weights, rows = weights_of(GEN), 265 + 32768 + 23
    weights |= {name: torch.zeros(rows, 64) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    folder = write(tmp_path / "emu3", weights, {**config_of(GEN), "vocab_size": rows})
    assert load(folder, with_vq=False).vocabulary == 32768


def encoder() -> Weights:
    """One number under each name that the released vision tokenizer has and that painting does not need."""
    names = [name for name in shapes_of("emu3_visionvq") if name.startswith(("encoder.", "quant_conv."))]
    return dict.fromkeys(names, torch.zeros(1))


def test_the_encoder_is_never_read(tmp_path: Path, emu3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "vq", {name: tensor.clone() for name, tensor in {**vq_weights(), **encoder()}.items()}, {})
    names = names_read(monkeypatch)
    assert same_weights(load(GEN, vq_path=tmp_path / "vq").vq, emu3.vq)
    assert not [name for name in names if name.startswith(("encoder.", "quant_conv."))]


def test_without_a_vq_nothing_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_in_transformers_layout(tmp_path / "emu3")
    names = names_read(monkeypatch)
    model = load(folder, with_vq=False)
    assert model.vq is None and model.tokenizer is None
    assert not [name for name in names if "vqmodel" in name]


def test_a_shard_stands_for_the_whole() -> None:
    assert load(GEN / "model-00002-of-00002.safetensors", with_vq=False).network.config.layers == 2


def test_every_weight_sits_on_a_leaf_made_by_operations() -> None:
    model = load(GEN, operations=Marked)
    kinds = tuple(vars(Marked)[name] for name in ("Linear", "Embedding", "RMSNorm", "GroupNorm", "Conv2d"))
    for network in (model.network, model.vq):
        assert not list(network.buffers())
        assert all(isinstance(leaf, kinds) for leaf in network.modules() if list(leaf.parameters(recurse=False)))


# Companions


@pytest.mark.parametrize("place", [".", "Emu3-VisionTokenizer", "../Emu3-VisionTokenizer"])
def test_the_vq_is_found_where_people_have_it(tmp_path: Path, emu3: Any, place: str) -> None:
    folder = downloaded(tmp_path / "Emu3-Gen")
    home = folder / place
    home.mkdir(exist_ok=True)
    shutil.copy(VQ / "model.safetensors", home)
    assert same_weights(load(folder).vq, emu3.vq)


def test_the_vq_may_be_chosen(tmp_path: Path, emu3: Any) -> None:
    folder = downloaded(tmp_path / "Emu3-Gen")
    transformers = write(tmp_path / "Emu3-Gen-hf", as_transformers_has_it(), transformers_config())
    for chosen in (VQ, VQ / "model.safetensors", transformers):
        assert same_weights(load(folder, vq_path=chosen).vq, emu3.vq)


def test_a_chosen_vq_takes_the_place_of_the_one_inside(tmp_path: Path, emu3: Any) -> None:
    other = {name: tensor + 1 if name == "decoder.conv_out.bias" else tensor for name, tensor in vq_weights().items()}
    folder = write(tmp_path / "emu3", as_transformers_has_it(vq=other), transformers_config())
    assert torch.equal(load(folder).vq.decoder.conv_out.bias, emu3.vq.decoder.conv_out.bias + 1)
    assert torch.equal(load(folder, vq_path=VQ).vq.decoder.conv_out.bias, emu3.vq.decoder.conv_out.bias)


def test_a_missing_vq_is_named_with_its_source_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = downloaded(tmp_path / "Emu3-Gen")
    names = names_read(monkeypatch)
    assert f"put model.safetensors from BAAI/Emu3-VisionTokenizer into {folder}, or choose it" in refusal(folder)
    assert not names
    assert load(folder, with_vq=False).vq is None


def test_what_is_no_vq_of_emu3() -> None:
    other = LUMINA / "chameleon" / "tokenizer" / "vqgan.ckpt"
    sentence = refusal(GEN, vq_path=other)
    assert "vqgan.ckpt is something else, not the VQ tokenizer" in sentence
    assert "choose model.safetensors from BAAI/Emu3-VisionTokenizer" in sentence
    assert "is a model, not the VQ tokenizer" in refusal(GEN, vq_path=GEN)


def test_a_vq_of_other_codes(tmp_path: Path) -> None:
    weights = {**vq_weights(), "quantize.embedding.weight": torch.zeros(512, 4)}
    assert "has 512 codes and the model model-00001-of-00002.safetensors 256" in refusal(
        GEN, vq_path=write(tmp_path / "vq", weights, {})
    )
    inside = write(tmp_path / "emu3", as_transformers_has_it(vq=weights), transformers_config())
    assert "has 512 codes of 8 pixels and the model 256 of 8; choose model.safetensors" in refusal(inside)


def test_a_vq_of_another_scale(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in vq_weights().items() if not name.startswith("decoder.up.3.")}
    del weights["decoder.up.2.upsample.conv.weight"], weights["decoder.up.2.upsample.conv.bias"]
    assert "has 256 codes of 4 pixels" in refusal(GEN, vq_path=write(tmp_path / "vq", weights, {}))


@pytest.mark.parametrize("name", ["decoder.mid.attn_1.q.weight", "decoder.time_res_stack.1.norm2.running_mean"])
def test_an_incomplete_vq(tmp_path: Path, name: str) -> None:
    weights = vq_weights()
    del weights[name]
    sentence = refusal(GEN, vq_path=write(tmp_path / "vq", weights, {}))
    assert "is incomplete" in sentence or "is damaged" in sentence


def test_a_missing_tokenizer_is_no_obstacle_and_a_wrong_one_is(tmp_path: Path) -> None:
    folder = write_with_official_vocabulary(tmp_path / "Emu3-Gen")
    other = write_tokenizer_json(tmp_path, ("<|extra_203|>", "<|image start|>"))
    sentence = refusal(folder, text_encoder_path=other)
    assert "is not the tokenizer of" in sentence and "<|extra_203|> has the id 256 and must have 462" in sentence
    (folder / "emu3.tiktoken").write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    assert "emu3.tiktoken is damaged" in refusal(folder)
    (folder / "emu3.tiktoken").unlink()
    assert load(folder).tokenizer is None


def test_the_official_vocabulary_comes_before_a_converted_one(tmp_path: Path) -> None:
    folder = write_with_official_vocabulary(tmp_path / "Emu3-Gen")
    write_tokenizer_json(folder)
    assert load(folder).tokenizer.id("<|image start|>") == 465


def test_a_folder_without_a_tokenizer_names_both_files(tmp_path: Path) -> None:
    assert "choose a folder with emu3.tiktoken or tokenizer.json in it" in refusal(GEN, text_encoder_path=tmp_path)


# What is refused, and what is said of kin


def test_emu3_chat_is_loaded_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its names and shapes are those of Emu3-Gen; its config.json differs."""
    config = {**config_of(GEN), "max_position_embeddings": 131072, "image_area": 262144}
    folder = write(tmp_path / "Emu3-Gen", weights_of(GEN), config)
    with caplog.at_level(logging.WARNING):
        assert load(folder, vq_path=VQ).area == 512 * 512
    assert "Emu3-Gen is Emu3-Chat, which was trained to talk about pictures" in caplog.text
    caplog.clear()
    load(GEN)
    assert not caplog.records


def test_emu3_5_is_another_network(tmp_path: Path) -> None:
    weights = {**weights_of(GEN), "model.embed_tokens.weight": torch.zeros(282926, 1)}
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(16)
    assert "is Emu3.5, whose network and vision tokenizer are others" in refusal(
        write(tmp_path / "Emu3-Gen", weights, config_of(GEN))
    )


def test_a_language_model_with_the_same_names(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    sentence = refusal(write(tmp_path / "Emu3-Gen", weights_of(GEN), config))
    assert "is a language model of which nothing tells how it paints: its config.json has no boi_token_id" in sentence
    assert "give BAAI/Emu3-Gen" in sentence


@pytest.mark.parametrize("foreign", ["q_norm.weight", "q_proj.bias"])
def test_other_language_models_are_of_no_family(tmp_path: Path, foreign: str) -> None:
    weights = {**weights_of(GEN), f"model.layers.0.self_attn.{foreign}": torch.zeros(16)}
    assert "is of no supported family" in refusal(write(tmp_path / "qwen", weights, config_of(GEN)))


def test_the_neighbours_are_not_emu3() -> None:
    assert [load(folder, with_vq=False).family for folder in (LUMINA, ANOLE)] == ["lumina-mgpt", "anole"]


def test_packed_weights(tmp_path: Path) -> None:
    weights, name = weights_of(GEN), "model.layers.0.self_attn.o_proj.weight"
    weights |= {name: torch.zeros(2048, 1, dtype=torch.uint8), f"{name}.absmax": torch.ones(32)}
    sentence = refusal(write(tmp_path / "Emu3-Gen-4bit", weights, config_of(GEN)))
    assert "is quantised by bitsandbytes, whose packed weights are not supported" in sentence


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_missing_weight(tmp_path: Path, name: str) -> None:
    for official in (True, False):
        weights = weights_of(GEN) if official else as_transformers_has_it()
        del weights[name if official else in_transformers([name])[name]]
        config = config_of(GEN) if official else transformers_config()
        sentence = refusal(write(tmp_path / str(official), weights, config), vq_path=VQ)
        assert "is incomplete" in sentence or "is damaged" in sentence


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = downloaded(tmp_path / "Emu3-Gen")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder)


def test_an_unknown_weight(tmp_path: Path) -> None:
    weights = {**weights_of(GEN), "model.layers.0.self_attn.sink": torch.zeros(1)}
    folder = write(tmp_path / "emu3", weights, config_of(GEN))
    assert "layers.0.self_attn.sink is unknown" in refusal(folder, vq_path=VQ)


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    folder = write(tmp_path / "emu3", weights_of(GEN), {**config_of(GEN), "num_attention_heads": 12})
    assert "tells 12 heads, which do not divide that; take the config.json" in refusal(folder)
