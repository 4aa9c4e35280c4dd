"""The parts of the continuous benchmark that do not wait for a model: its distance, its rivals, its table."""

from __future__ import annotations

import math

import pytest
import torch

import benchmark_continuous
from benchmark_continuous import Row, frechet_distance, neighbourhoods, rivals
from speculative_ar.decoders import SamplerSettings


def row(name: str, promise: str, passes: float) -> Row:
    return Row(name, promise, passes, 0.0, 0.0, 0.0, 0.0, 1.0, None, None, None)


def test_the_distance_of_gaussians_is_the_known_one() -> None:
    """|mean difference|^2 + sum of (s - t)^2 where the covariances share their axes."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(200_000, 3, generator=generator)
    other = torch.randn(200_000, 3, generator=generator) * torch.tensor([1.0, 2.0, 0.5]) + torch.tensor([0.5, 0, 0])
    assert frechet_distance(drawn, drawn) == pytest.approx(0.0, abs=1e-6)
    assert frechet_distance(drawn, other) == pytest.approx(0.25 + 1.0 + 0.25, abs=0.03)


def test_a_neighbourhood_is_two_tokens_and_the_two_below_them() -> None:
    tokens = torch.arange(12).view(1, 6, 2)  # 2 rows of 3
    assert neighbourhoods(tokens, (2, 3)).shape == (2, 8)
    assert sorted(neighbourhoods(tokens, (2, 3))[1].tolist()) == [2, 3, 4, 5, 8, 9, 10, 11]


def test_ar_rivals_have_as_many_steps_as_the_approximate_rows_took_passes() -> None:
    rows = [row("a", "approximate", 6.2), row("b", "approximate", 11.0), row("c", "approximate", 32.0)]
    planned = rivals(SamplerSettings(), rows)
    assert [(entry.settings.decoder, entry.settings.continuous.iterations) for entry in planned] == [
        ("ar", 11),
        ("ar", 6),
    ]


def test_what_was_not_measured_is_left_empty() -> None:
    line = benchmark_continuous.table([row("a", "lossless", 32.0)]).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")][-2:] == ["", ""]
    assert not math.isnan(float(line.split("|")[3]))
