"""How the positions that were not committed are drafted anew: the coupling of this pass's draws with the last pass's.

Each function maps a Window to LongTensor [B, W]; slot k's code is drawn from P[k], which becomes its stored row Q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import Purpose
from .window import Window, draw, residual_draw


def independent(window: Window) -> Tensor:
    """Speculative Jacobi Decoding (arXiv 2410.01699): a fresh draw in every pass."""
    gumbel = window.noise.gumbel(Purpose.DRAFT, window.positions, window.vocabulary, window.passes)
    return draw(window.logits, gumbel)


def gumbel(window: Window) -> Tensor:
    """Gumbel coupling (Speculative Coupled Decoding, arXiv 2510.24211): each position keeps its Gumbel vector."""
    return window.coupled_draws


def maximal(window: Window) -> Tensor:
    """Maximal coupling (Speculative Coupled Decoding, arXiv 2510.24211): keep with min(1, P/Q), else draw the residual.

    The released code for Lumina and Janus stores the old row for a kept draft, which is not lossless; the caller stores
    P[k] for every slot, as the theorem needs.
    """
    rows = window.probabilities
    fresh = window.noise.gumbel(Purpose.RESIDUAL, window.positions, window.vocabulary, window.passes)
    kept = torch.where(window.ratio_accepts, window.drafts, residual_draw(rows[:, :-1], window.sources, fresh[:, :-1]))
    return torch.cat((kept, draw(window.logits[:, -1:], fresh[:, -1:])), dim=1)
