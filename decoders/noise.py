"""Randomness as a pure function: the same seed, image, position and code give the same number on every device.

A counter hash in int64 tensor operations, so nothing depends on the window, the batch or a generator's state. Mixing
function: lowbias32 (C. Wellons, "Prospecting for hash functions", 2018), absorbed into two 32-bit lanes per row.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_BITS = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


class Purpose(IntEnum):
    """What a number is for. Purposes never share one: drafting noise reused for the residual is not lossless."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    INITIALISE = 4


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit values. Multipliers above 2^31 are taken modulo 2^32 as negatives, so int64 never wraps."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _BITS
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - (1 << 32))) & _BITS
    return x ^ (x >> 16)


class Noise:
    """The random numbers of one generation. Rows are images first_index .. first_index + batch_size - 1 of the seed.

    Positions are LongTensor [B, W]. `passes` (LongTensor [B], the row's own pass counter) makes a number fresh in every
    pass; without it the number belongs to the position for good.
    """

    def __init__(self, seed: int, first_index: int, batch_size: int, device: torch.device) -> None:
        sample = torch.arange(first_index, first_index + batch_size, device=device)
        lanes = tuple(torch.full_like(sample, start) for start in (0x2545F491, 0x6C078965))
        for word in (seed & _BITS, seed >> 32 & _BITS, sample):
            lanes = _absorb(lanes, word)
        self._lanes = lanes

    def _bits(self, purpose: Purpose, positions: Tensor, passes: Tensor | None) -> tuple[Tensor, Tensor]:
        lanes = tuple(lane[:, None] for lane in self._lanes)
        counter = torch.zeros_like(positions) if passes is None else passes[:, None] + 1
        for word in (int(purpose), positions, counter):
            lanes = _absorb(lanes, word)
        return lanes[0], lanes[1]

    def uniform(self, purpose: Purpose, positions: Tensor, passes: Tensor | None = None) -> Tensor:
        """float32 [B, W] in [0, 1), multiples of 2^-24."""
        a, b = self._bits(purpose, positions, passes)
        return (_mix(a ^ b) >> 8).float() * 2.0**-24

    def code(self, purpose: Purpose, positions: Tensor, vocabulary: int) -> Tensor:
        """LongTensor [B, W] of uniformly drawn codes."""
        a, b = self._bits(purpose, positions, None)
        return (_mix(a ^ b) * vocabulary) >> 32

    def gumbel(self, purpose: Purpose, positions: Tensor, vocabulary: int, passes: Tensor | None = None) -> Tensor:
        """float32 [B, W, V] of independent standard Gumbel values, -log(-log u) with u at the midpoints of 2^-32."""
        a, b = self._bits(purpose, positions, passes)
        codes = torch.arange(vocabulary, device=positions.device)
        bits = _mix((_mix(codes ^ a[..., None]) + b[..., None]) & _BITS)
        lower = (bits.float() + 0.5) * 2.0**-32
        upper = ((_BITS - bits).float() + 0.5) * 2.0**-32  # 1 - u, exact where u itself would round to 1
        exponential = torch.where(bits < 1 << 31, -lower.log(), -torch.log1p(-upper))
        return -exponential.log()


def _absorb(lanes: tuple[Tensor, ...], word: Tensor | int) -> tuple[Tensor, ...]:
    return tuple(_mix(((lane + _GOLDEN) & _BITS) ^ word) for lane in lanes)
