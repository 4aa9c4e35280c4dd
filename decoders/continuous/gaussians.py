"""Maximal coupling of two Gaussians with diagonal covariance, in log space: keep a draw of one as a draw of the other.

A draft x from q is kept as a draw from p with probability min(1, p(x) / q(x)), else replaced by a draw from the
residual max(p - q, 0): by rejection, or by reflection where the two differ in their means alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gaussian:
    """mean and log_std, float32 [..., C]."""

    mean: Tensor
    log_std: Tensor

    def at(self, noise: Tensor) -> Tensor:
        """The value that standard normal noise [..., C] stands for."""
        return self.mean + self.log_std.exp() * noise

    def noise_of(self, x: Tensor) -> Tensor:
        """The standard normal noise [..., C] that x stands for."""
        return (x - self.mean) * (-self.log_std).exp()


def log_ratio(p: Gaussian, q: Gaussian, p_noise: Tensor, q_noise: Tensor, softening: float = 1.0) -> Tensor:
    """log p(x) - log q(x) [...] where x stands for p_noise under p and for q_noise under q.

    softening divides both distances, as the released code of Continuous Speculative Decoding does; 1 is the true ratio.
    """
    distances = (q_noise**2 - p_noise**2) / (2 * softening**2)
    return (distances + q.log_std - p.log_std).sum(-1)


def keeps(uniform: Tensor, log_ratio: Tensor) -> Tensor:
    """bool [...]: whether drafts with these ratios are kept; uniform: float32 [...] in [0, 1)."""
    return uniform.log() < log_ratio


def residual_by_rejection(
    p: Gaussian, q: Gaussian, normals: Tensor, uniforms: Tensor, log_scale: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Proposals from p, taken with probability 1 - min(1, q(y) / (S p(y))) -> (y [..., C], bool [...] whether any was).

    normals: [R, ..., C], uniforms: [R, ...] of R proposals; the first that is taken counts, the last where none is.
    log_scale: log S [...], 0 for the true residual.
    """
    proposals = p.at(normals)
    log_q_share = -log_ratio(p, q, normals, q.noise_of(proposals)) - log_scale
    taken = uniforms < -torch.expm1(log_q_share.clamp(max=0))
    first = taken.long().argmax(0)
    first = torch.where(taken.any(0), first, len(taken) - 1)
    return proposals.take_along_dim(first[None, ..., None], 0)[0], taken.any(0)


def residual_by_reflection(p: Gaussian, q: Gaussian, q_noise: Tensor) -> Tensor:
    """Where both have the same spread: the draft's noise mirrored at the plane between the means -> [..., C]."""
    between = (q.mean - p.mean) * (-p.log_std).exp()
    direction = between / between.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(between.dtype).tiny)
    return p.at(q_noise - 2 * (direction * q_noise).sum(-1, keepdim=True) * direction)
