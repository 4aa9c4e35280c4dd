"""Measures the decoders on the bundled demo model: passes, acceptance, time, and what the loop costs beside the model.

Every figure of a table comes from one run, and for each (label, seed) pair all decoders run one after the other, so
that their ratios hold whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import environment

if __name__ == "__main__":
    environment.enter(__file__, environment.DEMO)

import pack

pack.register()

import torch  # noqa: E402

from speculative_ar import model_loaders  # noqa: E402
from speculative_ar.decoders import DECODERS, SamplerSettings, Statistics, TokenSession, generate  # noqa: E402

DRAFT_LENGTHS = (16, 32, 64)
DRAFT_MODEL_LENGTHS = (4, 8, 16)  # each draft costs a pass of the small model: longer ones lose more than they save
QUICK_PAIRS, QUICK_LENGTHS, QUICK_DRAFT_MODEL_LENGTHS = 3, (32,), (8,)
DTYPE = torch.float32  # what the nodes choose on a CPU


class TimedSession:
    """A session that adds the time spent inside the model to its owner's total."""

    def __init__(self, session: TokenSession, owner: TimedModel) -> None:
        self.session, self.owner = session, owner
        self.prefill_passes = session.prefill_passes

    def forward(self, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        logits = self.session.forward(tokens, start)
        self.owner.seconds += time.perf_counter() - begin
        return logits

    def close(self) -> None:
        self.session.close()


class TimedModel:
    """A model whose forward passes are timed; everything else is the model's own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def session(self, condition: Any, batch_size: int, guided: bool, window: int) -> TokenSession:
        begin = time.perf_counter()
        session = self.model.session(condition, batch_size, guided, window)
        self.seconds += time.perf_counter() - begin
        return TimedSession(session, self)


@dataclass(frozen=True)
class Run:
    statistics: Statistics
    seconds: float
    model_seconds: float


@dataclass(frozen=True)
class Row:
    """Means over the pairs. overhead: total time / time inside the models; pass_reduction against ar's passes."""

    decoder: str
    draft_length: int
    promise: str
    forward_passes: float
    draft_passes: float
    pass_reduction: float
    acceptance_rate: float
    accepted_per_pass: float
    seconds: float
    overhead: float


def summarise(runs: list[Run], ar_passes: float) -> Row:
    first = runs[0].statistics
    passes = mean(run.statistics.forward_passes for run in runs)
    seconds = sum(run.seconds for run in runs)
    return Row(
        decoder=first.decoder,
        draft_length=first.draft_length,
        promise=first.promise,
        forward_passes=passes,
        draft_passes=mean(run.statistics.draft_passes for run in runs),
        pass_reduction=ar_passes / passes,
        acceptance_rate=sum(r.statistics.accepted for r in runs) / max(sum(r.statistics.drafted for r in runs), 1),
        accepted_per_pass=sum(run.statistics.accepted for run in runs) / (passes * len(runs)),
        seconds=seconds / len(runs),
        overhead=seconds / sum(run.model_seconds for run in runs),
    )


def mean(values: Iterator[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def run_once(target: TimedModel, draft: TimedModel, condition: Any, settings: SamplerSettings) -> Run:
    target.seconds = draft.seconds = 0.0
    begin = time.perf_counter()
    statistics = generate(target, condition, settings, draft_model=draft).statistics
    return Run(statistics, time.perf_counter() - begin, target.seconds + draft.seconds)


def measure(pairs: int, lengths: tuple[int, ...], decoders: list[str], sampling: dict[str, Any]) -> list[Row]:
    """Runs every decoder at every draft length over (label, seed) pairs that walk through the labels."""
    bundled = model_loaders.bundled()
    target = TimedModel(model_loaders.load(bundled["demo-tokens"], dtype=DTYPE))
    draft = TimedModel(model_loaders.load(bundled["demo-tokens-draft"], dtype=DTYPE, with_vq=False))
    plan = [(name, length) for name in decoders for length in lengths_of(name, lengths)]
    runs: dict[tuple[str, int], list[Run]] = {key: [] for key in plan}
    warm_up = SamplerSettings(decoder="seed-exact", draft_length=max(lengths), **sampling)
    run_once(target, draft, target.class_label(0), warm_up)
    for pair in range(pairs):
        label = pair * len(target.labels) // pairs
        for name, length in plan:
            settings = SamplerSettings(decoder=name, draft_length=length, seed=pair, **sampling)
            runs[name, length].append(run_once(target, draft, target.class_label(label), settings))
        print(f"\rpair {pair + 1} of {pairs} ({target.labels[label]})".ljust(60), end="", file=sys.stderr, flush=True)
    print("\r".ljust(61) + "\r", end="", file=sys.stderr, flush=True)
    ar_passes = mean(run.statistics.forward_passes for run in runs["ar", 1])
    return [summarise(runs[key], ar_passes) for key in plan]


def lengths_of(decoder: str, lengths: tuple[int, ...]) -> tuple[int, ...]:
    row = DECODERS[decoder]
    if not row.speculative:
        return (1,)
    if row.needs_draft_model:
        return DRAFT_MODEL_LENGTHS if lengths == DRAFT_LENGTHS else QUICK_DRAFT_MODEL_LENGTHS
    return lengths


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = ("decoder", "draft length", "promise", "forward passes", "draft passes", "fewer passes", "acceptance",
            "accepted per pass", "seconds", "total / model time")  # fmt: skip
    lines = [head, tuple("---" for _ in head)]
    for row in rows:
        lines.append((
            row.decoder, str(row.draft_length), row.promise, f"{row.forward_passes:.1f}", f"{row.draft_passes:.0f}",
            f"{row.pass_reduction:.2f}x", f"{100 * row.acceptance_rate:.0f} %", f"{row.accepted_per_pass:.2f}",
            f"{row.seconds:.2f}", f"{row.overhead:.2f}",
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=24, help="(label, seed) pairs, default 24")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs at draft length {QUICK_LENGTHS[0]}")
    parser.add_argument("--decoder", action="append", choices=list(DECODERS), help="measure this one beside ar")
    parser.add_argument("--cfg", type=float, default=4.0, help="guidance, default 4: LlamaGen's own")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    arguments = parser.parse_args()
    sampling = {
        "guidance_scale": arguments.cfg,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
    }
    pairs, lengths = (QUICK_PAIRS, QUICK_LENGTHS) if arguments.quick else (arguments.pairs, DRAFT_LENGTHS)
    decoders = [name for name in DECODERS if not arguments.decoder or name in ("ar", *arguments.decoder)]
    rows = measure(pairs, lengths, decoders, sampling)
    print(table(rows))
    chosen = f"cfg {arguments.cfg:g}, temperature {arguments.temperature:g}, top-k {arguments.top_k}, float32"
    print(f"\nMeans over {pairs} (label, seed) pairs; {chosen}.")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
