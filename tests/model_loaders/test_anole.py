"""Anole in the transformers layout against the code that it was saved with; its VQ lies among its own weights."""

from __future__ import annotations

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
from speculative_ar.model_loaders.chameleon_files import key_map, read_config, read_ids, reshapes, vq_sources
from speculative_ar.model_loaders.detect import family_of
from speculative_ar.model_loaders.vq import VQConfig, VQDecoder
from speculative_ar.model_loaders.weights import check_fit
from tests.model_loaders.chameleon import (
    ANOLE,
    CODES,
    FIRST_CODE,
    LOGITS,
    PICTURES,
    VQGAN,
    config_of,
    logits,
    names_read,
    refusal,
    weights_of,
    write,
    write_tokenizer,
)
from tests.model_loaders.manifests import shapes_of

GUIDANCE = 3.0


def load(path: Path, **more: Any) -> Any:
    return model_loaders.load(path, **{"dtype": torch.float32, **more})


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(ANOLE / "golden.safetensors")


@pytest.fixture(scope="module")
def anole() -> Any:
    return load(ANOLE)


@pytest.fixture(scope="module")
def condition(anole: Any, golden: dict[str, Tensor]) -> Any:
    return anole.condition(golden["prompt_cond"].tolist()[:-1])


def test_both_streams_end_with_the_beginning_of_the_image(condition: Any, golden: dict[str, Tensor]) -> None:
    assert list(condition.ids) == golden["prompt_cond"].tolist()
    assert list(condition.unconditional) == golden["prompt_uncond"].tolist()


def test_there_is_nothing_between_the_codes(condition: Any) -> None:
    assert condition.layout.grid == (1, 4, 4)
    assert condition.layout.forced.tolist() == [-1] * 16


@pytest.mark.parametrize("window", [1, 5, 16])
def test_logits(anole: Any, condition: Any, golden: dict[str, Tensor], window: int) -> None:
    computed = logits(anole, condition, golden["tokens_greedy_cfg3"] - FIRST_CODE, window)
    for stream, name in enumerate(("cond", "uncond")):
        expected = golden[f"logits_{name}_image_range"]
        torch.testing.assert_close(computed[stream, :, :512], expected, atol=LOGITS, rtol=0)
    first = golden["logits_cond_first_row_full"][FIRST_CODE : FIRST_CODE + CODES]
    torch.testing.assert_close(computed[0, 0], first, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("name, guidance", [("tokens_greedy_cfg3", GUIDANCE), ("tokens_greedy_nocfg", 1.0)])
@pytest.mark.parametrize("decoder", ["ar", "seed-exact"])
def test_greedy_tokens(
    anole: Any, condition: Any, golden: dict[str, Tensor], decoder: str, name: str, guidance: float
) -> None:
    settings = SamplerSettings(decoder, draft_length=6, guidance_scale=guidance, temperature=0)
    tokens = generate(anole, condition, settings).tokens[0]
    assert (tokens + FIRST_CODE).tolist() == golden[name].tolist()


def test_picture(anole: Any, condition: Any, golden: dict[str, Tensor]) -> None:
    tokens = golden["vq_ids"].flatten()[None]
    torch.testing.assert_close(anole.pixels(tokens, condition.layout), golden["image"], atol=PICTURES, rtol=0)
    assert anole.decode(tokens, condition.layout).shape == (1, 64, 64, 3)


def test_its_own_vq_is_taken_in_full_precision_and_without_its_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_read(monkeypatch)
    model = load(ANOLE, dtype=None)
    assert model.dtype == torch.bfloat16 == model.network.output.weight.dtype
    assert {weight.dtype for weight in model.vq.parameters()} == {torch.float32}
    assert not [name for name in names if ".encoder." in name or ".quant_conv." in name]
    table = weights_of(ANOLE)["model.vqmodel.quantize.embedding.weight"]
    assert torch.equal(model.code_embeddings(), table)


def test_without_its_vq_nothing_of_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_read(monkeypatch)
    assert load(ANOLE, with_vq=False).vq is None
    assert not [name for name in names if "vqmodel" in name]


def test_another_vq_may_be_chosen() -> None:
    table = torch.load(VQGAN, weights_only=True)["state_dict"]["quantize.embedding.weight"]
    assert torch.equal(load(ANOLE, vq_path=VQGAN).code_embeddings(), table)


def test_the_prompt_is_the_text_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model = load(ANOLE, text_encoder_path=tmp_path)
    prompt = model.prompt("a red fox", negative="rain")
    assert prompt.text == "a red fox"
    assert prompt.ids == (0, 8730, 8731, 8732, 8710, 8197)
    assert prompt.unconditional == (0, 8737, 8710, 8197)
    assert model.prompt("a red fox", width=64, height=64).unconditional == (0, 8197)


def test_it_draws_one_size(anole: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot draw 96 x 64 pixels; the nearest size, and the only one, is 64 x 64"):
        anole.prompt("a red fox", width=96, height=64)
    plain = write(tmp_path / "anole", weights_of(ANOLE), {})
    assert load(plain, with_vq=False).size == 512  # the released size, where no config.json tells
    assert load(plain, with_vq=False, overrides={"size": 64}).size == 64


def test_without_a_tokenizer_it_says_what_to_fetch(anole: Any) -> None:
    with pytest.raises(ValueError, match=r"put tokenizer\.json from leloy/Anole-7b-v0\.1-hf into .*anole_hf,"):
        anole.prompt("a red fox")


def test_a_class_label_is_refused(anole: Any) -> None:
    with pytest.raises(ValueError, match="takes a prompt, not a class label"):
        anole.class_label("fox")


def test_detection_ignores_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "Lumina-mGPT-7B-768", weights_of(ANOLE), config_of(ANOLE), "c2i_B_256.safetensors")
    shutil.copy(VQGAN, folder)
    model = load(folder)
    assert (model.family, model.size) == ("anole", 64)
    assert torch.equal(model.code_embeddings(), weights_of(ANOLE)["model.vqmodel.quantize.embedding.weight"])


def test_every_name_of_the_released_files_is_taken_but_the_vqs_encoder() -> None:
    shapes = shapes_of("anole_7b_hf")
    config, ids, sources = read_config(shapes, {}), read_ids({}), key_map(shapes, "7B")
    network = ChameleonNetwork(config, 0, nn, device="meta")
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    check_fit("7B", expected, shapes, sources, reshapes(config, ids.codes, ()))
    of_vq = vq_sources(shapes)
    vq_config = VQConfig.of_decoder({name: shapes[parts[0]] for name, parts in of_vq.items()}, normalised=False)
    expected = {name: tuple(tensor.shape) for name, tensor in VQDecoder(vq_config, device="meta").state_dict().items()}
    check_fit("VQ", expected, shapes, of_vq)
    left = set(shapes) - {name for parts in (*sources.values(), *of_vq.values()) for name in parts}
    assert {".".join(name.split(".")[:3]) for name in left} == {"model.vqmodel.encoder", "model.vqmodel.quant_conv"}
    family = family_of(shapes)
    assert family is not None and family.title == "Anole"


def test_metas_own_layout_is_refused_in_words(tmp_path: Path) -> None:
    weights = {
        "tok_embeddings.weight": torch.zeros(8, 4),
        "layers.0.attention.wqkv.weight": torch.zeros(12, 4),
        "layers.0.attention.q_normalization.weight": torch.zeros(2),
    }
    (tmp_path / "7b").mkdir()
    torch.save(weights, tmp_path / "7b" / "consolidated.pth")
    for path in (tmp_path / "7b", tmp_path / "7b" / "consolidated.pth"):
        sentence = refusal(path)
        assert "in Meta's own layout" in sentence and "leloy/Anole-7b-v0.1-hf" in sentence


def test_a_missing_weight(tmp_path: Path) -> None:
    for name in ("model.norm.weight", "lm_head.weight", "model.vqmodel.decoder.conv_in.bias"):
        weights = weights_of(ANOLE)
        del weights[name]
        assert "is missing" in refusal(write(tmp_path / name, weights, config_of(ANOLE)))
