"""Lumina-mGPT against its own code, and all the ways in which its files and companions lie about."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from speculative_ar import model_loaders
from speculative_ar.decoders import SamplerSettings, generate
from speculative_ar.model_loaders.chameleon import ChameleonNetwork
from speculative_ar.model_loaders.chameleon_files import (
    is_chameleon_vq,
    key_map,
    read_config,
    read_ids,
    reshapes,
    vq_sources,
)
from speculative_ar.model_loaders.detect import family_of
from speculative_ar.model_loaders.vq import VQConfig, VQDecoder
from speculative_ar.model_loaders.weights import check_fit
from tests.model_loaders.chameleon import (
    ANOLE,
    CODES,
    FIRST_CODE,
    IMAGE_END,
    LOGITS,
    LUMINA,
    PICTURES,
    ROW_END,
    SIZE,
    VQGAN,
    Weights,
    codes_of,
    config_of,
    logits,
    names_read,
    plain_logits,
    refusal,
    weights_of,
    without_vq,
    write,
    write_tokenizer,
)
from tests.model_loaders.manifests import shapes_of
from tests.model_loaders.test_reading import Marked

GUIDANCE = 4.0
HEIGHT, WIDTH = 2, 3  # the golden's picture, in units of 32 pixels


def load(path: Path, **more: Any) -> Any:
    return model_loaders.load(path, **{"overrides": SIZE, "dtype": torch.float32, **more})


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(LUMINA / "golden.safetensors")


@pytest.fixture(scope="module")
def lumina() -> Any:
    return load(LUMINA)


@pytest.fixture(scope="module")
def condition(lumina: Any, golden: dict[str, Tensor]) -> Any:
    return lumina.condition(golden["prompt"].tolist(), HEIGHT, WIDTH)


def test_the_prompt_ends_with_the_size_and_the_unconditional_stream_has_nothing_else(
    condition: Any, golden: dict[str, Tensor]
) -> None:
    assert list(condition.ids) == golden["sequence"][: -len(golden["generated"])].tolist()
    assert condition.unconditional == (8197, 8804 + HEIGHT, 8804 + WIDTH)


def test_rows_end_with_structure_and_so_does_the_picture(condition: Any, golden: dict[str, Tensor]) -> None:
    forced = condition.layout.forced
    assert torch.equal(codes_of(golden["generated"])[forced >= 0], forced[forced >= 0])
    assert (forced >= 0).nonzero()[:, 0].tolist() == [6, 13, 20, 27, 28]
    assert condition.layout.grid == (1, 4, 6)
    assert torch.equal(condition.layout.cells(codes_of(golden["generated"])[None])[0, 0], golden["vq_ids"])


@pytest.mark.parametrize("window", [1, 5, 29])
def test_logits(lumina: Any, condition: Any, golden: dict[str, Tensor], window: int) -> None:
    computed = logits(lumina, condition, codes_of(golden["generated"]), window)
    for stream, name in enumerate(("cond", "uncond")):
        expected = golden[f"logits_{name}_image_range"]
        torch.testing.assert_close(computed[stream, :, :512], expected, atol=LOGITS, rtol=0)
    conditional, unconditional = computed
    guided = unconditional + GUIDANCE * (conditional - unconditional)
    torch.testing.assert_close(guided[:, :512], golden["logits_cfg4_image_range"], atol=LOGITS * GUIDANCE, rtol=0)
    for row, step in enumerate(golden["rows_full"]):
        expected = golden["logits_cond_rows"][row, FIRST_CODE : FIRST_CODE + CODES]
        torch.testing.assert_close(conditional[step], expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("name, guidance", [("sequence", GUIDANCE), ("sequence_nocfg", 1.0)])
@pytest.mark.parametrize("decoder", ["ar", "seed-exact", "sjd"])
def test_greedy_tokens(
    lumina: Any, condition: Any, golden: dict[str, Tensor], decoder: str, name: str, guidance: float
) -> None:
    settings = SamplerSettings(decoder, draft_length=9, guidance_scale=guidance, temperature=0)
    tokens = generate(lumina, condition, settings).tokens[0]
    assert tokens.tolist() == codes_of(golden[name][-len(golden["generated"]) :]).tolist()


def test_picture(lumina: Any, condition: Any, golden: dict[str, Tensor]) -> None:
    tokens = codes_of(golden["generated"])[None]
    torch.testing.assert_close(lumina.pixels(tokens, condition.layout), golden["image"], atol=PICTURES, rtol=0)
    shown = lumina.decode(tokens, condition.layout)[0]
    assert shown.shape == (64, 96, 3)
    assert ((shown * 255).int() - golden["image_u8_hwc"].int()).abs().max() <= 1


def test_code_vectors_are_those_of_the_file(lumina: Any) -> None:
    table = torch.load(VQGAN, weights_only=True)["state_dict"]["quantize.embedding.weight"]
    assert torch.equal(lumina.code_embeddings(), table)
    assert lumina.vq.config.factor == 16


def test_the_file_decides_the_precision_and_the_vq_stays_exact() -> None:
    model = load(LUMINA, dtype=None)
    assert model.dtype == torch.bfloat16 == model.network.output.weight.dtype
    assert {weight.dtype for weight in model.vq.parameters()} == {torch.float32}


# Sizes


@pytest.mark.parametrize(
    "folder, size", [("Lumina-mGPT-7B-512", 512), ("Lumina-mGPT-7B-768-Omni", 768), ("lumina_1024", 1024)]
)
def test_the_name_of_the_folder_tells_the_size(tmp_path: Path, folder: str, size: int) -> None:
    model = load(without_vq(tmp_path / folder), overrides={}, with_vq=False)
    assert (model.name, model.size) == (folder, size)


def test_config_json_may_tell_the_size_as_well(tmp_path: Path) -> None:
    config = {**config_of(LUMINA), "_name_or_path": "Alpha-VLLM/Lumina-mGPT-7B-1024"}
    folder = write(tmp_path / "mine", weights_of(LUMINA), config)
    assert load(folder, overrides={}, with_vq=False).size == 1024


def test_a_stated_size_comes_first_and_768_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = without_vq(tmp_path / "Lumina-mGPT-7B-512")
    assert load(folder, overrides={"size": 1024}, with_vq=False).size == 1024
    assert "The size 700" in refusal(folder, overrides={"size": 700})
    folder = folder.rename(tmp_path / "renamed-a512b")  # digits inside a word, as in a commit's hash, tell nothing
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert load(folder, overrides={}, with_vq=False).size == 768
    assert "renamed-a512b was trained for: 768 x 768 pixels are taken" in caplog.text


@pytest.fixture(scope="module")
def of_768(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = without_vq(tmp_path_factory.mktemp("lumina") / "Lumina-mGPT-7B-768")
    write_tokenizer(folder)
    return load(folder, overrides={}, with_vq=True, vq_path=VQGAN)


@pytest.mark.parametrize(
    "width, height, rows, columns",
    [(0, 0, 48, 48), (1024, 576, 36, 64), (384, 1536, 96, 24), (64, 96, 6, 4), (512, 0, 48, 32)],
)
def test_allowed_sizes(of_768: Any, width: int, height: int, rows: int, columns: int) -> None:
    layout = of_768.prompt("a red fox", width=width, height=height).layout
    assert layout.grid == (1, rows, columns)
    assert layout.positions == rows * (columns + 1) + 1


@pytest.mark.parametrize(
    "width, height, nearest",
    [
        (1024, 1024, "768 x 768"),
        (1920, 1080, "1024 x 576"),
        (770, 760, "768 x 768"),
        (2048, 128, "1024 x 256"),
        (8, 8, "32 x 32"),
        (3000, 0, "1536 x 384"),
    ],
)
def test_an_impossible_size_names_the_nearest(of_768: Any, width: int, height: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {width} x .* the nearest size is {nearest}: both sides are"):
        of_768.prompt("a red fox", width=width, height=height)


@pytest.mark.parametrize("size, positions", [(512, 1057), (768, 2353), (1024, 4161)])
def test_the_released_sizes_have_the_released_lengths(of_768: Any, size: int, positions: int) -> None:
    units = size // 32
    assert of_768.condition([0], units, units).layout.positions == positions


# Prompt and ids

SENTENCE = (0, *range(8720, 8724), 8734, *range(8724, 8730))  # "Generate an image of 96x64 according to ... prompt:"
BEGIN = (8197, 8804 + 2, 8804 + 3)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = without_vq(tmp_path_factory.mktemp("lumina") / "lumina")
    write_tokenizer(folder)
    return load(folder, vq_path=VQGAN)


def test_the_prompt_says_the_size_between_one_bos_and_the_end_of_the_turn(told: Any) -> None:
    prompt = told.prompt("a red fox", width=96, height=64)
    assert prompt.text == "Generate an image of 96x64 according to the following prompt:\na red fox"
    assert prompt.ids == (*SENTENCE, 8730, 8731, 8732, 8710, *BEGIN)
    assert prompt.unconditional == BEGIN


def test_a_negative_prompt_takes_the_place_of_the_bare_stream(told: Any) -> None:
    prompt = told.prompt("a red fox", negative="rain", width=96, height=64)
    assert prompt.unconditional == (*SENTENCE, 8737, 8710, *BEGIN)
    assert told.prompt("a red fox", negative="  ", width=96, height=64).unconditional == BEGIN


def test_the_tokenizer_may_be_chosen(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for chosen in (tmp_path, tmp_path / "tokenizer.json"):
        model = load(LUMINA, text_encoder_path=chosen)
        assert model.prompt("a red fox", width=96, height=64).ids == (*SENTENCE, 8730, 8731, 8732, 8710, *BEGIN)


def test_without_a_tokenizer_it_loads_and_says_what_to_fetch(lumina: Any) -> None:
    with pytest.raises(ValueError, match=r"put tokenizer\.json from Alpha-VLLM/Lumina-mGPT-7B-768 into .*lumina_mgpt,"):
        lumina.prompt("a red fox")


def test_a_class_label_is_refused(lumina: Any) -> None:
    with pytest.raises(ValueError, match="takes a prompt, not a class label"):
        lumina.class_label(3)


def test_image_tokens_spell_their_code() -> None:
    ids = read_ids(config_of(LUMINA)["vocabulary_map"])
    assert ids == read_ids({})  # the published vocabulary, which is taken where no file tells
    assert ids.codes == tuple(range(FIRST_CODE, FIRST_CODE + CODES))
    assert (ids.end_of_turn, ids.image_begin, ids.image_end, ids.row_end) == (8710, 8197, 8196, ROW_END)
    assert ids.units[24] == 8828


@pytest.mark.parametrize("place", ["config.json", "beside", "chameleon/tokenizer", "../chameleon/tokenizer"])
def test_another_order_of_the_vocabulary(tmp_path: Path, golden: dict[str, Tensor], place: str) -> None:
    """Embeddings and vocabulary shuffled alike are the same model."""
    order = torch.randperm(8700, generator=torch.Generator().manual_seed(1)) + FIRST_CODE
    weights, config = weights_of(LUMINA), config_of(LUMINA)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = weights[name].clone()
        moved[order] = weights[name][FIRST_CODE : FIRST_CODE + len(order)]
        weights[name] = moved
    of = {number: number for number in range(8832)} | {FIRST_CODE + i: int(to) for i, to in enumerate(order)}
    vocabulary = {token: of[number] for token, number in config.pop("vocabulary_map").items()}
    if place == "config.json":
        config["vocabulary_map"] = vocabulary
    folder = write(tmp_path / "lumina", weights, config)
    if place != "config.json":
        home = folder / ("." if place == "beside" else place)
        home.mkdir(parents=True, exist_ok=True)
        (home / "text_tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf-8")
    model = load(folder, vq_path=VQGAN)
    prompt = model.condition([of[number] for number in golden["prompt"].tolist()], HEIGHT, WIDTH)
    assert prompt.ids[-3] == of[8197] != 8197
    computed = logits(model, prompt, codes_of(golden["generated"]), 29)
    torch.testing.assert_close(computed[0, :, :512], golden["logits_cond_image_range"], atol=LOGITS, rtol=0)


def test_a_vocabulary_without_all_codes(tmp_path: Path) -> None:
    config = config_of(LUMINA)
    del config["vocabulary_map"]["IMGIMGBCZ"]
    folder = write(tmp_path / "lumina", weights_of(LUMINA), config)
    assert "names 8191 image codes and must name 8192; download config.json again" in refusal(folder)


# The network


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_norms_of_queries_and_keys_in_any_number_of_rows(tmp_path: Path, golden: dict[str, Tensor], rows: int) -> None:
    weights = weights_of(LUMINA)
    for name, tensor in weights.items():
        if "_norm.weight" in name or "_norm.bias" in name:
            weights[name] = tensor.repeat(rows, 1)
    model = load(write(tmp_path / "lumina", weights, config_of(LUMINA)), vq_path=VQGAN)
    prompt = model.condition(golden["prompt"].tolist(), HEIGHT, WIDTH)
    computed = logits(model, prompt, codes_of(golden["generated"]), 29)
    torch.testing.assert_close(computed[0, :, :512], golden["logits_cond_image_range"], atol=LOGITS, rtol=0)


def with_rows_of_norms(weights: Weights, query_rows: int, key_rows: int) -> Weights:
    """Other scales and biases for each of so many runs of heads."""
    random = torch.Generator().manual_seed(2)
    for name, tensor in weights.items():
        if found := re.search(r"\.([qk])_norm\.", name):
            rows = query_rows if found[1] == "q" else key_rows
            weights[name] = torch.randn(rows, tensor.shape[1], generator=random)
    return weights


@pytest.mark.parametrize("theta_in", ["rope_theta", "rope_parameters"])
@pytest.mark.parametrize("swin_norm", [False, True])
def test_the_34b_kind_against_plain_formulas(tmp_path: Path, swin_norm: bool, theta_in: str) -> None:
    """Norms behind the branches, two query heads to a key head, and rows of norms for runs of heads."""
    weights = {name: tensor.float() for name, tensor in weights_of(LUMINA).items()}
    for name, tensor in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = tensor[:16].clone()
    weights = with_rows_of_norms(weights, query_rows=4, key_rows=1)
    config = {**config_of(LUMINA), "swin_norm": swin_norm}
    del config["rope_theta"]
    config[theta_in] = 500.0 if theta_in == "rope_theta" else {"rope_theta": 500.0}
    model = load(write(tmp_path / "lumina-34b", weights, config), vq_path=VQGAN)
    prompt = model.condition([0, 8750, 8751, 8710], 1, 1)
    tokens = torch.tensor([7, 8000, CODES, 3, 99, CODES, CODES + 1])
    computed = logits(model, prompt, tokens, 4)
    ids = {CODES: ROW_END, CODES + 1: IMAGE_END}
    picture = [ids.get(code, code + FIRST_CODE) for code in tokens.tolist()]
    for stream, before in zip(computed, (prompt.ids, prompt.unconditional), strict=True):
        expected = plain_logits(weights, [*before, *picture[:-1]], theta=500.0, norm_after=swin_norm)
        expected = expected[len(before) - 1 :, FIRST_CODE : FIRST_CODE + CODES]
        torch.testing.assert_close(stream, expected, atol=LOGITS, rtol=0)


def test_every_weight_sits_on_a_leaf_made_by_operations() -> None:
    model = load(LUMINA, operations=Marked)
    kinds = tuple(vars(Marked)[name] for name in ("Linear", "Embedding", "RMSNorm", "GroupNorm", "Conv2d"))
    for network in (model.network, model.vq):
        assert not list(network.buffers())
        assert all(isinstance(leaf, kinds) for leaf in network.modules() if list(leaf.parameters(recurse=False)))


def test_every_name_of_the_released_files_is_taken_at_full_size() -> None:
    shapes = shapes_of("lumina_mgpt_7b")
    config, ids, sources = read_config(shapes, {}), read_ids({}), key_map(shapes, "7B")
    network = ChameleonNetwork(config, 2, nn, device="meta")
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    check_fit("7B", expected, shapes, sources, reshapes(config, ids.codes, (ids.row_end, ids.image_end)))
    assert {name for parts in sources.values() for name in parts} == set(shapes)
    assert (config.layers, config.heads, config.cached_heads, config.head_dim) == (32, 32, 32, 128)
    assert (config.dim, config.ffn_dim, config.vocabulary, config.norm_eps, config.norm_after) == (
        *(4096, 11008, 65536, 1e-5, False),
    )
    family = family_of(shapes)
    assert family is not None and family.title == "Lumina-mGPT"


def test_of_the_released_vq_all_but_the_encoder_is_taken() -> None:
    shapes = shapes_of("chameleon_vqgan")
    assert is_chameleon_vq(shapes) and family_of(shapes) is None
    sources = vq_sources(shapes)
    config = VQConfig.of_decoder({name: shapes[parts[0]] for name, parts in sources.items()}, normalised=False)
    expected = {name: tuple(tensor.shape) for name, tensor in VQDecoder(config, device="meta").state_dict().items()}
    check_fit("VQ", expected, shapes, sources)
    left = set(shapes) - {name for parts in sources.values() for name in parts}
    assert {name.split(".")[0] for name in left} == {"encoder", "quant_conv"}
    assert config.decoder_channels == (128, 128, 256, 256, 512) and not config.attention
    assert (config.codebook_size, config.embed_dim, config.z_channels, config.factor) == (8192, 256, 256, 16)


# Files and companions


def test_detection_ignores_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "Anole-7b", weights_of(LUMINA), config_of(LUMINA), "vqgan_janus_t2i.safetensors")
    shutil.copy(VQGAN, folder / "Lumina-mGPT-7B-768.ckpt")
    model = load(folder)  # the only model in the folder, and the only VQ beside it
    assert model.family == "lumina-mgpt" and model.vq is not None


def test_a_shard_stands_for_the_whole(golden: dict[str, Tensor]) -> None:
    assert load(LUMINA / "model-00002-of-00002.safetensors", with_vq=False).network.config.layers == 2


@pytest.mark.parametrize("place", [".", "chameleon/tokenizer", "../chameleon/tokenizer"])
def test_the_vq_is_found_where_people_have_it(tmp_path: Path, lumina: Any, place: str) -> None:
    folder = without_vq(tmp_path / "lumina")
    home = folder / place
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(VQGAN, home)
    assert same_weights(load(folder).vq, lumina.vq)


def same_weights(vq: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(vq.state_dict().values(), other.state_dict().values(), strict=True))


def test_the_vq_may_be_chosen(tmp_path: Path, lumina: Any) -> None:
    folder = without_vq(tmp_path / "lumina")
    for chosen in (VQGAN, VQGAN.parent):
        assert same_weights(load(folder, vq_path=chosen).vq, lumina.vq)


@pytest.mark.parametrize("prefix", ["", "model.vqmodel.", "vqmodel."])
def test_conversions_of_the_vq(tmp_path: Path, lumina: Any, prefix: str) -> None:
    vq = torch.load(VQGAN, weights_only=True)["state_dict"]
    write(tmp_path / "vqvae-hf", {prefix + name: tensor for name, tensor in vq.items()}, {})
    assert same_weights(load(LUMINA, vq_path=tmp_path / "vqvae-hf").vq, lumina.vq)


def test_anoles_own_file_serves_as_the_vq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = without_vq(tmp_path / "lumina")
    names = names_read(monkeypatch)
    vq = load(folder, vq_path=ANOLE).vq
    assert torch.equal(vq.quantize.embedding.weight, weights_of(ANOLE)["model.vqmodel.quantize.embedding.weight"])
    assert not [name for name in names if ".encoder." in name]
    assert not [name for name in names[-len(vq.state_dict()) :] if "vqmodel" not in name]


def test_the_encoder_and_the_loss_are_never_read(tmp_path: Path, lumina: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vq = torch.load(VQGAN, weights_only=True)["state_dict"]
    extra = {"loss.discriminator.main.0.weight": torch.ones(2), "model_ema.decay": torch.ones(1)}
    folder = without_vq(tmp_path / "lumina")
    torch.save({"state_dict": {**vq, **extra}, "epoch": 3, "callbacks": {}}, folder / "vqgan.ckpt")
    names = names_read(monkeypatch)
    assert same_weights(load(folder).vq, lumina.vq)
    assert not [name for name in names if name.startswith(("encoder", "quant_conv", "loss", "model_ema"))]


def test_an_old_vq_file_is_found_as_well(tmp_path: Path, lumina: Any) -> None:
    folder = without_vq(tmp_path / "lumina")
    torch.save(torch.load(VQGAN, weights_only=True), folder / "vqgan.ckpt", _use_new_zipfile_serialization=False)
    assert same_weights(load(folder).vq, lumina.vq)


# What is refused


def test_a_missing_vq_is_named_with_its_source(tmp_path: Path) -> None:
    folder = without_vq(tmp_path / "lumina")
    sentence = refusal(folder)
    assert (
        f"put vqgan.ckpt from GAIR/Anole-7b-v0.1 (folder tokenizer, as in Meta's Chameleon release) into {folder}"
        in (sentence)
    )
    assert load(folder, with_vq=False).vq is None


def test_what_is_no_vq_of_chameleon(tmp_path: Path) -> None:
    folder = without_vq(tmp_path / "lumina")
    other = LUMINA.parent / "llamagen" / "vq_tiny.pt"
    assert "is something else, not the VQ tokenizer" in refusal(folder, vq_path=other)
    assert "is a model, not the VQ tokenizer" in (sentence := refusal(folder, vq_path=folder))
    assert "choose vqgan.ckpt from GAIR/Anole-7b-v0.1" in sentence


def test_a_vq_of_other_codes(tmp_path: Path) -> None:
    vq = torch.load(VQGAN, weights_only=True)["state_dict"]
    vq["quantize.embedding.weight"] = torch.zeros(16384, 8)
    torch.save({"state_dict": vq}, tmp_path / "vqgan.ckpt")
    assert "has 16384 codes and the model model-00001-of-00002.safetensors 8192" in refusal(
        LUMINA, vq_path=tmp_path / "vqgan.ckpt"
    )


def test_an_incomplete_vq(tmp_path: Path) -> None:
    vq = torch.load(VQGAN, weights_only=True)["state_dict"]
    del vq["decoder.up.3.upsample.conv.bias"]
    torch.save({"state_dict": vq}, tmp_path / "vqgan.ckpt")
    assert "decoder.conv_blocks.1.upsample.conv.bias is missing" in refusal(LUMINA, vq_path=tmp_path / "vqgan.ckpt")


class Callback:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getcwd, ()


def test_a_vq_with_pickled_callbacks(tmp_path: Path) -> None:
    folder = without_vq(tmp_path / "lumina")
    content = torch.load(VQGAN, weights_only=True)
    torch.save({**content, "callbacks": {"stop": Callback()}}, folder / "vqgan.ckpt")
    for sentence in (refusal(folder), refusal(LUMINA, vq_path=folder / "vqgan.ckpt")):
        assert "vqgan.ckpt holds program code" in sentence and "getcwd" in sentence and "safetensors" in sentence


def test_the_vq_as_the_model() -> None:
    assert "is a VQ tokenizer" in refusal(VQGAN)
    assert "is a VQ tokenizer" in refusal(VQGAN.parent)


def test_metas_chameleon_cannot_paint(tmp_path: Path) -> None:
    weights = {**weights_of(LUMINA), "model.vqmodel.encoder.conv_in.weight": torch.zeros(1)}
    sentence = refusal(write(tmp_path / "chameleon-7b", weights, config_of(LUMINA)))
    assert "is Meta's Chameleon" in sentence and "leloy/Anole-7b-v0.1-hf" in sentence
    config = {**config_of(LUMINA), "mask_image_logits": True}
    assert "painting disabled" in refusal(write(tmp_path / "chameleon-30b", weights_of(LUMINA), config))


def test_the_second_generation(tmp_path: Path) -> None:
    weights = {**weights_of(LUMINA), "model.embed_tokens.weight": torch.zeros(171_385, 32, dtype=torch.bfloat16)}
    assert "is Lumina-mGPT 2.0" in refusal(write(tmp_path / "lumina", weights, config_of(LUMINA)))


def test_four_bit_weights(tmp_path: Path) -> None:
    weights, name = weights_of(LUMINA), "model.layers.0.self_attn.q_proj.weight"
    weights |= {name: torch.zeros(512, 1, dtype=torch.uint8), f"{name}.absmax": torch.ones(8)}
    weights[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(8, dtype=torch.uint8)
    sentence = refusal(write(tmp_path / "Lumina-mGPT-7B-768-bnb-int4", weights, config_of(LUMINA)))
    assert "is quantised by bitsandbytes" in sentence and "the checkpoint that it was made from" in sentence


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.k_norm.bias",
    ],
)
def test_a_missing_weight(tmp_path: Path, name: str) -> None:
    weights = weights_of(LUMINA)
    del weights[name]
    assert "is incomplete" in refusal(write(tmp_path / "lumina", weights, config_of(LUMINA)), vq_path=VQGAN)


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = without_vq(tmp_path / "lumina")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder)


def test_rows_of_norms_that_do_not_divide_the_heads(tmp_path: Path) -> None:
    weights = weights_of(LUMINA)
    weights["model.layers.1.self_attn.q_norm.weight"] = torch.ones(3, 8)
    assert "q_norm.weight has the shape" in refusal(write(tmp_path / "lumina", weights, config_of(LUMINA)))


def test_a_damaged_config(tmp_path: Path) -> None:
    folder = without_vq(tmp_path / "lumina")
    for content in ("{", "[1]"):
        (folder / "config.json").write_text(content, encoding="utf-8")
        assert "config.json is damaged" in refusal(folder)
