"""Chooses the window where the user does not: what a pass of each length costs here, against what it brings.

The cost is measured on the user's device, once for a model and a size of batch; what a pass brings hardly depends on
the device and is a table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .checks import drafts_per_pass
from .interface import OnStep, Progress, Redraft, SamplerSettings, TokenLayout, TokenModel
from .table import Decoder

DRAFT_MODEL_LENGTH = 4  # the best of 4, 8 and 16 on the demo models; each draft costs a pass of the draft model
REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """A pass's window and its runner-up branches, and the mean positions it makes final."""

    window: int
    branches: int
    branch_length: int
    brings: float

    @property
    def slots(self) -> int:
        """Positions fed in one pass."""
        return self.window + (self.branches - 1) * self.branch_length


# Positions that a pass makes final, by window, and what runner-up branches add: means over 24 (label, seed) pairs of
# the bundled demo model, by `python tools/benchmark.py --draft-length 8` and so on, with `--branches` 4 and 8.
CHAINS: dict[Redraft, dict[int, float]] = {
    "independent": {8: 2.23, 16: 2.67, 32: 2.82, 64: 2.78},
    "gumbel": {8: 2.40, 16: 3.39, 32: 4.25, 64: 4.67},
    "maximal": {8: 2.44, 16: 3.35, 32: 4.19, 64: 4.74},
}
TREES = ((1, 1, 1.0), (4, 4, 1.09), (8, 4, 1.14))


def shapes(decoder: Decoder, settings: SamplerSettings, layout: TokenLayout) -> list[Shape]:
    """The shapes that the settings leave open."""
    options, chains = settings.options, CHAINS[decoder.redraft]
    fitting = [length for length in chains if length <= layout.positions] or [layout.positions]
    windows = [settings.draft_length] if settings.draft_length else fitting
    trees: Sequence[tuple[int, int, float]] = ((options.branches, options.branch_length, 1.0),)
    if not decoder.follows_branches:
        trees = TREES[:1]
    elif options.branches == 0:
        trees = TREES
    return [
        Shape(window, count, length, chains.get(window, 1.0) * gain)
        for window in windows
        for count, length, gain in trees
    ]


def is_open(decoder: Decoder, settings: SamplerSettings) -> bool:
    """Whether the settings leave the window or its branches to a measurement."""
    return decoder.speculative and (
        settings.draft_length == 0 or (decoder.follows_branches and settings.options.branches == 0)
    )


def longest_pass(decoder: Decoder, settings: SamplerSettings, layout: TokenLayout) -> int:
    """Positions of the longest pass that a generation with these settings may make."""
    if decoder.needs_draft_model and settings.draft_length == 0:
        return DRAFT_MODEL_LENGTH + 1
    if decoder.follows_branches or is_open(decoder, settings):
        return max(shape.slots for shape in shapes(decoder, settings, layout))
    return drafts_per_pass(decoder, settings, layout) + 1


def tuned(
    model: TokenModel,
    condition: Any,
    settings: SamplerSettings,
    decoder: Decoder,
    layout: TokenLayout,
    on_step: OnStep,
) -> tuple[SamplerSettings, str]:
    """The settings with the shape chosen that makes positions final fastest, and the choice in words."""
    if decoder.needs_draft_model:
        return replace(settings, draft_length=DRAFT_MODEL_LENGTH), f"{DRAFT_MODEL_LENGTH} drafts a round"
    choices = shapes(decoder, settings, layout)
    seconds = _pass_seconds(model, condition, settings, sorted({shape.slots for shape in choices}), layout, on_step)
    best = min(choices, key=lambda shape: seconds[shape.slots] / shape.brings)
    options = replace(settings.options, branches=best.branches, branch_length=best.branch_length)
    measured = ", ".join(f"{slots}: {1000 * seconds[slots]:.1f}" for slots in sorted(seconds))
    chosen = f"window {best.window}" + f" with {best.branches} branches" * (best.branches > 1)
    return (
        replace(settings, draft_length=best.window, options=options),
        f"{chosen}, from ms a pass by positions fed on {model.device} ({measured})",
    )


def _pass_seconds(
    model: TokenModel,
    condition: Any,
    settings: SamplerSettings,
    lengths: list[int],
    layout: TokenLayout,
    on_step: OnStep,
) -> dict[int, float]:
    """Seconds of a pass by positions fed, at half a picture's cache; measured once and kept by the model."""
    device, guided = torch.device(model.device), settings.guidance_scale > 1
    key = device, model.dtype, settings.batch_size, guided, layout.positions
    known = model.pass_seconds.setdefault(key, {})
    unknown = [length for length in lengths if length not in known]
    if unknown:
        tokens = torch.zeros(settings.batch_size, max(unknown), dtype=torch.long, device=device)
        start = torch.full((settings.batch_size,), -1, device=device)
        nothing_yet = Progress(
            [0] * settings.batch_size, layout.positions, 0, tokens[:, :1].expand(-1, layout.positions)
        )
        session = model.session(condition, settings.batch_size, guided, max(unknown))
        try:
            for length in unknown:
                times = []
                for _ in range(REPEATS):
                    on_step(nothing_yet)
                    begin = _now(device)
                    session.forward(tokens[:, :length], start, furthest=layout.positions // 2)
                    times.append(_now(device) - begin)
                known[length] = min(times)
        finally:
            session.close()
    return known


def _now(device: torch.device) -> float:
    """The host's clock once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
