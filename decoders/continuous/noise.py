"""The noise of continuous tokens: every number belongs to a seed, an image, a position and a step of the diffusion.

A picture so depends on no batch size, window or decoder's pace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..noise import Noise, Purpose

TRIES = 64  # proposals for a residual that are drawn together


class LatentNoise:
    """What a decoder draws from. Positions are LongTensor [B, S]; steps: T; channels: C."""

    def __init__(self, noise: Noise, steps: int, channels: int, device: torch.device) -> None:
        self._noise, self._channels = noise, channels
        self._steps = torch.arange(steps, device=device)[:, None, None]
        self._start = torch.full((1, 1, 1), steps, device=device)
        self._tries = torch.arange(TRIES, device=device)[:, None, None]

    def order(self, positions: Tensor) -> Tensor:
        """LongTensor [B, N]: a random order of positions [B, N] for each image."""
        return self._noise.uniform(Purpose.ORDER, positions).argsort(dim=-1, stable=True)

    def start(self, positions: Tensor) -> Tensor:
        """float32 [B, S, C]: the state before the first step."""
        return self._noise.normal(Purpose.DRAFT, positions, self._channels, self._start)[0]

    def steps(self, positions: Tensor) -> Tensor:
        """float32 [T, B, S, C]: the noise that each step adds."""
        return self._noise.normal(Purpose.DRAFT, positions, self._channels, self._steps)

    def accept(self, positions: Tensor) -> Tensor:
        """float32 [T, B, S] in [0, 1): what each step's acceptance is decided by; a token's own is that of step 0."""
        return self._noise.uniforms(Purpose.ACCEPT, positions, self._steps)

    def residual(self, positions: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Normals [R, B, S, C] and uniforms [R, B, S] of R proposals for each token.

        draw: LongTensor [B, S], the number of the draw: those of two numbers have nothing in common.
        """
        counts = self._tries + draw * TRIES
        normals = self._noise.normal(Purpose.RESIDUAL, positions, self._channels, counts)
        return normals, self._noise.uniforms(Purpose.RESIDUAL, positions, counts)
