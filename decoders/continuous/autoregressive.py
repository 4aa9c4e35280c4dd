"""AR step after AR step, in step for all images: the reference sampler, or any other way to run its chains."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .chain import Chains, Denoiser, sample
from .noise import LatentNoise
from .run import Run

Draw = Callable[[Denoiser, Chains, LatentNoise], Tensor]


def draw(denoiser: Denoiser, chains: Chains, noise: LatentNoise) -> Tensor:
    """Tokens [M, C] by the sequential sampler."""
    return sample(denoiser, chains, noise).token


def autoregressive(run: Run, draw: Draw = draw, steps: int | None = None) -> None:
    """Fills the canvas: every step sees the tokens of the steps before it (MAR, arXiv 2406.11838, section 3).

    steps: how many of the schedule's steps; None: all.
    """
    schedule = run.canvas.schedule
    for step in range(schedule.iterations if steps is None else steps):
        chains = step_chains(run, run.target, step)
        with run.trace.timed("head"):
            tokens = draw(run.target, chains, run.noise)
        run.canvas.write(chains.positions, tokens.view(*chains.positions.shape, -1))
        run.trace.commit([schedule.size(step)] * run.batch_size)


def step_chains(run: Run, model: Denoiser, step: int) -> Chains:
    """A model's pass for one AR step, the same for all images."""
    steps, schedule = run.lockstep(step), run.canvas.schedule
    asked = run.canvas.asked(steps, schedule.size(step))
    return run.chains(model, asked, run.canvas.bounds[steps], schedule.bounds[step])
