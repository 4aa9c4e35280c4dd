"""What a generation measured: kept on the host while it runs, summed up at the end, made JSON by one function."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .interface import Promise, TokenLayout


@dataclass(frozen=True)
class Statistics:
    """The figures of one generation; counts are sums over the batch, positions and passes are those of one row.

    accepted_per_pass: one list per row, the positions that each forward pass made final.
    acceptance_map: one list per row and position, the size of the pass that made it final (0 where none did).
    acceptance_rate: accepted / drafted free positions. mean_accepted_length: final positions a pass.
    pass_reduction: free positions / forward passes. seconds by the host's clock; total is their sum.
    """

    decoder: str
    promise: Promise
    seed: int
    draft_length: int
    batch_size: int
    positions: int
    free_positions: int
    forward_passes: int
    draft_passes: int
    prefill_passes: int
    accepted_per_pass: list[list[int]]
    drafted: int
    accepted: int
    acceptance_rate: float
    mean_accepted_length: float
    pass_reduction: float
    acceptance_map: list[list[int]]
    seconds: dict[str, float]
    tokens_per_second: float
    device: str
    dtype: str
    streamed: bool = False

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self)


class Trace:
    """The host's record of a running generation: one small report a pass."""

    def __init__(self, layout: TokenLayout, batch_size: int, drafts_per_pass: int) -> None:
        free = (layout.forced < 0).long()
        self._free_before = [0, *free.cumsum(0).tolist()]
        self._end, self._drafts_per_pass = layout.end, drafts_per_pass
        self.positions, self.free_positions = layout.positions, self._free_before[-1]
        self.committed = [0] * batch_size
        self.accepted_per_pass: list[list[int]] = [[] for _ in range(batch_size)]
        self.passes = self.draft_passes = self.prefill_passes = 0
        self.drafted = self.accepted = 0
        self.seconds = dict.fromkeys(("prefill", "draft", "verify", "decode", "total"), 0.0)

    @property
    def finished(self) -> bool:
        return all(done >= self._end for done in self.committed)

    def record(self, report: list[list[int]]) -> None:
        """One pass: [committed positions, accepted drafts] of each row; rows that were finished before do not count."""
        self.passes += 1
        for row, (committed, accepted) in enumerate(report):
            before = self.committed[row]
            if before >= self._end:
                continue
            last_draft = min(before + self._drafts_per_pass, self._end)
            self.drafted += self._free_before[last_draft] - self._free_before[before]
            self.accepted += self._free_before[before + accepted] - self._free_before[before]
            self.accepted_per_pass[row].append(committed - before)
            self.committed[row] = committed

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the block's time to `phase`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """One forward pass of the draft model."""
        self.draft_passes += 1
        with self.timed("draft"):
            yield

    def acceptance_map(self) -> list[list[int]]:
        """See Statistics.acceptance_map."""
        rows = [[size for size in sizes for _ in range(size)] for sizes in self.accepted_per_pass]
        return [row + [0] * (self.positions - len(row)) for row in rows]

    def summary(
        self, decoder: str, promise: Promise, seed: int, draft_length: int, device: torch.device, dtype: torch.dtype
    ) -> Statistics:
        """The figures of the finished generation."""
        sizes = [size for row in self.accepted_per_pass for size in row]
        total = self.seconds["total"]
        return Statistics(
            decoder=decoder,
            promise=promise,
            seed=seed,
            draft_length=draft_length,
            batch_size=len(self.committed),
            positions=self.positions,
            free_positions=self.free_positions,
            forward_passes=self.passes,
            draft_passes=self.draft_passes,
            prefill_passes=self.prefill_passes,
            accepted_per_pass=self.accepted_per_pass,
            drafted=self.drafted,
            accepted=self.accepted,
            acceptance_rate=self.accepted / max(self.drafted, 1),
            mean_accepted_length=sum(sizes) / max(len(sizes), 1),
            pass_reduction=self.free_positions / max(self.passes, 1),
            acceptance_map=self.acceptance_map(),
            seconds=dict(self.seconds),
            tokens_per_second=self.free_positions * len(self.committed) / max(total, 1e-9),
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
        )
