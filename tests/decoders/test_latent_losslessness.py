"""Every continuous decoder that promises the model's distribution, against the exact Gaussian law of a linear model."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2, kstest

from speculative_ar.decoders import SamplerSettings, generate
from speculative_ar.decoders.continuous import cspd, speculative_head
from speculative_ar.decoders.interface import ContinuousOptions
from tests.decoders.latent_toy import LatentToy

PICTURES = 20_000
SIGNIFICANCE = 1e-4
EXACT_CSPD = {"verification": "prefix", "sigma_factor": "off", "softening": 1.0, "prefill_ratio": 0.0}


def p_value(tokens: torch.Tensor, law: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The least of three tests of pictures [B, N, C] against a Gaussian: means, second moments, each coordinate's law.

    A Bonferroni factor makes it a p-value again.
    """
    mean, covariance = law
    whitened = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (tokens.flatten(1).double() - mean).T, upper=False
    ).T
    count, width = whitened.shape
    means = chi2.sf(float(count * whitened.mean(0).square().sum()), width)
    products = (whitened[:, :, None] * whitened[:, None, :]).mean(0) - torch.eye(width)
    upper = torch.triu(products)
    scaled = count * (upper.square() / (1 + torch.eye(width))).sum()
    moments = chi2.sf(float(scaled), width * (width + 1) // 2)
    coordinates = min(kstest(column.numpy(), "norm").pvalue for column in whitened.T) * width
    return 3 * min(means, moments, coordinates)


def tokens_of(decoder: str, model: LatentToy, options: dict, length: int = 3, batch: int = PICTURES, **more: object):
    settings = SamplerSettings(
        decoder=decoder,
        draft_length=length,
        seed=4,
        batch_size=batch,
        continuous=ContinuousOptions(guidance_schedule="constant", **options),
        **more,
    )
    return generate(model, None, settings, draft_model=LatentToy(steps=model.diffusion_steps, bend=0.15))


@pytest.mark.parametrize("more", [{}, {"guidance_scale": 1.7, "temperature": 0.8}], ids=["plain", "guided"])
@pytest.mark.parametrize(
    "decoder, options, length",
    [
        ("ar", {}, 1),
        ("ar", {"noisy_last_step": True}, 1),
        ("seed-exact", {"tolerance": 0.0}, 2),
        ("head-speculative", {}, 1),
        ("head-speculative", {}, 2),
        ("head-speculative", {}, 9),
        ("cspd", EXACT_CSPD, 1),
        ("cspd", EXACT_CSPD, 2),
    ],
)
def test_pictures_have_the_model_s_law(decoder: str, options: dict, length: int, more: dict) -> None:
    model = LatentToy()
    generation = tokens_of(decoder, model, options, length, **more)
    assert generation.statistics.promise in ("reference", "seed-exact", "lossless")
    noisy = decoder == "cspd" or bool(options.get("noisy_last_step"))
    law = model.law(4, more.get("guidance_scale", 1.0), more.get("temperature", 1.0), noisy)
    assert p_value(generation.tokens, law) > SIGNIFICANCE
    if decoder in ("cspd", "head-speculative"):
        assert 0.1 < generation.statistics.acceptance_rate < 1, "a test without rejections proves nothing"


def everything(uniform: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ratio, dtype=torch.bool)


@pytest.mark.parametrize(
    "decoder, options, module",
    [("cspd", EXACT_CSPD, cspd), ("head-speculative", {}, speculative_head)],
)
def test_the_test_sees_a_rule_that_keeps_everything(monkeypatch, decoder: str, options: dict, module: object) -> None:
    monkeypatch.setattr(module, "keeps", everything)
    law = LatentToy().law(4, noisy_last=decoder == "cspd")
    assert p_value(tokens_of(decoder, LatentToy(), options).tokens, law) < SIGNIFICANCE


@pytest.mark.parametrize(
    "decoder, options, module",
    [("cspd", EXACT_CSPD, cspd), ("head-speculative", {}, speculative_head)],
)
def test_the_test_sees_a_redraw_from_the_target_itself(
    monkeypatch, decoder: str, options: dict, module: object
) -> None:
    def first(p, q, normals, uniforms, log_scale=0.0):
        return p.at(normals[0]), torch.ones(normals.shape[1:-1], dtype=torch.bool)

    monkeypatch.setattr(module, "residual_by_rejection", first)
    law = LatentToy().law(4, noisy_last=decoder == "cspd")
    assert p_value(tokens_of(decoder, LatentToy(), options).tokens, law) < SIGNIFICANCE


@pytest.mark.parametrize("sigma_factor", ["paper", "released"])
def test_a_sigma_factor_moves_the_law(sigma_factor: str) -> None:
    options = {**EXACT_CSPD, "sigma_factor": sigma_factor}
    generation = tokens_of("cspd", LatentToy(), options)
    assert generation.statistics.promise == "approximate"
    assert p_value(generation.tokens, LatentToy().law(4, noisy_last=True)) < SIGNIFICANCE
