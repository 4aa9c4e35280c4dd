"""Emu3 against its own code: logits, guidance, greedy tokens and pictures; its prompts and its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculative_ar.decoders import SamplerSettings, generate
from tests.model_loaders.chameleon import logits, weights_of
from tests.model_loaders.emu3 import (
    BEGIN,
    CODES,
    COLUMNS,
    FIRST_CODE,
    GEN,
    GOLDEN,
    IMAGE,
    IMAGE_BEGIN,
    LOGITS,
    PICTURES,
    ROWS,
    VQ,
    codes_of,
    json_of,
    load,
    official_ids,
    spelt,
    write_in_transformers_layout,
    write_tokenizer_json,
    write_with_official_vocabulary,
)

GUIDANCE = 3.0
SIZE = {"size": 39}  # with which the goldens' 32 x 48 pixels are allowed
QUALITY = " masterpiece, film grained, best quality."
LAYOUTS = pytest.mark.parametrize("layout", ["official", "transformers", "older transformers"])


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("emu3")
    return {
        "official": load(GEN),
        "transformers": load(write_in_transformers_layout(folder / "new")),
        "older transformers": load(write_in_transformers_layout(folder / "old", older=True)),
    }


@pytest.fixture(scope="module")
def emu3(models: dict[str, Any]) -> Any:
    return models["official"]


@pytest.fixture(scope="module")
def condition(emu3: Any, golden: dict[str, Tensor]) -> Any:
    return emu3.condition(golden["pos_ids"].tolist(), golden["neg_ids"].tolist(), ROWS, COLUMNS)


# What Emu3's own code computes


@LAYOUTS
@pytest.mark.parametrize("window", [1, 7, 31])
def test_logits(models: dict[str, Any], golden: dict[str, Tensor], condition: Any, layout: str, window: int) -> None:
    """The streams have prefixes of different lengths, so a code has one position in one and another in the other."""
    computed = logits(models[layout], condition, codes_of(golden["generated"]), window)
    for stream, name in zip(computed, ("cond", "uncond"), strict=True):
        torch.testing.assert_close(stream, golden[f"logits_{name}"][:, FIRST_CODE:], atol=LOGITS, rtol=0)


def test_guidance_on_logits_is_theirs_on_log_probabilities_but_for_a_constant_a_row(
    emu3: Any, golden: dict[str, Tensor], condition: Any
) -> None:
    conditional, unconditional = logits(emu3, condition, codes_of(golden["generated"]), 31)
    constant = unconditional + GUIDANCE * (conditional - unconditional) - golden["logits_cfg3"][:, FIRST_CODE:]
    assert (constant.amax(dim=1) - constant.amin(dim=1)).max() < LOGITS * GUIDANCE


@LAYOUTS
@pytest.mark.parametrize("decoder, draft_length", [("ar", 1), ("seed-exact", 9), ("seed-exact", 31), ("sjd", 9)])
def test_greedy_tokens(
    models: dict[str, Any], golden: dict[str, Tensor], condition: Any, layout: str, decoder: str, draft_length: int
) -> None:
    settings = SamplerSettings(decoder, draft_length=draft_length, guidance_scale=GUIDANCE, temperature=0)
    generation = generate(models[layout], condition, settings)
    assert torch.equal(generation.tokens[0], codes_of(golden["generated"]))


def test_structure_costs_no_pass_of_its_own(emu3: Any, condition: Any) -> None:
    settings = SamplerSettings("ar", guidance_scale=GUIDANCE, temperature=0)
    assert generate(emu3, condition, settings).statistics.forward_passes == ROWS * COLUMNS


@LAYOUTS
def test_picture(models: dict[str, Any], golden: dict[str, Tensor], condition: Any, layout: str) -> None:
    model, tokens = models[layout], codes_of(golden["generated"])[None]
    torch.testing.assert_close(model.pixels(tokens, condition.layout), golden["image"], atol=PICTURES, rtol=0)
    assert model.decode(tokens, condition.layout).shape == (1, 32, 48, 3)


def test_a_picture_is_the_first_frame_of_a_video(emu3: Any, golden: dict[str, Tensor]) -> None:
    """Whatever codes follow: the decoder never looks ahead."""
    first = emu3.vq.decode(golden["vq.video_codes"][:, 0])
    torch.testing.assert_close(first, golden["vq.video"][:, 0], atol=PICTURES, rtol=0)


def test_rows_end_with_structure_and_so_does_the_picture(condition: Any, golden: dict[str, Tensor]) -> None:
    layout, tokens = condition.layout, codes_of(golden["generated"])
    assert torch.equal(tokens[layout.forced >= 0], layout.forced[layout.forced >= 0])
    assert layout.grid == (1, ROWS, COLUMNS) and layout.positions == ROWS * (COLUMNS + 1) + 3
    assert torch.equal(layout.cells(tokens[None])[0, 0], golden["codes"])


def test_structure_codes_are_fed_as_their_tokens(emu3: Any) -> None:
    codes = torch.tensor([0, CODES - 1, CODES, CODES + 1, CODES + 2, CODES + 3])
    table = weights_of(GEN)["model.embed_tokens.weight"]
    assert torch.equal(emu3.network.embed_codes(codes), table[[265, 520, 257, 258, 264, 261]])


def test_code_vectors_are_those_of_the_file(emu3: Any) -> None:
    assert torch.equal(emu3.code_embeddings(), load_file(VQ / "model.safetensors")["quantize.embedding.weight"])
    assert emu3.vq.config.factor == 8


# Prompts


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Transformers' layout, whose tokenizer spells as the goldens do."""
    return load(write_in_transformers_layout(tmp_path_factory.mktemp("emu3") / "Emu3-Gen-hf"), overrides=SIZE)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The official layout with all of its files."""
    return load(write_with_official_vocabulary(tmp_path_factory.mktemp("emu3") / "Emu3-Gen"))


def test_the_size_ends_both_streams_of_any_length(told: Any) -> None:
    prompt = told.prompt("cat", negative="rain", width=48, height=32)
    size = [IMAGE_BEGIN, *spelt("4*6"), IMAGE]
    assert list(prompt.ids) == [BEGIN, *spelt("cat" + QUALITY), *size]
    assert list(prompt.unconditional) == [BEGIN, *spelt("rain"), *size]


def test_what_the_demo_adds_is_the_default_and_visible(told: Any) -> None:
    prompt = told.prompt(" cat \n", width=48, height=32)
    assert prompt.text == f"<|extra_203|>cat{QUALITY}<|image start|>4*6<|image token|>"
    assert prompt.ids == told.prompt("cat", negative="rain", width=48, height=32).ids
    opposite = json_of(GOLDEN / "tokenizer_examples.json")["neg_text"]
    opposite = opposite.removeprefix("<|extra_203|>").partition("<|image start|>")[0]
    assert list(prompt.unconditional) == [BEGIN, *spelt(opposite), IMAGE_BEGIN, *spelt("4*6"), IMAGE]
    assert told.prompt("cat", negative=" \n", width=48, height=32).unconditional == prompt.unconditional


def test_the_words_for_quality_can_be_left_out(tmp_path: Path, golden: dict[str, Tensor]) -> None:
    """Then the prompt is the goldens'."""
    model = load(write_in_transformers_layout(tmp_path / "emu3"), overrides={**SIZE, "quality": ""})
    prompt = model.prompt("cat", negative="lowres, bad", width=48, height=32)
    assert list(prompt.ids) == golden["pos_ids"].tolist()
    assert list(prompt.unconditional) == golden["neg_ids"].tolist()


def test_the_official_files_give_prompt_logits_and_picture(published: Any, golden: dict[str, Tensor]) -> None:
    """From emu3.tiktoken to the pixels, by the ids that the official rule gives."""
    ids = official_ids()
    assert list(published.prompt("cat", width=48, height=32).ids) == [
        ids[number] for number in (BEGIN, *spelt("cat" + QUALITY), IMAGE_BEGIN, *spelt("4*6"), IMAGE)
    ]
    prompts = ([ids[number] for number in golden[name].tolist()] for name in ("pos_ids", "neg_ids"))
    condition = published.condition(*prompts, ROWS, COLUMNS)
    computed = logits(published, condition, codes_of(golden["generated"]), 31)
    torch.testing.assert_close(computed[1], golden["logits_uncond"][:, FIRST_CODE:], atol=LOGITS, rtol=0)
    picture = published.pixels(codes_of(golden["generated"])[None], condition.layout)
    torch.testing.assert_close(picture, golden["image"], atol=PICTURES, rtol=0)


def test_the_tokenizer_may_be_chosen(tmp_path: Path) -> None:
    file = write_tokenizer_json(tmp_path)
    for chosen in (tmp_path, file):
        model = load(GEN, text_encoder_path=chosen)
        assert model.prompt("cat", width=48, height=32).ids[:4] == (BEGIN, *spelt("cat"))


def test_without_a_tokenizer_it_loads_and_says_what_to_fetch(emu3: Any) -> None:
    with pytest.raises(ValueError, match=r"put emu3\.tiktoken from BAAI/Emu3-Gen into .*Emu3-Gen, or choose"):
        emu3.prompt("cat")


def test_a_class_label_is_refused(emu3: Any) -> None:
    with pytest.raises(ValueError, match="takes a prompt, not a class label"):
        emu3.class_label(3)


# Sizes


@pytest.fixture(scope="module")
def of_720(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With the area of the released model, which is taken where config.json tells none."""
    folder = write_in_transformers_layout(tmp_path_factory.mktemp("emu3") / "Emu3-Gen-hf")
    return load(folder)


@pytest.mark.parametrize(
    "width, height, rows, columns",
    [
        *((0, 0, 90, 90), (720, 720, 90, 90), (0, 720, 90, 90), (728, 720, 90, 91)),
        *((960, 544, 68, 120), (544, 960, 120, 68), (832, 624, 78, 104), (1104, 472, 59, 138)),
    ],
)
def test_allowed_sizes(of_720: Any, width: int, height: int, rows: int, columns: int) -> None:
    prompt = of_720.prompt("cat", width=width, height=height)
    assert prompt.layout.grid == (1, rows, columns)
    assert list(prompt.ids[prompt.ids.index(IMAGE_BEGIN) :]) == [IMAGE_BEGIN, *spelt(f"{rows}*{columns}"), IMAGE]


def test_the_released_size_has_the_released_length(of_720: Any) -> None:
    assert of_720.prompt("cat").layout.positions == 8190 + 3


@pytest.mark.parametrize(
    "width, height, nearest",
    [
        *((1024, 1024, "720 x 720"), (512, 512, "720 x 720"), (725, 715, "728 x 712"), (736, 720, "728 x 712")),
        *((1920, 1080, "960 x 544"), (960, 0, "832 x 624"), (4096, 1024, "1440 x 360")),
    ],
)
def test_an_impossible_size_names_the_nearest(of_720: Any, width: int, height: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {width} x .* pixels; the nearest size is {nearest}: both sides"):
        of_720.prompt("cat", width=width, height=height)


@pytest.mark.parametrize("ratio", [(1, 1), (4, 3), (3, 4), (16, 9), (9, 16), (3, 2), (21, 9), (1, 3), (359, 363)])
def test_the_official_rule_gives_allowed_sizes_alone(of_720: Any, ratio: tuple[int, int]) -> None:
    """Rounding after scaling the ratio to the area; what it gives is drawn, whatever ratio that has of its own."""
    wide, high = ratio
    scale = (720 * 720 / (wide * high)) ** 0.5
    rows, columns = round(high * scale / 8), round(wide * scale / 8)
    assert of_720.prompt("cat", width=8 * columns, height=8 * rows).layout.grid == (1, rows, columns)


def test_config_json_tells_the_area(emu3: Any) -> None:
    assert emu3.area == 1536
    assert load(GEN, overrides={"size": 512}, with_vq=False).area == 512 * 512
