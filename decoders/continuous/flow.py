"""The reverse flow of xAR (arXiv 2502.20388) as a ReverseProcess: a straight path between noise and cell, walked by
Euler and Maruyama's method, or by Euler's without noise."""

from __future__ import annotations

import torch
from torch import Tensor

_LAST_TIME = 0.04


class StraightFlow:
    """Implements decoders.interface.ReverseProcess. Output and prediction are the velocity, noise minus cell, [.., C].

    steps: K calls at times from 1 to 0.04, then 0. The standard deviations are the schedule's own, the network has no
    say in them.
    """

    def __init__(self, steps: int, deterministic: bool, device: torch.device) -> None:
        self.steps, self.deterministic = steps, deterministic
        end = 0.0 if deterministic else _LAST_TIME
        times = torch.linspace(1, end, steps + 1 if deterministic else steps, dtype=torch.float64)[:steps].flip(0)
        self._times = times.float().to(device)
        advance = times - torch.cat((torch.zeros(1, dtype=torch.float64), times[:-1]))
        self._advance = advance.float().to(device)
        self._log_std = (0.5 * (2 * times * advance).log()).float().to(device)

    def time(self, step: Tensor) -> Tensor:
        """From 0 (the cell) to 1 (noise)."""
        return self._times[step]

    def predict(self, output: Tensor, x: Tensor, step: Tensor) -> Tensor:  # noqa: ARG002  (the velocity goes by no x)
        """See ReverseProcess.predict."""
        return output

    def guess(self, x: Tensor) -> Tensor:
        """Straight to the mean of all cells, which is 0."""
        return x

    def transition(self, prediction: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ReverseProcess.transition. The drift of the stochastic path is (2 - t) v + x, the other's is v."""
        time, advance = self._times[step][..., None], self._advance[step][..., None]
        if self.deterministic:
            return torch.ones_like(time), -advance * prediction, torch.full_like(prediction, -torch.inf)
        log_std = self._log_std[step][..., None].expand_as(prediction)
        return 1 - advance, -advance * (2 - time) * prediction, log_std
