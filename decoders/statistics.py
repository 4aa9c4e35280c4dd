"""What a generation measured: gathered on the device while it runs, summed up at the end, made JSON by one function."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .interface import Promise, TokenLayout


@dataclass(frozen=True)
class Statistics:
    """The figures of one generation; counts are sums over the batch, positions and passes are those of one row.

    accepted_per_pass: one list per row, the positions that each forward pass made final.
    acceptance_map: one list per row and position, the size of the pass that made it final (0 where none did).
    acceptance_rate: accepted / drafted free positions. mean_accepted_length: final positions a pass.
    pass_reduction: free positions / forward passes. seconds by the host's clock, prefill and draft on a GPU by its own.
    branches: first drafts tried in a pass. parts: the decoder's redraft, verify and initialise as they ran. prompt:
    what the model was told, template included. window_choice: how an automatic draft length was found, or "".
    streamed: whether weights were copied in as they were used.
    Of continuous tokens alone: head_calls, draft_head_calls: calls of the denoiser after one another. audit_residual:
    the largest distance between a token and what the model gives in its place after the tokens before it, over the
    steps that were looked at. deviation: the largest distance between a token and that of `ar`. None: not measured.
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
    branches: int = 1
    parts: dict[str, str] = field(default_factory=dict)
    prompt: str = ""
    window_choice: str = ""
    streamed: bool = False
    head_calls: int = 0
    draft_head_calls: int = 0
    audit_residual: float | None = None
    deviation: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self)


class Stopwatch:
    """Adds up the seconds of a generation's phases."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = dict.fromkeys(("prefill", "draft", "verify", "decode", "total"), 0.0)
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the block's time to `phase`; on a GPU that of its queued work, without waiting for it."""
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._spans.append((phase, begin, end))
        else:
            started = time.perf_counter()
            yield
            self.seconds[phase] += time.perf_counter() - started

    def finish(self, total: float) -> None:
        """Sums up the times once the device is done; total: seconds of the whole generation by the host's clock."""
        for phase, begin, end in self._spans:
            self.seconds[phase] += begin.elapsed_time(end) / 1000
        self.seconds["total"] = total
        self.seconds["verify"] = max(total - self.seconds["prefill"] - self.seconds["draft"], 0.0)


class Trace(Stopwatch):
    """The host's record of a generation: times while it runs, counts from the board's reports when it is done."""

    def __init__(self, layout: TokenLayout, batch_size: int, drafts_per_pass: int, device: torch.device) -> None:
        super().__init__(device)
        free = (layout.forced < 0).long()
        self._free_before = [0, *free.cumsum(0).tolist()]
        self._end, self._drafts_per_pass = layout.end, drafts_per_pass
        self.positions, self.free_positions = layout.positions, self._free_before[-1]
        self.accepted_per_pass: list[list[int]] = [[] for _ in range(batch_size)]
        self.passes = self.draft_passes = self.prefill_passes = 0
        self.drafted = self.accepted = 0

    def read(self, reports: Tensor) -> None:
        """Takes LongTensor [passes, B, 2]: committed positions and accepted drafts of each row after each pass.

        A row that was finished before a pass does not count in it, nor does a pass in which all were.
        """
        before = [0] * len(self.accepted_per_pass)
        for report in reports.tolist():
            if all(done >= self._end for done in before):
                return
            self.passes += 1
            for row, (committed, accepted) in enumerate(report):
                if before[row] < self._end:
                    self._count(row, before[row], committed, accepted)
                    before[row] = committed

    def _count(self, row: int, before: int, committed: int, accepted: int) -> None:
        last_draft = min(before + self._drafts_per_pass, self._end)
        self.drafted += self._free_before[last_draft] - self._free_before[before]
        self.accepted += self._free_before[before + accepted] - self._free_before[before]
        self.accepted_per_pass[row].append(committed - before)

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

    def summary(self, decoder: str, promise: Promise, draft_length: int, dtype: torch.dtype, **told: Any) -> Statistics:
        """The figures of the finished generation; `told` are fields that the generation knows and no count tells."""
        sizes = [size for row in self.accepted_per_pass for size in row]
        total = self.seconds["total"]
        return Statistics(
            decoder=decoder,
            promise=promise,
            draft_length=draft_length,
            batch_size=len(self.accepted_per_pass),
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
            tokens_per_second=self.free_positions * len(self.accepted_per_pass) / max(total, 1e-9),
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            **told,
        )
