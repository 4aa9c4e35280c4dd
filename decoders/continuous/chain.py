"""The sequential sampler of a token: all steps from noise to the token, one call of the denoiser each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..interface import LatentSession, ReverseProcess
from .gaussians import Gaussian
from .noise import LatentNoise


@dataclass(frozen=True, eq=False)
class Denoiser:
    """A model's part in a run: its session, the steps of its tokens, and who is told before each call.

    temperature multiplies the standard deviations. noisy_last: whether the last step adds noise too.
    """

    session: LatentSession
    process: ReverseProcess
    before_call: Callable[[], None]
    temperature: float = 1.0
    noisy_last: bool = False

    def predict(self, x: Tensor, step: Tensor, chains: Chains) -> Tensor:
        """One call: what the network says about states [M, K, C] at steps [M, K] -> predictions [M, K, Q]."""
        self.before_call()
        output = self.session.denoise(x, self.process.time(step), chains.features, chains.guidance)
        return self.process.predict(output, x, step)

    def next(self, prediction: Tensor, x: Tensor, step: Tensor) -> Gaussian:
        """The law of the state after x [..., C] at step [...], by a prediction [..., Q]."""
        factor, offset, log_std = self.process.transition(prediction, step)
        heat = math.log(self.temperature) if self.temperature else -math.inf
        return Gaussian(factor * x + offset, log_std + heat)

    def adds_noise(self, step: int) -> bool:
        return step > 0 or self.noisy_last


@dataclass(frozen=True, eq=False)
class Chains:
    """M = B * S chains to run. features: what the denoiser knows of each. positions: LongTensor [B, S], where their
    tokens go. guidance: float32 [M]."""

    features: Any
    positions: Tensor
    guidance: Tensor


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The end of M chains. token: float32 [M, C]. last: the law of the last step. log_spread: [M, C], the sum of the
    log standard deviations of the steps before it."""

    token: Tensor
    last: Gaussian
    log_spread: Tensor

    def split(self, batch_size: int, count: int) -> tuple[Trajectory, Trajectory]:
        """The chains of each image's first `count` positions, and those of the others."""

        def parts(values: Tensor) -> list[Tensor]:
            rows = values.view(batch_size, -1, values.shape[-1])
            return [rows[:, :count].flatten(0, 1), rows[:, count:].flatten(0, 1)]

        split = (self.token, self.last.mean, self.last.log_std, self.log_spread)
        first, second = (
            Trajectory(token, Gaussian(mean, log_std), log_spread)
            for token, mean, log_std, log_spread in zip(*map(parts, split), strict=True)
        )
        return first, second

    @staticmethod
    def joined(pieces: Sequence[Trajectory], batch_size: int) -> Trajectory:
        """Trajectories of the same images, one after another along the positions."""

        def whole(parts: Iterable[Tensor]) -> Tensor:
            return torch.cat([part.view(batch_size, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)

        mean, log_std = (whole(parts) for parts in zip(*((p.last.mean, p.last.log_std) for p in pieces), strict=True))
        tokens, spreads = (piece.token for piece in pieces), (piece.log_spread for piece in pieces)
        return Trajectory(whole(tokens), Gaussian(mean, log_std), whole(spreads))


def sample(denoiser: Denoiser, chains: Chains, noise: LatentNoise) -> Trajectory:
    """Runs the chains with the noise of their positions."""
    x = noise.start(chains.positions).flatten(0, 1)
    added = noise.steps(chains.positions).flatten(1, 2)
    log_spread = torch.zeros_like(x)
    for step in reversed(range(denoiser.process.steps)):
        steps = torch.full((len(x), 1), step, device=x.device)
        prediction = denoiser.predict(x[:, None], steps, chains)[:, 0]
        law = denoiser.next(prediction, x, steps[:, 0])
        x = law.at(added[step]) if denoiser.adds_noise(step) else law.mean
        if step:
            log_spread = log_spread + law.log_std
    return Trajectory(x, law, log_spread)
