"""Janus against its own code and against transformers: logits, guidance, greedy tokens, pictures and prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from speculative_ar.decoders import SamplerSettings, generate
from speculative_ar.model_loaders import CheckpointError
from tests.model_loaders.chameleon import logits
from tests.model_loaders.janus import (
    ASSISTANT,
    BEGIN,
    IMAGE_BEGIN,
    LOGITS,
    OFFICIAL,
    PAD,
    PICTURES,
    SIZE,
    SPECIAL,
    TRANSFORMERS,
    USER,
    load,
    spelt,
    weights_of,
    write_tokenizer,
)

GUIDANCE = 5.0
PRO = "<|User|>: a fox\n\n<|Assistant|>:<begin_of_image>"
PLAIN = "User: a fox\n\nAssistant:<begin_of_image>"
LAYOUTS = pytest.mark.parametrize("folder", [OFFICIAL, TRANSFORMERS], ids=["official", "transformers"])


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(OFFICIAL / "golden.safetensors")


@pytest.fixture(scope="module")
def golden_of_transformers() -> dict[str, Tensor]:
    return load_file(TRANSFORMERS / "golden.safetensors")


@pytest.fixture(scope="module")
def models() -> dict[Path, Any]:
    return {folder: load(folder) for folder in (OFFICIAL, TRANSFORMERS)}


@pytest.fixture(scope="module")
def janus(models: dict[Path, Any]) -> Any:
    return models[OFFICIAL]


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = shutil.copytree(OFFICIAL, tmp_path_factory.mktemp("janus") / "Janus-Pro-1B")
    write_tokenizer(folder)
    return load(folder)


def prompt(model: Any, golden: dict[str, Tensor], index: int) -> Any:
    """The condition of one of the golden's two prompts."""
    return model.condition(golden["prompt_tokens_interleaved"][2 * index].tolist(), PAD)


@pytest.mark.parametrize("index", [0, 1])
def test_the_unconditional_stream_is_as_long_and_padded_between_first_and_last(
    janus: Any, golden: dict[str, Tensor], index: int
) -> None:
    condition = prompt(janus, golden, index)
    assert list(condition.ids) == golden["prompt_tokens_interleaved"][2 * index].tolist()
    assert list(condition.unconditional) == golden["prompt_tokens_interleaved"][2 * index + 1].tolist()


def test_there_is_nothing_between_the_codes(janus: Any, golden: dict[str, Tensor]) -> None:
    layout = janus.layout(prompt(janus, golden, 0))
    assert layout.grid == (1, 4, 4) and layout.forced.tolist() == [-1] * 16


@LAYOUTS
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("window", [1, 5, 16])
def test_logits(models: dict[Path, Any], golden: dict[str, Tensor], folder: Path, index: int, window: int) -> None:
    tokens = golden["tokens_greedy_cfg5"][index]
    computed = logits(models[folder], prompt(models[folder], golden, index), tokens, window)
    expected = golden[f"logits_{'cached' if window == 1 else 'teacher_forced'}_interleaved"]
    torch.testing.assert_close(computed, expected[2 * index : 2 * index + 2], atol=LOGITS, rtol=0)
    guided = computed[1] + GUIDANCE * (computed[0] - computed[1])
    torch.testing.assert_close(guided, golden["logits_cfg5"][index], atol=GUIDANCE * LOGITS, rtol=0)


def test_logits_of_transformers(models: dict[Path, Any], golden_of_transformers: dict[str, Tensor]) -> None:
    model, rows = models[TRANSFORMERS], golden_of_transformers["prompt_tokens_cond_then_uncond"]
    for index in range(2):
        condition = model.condition(rows[index].tolist(), PAD)
        assert list(condition.unconditional) == rows[index + 2].tolist()
        computed = logits(model, condition, golden_of_transformers["tokens_greedy_cfg5"][index], 16)
        expected = golden_of_transformers["logits_cached"][[index, index + 2]]
        torch.testing.assert_close(computed, expected, atol=LOGITS, rtol=0)


@LAYOUTS
@pytest.mark.parametrize("decoder", ["ar", "seed-exact"])
@pytest.mark.parametrize("index", [0, 1])
def test_greedy_tokens(
    models: dict[Path, Any], golden: dict[str, Tensor], folder: Path, decoder: str, index: int
) -> None:
    settings = SamplerSettings(decoder, draft_length=6, guidance_scale=GUIDANCE, temperature=0)
    tokens = generate(models[folder], prompt(models[folder], golden, index), settings).tokens[0]
    assert tokens.tolist() == golden["tokens_greedy_cfg5"][index].tolist()


def test_what_is_fed_back_for_a_code(janus: Any, golden: dict[str, Tensor]) -> None:
    inputs = janus.network.embed_codes(golden["tokens_greedy_cfg5"])
    torch.testing.assert_close(inputs, golden["gen_embeds_of_tokens"], atol=1e-5, rtol=0)


@LAYOUTS
def test_pictures(
    models: dict[Path, Any],
    golden: dict[str, Tensor],
    golden_of_transformers: dict[str, Tensor],
    folder: Path,
) -> None:
    model, tokens = models[folder], golden["tokens_greedy_cfg5"]
    layout = model.layout(prompt(model, golden, 0))
    for expected in (golden["image"], golden_of_transformers["image"]):
        torch.testing.assert_close(model.pixels(tokens, layout), expected, atol=PICTURES, rtol=0)
    shown = model.decode(tokens, layout)
    assert shown.shape == (2, 64, 64, 3) and shown.dtype == torch.float32
    steps = ((shown * 255).floor() - golden["image_u8_nhwc"]).abs()
    assert steps.max() <= 1 and (steps == 0).float().mean() > 0.99


def test_the_vectors_of_the_codes_are_those_of_the_vq_and_not_those_that_are_fed_back(janus: Any) -> None:
    table = weights_of(OFFICIAL)["gen_vision_model.quantize.embedding.weight"].float()
    torch.testing.assert_close(janus.code_embeddings(), F.normalize(table, dim=-1))


def test_both_layouts_give_one_model(models: dict[Path, Any]) -> None:
    for part in ("network", "vq"):
        official, other = (getattr(models[folder], part).state_dict() for folder in (OFFICIAL, TRANSFORMERS))
        assert official.keys() == other.keys()
        assert all(torch.equal(official[name], other[name]) for name in official)


def test_a_prompt_in_the_words_of_janus_pro(with_tokenizer: Any) -> None:
    condition = with_tokenizer.prompt("  a fox\n")
    assert condition.text == PRO
    words = [USER, *spelt(": a fox\n\n"), ASSISTANT, *spelt(":")]
    assert list(condition.ids) == [BEGIN, *words, IMAGE_BEGIN]
    assert list(condition.unconditional) == [BEGIN, *[PAD] * len(words), IMAGE_BEGIN]


def test_a_negative_prompt_takes_the_place_of_the_padding(with_tokenizer: Any) -> None:
    condition = with_tokenizer.prompt("a fox", negative="rain")
    assert condition.unconditional == with_tokenizer.prompt("rain").ids
    assert with_tokenizer.prompt("a fox", negative=" ").unconditional == with_tokenizer.prompt("a fox").unconditional
    tokens = generate(with_tokenizer, condition, SamplerSettings("seed-exact", draft_length=4, guidance_scale=5.0))
    reference = generate(with_tokenizer, condition, SamplerSettings("ar", guidance_scale=5.0))
    assert torch.equal(tokens.tokens, reference.tokens)


def test_a_tokenizer_without_role_tokens_is_that_of_the_older_janus(tmp_path: Path) -> None:
    condition = load(OFFICIAL, text_encoder_path=write_tokenizer(tmp_path, SPECIAL)).prompt("a fox")
    assert condition.text == PLAIN
    assert list(condition.ids) == [BEGIN, *spelt("User: a fox\n\nAssistant:"), IMAGE_BEGIN]


@pytest.mark.parametrize("name, text", [("Janus-1.3B", PLAIN), ("Janus-Pro-1B", PRO), ("Janus-Pro-7B", PRO)])
def test_else_only_its_name_tells_the_older_janus(tmp_path: Path, name: str, text: str) -> None:
    folder = shutil.copytree(OFFICIAL, tmp_path / name)
    write_tokenizer(folder)
    assert load(folder).prompt("a fox").text == text


def test_the_config_may_hold_that_name(tmp_path: Path) -> None:
    folder = shutil.copytree(OFFICIAL, tmp_path / "0123abcd")
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "deepseek-ai/Janus-1.3B"}))
    assert load(folder).prompt("a fox").text == PLAIN


def test_the_roles_may_be_stated(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    stated = {**SIZE, "roles": ("User", "Assistant")}
    assert load(OFFICIAL, text_encoder_path=tmp_path, overrides=stated).prompt("a fox").text == PLAIN


def test_the_pad_is_the_one_of_the_own_code_whatever_a_config_says(tmp_path: Path) -> None:
    folder = shutil.copytree(TRANSFORMERS, tmp_path / "janus")
    write_tokenizer(folder)
    for file in ("generation_config.json", "config.json"):
        content = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps({**content, "pad_token_id": 2}))
    assert set(load(folder).prompt("a fox").unconditional) == {BEGIN, PAD, IMAGE_BEGIN}


def test_it_draws_one_size(with_tokenizer: Any) -> None:
    assert with_tokenizer.prompt("a fox", width=64, height=64).ids == with_tokenizer.prompt("a fox").ids
    with pytest.raises(ValueError, match="cannot draw 96 x 64 pixels; the nearest size, and the only one, is 64 x 64"):
        with_tokenizer.prompt("a fox", width=96, height=64)


def test_a_class_label_is_refused(janus: Any) -> None:
    with pytest.raises(ValueError, match="takes a prompt, not a class label"):
        janus.class_label(207)


def test_without_a_tokenizer_it_says_what_to_fetch(janus: Any) -> None:
    with pytest.raises(
        ValueError, match=r"put tokenizer\.json from deepseek-ai/Janus-Pro-7B into .*janus_official, or"
    ):
        janus.prompt("a fox")


@pytest.mark.parametrize("tokens", [("<s>",), SPECIAL[:2], SPECIAL[1:]])
def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, tokens: tuple[str, ...]) -> None:
    write_tokenizer(tmp_path, tokens)
    with pytest.raises(
        CheckpointError, match=r"is no tokenizer of Janus, it lacks .* such as <begin_of_image>; give tok"
    ):
        load(OFFICIAL, text_encoder_path=tmp_path)
