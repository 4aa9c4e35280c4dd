"""The benchmark's runs: every decoder over (label, seed) pairs, and one decoder against a single setting."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmark_costs import Cost, LoggedModel, measure_cost, synchronise
from benchmark_models import Subject
from speculative_ar.decoders import SamplerSettings, Statistics, generate

SWEEPS: dict[str, tuple[Any, ...]] = {
    "window": (1, 2, 4, 8, 16, 32, 64, 128),
    "size": ((16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (96, 96)),
    "batch": (1, 2, 4, 8, 16),
}


@dataclass(frozen=True)
class Run:
    statistics: Statistics
    seconds: float
    model_seconds: float


@dataclass(frozen=True)
class Row:
    """Means over the pairs. pass_reduction against ar's passes; overhead: total time / time inside the models.

    On a GPU, where the host does not see when a pass ends, overhead is the cost's bare_ratio. cost is measured on the
    first pair, and None in a quick run.
    """

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
    branches: int
    branch_length: int
    batch_size: int
    cost: Cost | None

    def to_json(self) -> dict[str, Any]:
        """A flat dict, the figures of the cost among the others."""
        fields = asdict(self)
        return fields | (fields.pop("cost") or {})


@dataclass(frozen=True)
class SweepRow:
    """One value of the setting that a sweep walks through."""

    value: str
    decoder: str
    draft_length: int
    forward_passes: int
    seconds: float
    ms_per_token: float
    cost: Cost

    def to_json(self) -> dict[str, Any]:
        """A flat dict, the figures of the cost among the others."""
        fields = asdict(self)
        return fields | fields.pop("cost")


def measure(subject: Subject, plan: list[SamplerSettings], pairs: int, bandwidth: float) -> list[Row]:
    """Runs the plan, ar first, over pairs that walk through the conditions; bandwidth 0 measures no costs."""
    runs: dict[SamplerSettings, list[Run]] = {settings: [] for settings in plan}
    run_once(subject, subject.conditions[0][1], plan[-1])  # warms up
    for pair in range(pairs):
        name, condition = subject.conditions[pair * len(subject.conditions) // pairs]
        for settings in plan:
            tell(f"pair {pair + 1} of {pairs} ({name}): {settings.decoder} {settings.draft_length}")
            runs[settings].append(run_once(subject, condition, replace(settings, seed=pair)))
    costs: dict[SamplerSettings, Cost] = {}
    for settings in plan if bandwidth else ():
        tell(f"cost of a pass: {settings.decoder} {settings.draft_length}")
        costs[settings], _ = measure_cost(subject, subject.conditions[0][1], settings, bandwidth)
    tell("")
    ar_passes = mean(run.statistics.forward_passes for run in runs[plan[0]])
    return [summarise(settings, runs[settings], ar_passes, costs.get(settings)) for settings in plan]


def tell(text: str) -> None:
    """Shows what is being done on one line that later ones replace."""
    print("\r" + text.ljust(70) + ("" if text else "\r"), end="", file=sys.stderr, flush=True)


def run_once(subject: Subject, condition: Any, settings: SamplerSettings) -> Run:
    """One generation, its time, and on a CPU the part of it that was spent inside the models."""
    models: tuple[Any, Any] = subject.target, subject.draft
    if subject.target.device.type != "cuda":  # there, logging would keep passes from being recorded as graphs
        models = LoggedModel(subject.target), LoggedModel(subject.draft)
    begin = time.perf_counter()
    statistics = generate(models[0], condition, settings, draft_model=models[1]).statistics
    synchronise(subject.target.device)
    seconds = time.perf_counter() - begin
    return Run(statistics, seconds, sum(model.seconds for model in models if isinstance(model, LoggedModel)))


def summarise(settings: SamplerSettings, runs: list[Run], ar_passes: float, cost: Cost | None) -> Row:
    first = runs[0].statistics
    passes = mean(run.statistics.forward_passes for run in runs)
    seconds, inside = (sum(getattr(run, name) for run in runs) for name in ("seconds", "model_seconds"))
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
        overhead=seconds / inside if inside else cost.bare_ratio if cost else 0.0,
        branches=settings.options.branches,
        branch_length=settings.options.branch_length,
        batch_size=settings.batch_size,
        cost=cost,
    )


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def sweep(subject: Subject, name: str, base: SamplerSettings, bandwidth: float) -> Iterator[SweepRow]:
    """The cost against one setting, everything else as in base; windows longer than the picture are left out."""
    for value in SWEEPS[name]:
        chosen, settings = subject, base
        if name == "size":
            chosen = subject.with_grid(*value)
        elif name == "batch":
            settings = replace(base, batch_size=value)
        else:
            settings = replace(base, draft_length=value)
        condition = chosen.conditions[0][1]
        positions = chosen.target.layout(condition).positions
        if settings.draft_length > positions:
            continue
        cost, statistics = measure_cost(chosen, condition, settings, bandwidth, repeats=1)
        seconds = cost.ms_per_pass * statistics.forward_passes / 1000
        yield SweepRow(
            value="x".join(map(str, value)) if name == "size" else str(value),
            decoder=settings.decoder,
            draft_length=settings.draft_length,
            forward_passes=statistics.forward_passes,
            seconds=seconds,
            ms_per_token=1000 * seconds / (positions * settings.batch_size),
            cost=cost,
        )
