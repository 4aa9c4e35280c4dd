"""Groups of look-alike codes for grouped verification (Grouped Speculative Decoding, arXiv 2508.07747)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .window import at

_CODE_BITS = 20  # more than any vocabulary needs
_CODE = (1 << _CODE_BITS) - 1
_NO_KEY = 1 << 62


class Groups(Protocol):
    def masses(self, target: Tensor, source: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """P(C(x)) and Q(C(x)), float32 [B, S] each, from rows [B, S, V] and drafts LongTensor [B, S]."""


@dataclass(frozen=True, eq=False)
class DynamicGroups:
    """The codes nearest in rank to the draft under the target, filtered by probability and by distance.

    Of size G: G // 2 ranks below the draft, itself, and the rest above (7 below and 6 above for the released 14). A
    code further than probability_gap in probability, or than distance_limit between code vectors, does not count.
    """

    size: int
    probability_gap: float
    distance_limit: float
    embeddings: Tensor  # float32 [V, C]

    def masses(self, target: Tensor, source: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        keys = _rank_keys(target)
        own = at(keys, drafts)[..., None]
        below, above = min(self.size // 2, keys.shape[-1]), min(self.size - self.size // 2 - 1, keys.shape[-1])
        members_below = torch.where(keys < own, keys, -1).topk(below, dim=-1).values
        members_above = torch.where(keys > own, keys, _NO_KEY).topk(above, dim=-1, largest=False).values
        neighbours = torch.cat((members_below, own, members_above), dim=-1)
        inside = (neighbours >= 0) & (neighbours < _NO_KEY)
        codes = (neighbours & _CODE).clamp(max=keys.shape[-1] - 1)
        p, q = target.gather(-1, codes), source.gather(-1, codes)
        alike = (p - at(target, drafts)[..., None]).abs() <= self.probability_gap
        distance = (self.embeddings[codes] - self.embeddings[drafts][..., None, :]).norm(dim=-1)
        members = inside & alike & (distance <= self.distance_limit)
        return (p * members).sum(-1), (q * members).sum(-1)


def _rank_keys(rows: Tensor) -> Tensor:
    """int64 [..., V] in the order of a stable sort by probability: a float's bits rise with it, equals go by code."""
    codes = torch.arange(rows.shape[-1], device=rows.device)
    return rows.contiguous().view(torch.int32).long() << _CODE_BITS | codes


@dataclass(frozen=True, eq=False)
class StaticGroups:
    """A partition of the codes: acceptance is one minus the total variation of the group laws."""

    group_of: Tensor  # LongTensor [V]
    count: int

    def masses(self, target: Tensor, source: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        index = self.group_of.expand_as(target)
        empty = target.new_zeros(*target.shape[:-1], self.count)
        group = self.group_of[drafts]
        return at(empty.scatter_add(-1, index, target), group), at(empty.scatter_add(-1, index, source), group)


def dynamic_groups(embeddings: Tensor, size: int, probability_gap: float, relative_distance: float) -> DynamicGroups:
    """relative_distance counts in median nearest-neighbour distances of the code vectors; 0 sets no limit."""
    limit = relative_distance * median_neighbour_distance(embeddings) if relative_distance > 0 else float("inf")
    return DynamicGroups(size, probability_gap, limit, embeddings)


def static_groups(embeddings: Tensor, size: int, iterations: int = 10) -> StaticGroups:
    """Lloyd's k-means with V / size centres, started from evenly spaced codes, so the partition is reproducible."""
    device, embeddings = embeddings.device, embeddings.cpu()  # sums on a GPU come in no fixed order
    count = max(1, embeddings.shape[0] // size)
    centres = embeddings[torch.linspace(0, embeddings.shape[0] - 1, count).long()]
    for _ in range(iterations):
        group_of = torch.cdist(embeddings, centres).argmin(-1)
        sums = torch.zeros_like(centres).index_add_(0, group_of, embeddings)
        sizes = torch.bincount(group_of, minlength=count)[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return StaticGroups(torch.cdist(embeddings, centres).argmin(-1).to(device), count)


def median_neighbour_distance(embeddings: Tensor) -> float:
    """The median over codes of the distance to the nearest other code, in blocks that bound the memory."""
    nearest = []
    for block, rows in zip(embeddings.split(1024), torch.arange(embeddings.shape[0]).split(1024), strict=True):
        distances = torch.cdist(block, embeddings)
        distances[torch.arange(len(rows)), rows] = torch.inf
        nearest.append(distances.amin(-1))
    return torch.cat(nearest).median().item()
