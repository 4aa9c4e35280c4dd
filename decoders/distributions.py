"""From raw logits to the distribution that is sampled: guidance, temperature, top-k, top-p, softmax, in this order."""

from __future__ import annotations

import torch
from torch import Tensor


def guide(logits: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance u + s (c - u). logits [G, ...], conditional first; G = 1 passes through."""
    if logits.shape[0] == 1:
        return logits[0]
    conditional, unconditional = logits
    return unconditional + scale * (conditional - unconditional)


def filter_logits(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """float32 [..., V] -> the same with -inf outside the support; softmax of it is the sampled distribution.

    Temperature 0 keeps the likeliest code alone. Every step acts on a row alone, so that a row does not depend on the
    window that it was computed in.
    """
    if temperature == 0:
        temperature, top_k = 1.0, 1
    if temperature != 1:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = torch.where(top_k_mask(logits, top_k), logits, -torch.inf)
    if top_p < 1:
        logits = torch.where(top_p_mask(logits, top_p), logits, -torch.inf)
    return logits


def top_k_mask(logits: Tensor, k: int) -> Tensor:
    """True for exactly k entries of each row; among equals the lowest index wins."""
    kth = logits.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = logits > kth, logits == kth
    return above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def top_p_mask(logits: Tensor, p: float) -> Tensor:
    """True for the likeliest entries: one stays while the mass before it is at most p (nucleus sampling)."""
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before <= p)
