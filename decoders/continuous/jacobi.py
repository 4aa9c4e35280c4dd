"""`seed-exact` for continuous tokens, ours: fixed-noise Jacobi that always keeps the target's own token.

With its noise fixed, a token is a function of the tokens before it. One pass computes the tokens of W AR steps after
guesses for one another; as long as a guess was within the tolerance of what came out in its place, the next step's
token counts too. What is emitted is never a guess, always what the target gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .autoregressive import autoregressive
from .chain import sample
from .run import Run

AUDITED_STEPS = 8


def seed_exact(run: Run, window: int, tolerance: float) -> None:
    """Fills the canvas. Every token is the target's after a prefix each of whose tokens is within the tolerance
    (Euclidean distance) of the emitted one. At tolerance 0 nothing but `ar`'s own passes gives `ar`'s own rounding."""
    if tolerance == 0:
        run.trace.audit_residual = 0.0
        autoregressive(run)
        return
    guess_all(run)
    schedule, canvas = run.canvas.schedule, run.canvas
    end = schedule.iterations
    front, fronts = run.lockstep(0), [0] * run.batch_size
    offsets = torch.arange(window, device=front.device)
    while min(fronts) < end:
        furthest = max(fronts) + window - 1
        steps = (front + offsets).clamp(max=end - 1)
        asked = canvas.asked(steps, schedule.most(min(fronts), furthest))
        positions, tokens = _draw(run, asked, canvas.bounds[steps], schedule.bounds[min(furthest, end - 1)])
        guesses = canvas.read(positions)
        repeated = _distances(tokens, guesses, window) <= tolerance
        emitted = 1 + repeated[:, :-1].long().cumprod(1).sum(1, keepdim=True)
        canvas.write(positions, torch.where((front < end)[..., None], tokens, guesses))
        before, front = fronts, (front + emitted).clamp(max=end)
        fronts = run.finish_steps(before, front)
        _count_guesses(run, window, before, fronts)
    _audit(run)


def guess_all(run: Run) -> None:
    """First guesses: every token as the model draws it when it knows no other."""
    nothing = torch.zeros_like(run.lockstep(0))
    run.canvas.write(*_draw(run, run.canvas.all_asked(), nothing, 0))


def _draw(run: Run, asked: tuple[Tensor, Tensor], known: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Positions [B, W * S] and their tokens [B, W * S, C]."""
    chains = run.chains(run.target, asked, known, longest)
    with run.trace.timed("head"):
        tokens = sample(run.target, chains, run.noise).token
    return chains.positions, tokens.view(*chains.positions.shape, -1)


def _distances(tokens: Tensor, others: Tensor, steps: int) -> Tensor:
    """float32 [B, W]: the largest distance among the tokens of each of W steps; tokens: [B, W * S, C]."""
    return (tokens - others).norm(dim=-1).unflatten(1, (steps, -1)).amax(-1)


def _count_guesses(run: Run, window: int, before: list[int], after: list[int]) -> None:
    """A pass judges the guesses behind its first step; those that were passed by were accepted."""
    bounds, end = run.canvas.schedule.bounds, run.canvas.schedule.iterations
    for old, new in zip(before, after, strict=True):
        if old < end:
            run.trace.judge(bounds[min(old + window, end)] - bounds[old + 1], bounds[new] - bounds[old + 1])


def _audit(run: Run) -> None:
    """Draws some steps again after the tokens that were emitted before them: how far is the picture from itself?"""
    canvas, schedule = run.canvas, run.canvas.schedule
    last = schedule.iterations - 1
    count = min(AUDITED_STEPS, schedule.iterations)
    chosen = [round(last * (index + 1) / count) for index in range(count)]
    steps = torch.tensor(chosen, device=canvas.order.device).expand(run.batch_size, -1)
    asked = canvas.asked(steps, schedule.most(0, last))
    positions, tokens = _draw(run, asked, canvas.bounds[steps], schedule.bounds[last])
    run.trace.audit_residual = float(_distances(tokens, canvas.read(positions), count).max())
