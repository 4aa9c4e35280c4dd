"""Runner-up branches: guesses for the first draft beside the best one, checked in the same pass.

Ours. Under equality verification any guess is legal, so the pass carries, besides the main chain, short branches that
begin with the next best codes. Where the target's own code is one of them, its branch is followed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .window import draw


@dataclass(frozen=True, eq=False)
class Tree:
    """The slots of a pass: a main chain of W, then count - 1 branches of `length` slots that leave it at slot 0.

    parents: LongTensor [T], the slot each slot follows, -1 for slot 0. paths: LongTensor [count, W], the slots of the
    chain that each first draft begins; behind a branch's end they are the main chain's. reach: LongTensor [count], how
    many drafts of a path can be accepted.
    """

    count: int
    length: int
    parents: Tensor
    paths: Tensor
    reach: Tensor

    @staticmethod
    def of(window: int, count: int, length: int, device: torch.device) -> Tree | None:
        """A tree over a main chain of `window` slots, or None where that is a chain; branches end where it ends."""
        if count < 2 or window < 2:
            return None
        length = min(length, window - 1)
        chain = torch.arange(window, device=device)
        starts = window + length * torch.arange(count - 1, device=device)[:, None]
        branches = starts + torch.arange(length, device=device)
        parents = torch.cat((chain - 1, torch.where(branches == starts, 0, branches - 1).flatten()))
        paths = chain.repeat(count, 1)
        paths[1:, 1 : length + 1] = branches
        reach = torch.full((count,), length, device=device)
        reach[0] = window - 1
        return Tree(count, length, parents, paths, reach)

    @property
    def slots(self) -> int:
        """T."""
        return self.parents.shape[0]

    def first_drafts(self, main: Tensor, scores: Tensor) -> Tensor:
        """LongTensor [B, count]: the main chain's draft [B, 1] and the best other codes by scores [B, V]."""
        others = scores.scatter(1, main, -torch.inf)
        return torch.cat((main, others.topk(self.count - 1, dim=-1).indices), dim=1)

    def feed(self, chain: Tensor, first_drafts: Tensor) -> Tensor:
        """LongTensor [B, T] from the main chain's inputs [B, W]: each branch is its first draft, then the chain's."""
        rest = chain[:, None, 2 : self.length + 1].expand(-1, self.count - 1, -1)
        branches = torch.cat((first_drafts[:, 1:, None], rest), dim=2)
        return torch.cat((chain, branches.flatten(1)), dim=1)

    def follow(self, first_logits: Tensor, gumbel: Tensor, first_drafts: Tensor) -> Tensor:
        """LongTensor [B]: the path whose first draft is the target's own code, the main one where none is."""
        own = draw(first_logits, gumbel)
        return (first_drafts == own[:, None]).long().argmax(-1)
