"""tools/gpu_check.py without a GPU: every figure is measured on a tiny model, and a miss is an exit code."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmark_models
import gpu_check
from gpu_check import Finding, Limits, Size
from tests.tools.tiny_subject import tiny_subject

ROOT = Path(__file__).parents[2]
SIZE = Size(rows=4, columns=5, window=4, drafts=2, batch=2, pairs=1)


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    demo = benchmark_models.demo(torch.device("cpu"), torch.float32)
    return {finding.what: finding for finding in gpu_check.check_all(tiny_subject(), demo, SIZE, Limits())}


def test_every_decoder_is_measured(findings: dict[str, Finding]) -> None:
    rows = ("seed-exact, 4", "scd-gumbel, 4", "scd-maximal, 4", "sjd, 4", "gsd, 4", "draft-model, 2")
    for row in rows:
        for figure in ("share of the roofline", "total / bare forward passes", "host reads a pass"):
            value = findings[f"{row}: {figure}"].value
            assert math.isfinite(value) and value > 0


def test_what_does_not_depend_on_the_device_holds_here_too(findings: dict[str, Finding]) -> None:
    for what in (
        "seed-exact: tokens that differ with graphs",
        "scd-maximal: tokens that differ with graphs",
        "batch: passes beyond its slowest row's",
        "batch: rows that go another way than alone",
        "seed-exact: tokens that differ from ar's",
        "passes that could not be recorded",
    ):
        assert findings[what].holds, findings[what]


def test_times_are_compared(findings: dict[str, Finding]) -> None:
    for what in ("first use: seconds more than later", "twice the codes: times the seconds", "seconds of this check"):
        assert math.isfinite(findings[what].value)


@pytest.mark.parametrize(
    ("value", "at_least", "holds"), [(1.0, False, True), (1.2, False, False), (1.2, True, True), (1.0, True, False)]
)
def test_a_limit_bounds_one_side(value: float, at_least: bool, holds: bool) -> None:
    assert Finding("", value, 1.1, at_least).holds == holds


def test_a_miss_is_named_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Finding("passes", 1.0, 2.0), Finding("roofline", 0.4, 0.6, at_least=True)
    assert gpu_check.report([good, good]) == 0
    assert "All 2 hold." in capsys.readouterr().out
    assert gpu_check.report([good, bad]) == 1
    printed = capsys.readouterr().out
    assert "| roofline | 0.40     | at least 0.6 | MISSED |" in printed
    assert "1 of 2 missed." in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the check would start")
def test_without_a_gpu_it_says_so() -> None:
    result = subprocess.run([sys.executable, str(ROOT / "tools" / "gpu_check.py")], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "gpu_check.py: torch sees no CUDA GPU here: run it on a machine with one and a CUDA build of torch."
    ]
