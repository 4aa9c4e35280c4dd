"""Maximal coupling of two Gaussians: the result has the target's law, and as many drafts are kept as can be."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import kstest, norm

from speculative_ar.decoders.continuous.gaussians import (
    Gaussian,
    keeps,
    log_ratio,
    residual_by_reflection,
    residual_by_rejection,
)

SAMPLES = 100_000
PROPOSALS = 64


def gaussian(mean: list[float], std: list[float]) -> Gaussian:
    return Gaussian(torch.tensor(mean).expand(SAMPLES, -1), torch.tensor(std).log().expand(SAMPLES, -1))


def coupled(p: Gaussian, q: Gaussian, reflect: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws of p made from drafts of q, and which drafts were kept."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(p.mean.shape, generator=generator)
    x = q.at(noise)
    kept = keeps(torch.rand(SAMPLES, generator=generator), log_ratio(p, q, p.noise_of(x), noise))
    if reflect:
        return torch.where(kept[:, None], x, residual_by_reflection(p, q, noise)), kept
    normals = torch.randn(PROPOSALS, *p.mean.shape, generator=generator)
    redrawn, found = residual_by_rejection(p, q, normals, torch.rand(PROPOSALS, SAMPLES, generator=generator))
    assert bool((found | kept).all())
    return torch.where(kept[:, None], x, redrawn), kept


CASES = {
    "reflected": (([0.0, 0.0, 0.0], [0.5, 1.0, 2.0]), ([0.3, -0.4, 0.9], [0.5, 1.0, 2.0]), True),
    "equal spreads": (([0.0, 0.0, 0.0], [0.5, 1.0, 2.0]), ([0.3, -0.4, 0.9], [0.5, 1.0, 2.0]), False),
    "other spreads": (([0.0, 0.0], [0.5, 1.0]), ([0.3, -0.4], [0.7, 0.8]), False),
}


@pytest.mark.parametrize("p, q, reflect", CASES.values(), ids=CASES)
def test_the_result_has_the_target_s_law(p: tuple, q: tuple, reflect: bool) -> None:
    target = gaussian(*p)
    result, kept = coupled(target, gaussian(*q), reflect)
    assert 0.3 < kept.float().mean() < 0.95
    noise = target.noise_of(result).double()
    assert min(kstest(column.numpy(), "norm").pvalue for column in noise.T) > 1e-4
    covariance = noise.T @ noise / SAMPLES
    assert (covariance - torch.eye(len(p[0]))).abs().max() < 4 * math.sqrt(2 / SAMPLES)


@pytest.mark.parametrize("distance", [0.2, 1.0, 3.0])
def test_equal_spreads_keep_as_many_drafts_as_the_laws_overlap(distance: float) -> None:
    p, q = gaussian([0.0, 0.0], [0.5, 0.5]), gaussian([0.0, 0.5 * distance], [0.5, 0.5])
    _, kept = coupled(p, q, reflect=True)
    expected = 2 * norm.cdf(-distance / 2)
    assert abs(kept.double().mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / SAMPLES)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_factor_on_the_ratio_biases_the_result(factor: float) -> None:
    """The law that the dossier derives (4.1, Fact B): TV to the target 0.868, 0.308, 0.217 and 0.375."""
    p, q = gaussian([0.0], [1.0]), gaussian([1.0], [1.0])
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(SAMPLES, 1, generator=generator)
    x = q.at(noise)
    log_factor = math.log(factor)
    ratio = log_ratio(p, q, p.noise_of(x), noise) + log_factor
    kept = keeps(torch.rand(SAMPLES, generator=generator), ratio)
    normals = torch.randn(512, SAMPLES, 1, generator=generator)
    redrawn, _ = residual_by_rejection(p, q, normals, torch.rand(512, SAMPLES, generator=generator), log_factor)
    result = torch.where(kept[:, None], x, redrawn)[:, 0].double()
    edges = torch.linspace(-4, 5, 91).double()
    law = torch.diff(torch.from_numpy(norm.cdf(edges.numpy())))
    shares = torch.histogram(result, edges).hist / SAMPLES
    distance = {0.1: 0.868, 0.5: 0.308, 2.0: 0.217, 10.0: 0.375}[factor]
    assert abs(float((shares - law).abs().sum()) / 2 - distance) < 0.02


def test_small_spreads_stay_in_log_space() -> None:
    """16 standard deviations of 1e-5: their product, 1e-80, is no float32."""
    p = Gaussian(torch.zeros(1, 16), torch.full((1, 16), math.log(1e-5)))
    q = Gaussian(torch.zeros(1, 16), torch.full((1, 16), math.log(2e-5)))
    noise = torch.ones(1, 16)
    x = q.at(noise)
    assert torch.allclose(log_ratio(p, q, p.noise_of(x), noise), torch.tensor([16 * (-1.5 + math.log(2))]), atol=1e-3)
