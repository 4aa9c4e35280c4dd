"""What a generation of continuous tokens counts while it runs, and whom it tells."""

from __future__ import annotations

import torch
from torch import Tensor

from ..interface import OnStep, Progress, Promise
from ..statistics import Statistics, Stopwatch
from .canvas import Canvas


class LatentTrace(Stopwatch):
    """Counts calls and final positions. Each call of a trunk or a denoiser is announced before it is made."""

    def __init__(self, canvas: Canvas, on_step: OnStep, device: torch.device) -> None:
        super().__init__(device)
        self.seconds["head"] = 0.0
        self._canvas, self._on_step = canvas, on_step
        self.accepted_per_pass: list[list[int]] = [[] for _ in canvas.order]
        self.passes = self.draft_passes = self.head_calls = self.draft_head_calls = 0
        self._drafts: list[tuple[Tensor | int, Tensor | int]] = []
        self.audit_residual: float | None = None
        self.deviation: float | None = None

    def trunk(self, draft: bool) -> None:
        """Before a pass of the target's trunk, or of the draft model's."""
        self._tell()
        self.draft_passes += draft
        self.passes += not draft

    def head(self, draft: bool) -> None:
        """Before a call of the target's denoiser, or of the draft model's."""
        self._tell()
        self.draft_head_calls += draft
        self.head_calls += not draft

    def commit(self, counts: list[int]) -> None:
        """Takes the positions that became final in each row; a row with none is finished already."""
        for sizes, count in zip(self.accepted_per_pass, counts, strict=True):
            if count:
                sizes.append(count)

    def judge(self, drafted: Tensor | int, accepted: Tensor | int) -> None:
        """Takes how many drafts were judged and how many of them kept; the device's numbers are read in the end."""
        self._drafts.append((drafted, accepted))

    def _tell(self) -> None:
        done, order = [sum(sizes) for sizes in self.accepted_per_pass], self._canvas.order
        self._on_step(Progress(done, order.shape[1], self.passes, self._canvas.tokens, order))

    def summary(self, decoder: str, promise: Promise, draft_length: int, dtype: torch.dtype, seed: int) -> Statistics:
        """The figures of the finished generation."""
        sizes = [size for row in self.accepted_per_pass for size in row]
        drafted, accepted = (sum(int(counts[index]) for counts in self._drafts) for index in (0, 1))
        positions, batch_size = self._canvas.order.shape[1], len(self.accepted_per_pass)
        return Statistics(
            decoder=decoder,
            promise=promise,
            seed=seed,
            draft_length=draft_length,
            batch_size=batch_size,
            positions=positions,
            free_positions=positions,
            forward_passes=self.passes,
            draft_passes=self.draft_passes,
            prefill_passes=0,
            accepted_per_pass=self.accepted_per_pass,
            drafted=drafted,
            accepted=accepted,
            acceptance_rate=accepted / max(drafted, 1),
            mean_accepted_length=sum(sizes) / max(len(sizes), 1),
            pass_reduction=positions / max(self.passes, 1),
            acceptance_map=self._acceptance_map(),
            seconds=dict(self.seconds),
            tokens_per_second=positions * batch_size / max(self.seconds["total"], 1e-9),
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            head_calls=self.head_calls,
            draft_head_calls=self.draft_head_calls,
            audit_residual=self.audit_residual,
            deviation=self.deviation,
        )

    def _acceptance_map(self) -> list[list[int]]:
        by_rank = [[size for size in sizes for _ in range(size)] for sizes in self.accepted_per_pass]
        ranked = torch.tensor(by_rank)
        order: Tensor = self._canvas.order.cpu()
        return torch.zeros_like(ranked).scatter(1, order, ranked).tolist()
