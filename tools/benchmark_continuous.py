"""The benchmark of models with continuous tokens: passes, calls of the head, time, and how far the law has moved.

Time and counts are those of single pictures. The distance is Fréchet's between neighbourhoods of 2 x 2 tokens, which
tell whether tokens fit one another: those of each row that may move the law against those of `ar`, over many pictures
of the same labels. Its noise floor is the distance of a second lot of `ar` with other seeds. Fewer AR steps are the
fair rival of every approximate row, so `ar` also runs with as many steps as each took passes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pack

pack.register()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmark_costs import synchronise  # noqa: E402
from benchmark_runs import mean, tell  # noqa: E402
from benchmark_tables import markdown  # noqa: E402
from speculative_ar import model_loaders  # noqa: E402
from speculative_ar.decoders import (  # noqa: E402
    ContinuousModel,
    SamplerSettings,
    Statistics,
    generate,
)

OTHER_SEEDS = 1_000_000
BATCH = 24

RELEASED = {"verification": "block", "sigma_factor": "released"}
PAPER = {"verification": "prefix", "sigma_factor": "paper", "softening": 1.0}
EXACT = {"verification": "prefix", "sigma_factor": "off", "softening": 1.0}


@dataclass(frozen=True)
class Subject:
    """A target and a draft model, and the labels that they draw in turn."""

    target: ContinuousModel
    draft: ContinuousModel
    conditions: list[tuple[str, Any]]


@dataclass(frozen=True)
class Entry:
    """A row to be: what is run, and how it is called."""

    name: str
    settings: SamplerSettings


@dataclass(frozen=True)
class Row:
    """Means over single pictures, but for the distance: of many pictures, to those of `ar` with all steps.

    token_error: the mean distance of a token to that of `ar` with the same seed, where the decoder promises the seed.
    """

    name: str
    promise: str
    trunk_passes: float
    draft_passes: float
    head_calls: float
    draft_head_calls: float
    acceptance_rate: float
    seconds: float
    distance: float | None
    token_error: float | None
    audit_residual: float | None

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self)


def demo(device: torch.device) -> Subject:
    """The trained pair that ships with the pack, asked for each of its labels."""
    paths = model_loaders.bundled()
    target = model_loaders.load(paths["demo-continuous"], device=device, dtype=torch.float32)
    draft = model_loaders.load(paths["demo-continuous-draft"], device=device, dtype=torch.float32, with_vq=False)
    return Subject(target, draft, [(label, target.class_label(label)) for label in target.labels])


def entries(base: SamplerSettings) -> list[Entry]:
    """Every decoder at a few draft lengths, the reference first."""

    def entry(name: str, decoder: str, length: int = 0, options: Mapping[str, Any] | None = None) -> Entry:
        continuous = replace(base.continuous, **(options or {}))
        return Entry(name, replace(base, decoder=decoder, draft_length=length, continuous=continuous))

    return [
        entry("ar", "ar"),
        *(entry(f"head-speculative, {length} drafts", "head-speculative", length) for length in (5, 10, 20)),
        *(
            entry(f"seed-exact, {length} steps, tolerance {bound:g}", "seed-exact", length, {"tolerance": bound})
            for bound in (0.02, 0.1)
            for length in (4, 8)
        ),
        *(entry(f"cspd, block, {length} drafts", "cspd", length, RELEASED) for length in (4, 8)),
        entry("cspd, prefix, 4 drafts", "cspd", 4, PAPER),
        entry("cspd, prefix, exact, 4 drafts", "cspd", 4, EXACT),
    ]


def rivals(base: SamplerSettings, rows: Sequence[Row]) -> list[Entry]:
    """`ar` with as many AR steps as the approximate rows took passes of the target's trunk, where they saved any."""
    most = max(row.trunk_passes for row in rows)
    taken = {round(row.trunk_passes) for row in rows if row.promise == "approximate"}
    passes = sorted((count for count in taken if count < most), reverse=True)
    return [
        Entry(
            f"ar, {steps} AR steps",
            replace(base, decoder="ar", draft_length=1, continuous=replace(base.continuous, iterations=steps)),
        )
        for steps in passes
    ]


def measure(subject: Subject, base: SamplerSettings, pairs: int, pictures: int) -> list[Row]:
    """All rows; pictures = 0 leaves out the distances."""
    planned = entries(base)
    reference = planned[0].settings
    known = latents(subject, reference, pictures) if pictures else None
    rows = [row for entry in planned for row in [row_of(subject, entry, reference, pairs, pictures, known)]]
    rows += [row_of(subject, entry, reference, pairs, pictures, known) for entry in rivals(base, rows)]
    tell("")
    return rows


def row_of(
    subject: Subject, entry: Entry, reference: SamplerSettings, pairs: int, pictures: int, known: Tensor | None
) -> Row:
    """Measures one entry: single pictures for the counts, many for the distance."""
    runs: list[tuple[Statistics, float, float]] = []
    for pair in range(pairs):
        name, condition = subject.conditions[pair % len(subject.conditions)]
        tell(f"{entry.name}: picture {pair + 1} of {pairs} ({name})")
        settings = replace(entry.settings, seed=pair)
        begin = time.perf_counter()
        made = generate(subject.target, condition, settings, draft_model=subject.draft)
        synchronise(subject.target.device)
        seconds = time.perf_counter() - begin
        error = float("nan")
        if made.statistics.promise.startswith("seed-exact"):
            expected = generate(subject.target, condition, replace(reference, seed=pair)).tokens
            error = float((made.tokens - expected).norm(dim=-1).mean())
        runs.append((made.statistics, seconds, error))
    found = [statistics for statistics, _, _ in runs]
    distance = None
    kept = sum(one.accepted for one in found)
    moves_the_law = found[0].promise == "reference" or (found[0].promise == "approximate" and kept)
    if known is not None and moves_the_law:
        distance = frechet_distance(known, latents(subject, entry.settings, pictures, OTHER_SEEDS))
    exact = found[0].promise.startswith("seed-exact")
    return Row(
        name=entry.name,
        promise=found[0].promise,
        trunk_passes=mean(one.forward_passes for one in found),
        draft_passes=mean(one.draft_passes for one in found),
        head_calls=mean(one.head_calls for one in found),
        draft_head_calls=mean(one.draft_head_calls for one in found),
        acceptance_rate=kept / max(sum(one.drafted for one in found), 1),
        seconds=mean(seconds for _, seconds, _ in runs),
        distance=distance,
        token_error=mean(error for _, _, error in runs) if exact else None,
        audit_residual=max(one.audit_residual or 0.0 for one in found) if exact else None,
    )


def latents(subject: Subject, settings: SamplerSettings, pictures: int, seed: int = 0) -> Tensor:
    """Neighbourhoods of finished latents [P * (h - 1) * (w - 1), 4 * C], the labels by turns.

    Each label has seeds of its own: noise that labels share would tie their pictures.
    """
    made = []
    share = max(1, pictures // len(subject.conditions))
    for label, (name, condition) in enumerate(subject.conditions):
        for first in range(0, share, BATCH):
            tell(f"{settings.decoder} {settings.draft_length}: latents of {name}")
            several = replace(settings, seed=seed + label, batch_size=min(BATCH, share - first), first_index=first)
            made.append(generate(subject.target, condition, several, draft_model=subject.draft).tokens)
    return neighbourhoods(torch.cat(made), subject.target.layout(subject.conditions[0][1]).grid[1:])


def neighbourhoods(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """Tokens [P, h * w, C] -> every 2 x 2 of them [P * (h - 1) * (w - 1), 4 * C]."""
    rows = tokens.unflatten(1, tuple(grid))
    return rows.unfold(1, 2, 1).unfold(2, 2, 1).flatten(3).flatten(0, 2)


def frechet_distance(known: Tensor, other: Tensor) -> float:
    """Fréchet's distance of the Gaussians fitted to rows [P, D]."""
    first, second = known.double(), other.double()
    covariances = first.T.cov(), second.T.cov()
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    spread = covariances[0].trace() + covariances[1].trace() - 2 * roots
    return float((first.mean(0) - second.mean(0)).square().sum() + spread)


def table(rows: list[Row]) -> str:
    """What each decoder saves, and what it costs."""
    head = ("decoder", "promise", "trunk passes", "draft passes", "head calls", "draft's", "acceptance", "seconds",
            "Fréchet distance to ar", "token error")  # fmt: skip
    body = [
        (
            row.name, row.promise, f"{row.trunk_passes:.1f}", f"{row.draft_passes:.0f}", f"{row.head_calls:.0f}",
            f"{row.draft_head_calls:.0f}", f"{100 * row.acceptance_rate:.0f} %", f"{row.seconds:.2f}",
            "" if row.distance is None else f"{row.distance:.3f}",
            "" if row.token_error is None else f"{row.token_error:.4f}",
        )
        for row in rows
    ]  # fmt: skip
    return markdown(head, body)
