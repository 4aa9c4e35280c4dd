"""How a position that just entered the window gets its first draft, and which row that draft was drawn from.

A new draft depends on earlier positions and fresh noise alone, and its row is stored as it was drawn from: that keeps
the ratio test exact. Each function maps an Entry to (LongTensor [B, S] codes, float32 [B, S, V] rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import Noise, Purpose
from .window import draw


@dataclass(frozen=True, eq=False)
class Entry:
    """The slots of a window that may be new.

    positions: LongTensor [B, S]. frontier: LongTensor [B, 1], the first position that never had a draft.
    tokens: LongTensor [B, N + W], codes by position (final or drafted before the frontier).
    last_rows: float32 [B, 1, V], the distribution last computed for position frontier - 1 (uniform before any pass).
    row_length: positions from one grid row to the next.
    """

    positions: Tensor
    frontier: Tensor
    tokens: Tensor
    last_rows: Tensor
    row_length: int
    noise: Noise

    @property
    def vocabulary(self) -> int:
        return self.last_rows.shape[-1]


def random(entry: Entry) -> tuple[Tensor, Tensor]:
    """A uniformly drawn code with the uniform row (the released code stores one-hot: also exact, accepted far less)."""
    codes = entry.noise.code(Purpose.INITIALISE, entry.positions, entry.vocabulary)
    uniform = entry.last_rows.new_full((), 1 / entry.vocabulary)
    return codes, uniform.expand(*codes.shape, entry.vocabulary)


def left(entry: Entry) -> tuple[Tensor, Tensor]:
    """A copy of the left neighbour; a row's first position draws at random. One-hot rows."""
    row_start = entry.positions - entry.positions % entry.row_length
    return _copy(entry, torch.maximum(entry.frontier - 1, row_start))


def above(entry: Entry) -> tuple[Tensor, Tensor]:
    """A copy of the neighbour above, as many rows up as have a draft; the first row draws at random. One-hot rows."""
    rows_up = (entry.positions - entry.frontier) // entry.row_length + 1
    return _copy(entry, entry.positions - rows_up * entry.row_length)


def neighbour(entry: Entry) -> tuple[Tensor, Tensor]:
    """A draw from the row of the last position before the frontier, with the new position's own Gumbel vector."""
    gumbel = entry.noise.gumbel(Purpose.DRAFT, entry.positions, entry.vocabulary)
    codes = draw(entry.last_rows.log(), gumbel)
    return codes, entry.last_rows.expand(*codes.shape, entry.vocabulary)


def _copy(entry: Entry, origin: Tensor) -> tuple[Tensor, Tensor]:
    """Codes from position `origin` where that had one, else the random code that belongs to that position."""
    drawn = entry.noise.code(Purpose.INITIALISE, origin, entry.vocabulary)
    had_draft = (origin >= 0) & (origin < entry.frontier)
    copied = entry.tokens.gather(1, origin.clamp(min=0))
    codes = torch.where(had_draft, copied, drawn).clamp(max=entry.vocabulary - 1)
    return codes, F.one_hot(codes, entry.vocabulary).float()
