"""One forward pass as the decoding parts see it: W slots, of which the first W - 1 carry a draft to be verified."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .noise import Noise, Purpose


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
        return draw(self.logits, self.noise.gumbel(Purpose.DRAFT, self.positions, self.vocabulary))

    @property
    def bonus(self) -> Tensor:
        """LongTensor [B, 1]: the code behind a wholly accepted window. Its position never had a draft before."""
        gumbel = self.noise.gumbel(Purpose.DRAFT, self.positions[:, -1:], self.vocabulary)
        return draw(self.logits[:, -1:], gumbel)

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


def take_slot(rows: Tensor, slot: Tensor) -> Tensor:
    """rows [B, W, ...], slot LongTensor [B, 1] -> [B, 1, ...]."""
    index = slot.view(-1, *[1] * (rows.dim() - 1))
    return torch.take_along_dim(rows, index, dim=1)


def residual_draw(target: Tensor, source: Tensor, gumbel: Tensor) -> Tensor:
    """A draw from norm(max(P - Q, 0)), or from P where rounding left no residual mass (Leviathan et al. 2023, A.1)."""
    residual = (target - source).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    return draw(residual.log(), gumbel)
