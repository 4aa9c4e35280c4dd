"""The picture under way: its tokens, the order of their generation, and which of them each AR step makes."""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import LatentNoise
from .schedule import Schedule


class Canvas:
    """tokens: float32 [B, N, C], changed in place. order: LongTensor [B, N], positions as they are generated."""

    def __init__(self, order: Tensor, channels: int, schedule: Schedule) -> None:
        self.order, self.schedule = order, schedule
        self.tokens = torch.zeros(*order.shape, channels, device=order.device)
        self.bounds = torch.tensor(schedule.bounds, device=order.device)
        self._guidance = torch.tensor(schedule.guidance, device=order.device)

    def asked(self, steps: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """LongTensor [B, W, S], the positions that AR steps [B, W] make, and float32 [B, W, S], how they are guided.

        S = most; a step of fewer repeats its last. What is computed for a repeated position is the same each time, so
        that nothing has to be masked.
        """
        first, end = self.bounds[steps][..., None], self.bounds[steps + 1][..., None]
        ranks = torch.minimum(first + torch.arange(most, device=steps.device), end - 1)
        positions = self.order.gather(1, ranks.flatten(1)).view(ranks.shape)
        return positions, self._guidance[steps][..., None].expand_as(positions)

    def between(self, first: int, end: int, guidance: float) -> tuple[Tensor, Tensor]:
        """The same for ranks first .. end - 1 of the order as one step, guided alike: [B, 1, S] both."""
        positions = self.order[:, None, first:end]
        return positions, torch.full(positions.shape, guidance, device=positions.device)

    def all_asked(self) -> tuple[Tensor, Tensor]:
        """The same for all steps together, as one: [B, 1, N] both."""
        ranks = torch.arange(self.order.shape[1], device=self.order.device)
        steps = torch.searchsorted(self.bounds, ranks, right=True) - 1
        positions = self.order[:, None]
        return positions, self._guidance[steps].expand_as(positions)

    def read(self, positions: Tensor) -> Tensor:
        """float32 [B, S, C] of positions [B, S]."""
        return self.tokens.gather(1, positions[..., None].expand(-1, -1, self.tokens.shape[-1]))

    def write(self, positions: Tensor, tokens: Tensor) -> None:
        """Puts tokens [B, S, C] at positions [B, S]."""
        self.tokens.scatter_(1, positions[..., None].expand_as(tokens), tokens)


def generation_order(
    noise: LatentNoise, batch_size: int, positions: int, in_order: bool, device: torch.device
) -> Tensor:
    """LongTensor [B, N]: raster order, or a random one of each image's own."""
    raster = torch.arange(positions, device=device).expand(batch_size, -1)
    return raster.clone() if in_order else noise.order(raster)
