"""The ragged session: a static cache in which the rows of a batch stand at different positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .transformer import CachedRows, KeyValueCache, Transformer


class RaggedSession:
    """Implements decoders.interface.TokenSession for a Transformer whose condition is a run of embedded rows.

    Slot P + i of the cache holds image position i, where P is the number of condition rows; position -1 is the
    last condition row. `embed` maps codes to inputs, `head` maps features to logits over the free codes.
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
        shifts: Tensor | None = None,  # LongTensor [G], slots before a stream's own first position; None: none
    ) -> None:
        guidance, length, _ = prefix.shape
        self.transformer, self.embed, self.head = transformer, embed, head
        self.batch_size, self.guidance, self.prefix_length = batch_size, guidance, length
        device = prefix.device
        self.cos, self.sin = (table.to(device) for table in rotary)
        slots = self.cos.shape[0]
        rows = guidance * batch_size
        self.cache = KeyValueCache(transformer.config, rows, slots, device, prefix.dtype)
        self.rows = torch.arange(rows, device=device)[:, None]
        self.key_slots = torch.arange(slots, device=device)
        self.offsets = torch.arange(window, device=device)
        shifts = torch.zeros(guidance, dtype=torch.long) if shifts is None else shifts
        self.shifts = shifts.to(device).repeat_interleave(batch_size)[:, None]
        self.key_visible = torch.ones(rows, slots, dtype=torch.bool, device=device)
        self.key_visible[:, :length] = prefix_visible.repeat_interleave(batch_size, dim=0)
        self.last_prefix_row = prefix[:, -1:].repeat_interleave(batch_size, dim=0)
        self._base = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.resident = all(weight.device == device for weight in transformer.parameters())
        self._parents: Tensor | None = None
        self.prefill_passes = 0
        if length > 1:
            self._prefill(prefix[:, :-1])

    def _prefill(self, rows: Tensor) -> None:
        """Runs the condition once a stream and copies what it left to every image of the batch."""
        guidance, length, _ = rows.shape
        config, device = self.transformer.config, rows.device
        cache = KeyValueCache(config, guidance, length, device, rows.dtype)
        slots = self.key_slots[:length].expand(guidance, -1)
        visible = self.visible(slots, self.key_visible[:: self.batch_size, :length])
        self._run(cache, rows, slots, visible, slots - self.shifts[:: self.batch_size])
        for held, of_streams in ((self.cache.keys, cache.keys), (self.cache.values, cache.values)):
            held[:, :, :length] = of_streams.repeat_interleave(self.batch_size, dim=1)
        self.prefill_passes = 1

    def _run(self, cache: KeyValueCache, inputs: Tensor, slots: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """inputs [R, T, dim] stored at slots [R, T], turned as positions [R, T] (0: the stream's first row)."""
        positions = positions.clamp(min=0)
        cached = CachedRows(cache, self.rows[: len(inputs)], slots, visible)
        return self.transformer.hidden(inputs, self.cos[positions], self.sin[positions], cached)

    def visible(self, slots: Tensor, key_visible: Tensor) -> Tensor:
        """Which keys a query at each slot sees: LongTensor [R, T], bool [R, S] -> bool [R, T, S]."""
        keys = self.key_slots[: key_visible.shape[1]]
        own = keys == slots[..., None]  # a padded condition row still sees itself, so no row is empty
        return ((keys <= slots[..., None]) & key_visible[:, None]) | own

    def _visible_in_tree(self, ancestors: Tensor, key_visible: Tensor) -> Tensor:
        """As `visible` for a tree from slot self._base on: the committed prefix, and each slot's own ancestors."""
        relative = self.key_slots[: key_visible.shape[1]] - self._base
        inside = (relative >= 0) & (relative < len(ancestors))
        of_tree = ancestors.T[relative.clamp(0, len(ancestors) - 1)].transpose(1, 2) & inside[:, None]
        return ((relative < 0) & key_visible)[:, None] | of_tree

    def forward(self, tokens: Tensor, start: Tensor, parents: Tensor | None = None, furthest: int = -1) -> Tensor:
        """See TokenSession.forward."""
        length = tokens.shape[1]
        offsets = self.offsets[:length]
        self._base = (start + self.prefix_length).repeat(self.guidance)[:, None]
        slots = self._base + offsets
        key_visible = self.key_visible[:, : self._filled(length, furthest)]
        if parents is None:
            visible = self.visible(slots, key_visible)
        else:
            ancestors = self._ancestry(parents)
            visible = self._visible_in_tree(ancestors, key_visible)
            offsets = ancestors.sum(dim=1) - 1
        inputs = self.embed(tokens).repeat(self.guidance, 1, 1)
        before_codes = (start[:, None] + offsets < 0).repeat(self.guidance, 1)
        inputs = torch.where(before_codes[..., None], self.last_prefix_row, inputs)
        features = self._run(self.cache, inputs, slots, visible, self._base + offsets - self.shifts)
        return self.head(features).float().unflatten(0, (self.guidance, self.batch_size))

    def _ancestry(self, parents: Tensor) -> Tensor:
        """`ancestry`, remembered for the next pass: a generation keeps its tree."""
        if self._parents is not parents:
            self._parents, self._ancestors = parents, ancestry(parents)
        return self._ancestors

    def _filled(self, length: int, furthest: int) -> int:
        """How many slots of the cache a pass of `length` looks at."""
        slots = len(self.key_slots)
        return slots if furthest < 0 else min(slots, self.prefix_length + furthest + length)

    def keep(self, path: Tensor) -> None:
        """See TokenSession.keep."""
        origin = self._base + path.repeat(self.guidance, 1)
        self.cache.move(self.rows, origin, self._base + self.offsets[: path.shape[1]])

    def close(self) -> None:
        """See TokenSession.close."""
        self.cache.keys = self.cache.values = torch.empty(0)


def ancestry(parents: Tensor) -> Tensor:
    """bool [T, T] from each slot's parent [T] (-1: none): whether column's slot is the row's, or an ancestor of it."""
    slots = torch.arange(len(parents), device=parents.device)
    related = slots == slots[:, None]
    step = slots == parents[:, None]
    for _ in range(max(len(parents) - 1, 1).bit_length()):
        related = related | (step.float() @ related.float() > 0)
        step = step.float() @ step.float() > 0
    return related
