"""The counter noise: a pure function of its key, uniform, and without a trace of dependence between keys."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from speculative_ar.decoders.noise import Noise, Purpose

CPU = torch.device("cpu")
POSITIONS = torch.arange(400)[None]


def gumbel(seed: int = 0, first: int = 0, batch: int = 1, positions: Tensor = POSITIONS, vocabulary: int = 500, **more):
    return Noise(seed, first, batch, CPU).gumbel(Purpose.DRAFT, positions.expand(batch, -1), vocabulary, **more)


def devices() -> list[str]:
    return ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()


@pytest.mark.parametrize("device", devices())
def test_known_values_on_every_device(device: str) -> None:
    """The stream is part of the promise: a seed shared in a workflow gives the same picture in every version."""
    noise = Noise(2**63 + 5, 3, 1, torch.device(device))
    positions = torch.tensor([[0, 1, 1000]], device=device)
    passes = torch.tensor([7], device=device)
    assert noise.code(Purpose.INITIALISE, positions, 16384).tolist() == [[3768, 9380, 10684]]
    assert (noise.uniform(Purpose.ACCEPT, positions, passes) * 2**24).tolist() == [[6540273, 13342168, 9864239]]
    assert noise.gumbel(Purpose.DRAFT, positions[:, :1], 3).tolist()[0][0] == pytest.approx(
        [2.89465, 3.719903, 2.584667], rel=1e-5
    )


def test_window_batch_and_vocabulary_leave_a_value_alone() -> None:
    whole = gumbel(seed=9, batch=4)
    assert torch.equal(gumbel(seed=9, batch=4, positions=POSITIONS[:, 100:133]), whole[:, 100:133])
    assert torch.equal(gumbel(seed=9, batch=4, vocabulary=200), whole[..., :200])
    assert torch.equal(gumbel(seed=9, first=2, batch=1), whole[2:3])


def test_computation_dtype_of_the_model_leaves_a_value_alone() -> None:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        double = gumbel(seed=1)
    finally:
        torch.set_default_dtype(default)
    assert double.dtype == torch.float32
    assert torch.equal(double, gumbel(seed=1))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_values_are_gumbel_and_uniform(seed: int) -> None:
    values = gumbel(seed=seed).flatten().double()
    assert kstest(torch.exp(-torch.exp(-values)).numpy(), "uniform").pvalue > 1e-4
    uniforms = Noise(seed, 0, 500, CPU).uniform(Purpose.ACCEPT, POSITIONS.expand(500, -1)).flatten()
    assert uniforms.min() >= 0 and uniforms.max() < 1
    assert kstest(uniforms.numpy(), "uniform").pvalue > 1e-4


def test_codes_are_uniform() -> None:
    codes = Noise(0, 0, 500, CPU).code(Purpose.INITIALISE, POSITIONS.expand(500, -1), 100).flatten()
    counts = torch.bincount(codes, minlength=100).double()
    assert len(counts) == 100
    expected = codes.numel() / 100
    assert ((counts - expected) ** 2 / expected).sum() < 180  # chi-square, 99 degrees of freedom, p about 1e-6


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of the correlation of independent samples."""
    a, b = a.flatten().double(), b.flatten().double()
    return abs(torch.corrcoef(torch.stack((a, b)))[0, 1].item()) * math.sqrt(a.numel())


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"seed": 2**32},
        {"first": 1},
        {"positions": POSITIONS + 1},
        {"positions": POSITIONS + 400},
        {"passes": torch.tensor([0])},
        {"passes": torch.tensor([1])},
    ],
    ids=str,
)
def test_neighbouring_keys_are_independent(other: dict) -> None:
    a, b = gumbel(), gumbel(**other)
    assert correlation(a, b) < 5
    assert correlation(a[..., 1:], b[..., :-1]) < 5
    assert (a.argmax(-1) == b.argmax(-1)).sum() < 8  # 400 rows of 500 codes agree 0.8 times on average


def test_purposes_are_independent() -> None:
    noise = Noise(0, 0, 500, CPU)
    positions = POSITIONS.expand(500, -1)
    drawn = [noise.uniform(purpose, positions) for purpose in Purpose]
    for index, a in enumerate(drawn):
        assert all(correlation(a, b) < 5 for b in drawn[index + 1 :])


def test_no_two_rows_repeat() -> None:
    rows = gumbel(batch=20, vocabulary=2).flatten(0, 1)
    assert len(rows.unique(dim=0)) == len(rows)
