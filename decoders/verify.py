"""Which drafts are accepted, and what is committed at the first one that is not.

A verifier maps a Window to accepts, bool [B, W - 1]; its resampler maps (window, slot LongTensor [B, 1], the first
rejected draft's) to the code LongTensor [B, 1] committed there. Where no draft is rejected the engine takes the bonus.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grouping import Groups
from .noise import Purpose
from .window import Window, residual_draw, take_slots


def speculative(window: Window) -> Tensor:
    """The ratio test of speculative sampling: accept x with min(1, P(x) / Q(x)) (Leviathan 2023, Chen 2023)."""
    return window.ratio_accepts


def grouped(window: Window, groups: Groups) -> Tensor:
    """Grouped Speculative Decoding (arXiv 2508.07747): the ratio of group masses, min(1, P(C(x)) / Q(C(x))).

    Lossy by design. The accepted code is the draft itself; a rejection draws from the ordinary residual.
    """
    target, source = groups.masses(window.probabilities[:, :-1], window.sources, window.drafts)
    return window.uniforms * source < target


def exact(window: Window) -> Tensor:
    """Equality with the target's own draw under fixed noise (predictive sampling, Wiggers & Hoogeboom 2020)."""
    return window.coupled_draws[:, :-1] == window.drafts


def nothing(window: Window) -> Tensor:
    """No draft at all: plain autoregressive decoding, whose window spans forced positions alone."""
    return torch.zeros_like(window.drafts, dtype=torch.bool)


def resample_residual(window: Window, slot: Tensor) -> Tensor:
    """A draw from norm(max(P - Q, 0)), with noise that nothing else uses."""
    target, source = take_slots(window.probabilities, slot), take_slots(window.sources, slot)
    position = take_slots(window.positions, slot)
    fresh = window.noise.gumbel(Purpose.RESIDUAL, position, window.vocabulary, window.passes)
    return residual_draw(target, source, fresh)


def resample_own(window: Window, slot: Tensor) -> Tensor:
    """The target's own draw, which is plain AR's."""
    return window.coupled_draws.gather(1, slot)
