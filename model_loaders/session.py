"""The ragged session: a static cache in which the rows of a batch stand at different positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .transformer import CachedRows, KeyValueCache, Transformer


class RaggedSession:
    """Implements decoders.interface.TokenSession for a Transformer whose condition is a run of embedded rows.

    Slot P + i of the cache holds image position i, where P is the number of condition rows; position -1 is the
    last condition row. `embed` maps codes to inputs, `head` maps features to float32 logits over the free codes.
    """

    def __init__(
        self,
        transformer: Transformer,
        prefix: Tensor,  # [G, P, dim] embedded condition rows, the same for each image of the batch
        prefix_visible: Tensor,  # bool [G, P], False where a condition row is padding
        rotary: tuple[Tensor, Tensor],  # cos, sin [slots, head_dim / 2]
        batch_size: int,
        window: int,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        guidance, length, _ = prefix.shape
        self.transformer, self.embed, self.head = transformer, embed, head
        self.batch_size, self.prefix_length = batch_size, length
        device = prefix.device
        self.cos, self.sin = (table.to(device) for table in rotary)
        slots = self.cos.shape[0]
        rows = guidance * batch_size
        self.cache = KeyValueCache(transformer.config, rows, slots, device, prefix.dtype)
        self.rows = torch.arange(rows, device=device)[:, None]
        self.key_slots = torch.arange(slots, device=device)
        self.window_offsets = torch.arange(window, device=device)
        self.key_visible = torch.ones(rows, slots, dtype=torch.bool, device=device)
        self.key_visible[:, :length] = prefix_visible.repeat_interleave(batch_size, dim=0)
        self.last_prefix_row = prefix[:, -1:].repeat_interleave(batch_size, dim=0)
        self.prefill_passes = 0
        if length > 1:
            self._prefill(prefix[:, :-1].repeat_interleave(batch_size, dim=0))

    def _prefill(self, rows: Tensor) -> None:
        slots = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[:2])
        self._run(rows, slots)
        self.prefill_passes = 1

    def _run(self, inputs: Tensor, slots: Tensor) -> Tensor:
        cached = CachedRows(self.cache, self.rows, slots, self.visible(slots)[:, None])
        return self.transformer.hidden(inputs, self.cos[slots], self.sin[slots], cached)

    def visible(self, slots: Tensor) -> Tensor:
        """Which keys a query at each slot sees: LongTensor [R, T] -> bool [R, T, S]."""
        causal = self.key_slots <= slots[..., None]
        own = self.key_slots == slots[..., None]  # a padded condition row still sees itself, so no row is empty
        return (causal & self.key_visible[:, None, :]) | own

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """See TokenSession.forward."""
        positions = start[:, None] + self.window_offsets[: tokens.shape[1]]
        guidance = self.rows.shape[0] // self.batch_size
        positions = positions.repeat(guidance, 1)
        inputs = self.embed(tokens).repeat(guidance, 1, 1)
        inputs = torch.where((positions < 0)[..., None], self.last_prefix_row, inputs)
        features = self._run(inputs, positions + self.prefix_length)
        return self.head(features).float().unflatten(0, (guidance, self.batch_size))

    def close(self) -> None:
        """See TokenSession.close."""
        self.cache.keys = self.cache.values = torch.empty(0)
