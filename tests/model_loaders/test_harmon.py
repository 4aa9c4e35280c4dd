"""Harmon from its files: what each part computes, whole pictures in two sizes, both layouts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor

from speculative_ar import model_loaders
from speculative_ar.decoders import ContinuousModel, ContinuousOptions, SamplerSettings, generate
from speculative_ar.decoders.continuous.autoregressive import autoregressive
from speculative_ar.model_loaders import CheckpointError
from speculative_ar.model_loaders.detect import family_of
from speculative_ar.model_loaders.harmon import HarmonCondition, HarmonNetwork, Places
from speculative_ar.model_loaders.harmon_files import key_map, read_config, reshapes
from speculative_ar.model_loaders.mar import Seen
from speculative_ar.model_loaders.weights import _BLOCK_MATRIX, check_fit
from tests.model_loaders.continuous import GOLDEN, HARMON, VAE, save_harmon, write_tokenizer
from tests.model_loaders.continuous import HARMON_HEADS as HEADS
from tests.model_loaders.golden_noise import GoldenNoise, golden_run
from tests.model_loaders.manifests import shapes_of

OFFICIAL = ContinuousOptions(diffusion_steps=10, respacing="strided", iterations=16)
RUNS = {
    "run_a": ({}, {}),
    "run_b": ({"cfg": 3.0}, {"iterations": 6}),
    "run_c": ({"cfg": 3.0, "temperature": 0.9}, {"iterations": 8, "guidance_schedule": "linear"}),
    "big": ({"cfg": 3.0}, {"iterations": 6}),
}
SIZES = {  # the language model's width, layers, heads, key heads; MAR's width and blocks
    "harmon_0_5b": (896, 24, 14, 2, 768, 12),
    "harmon_1_5b": (1536, 28, 12, 2, 1280, 20),
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "harmon" / "io.safetensors")


@pytest.fixture(scope="module")
def harmon() -> Any:
    return model_loaders.load(HARMON, overrides=HEADS, vq_path=VAE)


def condition_of(golden: dict[str, Tensor], image: int, grid: tuple[int, int] = (4, 4)) -> HarmonCondition:
    """Images first in the golden's rows, then their unconditional streams."""
    ids = [tuple(golden["input_ids"][row][golden["attention_mask"][row].bool()].tolist()) for row in (image, image + 2)]
    return HarmonCondition(ids[0], ids[1], grid)


@torch.inference_mode()
def test_each_part_computes_what_the_official_code_does(harmon: Any, golden: dict[str, Tensor]) -> None:
    network = harmon.network
    for image in range(2):
        mask, tokens = golden["encdec.mask"][image, None], golden["encdec.tokens"][image, None]
        order, known = mask.argsort(dim=1, stable=True), (mask == 0).sum(1)
        seen = Seen.of(order, known, int(known[0]))
        encoded = network.mar.encode(tokens, seen, network.mar.unconditional_rows(1, torch.device("cpu")))
        torch.testing.assert_close(encoded[0], golden["encdec.mar_enc"][image], atol=2e-5, rtol=0)
        read = network.proj_in(encoded)
        torch.testing.assert_close(read[0].roll(-4, 0), golden["encdec.llm_in"][image], atol=2e-5, rtol=0)
        session = harmon.latent_session(condition_of(golden, image), 1, True)
        told = network.proj_out(session._understood(read, seen))
        for stream, row in enumerate((image, image + 2)):
            known_rows = encoded[0] + told[stream]
            torch.testing.assert_close(known_rows, golden["encdec.x_enc"][row], atol=2e-5, rtol=0)
            z = network.mar.decode(known_rows[None], seen)
            torch.testing.assert_close(z[0], golden["encdec.z"][row], atol=5e-5, rtol=0)


@torch.inference_mode()
def test_position_tables_stretch_as_in_the_official_code(harmon: Any, golden: dict[str, Tensor]) -> None:
    places = Places.of(harmon.network.mar, (6, 6), torch.device("cpu"))
    torch.testing.assert_close(places.encoder, golden["big.encoder_pos_embed"][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(places.head, golden["big.diffusion_pos_embed"][0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("image", [0, 1])
@pytest.mark.parametrize("name", RUNS)
@torch.inference_mode()
def test_ar_is_the_official_sampler(harmon: Any, golden: dict[str, Tensor], name: str, image: int) -> None:
    settings, options = RUNS[name]
    prefix, side = ("big.", 6) if name == "big" else ("", 4)
    rows = slice(image, image + 1)
    noise = GoldenNoise(golden[f"{prefix}x_T"][rows], golden[f"{prefix}eps"][:, rows])
    condition = condition_of(golden, image, (side, side))
    order = golden[f"{prefix}orders"][rows].flip(1)
    run = golden_run(harmon, condition, order, noise, options=replace(OFFICIAL, **options), **settings)
    autoregressive(run)
    made = run.canvas.tokens[0].unflatten(0, (side, side))
    assert torch.allclose(made, golden[f"{name}.latent_mn"][image], atol=2e-4)
    picture = harmon.decode(run.canvas.tokens, harmon.layout(condition))[0]
    expected = ((golden[f"{name}.image"][image] + 1) / 2).clamp(0, 1).permute(1, 2, 0)
    assert torch.allclose(picture, expected, atol=2e-4)


@torch.inference_mode()
def test_rows_that_know_different_numbers_of_tokens_are_what_each_is_alone(harmon: Any, golden: dict) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(4, 16, 16, generator=generator)
    order = torch.rand(4, 16, generator=generator).argsort(dim=1)
    known, asked = torch.tensor([0, 3, 9, 15]), order[:, -2:]
    session = harmon.latent_session(condition_of(golden, 1), 1, True)
    together = session.features(tokens, order, known, 15, asked).unflatten(1, (4, 2))
    for row, count in enumerate(known.tolist()):
        one = slice(row, row + 1)
        alone = session.features(tokens[one], order[one], known[one], count, asked[one])
        torch.testing.assert_close(together[:, row], alone, atol=2e-5, rtol=0)


def test_seed_exact_finds_the_pictures_of_ar(harmon: Any, golden: dict[str, Tensor]) -> None:
    options = ContinuousOptions(diffusion_steps=20, respacing="strided", iterations=16, measure_deviation=True)
    settings = SamplerSettings("seed-exact", 8, guidance_scale=2.0, batch_size=2, seed=3, continuous=options)
    statistics = generate(harmon, condition_of(golden, 0), settings).statistics
    assert statistics.forward_passes < 16 and statistics.deviation < 0.5


def test_the_family_and_the_authors_settings(harmon: Any, golden: dict[str, Tensor]) -> None:
    assert isinstance(harmon, ContinuousModel) and (harmon.family, harmon.takes) == ("harmon", "a prompt")
    layout = harmon.layout(condition_of(golden, 0, (8, 8)))
    assert (layout.grid, layout.channels, layout.iterations) == ((1, 8, 8), 16, 64)
    assert (layout.guidance_schedule, harmon.diffusion_steps, harmon.respacing) == ("constant", 100, "even")


def test_the_other_layout_brings_its_vae_and_reads_prompts(tmp_path: Path, harmon: Any) -> None:
    folder = save_harmon(tmp_path)
    write_tokenizer(folder)
    model = model_loaders.load(folder, overrides=HEADS)
    assert torch.equal(model.vae.decoder.conv_in.weight, harmon.vae.decoder.conv_in.weight)
    ours, theirs = model.network.state_dict(), harmon.network.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    condition = model.prompt("a fox", width=12, height=8)
    begin, end = 95, 96
    assert condition.grid == (4, 6) and condition.ids[0] == begin and condition.ids.count(end) == 1
    assert condition.text == "<|im_start|>user\nGenerate an image: a fox<|im_end|>\n<|im_start|>assistant\n"
    assert condition.unconditional == model.prompt("another").unconditional
    assert model.prompt("a fox", negative="a dog").unconditional == model.prompt("a dog").ids
    assert model.prompt("a fox").grid == (8, 8)
    settings = SamplerSettings("ar", continuous=replace(OFFICIAL, iterations=4))
    assert generate(model, condition, settings).decode().shape == (1, 8, 12, 3)


def test_bad_input_is_one_sentence(harmon: Any, tmp_path: Path, golden: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"needs its tokenizer.*Qwen/Qwen2\.5-0\.5B-Instruct"):
        harmon.prompt("a fox")
    with pytest.raises(ValueError, match="cannot draw 20 x 8 pixels; each side is a multiple of 2 from 8 to 16"):
        harmon.prompt("a fox", width=20, height=8)
    with pytest.raises(ValueError, match="takes a prompt, not a class label"):
        harmon.class_label(3)
    with pytest.raises(ValueError, match="ids go beyond the 128"):
        harmon.layout(HarmonCondition((128,), (1,), (4, 4)))
    with pytest.raises(CheckpointError, match="state `language_heads`"):
        model_loaders.load(HARMON, overrides={"heads": 4}, with_vq=False)
    with pytest.raises(CheckpointError, match="The size 40 is none"):
        model_loaders.load(HARMON, overrides={**HEADS, "size": 40}, vq_path=VAE)
    folder = save_harmon(tmp_path)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"lacks <\|im_start\|>"):
        model_loaders.load(folder, overrides=HEADS)


@pytest.mark.parametrize("name", SIZES)
def test_every_published_size_is_read_from_its_shapes(name: str) -> None:
    shapes = shapes_of(name)
    family = family_of(shapes)
    assert family is not None and family.title == "Harmon"
    sources = key_map(shapes, name)
    config = read_config(shapes, sources, {}, name)
    language = config.language
    dim, layers, heads, kv_heads, width, depth = SIZES[name]
    assert (language.dim, language.layers, language.heads, language.kv_heads) == (dim, layers, heads, kv_heads)
    assert (config.mar.width, config.mar.depth, config.mar.buffer, config.mar.positions) == (width, depth, 64, 256)
    network = HarmonNetwork(config, device=torch.device("meta"))
    own = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    check_fit(name, own, shapes, sources, reshapes())
    assert len([key for key in own if _BLOCK_MATRIX.search(key)]) == 4 * layers + 8 * depth
