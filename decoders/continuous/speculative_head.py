"""`head-speculative`: speculation inside the denoiser, after De Bortoli et al. 2025 (arXiv 2501.05370); lossless.

The next K states of a chain are drafted as if the network kept saying what it said last (a frozen prediction), and one
call with K rows judges them all: each is kept or replaced by maximal coupling with the step's true law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .chain import Chains, Denoiser
from .gaussians import Gaussian, keeps, log_ratio, residual_by_reflection, residual_by_rejection
from .noise import LatentNoise

Count = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class Drafts:
    """K drafted states of M chains. steps: LongTensor [M, K]. before: [M, K, C], the state that each step starts from.
    law: what each draft was drawn from; noise: [M, K, C], with which; after: [M, K, C], the drafts themselves."""

    steps: Tensor
    before: Tensor
    law: Gaussian
    noise: Tensor
    after: Tensor


def speculative_sample(denoiser: Denoiser, chains: Chains, noise: LatentNoise, window: int, count: Count) -> Tensor:
    """Tokens [M, C] with the law of `chain.sample`, whose last step is without noise; window: K, drafts a call.

    count: told in each call how many drafts it judged and how many were kept, as numbers on the device.

    Each chain advances at its own pace. A residual that no proposal of a round hits is tried again in the next round,
    in which the same noise leads to the same rejection.
    """
    x = noise.start(chains.positions).flatten(0, 1)
    added = noise.steps(chains.positions).flatten(1, 2).movedim(0, 1)
    uniforms = noise.accept(chains.positions).flatten(1, 2).movedim(0, 1)
    first = denoiser.process.steps - 1
    rows = torch.arange(len(x), device=x.device)
    step, attempt = torch.full_like(rows, first), torch.zeros_like(rows)

    prediction = denoiser.process.guess(x)
    while bool((step >= 0).any()):
        drafts = draft(denoiser, prediction, x, step, added, window)
        seen = denoiser.predict(drafts.before, drafts.steps, chains)
        law = denoiser.next(seen, drafts.before, drafts.steps)
        ratio = log_ratio(law, drafts.law, law.noise_of(drafts.after), drafts.noise)
        drafted = step.clamp(0, window)  # step 0 has no noise and so nothing to draft
        kept = keeps(uniforms.gather(1, drafts.steps), ratio)
        kept &= torch.arange(window, device=x.device) < drafted[:, None]
        passed = kept.long().cumprod(1).sum(1)

        count(drafted.sum(), passed.sum())

        rejected, at = passed < drafted, passed.clamp(max=window - 1)
        p, q = _at(law, rows, at), _at(drafts.law, rows, at)
        number = (step - at).clamp(min=0) + (first + 1) * attempt
        redrawn, found = _residual(p, q, drafts.noise[rows, at], chains, noise, number)
        ended = ~rejected & (step < window)
        unresolved = rejected & ~found
        reached = torch.where(rejected[:, None], redrawn, torch.where(ended[:, None], p.mean, drafts.after[:, -1]))
        reached = torch.where(unresolved[:, None], drafts.before[rows, at], reached)
        advance = torch.where(unresolved, passed, torch.where(rejected | ended, passed + 1, window))

        active = step >= 0
        x = torch.where(active[:, None], reached, x)
        prediction = torch.where((active & ~unresolved)[:, None], seen[rows, at], prediction)
        attempt = torch.where(unresolved, attempt + 1, 0)
        step = torch.where(active, step - advance, step)
    return x


def draft(denoiser: Denoiser, prediction: Tensor, x: Tensor, step: Tensor, added: Tensor, window: int) -> Drafts:
    """The K states after x [M, C] at step [M] under a frozen prediction [M, Q]; added: noise [M, T, C].

    Every transition is affine in its state, so the K states are sums, computed in one product instead of K after one
    another. Steps below 1 are never drafted; they stand as step 1 or 0 in the result.
    """
    steps = step[:, None] - torch.arange(window, device=step.device)
    drawn = steps.clamp(min=1)
    frozen = prediction[:, None].expand(-1, window, -1)
    factor, offset, _ = denoiser.process.transition(frozen, drawn)
    spread = denoiser.next(frozen, x[:, None].expand(-1, window, -1), drawn).log_std
    noise = added.gather(1, drawn[..., None].expand(-1, -1, x.shape[-1]))
    reach = factor[..., 0].log().cumsum(1)
    share = (reach[:, :, None] - reach[:, None, :]).tril().exp().tril()
    after = reach.exp()[..., None] * x[:, None] + share @ (offset + spread.exp() * noise)
    before = torch.cat((x[:, None], after[:, :-1]), dim=1)
    return Drafts(steps.clamp(min=0), before, Gaussian(factor * before + offset, spread), noise, after)


def _at(law: Gaussian, rows: Tensor, index: Tensor) -> Gaussian:
    return Gaussian(law.mean[rows, index], law.log_std[rows, index])


def _residual(
    p: Gaussian, q: Gaussian, q_noise: Tensor, chains: Chains, noise: LatentNoise, number: Tensor
) -> tuple[Tensor, Tensor]:
    """A draw [M, C] from max(p - q, 0) for each chain, and whether there is one: reflection where the spreads agree."""
    normals, uniforms = noise.residual(chains.positions, number.view(chains.positions.shape))
    proposed, found = residual_by_rejection(p, q, normals.flatten(1, 2), uniforms.flatten(1, 2))
    alike = (p.log_std == q.log_std).all(-1)
    mirrored = residual_by_reflection(p, q, q_noise)
    return torch.where(alike[:, None], mirrored, proposed), found | alike
