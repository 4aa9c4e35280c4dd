"""One forward pass as the decoding parts see it: W slots, of which the first W - 1 carry a draft to be verified."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .noise import Noise, NoiseRing, Purpose


@dataclass(frozen=True, eq=False)
class Window:
    """What is known after a pass. Slot k speaks of position positions[:, k]; the last slot has no draft.

    logits: float32 [B, W, V], filtered; softmax gives P, the law of each position given the drafts before it.
    drafts: LongTensor [B, W - 1]; sources: float32 [B, W - 1, V], Q, the rows that the drafts were drawn from.
    positions: LongTensor [B, W]; passes: LongTensor [B], each row's own pass counter.
    """

    logits: Tensor
    drafts: Tensor
    sources: Tensor
    positions: Tensor
    passes: Tensor
    noise: Noise
    ring: NoiseRing  # the drafting noise of the window's positions

    @property
    def vocabulary(self) -> int:
        return self.logits.shape[-1]

    @cached_property
    def probabilities(self) -> Tensor:
        """P, float32 [B, W, V]."""
        return self.logits.softmax(-1)

    @cached_property
    def coupled_draws(self) -> Tensor:
        """LongTensor [B, W]: argmax(log P + g) with the one Gumbel vector that each position keeps for life."""
        return draw(self.logits, self.ring.at(self.positions))

    @property
    def bonus(self) -> Tensor:
        """LongTensor [B, 1]: the code behind a wholly accepted window. Its position never had a draft before."""
        return draw(self.logits[:, -1:], self.ring.at(self.positions[:, -1:]))

    @cached_property
    def ratio_accepts(self) -> Tensor:
        """bool [B, W - 1]: u < P(x) / Q(x), with a fresh uniform in every pass."""
        p = at(self.probabilities[:, :-1], self.drafts)
        q = at(self.sources, self.drafts)
        return self.uniforms * q < p

    @cached_property
    def uniforms(self) -> Tensor:
        """float32 [B, W - 1], fresh in every pass."""
        return self.noise.uniform(Purpose.ACCEPT, self.positions[:, :-1], self.passes)


def draw(logits: Tensor, gumbel: Tensor) -> Tensor:
    """The Gumbel-max draw: LongTensor [...] from logits [..., V]."""
    return (logits + gumbel).argmax(-1)


def at(rows: Tensor, codes: Tensor) -> Tensor:
    """rows[..., codes[...]]: the entry of each row [..., V] at its code."""
    return rows.gather(-1, codes[..., None])[..., 0]


def take_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """rows [B, W, ...], slots LongTensor [B, S] -> [B, S, ...]."""
    return rows[torch.arange(len(rows), device=rows.device)[:, None], slots]


def residual_draw(target: Tensor, source: Tensor, gumbel: Tensor) -> Tensor:
    """A draw from norm(max(P - Q, 0)), or from P where rounding left no residual mass (Leviathan et al. 2023, A.1).

    P is added 1e-30 times: that decides only where nothing else is left, for no Gumbel value makes up for it.
    """
    residual = (target - source).clamp_(min=0).add_(target, alpha=1e-30)
    return draw(residual.log_(), gumbel)
