"""MAR from its files: what the trunk and the head compute, which file is which, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from speculative_ar import model_loaders
from speculative_ar.decoders import ContinuousModel, ContinuousOptions
from speculative_ar.decoders.continuous.diffusion import GaussianDiffusion, cosine_betas, kept_times
from speculative_ar.decoders.continuous.schedule import cosine_bounds
from speculative_ar.model_loaders import CheckpointError
from speculative_ar.model_loaders.detect import family_of
from speculative_ar.model_loaders.mar import MARNetwork, Seen
from speculative_ar.model_loaders.mar_files import key_map, read_config, reshapes
from speculative_ar.model_loaders.weights import _BLOCK_MATRIX, check_fit
from tests.model_loaders.continuous import GOLDEN, HEADS, VAE, load_draft, load_mar, mar_weights
from tests.model_loaders.manifests import shapes_of

SIZES = {  # width, depth, heads, head width, head depth: the table of the paper and its code
    "mar_base": (768, 12, 12, 1024, 6),
    "mar_large": (1024, 16, 16, 1280, 8),
    "mar_huge": (1280, 20, 16, 1536, 12),
}


@pytest.fixture(scope="module")
def mar(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_mar(tmp_path_factory.mktemp("mar"))


@pytest.fixture(scope="module", params=["mar", "mar_draft"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Tensor]]:
    """A model and its goldens."""
    model = load_mar(tmp_path_factory.mktemp("mar")) if request.param == "mar" else load_draft()
    return model, load_file(GOLDEN / request.param / "io.safetensors")


def order_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """An order in which the unmasked positions come first, and how many they are."""
    return mask.argsort(dim=1, stable=True), (mask == 0).sum(1)


@torch.inference_mode()
def test_the_trunk_computes_what_the_official_code_does(pair: tuple[Any, dict[str, Tensor]]) -> None:
    model, golden = pair
    network, rows = model.network, len(golden["labels"])
    order, known = order_of(golden["encdec.mask"])
    seen = Seen.of(order, known, int(known.max()))
    said = {
        "cond": network.class_rows(golden["labels"]),
        "uncond": network.unconditional_rows(rows, torch.device("cpu")),
    }
    for stream, vector in said.items():
        encoded = network.encode(golden["encdec.tokens"], seen, vector)
        torch.testing.assert_close(encoded, golden[f"encdec.x_enc_{stream}"], atol=2e-5, rtol=0)
        torch.testing.assert_close(network.decode(encoded, seen), golden[f"encdec.z_{stream}"], atol=2e-5, rtol=0)
    nothing = Seen.of(order, torch.zeros_like(known), 0)
    z = network.decode(network.encode(golden["encdec.tokens"], nothing, said["cond"]), nothing)
    torch.testing.assert_close(z, golden["encdec_allmasked.z_cond"], atol=2e-5, rtol=0)


@torch.inference_mode()
def test_the_head_computes_what_the_official_code_does(pair: tuple[Any, dict[str, Tensor]]) -> None:
    model, golden = pair
    head = model.network.head
    output = head(golden["head.x"], golden["head.t"], head.condition(golden["head.z"]))
    torch.testing.assert_close(output, golden["head.out"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("tag, guidance, temperature", [("cfg1", 1.0, 1.0), ("cfg3_t09", 3.0, 0.9)])
@torch.inference_mode()
def test_every_step_of_a_token_is_the_official_one(
    pair: tuple[Any, dict[str, Tensor]], tag: str, guidance: float, temperature: float
) -> None:
    model, golden = pair
    process = model.process(ContinuousOptions(diffusion_steps=10, respacing="strided"))
    states = golden[f"head_traj_{tag}.x"]
    rows = states.shape[1]
    streams = ["cond", "uncond"] if guidance > 1 else ["cond"]
    z = torch.stack([golden[f"encdec.z_{stream}"].flatten(0, 1)[:rows] for stream in streams])
    session = model.latent_session(model.class_label(0), 1, guidance > 1)
    features, scale = model.network.head.condition(z), torch.full((rows,), guidance)
    for step in reversed(range(10)):
        x, steps = states[9 - step][:, None], torch.full((rows, 1), step)
        prediction = process.predict(session.denoise(x, process.time(steps), features, scale), x, steps)
        factor, offset, log_std = process.transition(prediction, steps)
        expected = {name: golden[f"head_traj_{tag}.{name}"][step] for name in ("mean", "log_variance", "pred_xstart")}
        torch.testing.assert_close((factor * x + offset)[:, 0], expected["mean"], atol=2e-5, rtol=0)
        torch.testing.assert_close(2 * log_std[:, 0], expected["log_variance"], atol=2e-5, rtol=0)
        torch.testing.assert_close(prediction[:, 0, :16], expected["pred_xstart"], atol=1e-3, rtol=0)


@torch.inference_mode()
def test_ddim_without_noise_is_the_official_loop(pair: tuple[Any, dict[str, Tensor]]) -> None:
    model, golden = pair
    options = ContinuousOptions(diffusion_steps=10, respacing="strided", diffusion_sampler="ddim")
    process = model.process(options)
    assert process.deterministic
    x = golden["x_T"].flatten(0, 1)[:32, None]
    features = model.network.head.condition(golden["encdec.z_cond"].flatten(0, 1))[None, : len(x)]
    session = model.latent_session(model.class_label(0), 1, False)
    for step in reversed(range(10)):
        steps = torch.full((len(x), 1), step)
        output = session.denoise(x, process.time(steps), features, torch.ones(len(x)))
        factor, offset, _ = process.transition(process.predict(output, x, steps), steps)
        x = factor * x + offset
    torch.testing.assert_close(x[:, 0], golden["head_ddim_eta0.x0"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("spelling", ["10", "25", "50", "100", "ddim10", "ddim25", "ddim50", "ddim100", "full1000"])
def test_respaced_tables_are_the_official_ones(spelling: str) -> None:
    tables = load_file(GOLDEN / "schedules" / "tables.safetensors")
    strided, steps = spelling.startswith("ddim"), int("".join(filter(str.isdigit, spelling)))
    times = kept_times(steps, "strided" if strided else "even")
    assert times == tables[f"{spelling}.timestep_map"].tolist()
    signal = (1 - cosine_betas()).cumprod(0)[times]
    torch.testing.assert_close(signal, tables[f"{spelling}.alphas_cumprod"], atol=0, rtol=1e-9)
    process = GaussianDiffusion(ContinuousOptions(), times, torch.device("cpu"))
    step = torch.arange(steps)
    clean = torch.ones(steps, 1)
    for share, name in ((0.0, "posterior_log_variance_clipped"), (1.0, "betas")):
        factor, offset, log_std = process.transition(torch.cat((clean, share * clean), 1), step)
        expected = tables[f"{spelling}.{name}"]
        expected = expected.log() if name == "betas" else expected
        torch.testing.assert_close(2 * log_std[:, 0].double(), expected, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(factor[:, 0].double(), tables[f"{spelling}.posterior_mean_coef2"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(offset[:, 0].double(), tables[f"{spelling}.posterior_mean_coef1"], atol=1e-6, rtol=1e-6)


def test_ar_schedules_are_the_official_ones() -> None:
    tables = load_file(GOLDEN / "schedules" / "tables.safetensors")
    schedules = [name for name in tables if name.startswith("mask_len.")]
    assert len(schedules) > 5
    for name in schedules:
        positions, iterations = (int(part[1:]) for part in name.split(".")[1:])
        known = [positions - masked for masked in tables[name].tolist()]
        ours = list(cosine_bounds(positions, iterations)[1:])
        assert ours[:-1] == known[:-1] and ours[-1] == positions


@torch.inference_mode()
def test_rows_that_know_different_numbers_of_tokens_are_what_each_is_alone(mar: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(4, 16, 16, generator=generator)
    order = torch.rand(4, 16, generator=generator).argsort(dim=1)
    known, asked = torch.tensor([0, 3, 9, 15]), order[:, -2:]
    session = mar.latent_session(mar.class_label(2), 1, True)
    together = session.features(tokens, order, known, 15, asked).unflatten(1, (4, 2))
    for row, count in enumerate(known.tolist()):
        one = slice(row, row + 1)
        alone = session.features(tokens[one], order[one], known[one], count, asked[one])
        torch.testing.assert_close(together[:, row], alone, atol=2e-5, rtol=0)
        other = tokens[one].clone()
        other[0, order[row, count:]] = 7.0  # what is not known yet must not matter
        torch.testing.assert_close(session.features(other, order[one], known[one], count, asked[one]), alone)


def test_patches_lie_where_the_official_code_puts_them(mar: Any) -> None:
    golden = load_file(GOLDEN / "mar" / "io.safetensors")
    layout = mar.layout(mar.class_label(0))
    assert torch.equal(mar.latent_maps(golden["patchify.out"], layout), golden["patchify.in"])


def test_the_trainer_s_file_is_read_for_its_averaged_weights(tmp_path: Path) -> None:
    """In the fixture's other set of weights every number is 0."""
    stored = torch.load(GOLDEN / "mar_draft" / "checkpoint-last.pth", weights_only=True)
    assert list(stored)[:2] == ["model", "model_ema"]
    model = load_draft()
    assert torch.equal(model.network.z_proj.weight, stored["model_ema"]["z_proj.weight"])
    assert isinstance(model, ContinuousModel) and (model.family, model.classes, model.vae) == ("mar", 10, None)


def test_the_family_is_read_from_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "llamagen_c2i_B_256.safetensors"
    save_file({name: value.contiguous() for name, value in mar_weights().items()}, path)
    model = model_loaders.load(path, overrides=HEADS, with_vq=False)
    assert (model.family, model.name, model.layout(model.class_label(1)).grid) == ("mar", path.stem, (1, 4, 4))


def test_what_a_file_states_is_taken(tmp_path: Path) -> None:
    stated = {"heads": 4, "labels": ["zero", "one"], "name": "digits", "iterations": 8, "diffusion_steps": 25}
    metadata = {key: json.dumps(value) for key, value in stated.items()}
    weights = {name: value.contiguous() for name, value in mar_weights().items()}
    save_file(weights, tmp_path / "own.safetensors", metadata=metadata)
    model = model_loaders.load(tmp_path / "own.safetensors", with_vq=False)
    layout = model.layout(model.class_label("ONE"))
    assert (model.name, model.diffusion_steps, layout.iterations, layout.guidance_schedule) == (
        "digits",
        25,
        8,
        "linear",
    )


@pytest.mark.parametrize("name", SIZES)
def test_a_released_file_fits_the_network(name: str) -> None:
    shapes = shapes_of(name)
    config = read_config(shapes, {}, name)
    network = MARNetwork(config, nn, device="meta")
    expected = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    sources = key_map(shapes)
    check_fit(name, expected, shapes, sources, reshapes())
    assert sum(map(len, sources.values())) == len(shapes)
    assert (config.width, config.depth, config.heads, config.head.width, config.head.depth) == SIZES[name]
    assert (config.decoder_depth, config.buffer, config.positions, config.classes) == (config.depth, 64, 256, 1000)
    family = family_of(shapes)
    assert family is not None and family.title == "MAR"
    matrices = {key: tensor for key, tensor in network.state_dict().items() if _BLOCK_MATRIX.search(key)}
    assert sum(tensor.numel() for tensor in matrices.values()) == 2 * config.depth * 12 * config.width**2


def test_the_head_stays_in_float32_whatever_the_trunk_is(tmp_path: Path) -> None:
    model = load_mar(tmp_path, dtype=torch.bfloat16, storage=torch.float8_e4m3fn)
    weights = model.network.state_dict()
    assert {tensor.dtype for name, tensor in weights.items() if name.startswith("head.")} == {torch.float32}
    assert weights["encoder_blocks.0.attn.qkv.weight"].dtype == torch.float8_e4m3fn
    assert weights["mask_token.weight"].dtype == model.dtype == torch.bfloat16


REFUSED = {
    "no heads": ({}, {}, ["48 channels wide", "state the number of heads"]),
    "heads that do not divide": ({}, {"heads": 5}, ["5 heads do not divide"]),
    "no square": ({}, {"heads": 4, "grid": (3, 5)}, ["16 tokens", "3 x 5"]),
    "an incomplete file": ({"decoder_norm.bias": None}, HEADS, ["incomplete", "decoder_norm.bias is missing"]),
    "a damaged weight": ({"decoder_norm.bias": torch.ones(3)}, HEADS, ["damaged", "decoder_norm.bias"]),
    "an unknown weight": ({"extra": torch.ones(3)}, HEADS, ["does not fit its family", "extra is unknown"]),
}


@pytest.mark.parametrize("changes, overrides, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict, overrides: dict, words: list[str]
) -> None:
    weights = {**mar_weights(), **changes}
    kept = {name: value.contiguous() for name, value in weights.items() if value is not None}
    save_file(kept, tmp_path / "mar.safetensors")
    with pytest.raises(CheckpointError) as refusal:
        model_loaders.load(tmp_path / "mar.safetensors", overrides=overrides, vq_path=VAE)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_conditions_of_another_kind_are_refused(mar: Any) -> None:
    with pytest.raises(ValueError, match="takes a class label, not a prompt"):
        mar.prompt("a digit")
    with pytest.raises(ValueError, match="takes a class label, not a prompt"):
        mar.layout(object())
    with pytest.raises(ValueError, match="has the classes 0 to 9"):
        mar.class_label(10)
    with pytest.raises(ValueError, match="loaded without its VAE"):
        load_draft().decode(torch.zeros(1, 16, 16), mar.layout(mar.class_label(0)))
