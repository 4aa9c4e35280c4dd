"""Checks on a GPU that decoding costs hardly more than the model, in under eight minutes.

    python tools/gpu_check.py

Needs a CUDA GPU with 24 GB, and the environment that has a CUDA build of torch. Random weights in the shape of
Lumina-mGPT 7B in bfloat16, and the bundled demo model in float32. Prints one table; exits with 1 where a figure misses
its limit.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import environment

if __name__ == "__main__":
    environment.enter(__file__, environment.DEMO)

import torch

import benchmark_models
import benchmark_tables
from benchmark_costs import LoggedModel, copy_bandwidth, measure_cost, synchronise
from benchmark_models import SHAPES, Subject
from speculative_ar.decoders import DECODERS, DecoderOptions, Generation, SamplerSettings, generate

MODEL = "lumina-7b"
SECONDS = 480
EXACT = SamplerSettings(decoder="seed-exact", guidance_scale=3.0)
BRANCHES = DecoderOptions(branches=8, branch_length=4)


@dataclass(frozen=True)
class Limits:
    """What the figures may be: at least for the share of the roofline, at most for the others."""

    roofline_share: float = 0.60
    bare_ratio: float = 1.10
    host_reads: float = 0.0
    first_use_seconds: float = 5.0
    doubling: float = 2.3
    branched_passes: float = 0.9


@dataclass(frozen=True)
class Size:
    """How much is measured: the grid of codes, which is doubled once, and the positions of a pass."""

    rows: int = 24
    columns: int = 24
    window: int = 32
    drafts: int = 8
    batch: int = 4
    pairs: int = 4


@dataclass(frozen=True)
class Finding:
    """A figure beside its limit."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Refusals(logging.Handler):
    """What decoders/capture.py says where passes could not be recorded as CUDA graphs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self.sentences.append(record.getMessage())


def run(subject: Subject, settings: SamplerSettings, index: int = 0) -> Generation:
    return generate(subject.target, subject.conditions[index][1], settings, draft_model=subject.draft)


def seconds(subject: Subject, settings: SamplerSettings) -> float:
    begin = time.perf_counter()
    run(subject, settings)
    synchronise(subject.target.device)
    return time.perf_counter() - begin


def check_costs(subject: Subject, size: Size, limits: Limits) -> Iterator[Finding]:
    """Every decoder's pass against the weights that it reads, and against the bare forward pass."""
    bandwidth = copy_bandwidth(subject.target.device)
    for name, decoder in DECODERS.items():
        if not decoder.speculative:
            continue
        length = size.drafts if decoder.needs_draft_model else size.window
        settings = replace(EXACT, decoder=name, draft_length=length)
        cost, _ = measure_cost(subject, subject.conditions[0][1], settings, bandwidth, repeats=2)
        row = f"{name}, {length}"
        yield Finding(f"{row}: share of the roofline", cost.roofline_share, limits.roofline_share, at_least=True)
        yield Finding(f"{row}: total / bare forward passes", cost.bare_ratio, limits.bare_ratio)
        yield Finding(f"{row}: host reads a pass", cost.host_reads_per_pass, limits.host_reads)


def check_first_use(subject: Subject, size: Size, limits: Limits) -> Iterator[Finding]:
    """What the first generation of a process takes longer than the second."""
    settings = replace(EXACT, draft_length=size.window)
    first, second = seconds(subject, settings), seconds(subject, settings)
    yield Finding("first use: seconds more than later", first - second, limits.first_use_seconds)


def check_graphs(subject: Subject, size: Size) -> Iterator[Finding]:
    """Recorded passes against plain ones: a logged model's are never recorded."""
    for name in ("seed-exact", "scd-maximal"):
        settings = replace(EXACT, decoder=name, draft_length=size.window)
        recorded = run(subject, settings).tokens
        plain = run(replace(subject, target=LoggedModel(subject.target)), settings).tokens
        yield Finding(f"{name}: tokens that differ with graphs", (recorded != plain).sum().item(), 0)


def check_doubling(subject: Subject, size: Size, limits: Limits) -> Iterator[Finding]:
    """Twice the codes in the same window."""
    settings = replace(EXACT, draft_length=size.window)
    short, long = (
        min(seconds(subject.with_grid(size.rows, columns), settings) for _ in range(2))
        for columns in (size.columns, 2 * size.columns)
    )
    yield Finding("twice the codes: times the seconds", long / short, limits.doubling)


def check_batch(subject: Subject, size: Size) -> Iterator[Finding]:
    """A batch takes the passes of its slowest row, and each row those that it takes alone."""
    settings = replace(EXACT, draft_length=size.window)
    together = run(subject, replace(settings, batch_size=size.batch)).statistics
    alone = [run(subject, replace(settings, first_index=index)).statistics for index in range(size.batch)]
    slowest = max(statistics.forward_passes for statistics in alone)
    yield Finding("batch: passes beyond its slowest row's", abs(together.forward_passes - slowest), 0)
    rows = zip(together.accepted_per_pass, alone, strict=True)
    changed = sum(row != statistics.accepted_per_pass[0] for row, statistics in rows)
    yield Finding("batch: rows that go another way than alone", changed, 0)


def check_exactness(demo: Subject, size: Size, limits: Limits) -> Iterator[Finding]:
    """The trained model in float32: the same tokens as ar, with branches too, and fewer passes with them."""
    differing, plain, branched = 0, 0, 0
    for pair in range(size.pairs):
        settings = replace(EXACT, draft_length=size.window, seed=pair)
        wanted = run(demo, replace(settings, decoder="ar"), pair).tokens
        chain, tree = run(demo, settings, pair), run(demo, replace(settings, options=BRANCHES), pair)
        differing += sum((found.tokens != wanted).sum().item() for found in (chain, tree))
        plain += chain.statistics.forward_passes
        branched += tree.statistics.forward_passes
    yield Finding("seed-exact: tokens that differ from ar's", differing, 0)
    yield Finding("seed-exact: passes with branches / without", branched / plain, limits.branched_passes)


def check_all(subject: Subject, demo: Subject, size: Size, limits: Limits) -> list[Finding]:
    """Everything, in an order that meets the first use first."""
    begin, refusals = time.perf_counter(), Refusals()
    logging.getLogger("speculative_ar.decoders.capture").addHandler(refusals)
    subject = subject.with_grid(size.rows, size.columns)
    parts = (
        check_first_use(subject, size, limits),
        check_graphs(subject, size),
        check_costs(subject, size, limits),
        check_doubling(subject, size, limits),
        check_batch(subject, size),
        check_exactness(demo, size, limits),
    )
    findings = []
    for part in parts:
        for finding in part:
            print(f"{time.perf_counter() - begin:4.0f} s  {finding.what}", file=sys.stderr, flush=True)
            findings.append(finding)
    findings.append(Finding("passes that could not be recorded", len(refusals.sentences), 0))
    findings.append(Finding("seconds of this check", time.perf_counter() - begin, SECONDS))
    logging.getLogger("speculative_ar.decoders.capture").removeHandler(refusals)
    return findings


def table(findings: list[Finding]) -> str:
    """The findings as a Markdown table."""
    body = [
        (
            finding.what,
            f"{finding.value:.2f}",
            f"{'at least' if finding.at_least else 'at most'} {finding.limit:g}",
            "holds" if finding.holds else "MISSED",
        )
        for finding in findings
    ]
    return benchmark_tables.markdown(("check", "measured", "limit", ""), body)


def report(findings: list[Finding]) -> int:
    """Prints the table; returns the exit code."""
    print(table(findings))
    missed = sum(not finding.holds for finding in findings)
    print(f"\n{missed} of {len(findings)} missed." if missed else f"\nAll {len(findings)} hold.")
    return 1 if missed else 0


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_check.py: torch sees no CUDA GPU here: run it on a machine with one and a CUDA build of torch.")
    device = torch.device("cuda", torch.cuda.current_device())
    subject = benchmark_models.synthetic(MODEL, SHAPES[MODEL], device, torch.bfloat16)
    demo = benchmark_models.demo(device, torch.float32)
    findings = check_all(subject, demo, Size(), Limits())
    automatic: Any = run(subject, replace(EXACT, draft_length=0, options=DecoderOptions(branches=0))).statistics
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; automatic: {automatic.window_choice}\n")
    sys.exit(report(findings))


if __name__ == "__main__":
    main()
