"""Runner-up branches where every code matters for all that follow: no token may come from another branch's context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculative_ar.decoders import DecoderOptions, SamplerSettings, generate
from tests.decoders.toy import ToyModel, ToySession

STATES = 7


class LongMemoryModel(ToyModel):
    """The law of the next code hangs on the sum of all codes before it; few codes are likely, so drafts are good."""

    def __init__(self, forced: dict[int, int]) -> None:
        super().__init__(6, 40, seed=3, forced=forced)
        self.law = 4 * torch.randn(STATES, 6, generator=torch.Generator().manual_seed(5))

    def session(self, condition: None, batch_size: int, guided: bool, window: int) -> LongMemorySession:
        return LongMemorySession(self, batch_size, window)


class LongMemorySession(ToySession):
    def __init__(self, model: LongMemoryModel, batch_size: int, window: int) -> None:
        self.law = model.law
        self.sums = torch.zeros(batch_size, model.positions + window + 2, dtype=torch.long)

    def forward(self, tokens: Tensor, start: Tensor, parents: Tensor | None = None, furthest: int = -1) -> Tensor:
        self.start, images = start, torch.arange(len(start))
        tokens = torch.where((start[:, None] < 0) & (torch.arange(tokens.shape[1]) == 0), 0, tokens)
        follows = torch.arange(tokens.shape[1]) - 1 if parents is None else parents
        slots: list[Tensor] = []
        for slot, parent in enumerate(follows.tolist()):
            before = self.sums[images, start + 1] if parent < 0 else slots[parent]
            slots.append(before + tokens[:, slot])
        self.slots = torch.stack(slots, dim=1)
        self.keep(torch.arange(tokens.shape[1]).expand_as(tokens))
        return self.law[self.slots % STATES][None]

    def keep(self, path: Tensor) -> None:
        positions = self.start[:, None] + torch.arange(path.shape[1]) + 2
        self.sums.scatter_(1, positions, self.slots.gather(1, path))

    def close(self) -> None:
        del self.sums


@pytest.mark.parametrize("every", [0, 3, 4, 5], ids=lambda every: f"forced every {every}")
@pytest.mark.parametrize("branch_length", [1, 2, 3, 4, 6])
def test_no_token_comes_from_another_branch(every: int, branch_length: int) -> None:
    model = LongMemoryModel(dict.fromkeys(range(every - 1, 40, every), 6) if every else {})
    settings = SamplerSettings("seed-exact", 10, seed=1, batch_size=50)
    plain = generate(model, None, SamplerSettings("ar", seed=1, batch_size=50))
    branches = DecoderOptions(branches=4, branch_length=branch_length)
    branched = generate(model, None, SamplerSettings("seed-exact", 10, seed=1, batch_size=50, options=branches))
    assert torch.equal(branched.tokens, plain.tokens)
    assert branched.statistics.forward_passes < generate(model, None, settings).statistics.forward_passes
