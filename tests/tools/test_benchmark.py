"""tools/benchmark.py as a user calls it, and what its figures mean, on models that are small or random."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmark
import benchmark_models
import benchmark_reference
import benchmark_runs
from benchmark_costs import LoggedModel, measure_cost, replay, weight_bytes
from benchmark_meters import TensorMeter
from benchmark_models import FIRST_CODE, SHAPES
from speculative_ar.decoders import DECODERS, DecoderOptions, SamplerSettings, generate
from tests.tools.tiny_subject import SHAPE, tiny_subject

ROOT = Path(__file__).parents[2]
COST = ("ms_per_pass", "bare_ms_per_pass", "bare_ratio", "host_reads_per_pass", "peak_memory_mb", "roofline_share")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    """What --json writes for the tiny model."""
    monkeypatch.setitem(SHAPES, "tiny", SHAPE)
    file = folder / "found.json"
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--synthetic", "tiny", "--json", str(file), *arguments])
    benchmark.main()
    return json.loads(file.read_text(encoding="utf-8"))


def test_quick_run_writes_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [
        sys.executable,
        "tools/benchmark.py",
        "--quick",
        "--pairs",
        "1",
        "--decoder",
        "seed-exact",
        "--json",
        str(file),
    ]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ar, exact = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert (ar["decoder"], ar["forward_passes"], ar["pass_reduction"]) == ("ar", 256, 1)
    assert (exact["decoder"], exact["draft_length"], exact["promise"]) == ("seed-exact", 32, "seed-exact")
    assert exact["forward_passes"] < 200
    assert 0 < exact["acceptance_rate"] < 1
    assert exact["seconds"] > 0 and exact["overhead"] >= 1
    assert f"{exact['pass_reduction']:.2f}x" in output


def test_every_decoder_has_every_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(monkeypatch, tmp_path, "--pairs", "1", "--draft-length", "4", "--branches", "3", "--branch-length", "2")
    rows = found["rows"]
    decoders = [(row["decoder"], row["branches"]) for row in rows]
    assert decoders == [("ar", 1), ("seed-exact", 1), ("seed-exact", 3), *((name, 1) for name in list(DECODERS)[2:])]
    assert {row["draft_length"] for row in rows[1:]} == {4}
    for row in rows:
        for figure in ("forward_passes", "pass_reduction", "seconds", "overhead", *COST):
            assert math.isfinite(row[figure]) and row[figure] > 0, (row["decoder"], figure)
        assert 0 <= row["acceptance_rate"] <= 1
    (reference,) = found["reference"]
    assert reference["draft_length"] == 4 and reference["ms_per_pass"] > 0
    printed = capsys.readouterr().out
    assert "| seed-exact  | 4 + 2x2      |" in printed
    assert "Of that time the decoders take, each pass: seed-exact " in printed


def test_a_batch_has_no_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--pairs", "1", "--decoder", "sjd", "--draft-length", "3", "--draft-length", "5", "--batch", "2")
    found = run(monkeypatch, tmp_path, *arguments)
    assert [(row["decoder"], row["draft_length"]) for row in found["rows"]] == [("ar", 1), ("sjd", 3), ("sjd", 5)]
    assert {row["batch_size"] for row in found["rows"]} == {2}
    assert "reference" not in found


def test_each_sweep_walks_through_its_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(benchmark_runs.SWEEPS, "window", (1, 4, 128))
    monkeypatch.setitem(benchmark_runs.SWEEPS, "size", ((2, 3), (3, 4)))
    monkeypatch.setitem(benchmark_runs.SWEEPS, "batch", (1, 2))
    chosen = [word for name in ("window", "size", "batch") for word in ("--sweep", name)]
    found = run(monkeypatch, tmp_path, *chosen, "--draft-length", "4")["sweeps"]
    values = {name: [row["value"] for row in rows] for name, rows in found.items()}
    assert values == {"window": ["1", "4"], "size": ["2x3", "3x4"], "batch": ["1", "2"]}
    for rows in found.values():
        for row in rows:
            assert all(math.isfinite(row[name]) and row[name] > 0 for name in ("seconds", "ms_per_token", *COST))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sweep", "size"], "error: the demo model draws one size only: --sweep size needs --synthetic"),
        (["--pairs", "0"], "error: argument --pairs: 0 is below 1"),
        (
            ["--quick", "--draft-length", "300"],
            "benchmark.py: draft_length is 300, but a picture of demo tokens",
        ),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_sentence(arguments: list[str], sentence: str) -> None:
    command = [sys.executable, "tools/benchmark.py", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_the_demo_model_draws_one_size() -> None:
    demo = benchmark_models.demo(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="demo tokens draws one size only: choose a model with --synthetic"):
        demo.with_grid(8, 8)


def test_synthetic_models_have_a_trained_models_spread() -> None:
    subject = benchmark_models.synthetic("80m", SHAPES["lumina-80m"], torch.device("cpu"), torch.float32)
    session = subject.target.session(subject.conditions[0][1], 1, True, 8)
    conditional, unconditional = session.forward(torch.arange(8)[None], torch.tensor([0]))
    logits = unconditional + 3 * (conditional - unconditional)
    assert 1 < torch.distributions.Categorical(logits=logits).entropy().mean() < 6


def test_synthetic_models_accept_and_reject() -> None:
    subject = tiny_subject()
    for decoder in ("seed-exact", "scd-maximal", "draft-model"):
        settings = SamplerSettings(decoder=decoder, draft_length=8, guidance_scale=3)
        statistics = generate(subject.target, subject.conditions[0][1], settings, draft_model=subject.draft).statistics
        assert 0 < statistics.acceptance_rate < 1


def test_shapes_are_lumina_s() -> None:
    with torch.device("meta"):
        networks = {name: benchmark_models.SyntheticNetwork(shape.config) for name, shape in SHAPES.items()}
    parameters = {name: sum(weight.numel() for weight in net.parameters()) for name, net in networks.items()}
    assert parameters["lumina-80m"] == pytest.approx(54.7e6, rel=0.01)  # 80 M with an output row for each id
    assert parameters["lumina-7b"] == pytest.approx(6.81e9, rel=0.01)


def test_the_reference_is_the_same_model() -> None:
    subject = tiny_subject()
    condition = subject.conditions[0][1]
    chameleon = benchmark_reference.Chameleon(subject.target, condition)
    session = subject.target.session(condition, 1, True, 8)
    codes = torch.arange(700, 712)
    first = torch.cat((chameleon.prompt[0, -1:], codes[:5] + FIRST_CODE))
    theirs = torch.cat((chameleon.forward(first), chameleon.forward(codes[5:] + FIRST_CODE)), dim=1)
    fed = torch.cat((codes[:1], codes[:5]))[None]  # the token at -1 is ignored
    parts = session.forward(fed, torch.tensor([-1])), session.forward(codes[None, 5:], torch.tensor([5]))
    ours = torch.cat(parts, dim=2)[:, 0]
    torch.testing.assert_close(ours, theirs[..., FIRST_CODE : FIRST_CODE + benchmark_models.CODES])


@pytest.mark.parametrize("branches", [1, 3])
def test_the_bare_run_feeds_what_the_decoder_fed(branches: int) -> None:
    subject = tiny_subject()
    condition = subject.conditions[0][1]
    options = DecoderOptions(branches=branches, branch_length=2)
    settings = SamplerSettings(decoder="seed-exact", draft_length=4, guidance_scale=2, options=options)
    log = LoggedModel(subject.target)
    passes = generate(log, condition, settings).statistics.forward_passes
    assert [call.tokens.shape[1] for call in log.calls] == [4 + 2 * (branches - 1)] * passes
    again = LoggedModel(subject.target)
    bare = LoggedModel(again)
    bare.arguments, bare.calls = log.arguments, list(log.calls)
    assert replay(bare) > 0
    assert len(again.calls) == passes
    for fed, call in zip(again.calls, log.calls, strict=True):
        assert torch.equal(fed.tokens, call.tokens) and torch.equal(fed.start, call.start)
        assert (fed.parents is call.parents) and fed.furthest == call.furthest


def test_a_decoder_asks_the_host_once_a_pass() -> None:
    subject = tiny_subject()
    for decoder in ("seed-exact", "draft-model"):
        settings = SamplerSettings(decoder=decoder, draft_length=4, guidance_scale=2)
        cost, _ = measure_cost(subject, subject.conditions[0][1], settings, bandwidth=1e9, repeats=1)
        assert cost.host_reads_per_pass == 1


def test_the_meter_sees_reads_and_living_tensors() -> None:
    with TensorMeter() as meter:
        kept = torch.zeros(1000)
        for _ in range(3):
            kept.add_(torch.ones(1000))
        assert kept.sum() == 3000  # asks once
        kept.tolist()
        torch.nonzero(kept)
    assert meter.reads == 3
    assert 8000 <= meter.peak_bytes < 8100 + 8000


def test_embeddings_are_looked_up_and_not_read() -> None:
    network = tiny_subject().target.network
    looked_up = (network.tok_embeddings, network.picture_embeddings)
    everything = sum(weight.nbytes for weight in network.parameters())
    assert weight_bytes(network) == everything - sum(table.weight.nbytes for table in looked_up)
