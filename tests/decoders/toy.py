"""A tiny token model whose joint distribution is enumerated exactly: an order-2 chain over a few codes."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from speculative_ar.decoders import SamplerSettings, TokenLayout
from speculative_ar.decoders.distributions import filter_logits, guide


class ToyModel:
    """logits of the next code from the last two; the unconditional stream has a table of its own."""

    name = "toy"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, vocabulary: int = 3, positions: int = 5, seed: int = 0, forced: dict[int, int] | None = None):
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary, self.positions = vocabulary, positions
        self.rows = 2 - positions % 2
        self.tables = 1.3 * torch.randn(2, vocabulary + 1, vocabulary + 1, vocabulary, generator=generator)
        self.embeddings = torch.randn(vocabulary, 4, generator=generator)
        self.pass_seconds = {}
        self.forced = torch.full((positions,), -1)
        for position, code in (forced or {}).items():
            self.forced[position] = code

    def layout(self, condition: None) -> TokenLayout:
        return TokenLayout((1, self.rows, self.positions // self.rows), self.forced)

    def session(self, condition: None, batch_size: int, guided: bool, window: int) -> ToySession:
        return ToySession(self, batch_size, guided, window)

    def decode(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        return tokens[:, None, :, None].expand(-1, -1, -1, 3) / (self.vocabulary - 1)

    def code_embeddings(self) -> Tensor:
        return self.embeddings

    def probabilities(self, settings: SamplerSettings) -> Tensor:
        """The exact law of all sequences, float64 [V ** N], the last position varying fastest."""
        tables = self.tables if settings.guidance_scale > 1 else self.tables[:1]
        logits = guide(tables, settings.guidance_scale)
        rows = filter_logits(logits, settings.temperature, settings.top_k, settings.top_p).double().softmax(-1)
        law = []
        for sequence in itertools.product(range(self.vocabulary), repeat=self.positions):
            context, mass = (self.vocabulary, self.vocabulary), 1.0
            for position, code in enumerate(sequence):
                forced = int(self.forced[position])
                mass *= float(rows[context][code]) if forced < 0 else float(code == forced)
                context = (context[1], code)
            law.append(mass)
        return torch.tensor(law, dtype=torch.float64)

    def counts(self, tokens: Tensor) -> Tensor:
        """How often each sequence occurs in tokens [B, N], int64 [V ** N]."""
        weights = self.vocabulary ** torch.arange(self.positions - 1, -1, -1)
        return torch.bincount((tokens * weights).sum(-1), minlength=self.vocabulary**self.positions)


class ToySession:
    """Remembers what was fed at each position, as a key-value cache does."""

    prefill_passes = 0
    resident = True

    def __init__(self, model: ToyModel, batch_size: int, guided: bool, window: int):
        self.tables = model.tables if guided else model.tables[:1]
        self.start_code = model.vocabulary
        self.fed = torch.full((batch_size, model.positions + window + 2), model.vocabulary)

    def forward(self, tokens: Tensor, start: Tensor, parents: Tensor | None = None, furthest: int = -1) -> Tensor:
        self.start, self.slots = start, tokens
        offsets = torch.arange(tokens.shape[1])
        tokens = torch.where(start[:, None] + offsets < 0, self.start_code, tokens)
        before_first = self.fed.gather(1, start[:, None] + 1)
        self.fed.scatter_(1, start[:, None] + offsets + 2, tokens)
        follows = offsets - 1 if parents is None else parents
        before = torch.where(follows < 0, before_first, tokens[:, follows.clamp(min=0)])
        return self.tables[:, before, tokens]

    def keep(self, path: Tensor) -> None:
        positions = self.start[:, None] + torch.arange(path.shape[1])
        tokens = torch.where(positions < 0, self.start_code, self.slots.gather(1, path))
        self.fed.scatter_(1, positions + 2, tokens)

    def close(self) -> None:
        del self.fed
