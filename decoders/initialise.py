"""How a position that just entered the window gets its first draft, and which row that draft was drawn from.

A new draft depends on earlier positions and fresh noise alone, and its row is stored as it was drawn from: that keeps
the ratio test exact. Each function maps an Entry to (LongTensor [B, S] codes, float32 [B, S, V] rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .interface import TokenLayout
from .noise import Noise, NoiseRing, Purpose
from .window import Window, draw, take_slots

Remembered = Literal["nothing", "codes", "rows"]


@dataclass(frozen=True, eq=False)
class Memory:
    """What the passes so far predicted, by position, as far as an initialiser looks at it (the other tensor is empty).

    codes: LongTensor [B, N + W], the likeliest code of the row last computed for each position. rows: float32
    [B, R, V], the rows themselves of the last R positions, at position modulo R; R is a grid row and a window.
    """

    codes: Tensor
    rows: Tensor

    @staticmethod
    def of(
        kept: Remembered, layout: TokenLayout, batch_size: int, window: int, vocabulary: int, device: torch.device
    ) -> Memory:
        """An empty memory for a generation."""
        positions = layout.positions + window if kept == "codes" else 0
        ring = layout.row_length + window if kept == "rows" else 0
        return Memory(
            torch.zeros(batch_size, positions, dtype=torch.long, device=device),
            torch.zeros(batch_size, ring, vocabulary, device=device),
        )

    def store(self, window: Window) -> None:
        """Takes over what a pass predicted."""
        if self.codes.numel():
            self.codes.scatter_(1, window.positions, window.logits.argmax(-1))
        if self.rows.numel():
            index = window.positions % self.rows.shape[1]
            self.rows[torch.arange(len(index), device=index.device)[:, None], index] = window.probabilities


@dataclass(frozen=True, eq=False)
class Entry:
    """The slots of a window that may be new.

    positions: LongTensor [B, S]. frontier: LongTensor [B, 1], the first position that never had a draft.
    tokens: LongTensor [B, N + W], codes by position (final or drafted before the frontier).
    last_rows: float32 [B, 1, V], the distribution last computed for position frontier - 1 (uniform before any pass).
    memory: older predictions. row_length: positions from one grid row to the next.
    """

    positions: Tensor
    frontier: Tensor
    tokens: Tensor
    last_rows: Tensor
    memory: Memory
    row_length: int
    noise: Noise
    ring: NoiseRing  # the drafting noise of the window's positions

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
    return _copy(entry, _left_of(entry), entry.tokens)


def left_likeliest(entry: Entry) -> tuple[Tensor, Tensor]:
    """The likeliest code of the left neighbour's row (the released `sample_horizon`). One-hot rows."""
    return _copy(entry, _left_of(entry), entry.memory.codes)


def above(entry: Entry) -> tuple[Tensor, Tensor]:
    """A copy of the neighbour above, as many rows up as have a draft; the first row draws at random. One-hot rows."""
    return _copy(entry, _above(entry), entry.tokens)


def above_likeliest(entry: Entry) -> tuple[Tensor, Tensor]:
    """The likeliest code of the upper neighbour's row (the released `sample_vertical`). One-hot rows."""
    return _copy(entry, _above(entry), entry.memory.codes)


def neighbour(entry: Entry) -> tuple[Tensor, Tensor]:
    """A draw from the row of the last position before the frontier, with the new position's own Gumbel vector."""
    return _drawn(entry, entry.last_rows)


def neighbour_above(entry: Entry) -> tuple[Tensor, Tensor]:
    """A draw from the upper neighbour's row with the new position's own Gumbel vector; the first row's is uniform."""
    origin = _above(entry)
    rows = take_slots(entry.memory.rows, origin.clamp(min=0) % entry.memory.rows.shape[1])
    had_draft = (origin >= 0) & (origin < entry.frontier)
    return _drawn(entry, torch.where(had_draft[..., None], rows, 1 / entry.vocabulary))


REMEMBERED: dict[str, Remembered] = {"left-likeliest": "codes", "above-likeliest": "codes", "neighbour-above": "rows"}


def _left_of(entry: Entry) -> Tensor:
    """LongTensor [B, S]: the last position with a draft in the same grid row; behind every draft at a row's start."""
    row_start = entry.positions - entry.positions % entry.row_length
    return torch.maximum(entry.frontier - 1, row_start)


def _above(entry: Entry) -> Tensor:
    """LongTensor [B, S]: the nearest position above that had a draft; negative in the first row."""
    rows_up = (entry.positions - entry.frontier) // entry.row_length + 1
    return entry.positions - rows_up * entry.row_length


def _drawn(entry: Entry, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Draws from rows [B, S or 1, V] with each position's own Gumbel vector."""
    codes = draw(rows.log(), entry.ring.at(entry.positions))
    return codes, rows.expand(*codes.shape, entry.vocabulary)


def _copy(entry: Entry, origin: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """What `codes` [B, N + W] holds at `origin` [B, S] where that had a draft, else the position's random code."""
    drawn = entry.noise.code(Purpose.INITIALISE, origin, entry.vocabulary)
    had_draft = (origin >= 0) & (origin < entry.frontier)
    copied = codes.gather(1, origin.clamp(min=0))
    chosen = torch.where(had_draft, copied, drawn).clamp(max=entry.vocabulary - 1)
    empty = entry.last_rows.new_zeros(*chosen.shape, entry.vocabulary)
    return chosen, empty.scatter_(-1, chosen[..., None], 1)
