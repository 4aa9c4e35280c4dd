"""Randomness as a pure function: the same seed, image, position and code give the same number on every device.

A counter hash in tensor operations, so nothing depends on the window, the batch or a generator's state. Mixing
function: lowbias32 (C. Wellons, "Prospecting for hash functions", 2018), absorbed into two 32-bit lanes per row. Words
are int32, whose products wrap: a processor multiplies twice as many of them at a time as of int64, or more.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_BITS = 0xFFFFFFFF


def _word(value: int) -> int:
    """The int32 with the low 32 bits of an integer."""
    return (value & _BITS) - ((value & 1 << 31) << 1)


_GOLDEN = _word(0x9E3779B9)
_FACTORS = _word(0x7FEB352D), _word(0x846CA68B)


class Purpose(IntEnum):
    """What a number is for. Purposes never share one: drafting noise reused for the residual is not lossless."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    INITIALISE = 4
    ORDER = 5


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, in place. Shifts of signed words drag the sign along; the masks drop it."""
    _fold(x, 16, 0xFFFF)
    x.mul_(_FACTORS[0])
    _fold(x, 15, 0x1FFFF)
    x.mul_(_FACTORS[1])
    return _fold(x, 16, 0xFFFF)


def _fold(x: Tensor, shift: int, mask: int) -> Tensor:
    return x.bitwise_xor_((x >> shift).bitwise_and_(mask))


def _unit(words: Tensor) -> Tensor:
    """float32 in [0, 1), multiples of 2^-24."""
    return (words >> 8 & 0xFFFFFF).float() * 2.0**-24


def _counter(passes: Tensor | None) -> Tensor | int:
    return 0 if passes is None else passes.int()[:, None] + 1


class Noise:
    """The random numbers of one generation. Rows are images first_index .. first_index + batch_size - 1 of the seed.

    Positions are LongTensor [B, W]. `passes` (LongTensor [B], the row's own pass counter) makes a number fresh in every
    pass; without it the number belongs to the position for good.
    """

    def __init__(self, seed: int, first_index: int, batch_size: int, device: torch.device) -> None:
        sample = torch.arange(first_index, first_index + batch_size, device=device, dtype=torch.int32)
        lanes = tuple(torch.full_like(sample, start) for start in (0x2545F491, 0x6C078965))
        for word in (_word(seed), _word(seed >> 32), sample):
            lanes = _absorb(lanes, word)
        self._lanes = lanes

    def _bits(self, purpose: Purpose, positions: Tensor, counter: Tensor | int) -> tuple[Tensor, Tensor]:
        """Two words for each position [B, W] and count, which broadcasts against it."""
        lanes = tuple(lane[:, None] for lane in self._lanes)
        for word in (int(purpose), positions.int(), counter):
            lanes = _absorb(lanes, word)
        return lanes[0], lanes[1]

    def uniform(self, purpose: Purpose, positions: Tensor, passes: Tensor | None = None) -> Tensor:
        """float32 [B, W] in [0, 1), multiples of 2^-24."""
        a, b = self._bits(purpose, positions, _counter(passes))
        return _unit(_mix(a ^ b))

    def uniforms(self, purpose: Purpose, positions: Tensor, counts: Tensor) -> Tensor:
        """float32 [T, B, W] in [0, 1) for each position and count; counts: LongTensor [T, 1 or B, 1 or W]."""
        a, b = self._bits(purpose, positions, counts.int() + 1)
        return _unit(_mix(a ^ b))

    def normal(self, purpose: Purpose, positions: Tensor, channels: int, counts: Tensor) -> Tensor:
        """float32 [T, B, W, C] of standard normals, counts as for `uniforms`, by Box and Muller's transform."""
        a, b = (lane[..., None] for lane in self._bits(purpose, positions, counts.int() + 1))
        halves = torch.arange(2 * channels, device=positions.device, dtype=torch.int32)
        radius, angle = _unit(_mix(_mix(halves ^ a).add_(b))).chunk(2, dim=-1)
        return (-2 * (-radius).log1p()).sqrt() * (2 * torch.pi * angle).cos()

    def code(self, purpose: Purpose, positions: Tensor, vocabulary: int) -> Tensor:
        """LongTensor [B, W] of uniformly drawn codes."""
        a, b = self._bits(purpose, positions, 0)
        return (_mix(a ^ b).long() & _BITS) * vocabulary >> 32

    def gumbel(self, purpose: Purpose, positions: Tensor, vocabulary: int, passes: Tensor | None = None) -> Tensor:
        """float32 [B, W, V] of independent standard Gumbel values, -log(-log u) with u at the midpoints of 2^-32."""
        a, b = self._bits(purpose, positions, _counter(passes))
        codes = torch.arange(vocabulary, device=positions.device, dtype=torch.int32)
        bits = _mix(_mix(codes ^ a[..., None]).add_(b[..., None]))
        # The nearer of u and 1 - u is exact, where the other one rounds: a negative word stands for u above one half.
        nearer = (bits >> 31).bitwise_xor_(bits).float().add_(0.5).mul_(2.0**-32)
        above_half = (-nearer).log1p_()
        return torch.where(bits < 0, above_half, nearer.log_()).neg_().log_().neg_()


class NoiseRing:
    """The drafting Gumbel vectors of a window's positions: each is computed once, when its position enters.

    rows: float32 [B, W, V], position p at p modulo W.
    """

    def __init__(self, noise: Noise, batch_size: int, window: int, vocabulary: int, device: torch.device) -> None:
        self._noise, self._vocabulary = noise, vocabulary
        self.rows = torch.zeros(batch_size, window, vocabulary, device=device)
        self._images = torch.arange(batch_size, device=device)[:, None]

    def enter(self, positions: Tensor) -> None:
        """Takes in positions LongTensor [B, S]; those of W passes ago are forgotten."""
        slots = positions % self.rows.shape[1]
        self.rows[self._images, slots] = self._noise.gumbel(Purpose.DRAFT, positions, self._vocabulary)

    def at(self, positions: Tensor) -> Tensor:
        """float32 [B, S, V] of positions in the window."""
        return self.rows[self._images, positions % self.rows.shape[1]]


def _absorb(lanes: tuple[Tensor, ...], word: Tensor | int) -> tuple[Tensor, ...]:
    return tuple(_mix((lane + _GOLDEN) ^ word) for lane in lanes)
