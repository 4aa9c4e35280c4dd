"""The reverse diffusion of MAR's head as a ReverseProcess: 1,000 cosine betas, respaced; DDPM with a learned variance,
or DDIM (improved DDPM, arXiv 2102.09672; DDIM, 2010.02502)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..interface import ContinuousOptions, Respacing

TIMES = 1000
_LARGEST_BETA = 0.999


def cosine_betas() -> Tensor:
    """float64 [1000], from the ratio of the signal left at the ends of each interval."""

    def signal(share: float) -> float:
        return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

    ratios = [signal((time + 1) / TIMES) / signal(time / TIMES) for time in range(TIMES)]
    return torch.tensor([min(1 - ratio, _LARGEST_BETA) for ratio in ratios], dtype=torch.float64)


def kept_times(steps: int, respacing: Respacing) -> list[int]:
    """The times that so many steps stop at; raises ValueError where they cannot be spaced so."""
    if respacing == "even":
        stride = (TIMES - 1) / max(steps - 1, 1)
        return sorted({round(index * stride) for index in range(steps)})
    for stride in range(1, TIMES):
        if len(range(0, TIMES, stride)) == steps:
            return list(range(0, TIMES, stride))
    raise ValueError(
        f"diffusion_steps is {steps}, which no whole stride through {TIMES} times gives: choose 100 or 50."
    )


class GaussianDiffusion:
    """Implements decoders.interface.ReverseProcess. A network's output is the noise and the variance's place, [.., 2C].

    Its prediction is the clean token and that place as a fraction g between the posterior variance and beta, [.., 2C];
    g may leave 0..1, as in the official code.
    """

    def __init__(self, options: ContinuousOptions, times: Sequence[int], device: torch.device) -> None:
        times, steps = list(times), len(times)
        signal = (1 - cosine_betas()).cumprod(0)[times]
        before = torch.cat((torch.ones(1, dtype=torch.float64), signal[:-1]))
        betas = 1 - signal / before
        posterior = betas * (1 - before) / (1 - signal)
        posterior[0] = posterior[min(1, steps - 1)]
        ddim = options.diffusion_sampler == "ddim"
        spread = options.eta * ((1 - before) / (1 - signal) * betas).sqrt()
        self.steps, self.deterministic, self._ddim = steps, ddim and options.eta == 0, ddim

        def table(values: Tensor) -> Tensor:
            return values.float().to(device)

        self._times = torch.tensor(times, device=device)
        self._from_x, self._from_noise = table(signal.rsqrt()), table((1 / signal - 1).sqrt())
        self._log_beta, self._log_posterior = table(betas.log()), table(posterior.log())
        if ddim:
            # x = sqrt(signal) clean + sqrt(1 - signal) noise gives the noise that the prediction stands for.
            along = (1 - before - spread**2).clamp(min=0).sqrt() / (1 - signal).sqrt()
            self._of_clean, self._of_x = table(before.sqrt() - along * signal.sqrt()), table(along)
        else:
            self._of_clean = table(betas * before.sqrt() / (1 - signal))
            self._of_x = table((1 - before) * (1 - betas).sqrt() / (1 - signal))
        self._log_spread = table(spread.log())

    def time(self, step: Tensor) -> Tensor:
        """The original time, 0 to 999."""
        return self._times[step].float()

    def predict(self, output: Tensor, x: Tensor, step: Tensor) -> Tensor:
        """See ReverseProcess.predict."""
        noise, place = output.chunk(2, dim=-1)
        clean = self._from_x[step][..., None] * x - self._from_noise[step][..., None] * noise
        return torch.cat((clean, (place + 1) / 2), dim=-1)

    def guess(self, x: Tensor) -> Tensor:
        """The mean of all tokens, which is 0, and a variance halfway between its bounds."""
        return torch.cat((torch.zeros_like(x), torch.full_like(x, 0.5)), dim=-1)

    def transition(self, prediction: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ReverseProcess.transition."""
        clean, share = prediction.chunk(2, dim=-1)
        factor, offset = self._of_x[step][..., None], self._of_clean[step][..., None] * clean
        if self._ddim:
            return factor, offset, self._log_spread[step][..., None].expand_as(offset)
        log_beta, log_posterior = self._log_beta[step][..., None], self._log_posterior[step][..., None]
        return factor, offset, 0.5 * (share * log_beta + (1 - share) * log_posterior)
