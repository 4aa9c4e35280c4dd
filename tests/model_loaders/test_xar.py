"""xAR from its files: the official velocities, whole pictures, every size, and our decoders on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculative_ar import model_loaders
from speculative_ar.decoders import ContinuousModel, ContinuousOptions, SamplerSettings, generate
from speculative_ar.decoders.continuous.autoregressive import autoregressive
from speculative_ar.model_loaders import CheckpointError
from speculative_ar.model_loaders.detect import family_of
from speculative_ar.model_loaders.weights import _BLOCK_MATRIX, check_fit
from speculative_ar.model_loaders.xar import XARNetwork
from speculative_ar.model_loaders.xar_files import key_map, read_config, reshapes
from tests.model_loaders.continuous import GOLDEN, VAE
from tests.model_loaders.golden_noise import GoldenNoise, golden_run
from tests.model_loaders.manifests import shapes_of

FILE = GOLDEN / "xar" / "xAR-tiny.pth"
RASTER = torch.arange(4)[None]
SIZES = {  # width, depth, heads, width inside the MLP, steps: the published models
    "xar_base": (768, 8, 12, 2048, 40),
    "xar_large": (1024, 16, 16, 2730, 50),
    "xar_huge": (1280, 20, 16, 3413, 50),
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "xar" / "io.safetensors")


@pytest.fixture(scope="module")
def xar() -> Any:
    return model_loaders.load(FILE, overrides={"heads": 2}, vq_path=VAE)


def cells(latents: Tensor) -> Tensor:
    """Cells [..., 64, 16] as the files' authors lay them out -> our tokens [..., 1024]."""
    return latents.transpose(-1, -2).flatten(-2)


def noise_of(golden: dict[str, Tensor], image: int) -> GoldenNoise:
    start = cells(golden["x_init"][:, image : image + 1]).transpose(0, 1)
    added = cells(golden["eps"][:, :, image : image + 1]).permute(1, 2, 0, 3)
    # Ours count steps down to 0, which adds nothing.
    return GoldenNoise(start, torch.cat((torch.zeros_like(added[:1]), added.flip(0))))


@torch.inference_mode()
def test_velocities_are_the_official_ones(xar: Any, golden: dict[str, Tensor]) -> None:
    for image in range(2):
        session = xar.latent_session(xar.class_label(int(golden["label"][image])), 1, False)
        tokens = torch.zeros(1, 4, 1024)
        tokens[0, 0] = cells(golden["vel1.clean_prev_cell"][image])
        calls = (
            (0, "vel0.x", golden["vel0.t"][image], "vel0.v"),
            (1, "vel1.x", torch.tensor(0.5), "vel1.v_cached_call"),
        )
        for known, name, time, expected in calls:
            features = session.features(tokens, RASTER, torch.tensor([known]), known, torch.tensor([[known]]))
            x = cells(golden[name][image])[None, None]
            velocity = session.denoise(x, time.view(1, 1), features, torch.ones(1))[0, 0]
            torch.testing.assert_close(velocity, cells(golden[expected][image]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("image", [0, 1])
@pytest.mark.parametrize("name, cfg", [("run_cfg1", 1.0), ("run_cfg27", 2.7)])
@torch.inference_mode()
def test_ar_is_the_official_sampler(xar: Any, golden: dict[str, Tensor], name: str, cfg: float, image: int) -> None:
    condition, options = xar.class_label(int(golden["label"][image])), ContinuousOptions(diffusion_steps=5)
    run = golden_run(xar, condition, RASTER, noise_of(golden, image), cfg=cfg, options=options)
    autoregressive(run)
    made = xar.latent_maps(run.canvas.tokens, xar.layout(condition))[0]
    assert torch.allclose(made, golden[f"{name}.latent"][image], atol=2e-4)
    picture = xar.decode(run.canvas.tokens, xar.layout(condition))
    assert picture.shape == (1, 16 * xar.vae.config.factor, 16 * xar.vae.config.factor, 3) and picture.isfinite().all()


@torch.inference_mode()
def test_ddim_is_the_official_euler_sampler(xar: Any, golden: dict[str, Tensor]) -> None:
    options = ContinuousOptions(diffusion_steps=5, diffusion_sampler="ddim")
    run = golden_run(xar, xar.class_label(int(golden["label"][0])), RASTER, noise_of(golden, 0), options=options)
    autoregressive(run, steps=1)
    assert torch.allclose(run.canvas.tokens[0, 0], cells(golden["euler_cell0_cfg1.x"][0]), atol=1e-4)


def test_cells_lie_where_the_official_code_puts_them(xar: Any, golden: dict[str, Tensor]) -> None:
    tokens = cells(golden["uncluster.in"].unflatten(1, (4, 64)))
    assert torch.equal(xar.latent_maps(tokens, xar.layout(xar.class_label(0))), golden["uncluster.out"])


@torch.inference_mode()
def test_chains_that_know_different_numbers_of_cells_are_what_each_is_alone(xar: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, x = torch.randn(4, 4, 1024, generator=generator), torch.randn(4, 2, 1024, generator=generator)
    time, known = torch.tensor([[0.3, 0.9]] * 4), torch.tensor([0, 1, 2, 3])
    session, scale = xar.latent_session(xar.class_label(2), 1, True), torch.full((4,), 2.0)
    order = RASTER.expand(4, -1)
    together = session.denoise(x, time, session.features(tokens, order, known, 3, known[:, None]), scale)
    for row, count in enumerate(known.tolist()):
        one = slice(row, row + 1)
        features = session.features(tokens[one], order[one], known[one], count, known[one, None])
        for state in range(2):
            alone = session.denoise(x[one, state : state + 1], time[one, state : state + 1], features, scale[one])
            torch.testing.assert_close(together[row, state], alone[0, 0], atol=2e-5, rtol=0)


def test_decoders_run_on_cells(xar: Any) -> None:
    """seed-exact finds ar's own cells. A state of 1,024 numbers is kept next to never, so that head-speculative only
    has to come to an end: it takes no more calls than there are steps, and one cell a pass."""

    def run(decoder: str, **options: Any) -> Any:
        continuous = ContinuousOptions(diffusion_steps=8, **options)
        settings = SamplerSettings(decoder, 4, guidance_scale=2.0, batch_size=2, seed=3, continuous=continuous)
        generation = generate(xar, xar.class_label(1), settings)
        assert generation.tokens.isfinite().all()
        return generation.statistics

    assert run("seed-exact", tolerance=1e-3, measure_deviation=True).deviation < 1e-2
    statistics = run("head-speculative")
    assert statistics.forward_passes == 4 and 0 < statistics.head_calls <= 32


def test_the_family_and_the_authors_settings(xar: Any) -> None:
    layout = xar.layout(xar.class_label(0))
    assert isinstance(xar, ContinuousModel) and (xar.family, xar.classes, xar.name) == ("xar", 1000, "xAR-tiny")
    assert (layout.grid, layout.channels, layout.iterations, layout.in_order) == ((1, 2, 2), 1024, 4, True)
    assert layout.guidance_schedule == "linear-from-one"


@pytest.mark.parametrize("name", SIZES)
def test_every_published_size_is_read_from_its_shapes(name: str) -> None:
    shapes = shapes_of(name)
    family = family_of(shapes)
    assert family is not None and family.title == "xAR"
    config = read_config(shapes, {}, name)
    width, depth, heads, mlp_width, _ = SIZES[name]
    assert (config.width, config.depth, config.decoder_depth, config.heads) == (width, depth, depth, heads)
    assert (config.mlp_width, config.side, config.classes) == (mlp_width, 8, 1000)
    network = XARNetwork(config, device=torch.device("meta"))
    own = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    check_fit(name, own, shapes, key_map(shapes), reshapes())
    matrices = [key for key in own if _BLOCK_MATRIX.search(key)]
    assert len(matrices) == 2 * depth * 5


def test_bad_input_is_one_sentence(xar: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only widths of 768, 1024, 1280 tell their heads"):
        model_loaders.load(FILE, with_vq=False)
    with pytest.raises(ValueError, match="takes a class label, not a prompt"):
        xar.prompt("a fox")
    with pytest.raises(ValueError, match="which eta is no part"):
        xar.process(ContinuousOptions(diffusion_sampler="ddim", eta=0.5))
    weights = torch.load(FILE, weights_only=True)
    weights["encoder_pos_embed_learned"] = torch.zeros(1, 250, 32)
    torch.save(weights, tmp_path / "damaged.pth")
    with pytest.raises(CheckpointError, match="250 positions make no square"):
        model_loaders.load(tmp_path / "damaged.pth", overrides={"heads": 2}, with_vq=False)
