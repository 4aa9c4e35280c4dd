"""Runs an iteration until every row is finished: tells the listener, bounds what attention looks at, keeps the time."""

from __future__ import annotations

from torch import Tensor

from .capture import Recorder
from .engine import Bounds, Iteration
from .interface import OnStep, Progress
from .mirror import Mirror
from .statistics import Trace

REACH = 64  # attention's bound moves in steps of so many positions, so that few passes differ in shape


class NotFinite(ArithmeticError):
    """The model's logits overflowed."""


def decode(iteration: Iteration, trace: Trace, on_step: OnStep, recorder: Recorder) -> Tensor:
    """Runs the iteration to the end -> LongTensor [B, N]; raises NotFinite, and whatever on_step raises."""
    board = iteration.board
    mirror = Mirror(len(board.committed), board.end, board.committed.device)
    window = entering = len(board.slots)
    passes = 0

    def tell() -> None:
        on_step(Progress(mirror.committed, board.positions, passes, board.tokens[:, : board.positions]))

    while not mirror.finished:
        bounds = Bounds(_reach(max(mirror.committed) + mirror.passes_ahead * window), entering)
        for phase in iteration.drafting():
            tell()
            with trace.drafting():
                recorder(phase, bounds)
        tell()
        recorder(iteration.verify, bounds)
        passes += 1
        mirror.post(board.committed, board.sound)
        entering = mirror.furthest_advance or window
        if not mirror.sound:
            raise NotFinite
    trace.read(board.reports[:passes])
    if not board.sound:
        raise NotFinite
    return board.tokens[:, : board.positions]


def _reach(committed: int) -> int:
    return -(-(committed + 1) // REACH) * REACH
