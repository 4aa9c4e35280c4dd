"""`cspd`: Continuous Speculative Decoding (arXiv 2411.11925) with a target and a draft model.

Both models run their chains with the same noise. A draft token x is kept with probability min(1, r), else redrawn:

    log r = log N(x; target's last step) - log N(x; draft's last step) + sign * log Sigma

where Sigma is the ratio of the products of the two chains' standard deviations over the steps before the last, draft
over target. Two verifications:

- `prefix` (the paper's Algorithm 1): gamma AR steps are drafted; one pass of the target judges each in the context of
  the drafts before it; behind the first step with a rejection all is drafted again. The last step adds noise.
- `block` (the released code): the target predicts all drafted positions from the context before the block; each is
  judged by itself and nothing is drafted again. The last step adds no noise.

sigma_factor: `paper` has sign 1, `released` -1 (the released code's exponent), `off` 0. softening divides the distances
in the ratio. Only `prefix` with `off` and softening 1 is exact, and it keeps next to nothing: the last step's standard
deviation is 0.006. prefill_ratio: the share of the AR steps that the target makes alone at the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..interface import ContinuousOptions, SigmaFactor
from .autoregressive import autoregressive, step_chains
from .chain import Trajectory, sample
from .gaussians import Gaussian, keeps, log_ratio, residual_by_rejection
from .run import Run

SIGNS: dict[SigmaFactor, int] = {"paper": 1, "released": -1, "off": 0}
MOST_ATTEMPTS = 2  # rounds of 64 proposals under a Sigma factor, whose residual can be next to empty


@dataclass(frozen=True, eq=False)
class Judgement:
    """What became of M drafts. kept: bool [M]. log_sigma: float32 [M], sign included."""

    kept: Tensor
    log_sigma: Tensor


def judge(run: Run, options: ContinuousOptions, positions: Tensor, target: Trajectory, draft: Trajectory) -> Judgement:
    """Which drafts are kept, for the M tokens of positions [B, S]."""
    log_sigma = SIGNS[options.sigma_factor] * (draft.log_spread - target.log_spread).sum(-1)
    noises = target.last.noise_of(draft.token), draft.last.noise_of(draft.token)
    ratio = log_ratio(target.last, draft.last, *noises, options.softening) + log_sigma
    return Judgement(keeps(run.noise.accept(positions)[0].flatten(), ratio), log_sigma)


def redraw(
    run: Run,
    options: ContinuousOptions,
    positions: Tensor,
    p: Gaussian,
    q: Gaussian,
    judgement: Judgement,
    needed: Tensor,
    otherwise: Tensor,
) -> Tensor:
    """Draws [M, C] from the residual where needed (bool [M]). Without Sigma proposals are made until one is taken;
    with it `otherwise` stands in after a while (the released code leaves zeros)."""
    redrawn, open_, attempts = otherwise, needed, 0
    while bool(open_.any()) and (options.sigma_factor == "off" or attempts < MOST_ATTEMPTS):
        normals, uniforms = run.noise.residual(positions, torch.full_like(positions, attempts))
        proposed, taken = residual_by_rejection(
            p, q, normals.flatten(1, 2), uniforms.flatten(1, 2), judgement.log_sigma
        )
        redrawn = torch.where((open_ & taken)[:, None], proposed, redrawn)
        open_, attempts = open_ & ~taken, attempts + 1
    return redrawn


def prefilled(run: Run, options: ContinuousOptions) -> int:
    """Lets the target make the first AR steps alone; how many they are, at least one."""
    iterations = run.canvas.schedule.iterations
    steps = min(int(options.prefill_ratio * iterations) + 1, iterations)
    autoregressive(run, steps=steps)
    return steps


def block(run: Run, options: ContinuousOptions, drafts: int) -> None:
    """Fills the canvas as the released code does: the target looks in at every AR step that `drafts` divides."""
    canvas, schedule = run.canvas, run.canvas.schedule
    assert run.draft is not None  # see checks
    verified = prefilled(run, options)
    last, pieces = schedule.iterations - 1, []
    for step in range(verified, schedule.iterations):
        with run.trace.timed("draft"):
            chains = step_chains(run, run.draft, step)
            pieces.append(sample(run.draft, chains, run.noise))
        canvas.write(chains.positions, pieces[-1].token.view(*chains.positions.shape, -1))
        if step % drafts and step < last:
            continue
        asked = canvas.between(schedule.bounds[verified], schedule.bounds[step + 1], schedule.guidance[step])
        known = canvas.bounds[run.lockstep(verified)]
        chains = run.chains(run.target, asked, known, schedule.bounds[verified])
        with run.trace.timed("head"):
            target = sample(run.target, chains, run.noise)
        draft = Trajectory.joined(pieces, run.batch_size)
        judgement = judge(run, options, chains.positions, target, draft)
        needed = ~judgement.kept
        redrawn = redraw(run, options, chains.positions, target.last, draft.last, judgement, needed, target.token)
        tokens = torch.where(needed[:, None], redrawn, draft.token)
        canvas.write(chains.positions, tokens.view(*chains.positions.shape, -1))
        run.trace.commit([chains.positions.shape[1]] * run.batch_size)
        run.trace.judge(chains.positions.numel(), judgement.kept.sum())
        verified, pieces = step + 1, []


def prefix(run: Run, options: ContinuousOptions, drafts: int) -> None:
    """Fills the canvas by the paper's Algorithm 1: `drafts` AR steps ahead, judged in context, back at a rejection."""
    canvas, schedule = run.canvas, run.canvas.schedule
    assert run.draft is not None  # see checks
    begin, end = prefilled(run, options), schedule.iterations
    front, fronts = run.lockstep(begin), [begin] * run.batch_size
    offsets = torch.arange(drafts + 1, device=front.device)
    while min(fronts) < end:
        furthest = max(fronts) + drafts
        steps, most = (front + offsets).clamp(max=end - 1), schedule.most(min(fronts), furthest)
        with run.trace.timed("draft"):
            draft = _drafted(run, front, steps[:, :drafts], most, max(fronts))
        chains = run.chains(
            run.target, canvas.asked(steps, most), canvas.bounds[steps], schedule.bounds[min(furthest, end - 1)]
        )
        with run.trace.timed("head"):
            everything = sample(run.target, chains, run.noise)
        target, bonus = everything.split(run.batch_size, drafts * most)
        positions = chains.positions[:, : drafts * most]
        judgement = judge(run, options, positions, target, draft)
        by_step = judgement.kept.view(run.batch_size, drafts, most)
        passed = by_step.all(-1).long().cumprod(1).sum(1, keepdim=True)
        needed = (~by_step & (offsets[:drafts] == passed)[..., None]).flatten()
        redrawn = redraw(run, options, positions, target.last, draft.last, judgement, needed, target.token)
        tokens = torch.where(needed[:, None], redrawn, draft.token).view(run.batch_size, drafts, most, -1)
        tokens = torch.cat((tokens, bonus.token.view(run.batch_size, 1, most, -1)), dim=1)
        _write_step(run, chains.positions, tokens, passed, front)
        drafted = sum(schedule.bounds[min(at + drafts, end)] - schedule.bounds[at] for at in fronts)
        reached = canvas.bounds[(front + passed).clamp(max=end)]
        run.trace.judge(drafted, (reached - canvas.bounds[front]).sum())
        front = (front + passed + 1).clamp(max=end)
        fronts = run.finish_steps(fronts, front)


def _drafted(run: Run, front: Tensor, steps: Tensor, most: int, furthest: int) -> Trajectory:
    """The drafts of AR steps [B, gamma], each after those before it; they stand on the canvas, too."""
    canvas, schedule, draft = run.canvas, run.canvas.schedule, run.draft
    assert draft is not None  # see checks
    pieces = []
    for index in range(steps.shape[1]):
        step = steps[:, index : index + 1]
        longest = schedule.bounds[min(furthest + index, schedule.iterations - 1)]
        chains = run.chains(draft, canvas.asked(step, most), canvas.bounds[step], longest)
        pieces.append(sample(draft, chains, run.noise))
        tokens = pieces[-1].token.view(*chains.positions.shape, -1)
        under_way = (front + index < schedule.iterations)[..., None]
        canvas.write(chains.positions, torch.where(under_way, tokens, canvas.read(chains.positions)))
    return Trajectory.joined(pieces, run.batch_size)


def _write_step(run: Run, positions: Tensor, tokens: Tensor, index: Tensor, front: Tensor) -> None:
    """Puts the tokens of the step at index [B, 1] on the canvas; tokens: [B, W, S, C], positions: [B, W * S]."""
    batch_size, windows, most, channels = tokens.shape
    at = index[..., None].expand(-1, -1, most)
    positions = positions.view(batch_size, windows, most).gather(1, at)[:, 0]
    chosen = tokens.gather(1, at[..., None].expand(-1, -1, -1, channels))[:, 0]
    under_way = (front + index < run.canvas.schedule.iterations)[..., None]
    run.canvas.write(positions, torch.where(under_way, chosen, run.canvas.read(positions)))


def run(run: Run, options: ContinuousOptions, drafts: int) -> None:
    """Fills the canvas by the chosen verification."""
    (prefix if options.verification == "prefix" else block)(run, options, drafts)
