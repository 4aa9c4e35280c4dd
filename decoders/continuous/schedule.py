"""How many positions are known after each AR step, and how strongly each step is guided (MAR, arXiv 2406.11838)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..interface import GuidanceSchedule, LatentLayout


@dataclass(frozen=True)
class Schedule:
    """The AR steps of a generation, the same for each picture of a batch.

    bounds: K + 1 numbers, the known positions before the first step (0) and after each (N in the end).
    guidance: K scales.
    """

    bounds: tuple[int, ...]
    guidance: tuple[float, ...]

    @property
    def iterations(self) -> int:
        """K."""
        return len(self.guidance)

    def size(self, step: int) -> int:
        """Positions that a step makes."""
        return self.bounds[step + 1] - self.bounds[step]

    def most(self, first: int, last: int) -> int:
        """Positions that the largest of the steps first .. last makes; steps behind the end count as the last one."""
        end = self.iterations - 1
        return max(map(self.size, range(min(first, end), min(last, end) + 1)))

    @staticmethod
    def of(layout: LatentLayout, iterations: int, scale: float, growth: GuidanceSchedule) -> Schedule:
        """The cosine schedule of so many steps, guided by `scale` in the end."""
        bounds = cosine_bounds(layout.positions, iterations)
        return Schedule(bounds, tuple(guidance_of(growth, scale, bounds, step) for step in range(iterations)))


def cosine_bounds(positions: int, iterations: int) -> tuple[int, ...]:
    """Known positions before the first and after each step; as many steps as positions make one a step."""
    bounds = [0]
    for step in range(1, iterations):
        masked = math.floor(positions * math.cos(math.pi / 2 * step / iterations))
        bounds.append(positions - max(1, min(positions - bounds[-1] - 1, masked)))
    return (*bounds, positions)


def guidance_of(growth: GuidanceSchedule, scale: float, bounds: tuple[int, ...], step: int) -> float:
    """The scale of a step: constant, by the known share after it (MAR), or from 1 in the first to `scale` (xAR)."""
    if growth == "constant":
        return scale
    if growth == "linear":  # at least one position counts as masked, also after the last step
        return 1 + (scale - 1) * min(bounds[step + 1], bounds[-1] - 1) / bounds[-1]
    return 1 + (scale - 1) * step / max(len(bounds) - 2, 1)
