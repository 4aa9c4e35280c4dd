"""The cache: whatever windows were fed and rolled back before, logits are those of one fresh pass over the prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

POSITIONS, WINDOW, BATCH = 16, 5, 3


def fresh_logits(model: Any, condition: Any, guided: bool, tokens: Tensor) -> Tensor:
    """Logits [G, N, V] of the position after each of `tokens`, the condition's last row first."""
    inputs = torch.cat((torch.zeros(1, dtype=torch.long), tokens))[None]
    return model.session(condition, 1, guided, inputs.shape[1]).forward(inputs, torch.tensor([-1]))[:, 0]


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_any_history_of_windows_gives_the_logits_of_a_fresh_pass(
    request: pytest.FixtureRequest, golden: dict[str, Tensor], kind: str, guided: bool, seed: int
) -> None:
    model = request.getfixturevalue(kind)
    pair = golden["t2i.t5_embeddings_right_padded"][0], golden["t2i.t5_mask_right_padded"][0]
    condition = model.class_label(3) if kind == "c2i" else model.caption(*pair)
    random = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    session = model.session(condition, BATCH, guided, WINDOW)
    history = torch.zeros(BATCH, POSITIONS + WINDOW, dtype=torch.long)
    filled = torch.full((BATCH,), -1)  # each row's next position that the cache does not hold
    for _ in range(25):
        length = int(integers(1, WINDOW + 1, 1))
        # Each row goes on where it stands or rolls back by its own amount.
        start = torch.stack([integers(-1, int(end) + 1, 1)[0] for end in filled.clamp(max=POSITIONS - 1)])
        tokens = integers(0, 256, BATCH, length)
        furthest = int(start.max()) + int(integers(0, 3, 1)) if integers(0, 2, 1) else -1
        logits = session.forward(tokens, start, furthest=furthest)
        for row in range(BATCH):
            begin = int(start[row])
            skipped = 1 if begin < 0 else 0
            history[row, begin + skipped : begin + length] = tokens[row, skipped:]
            filled[row] = begin + length
            seen = min(begin + length, POSITIONS)  # windows may reach past the picture; nothing reads those logits
            expected = fresh_logits(model, condition, guided, history[row, :seen])[:, begin + 1 :]
            computed = logits[:, row, : expected.shape[1]]
            torch.testing.assert_close(computed, expected, atol=1e-4, rtol=0)


def test_the_cache_takes_the_bytes_that_were_announced(c2i: Any, t2i: Any, golden: dict[str, Tensor]) -> None:
    pair = golden["t2i.t5_embeddings_right_padded"][0], golden["t2i.t5_mask_right_padded"][0]
    for model, condition in ((c2i, c2i.class_label(0)), (t2i, t2i.caption(*pair))):
        cache = model.session(condition, 3, True, WINDOW).cache
        assert cache.keys.nbytes + cache.values.nbytes == model.memory_required(condition, 3, True, WINDOW)


def test_only_a_caption_needs_a_prefill(c2i: Any, t2i: Any, golden: dict[str, Tensor]) -> None:
    pair = golden["t2i.t5_embeddings_right_padded"][0], golden["t2i.t5_mask_right_padded"][0]
    assert c2i.session(c2i.class_label(0), 1, True, 1).prefill_passes == 0
    assert t2i.session(t2i.caption(*pair), 1, True, 1).prefill_passes == 1


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
def test_a_tree_gives_each_slot_the_logits_of_its_own_chain(
    request: pytest.FixtureRequest, golden: dict[str, Tensor], kind: str
) -> None:
    model = request.getfixturevalue(kind)
    pair = golden["t2i.t5_embeddings_right_padded"][0], golden["t2i.t5_mask_right_padded"][0]
    condition = model.class_label(3) if kind == "c2i" else model.caption(*pair)
    parents = torch.tensor([-1, 0, 1, 2, 0, 4, 5, 0])
    chains = {3: [0, 1, 2, 3], 6: [0, 4, 5, 6], 7: [0, 7]}
    random = torch.Generator().manual_seed(0)
    committed = torch.randint(256, (2, 9), generator=random)
    slots = torch.randint(256, (2, len(parents)), generator=random)
    starts = torch.tensor([-1, 5])

    session = model.session(condition, 2, True, len(parents))
    session.forward(torch.cat((slots[:, :1], committed[:, :7]), dim=1), torch.tensor([-1, -1]))
    logits = session.forward(slots, starts, parents)
    session.keep(torch.tensor([chains[3], chains[6]]))
    after = session.forward(committed[:, 8:], starts + 4)

    for row, kept in ((0, chains[3]), (1, chains[6])):
        start = int(starts[row])
        prefix = committed[row, :start] if start > 0 else committed[row, :0]
        for chain in chains.values():
            tokens = slots[row, chain] if start >= 0 else slots[row, chain[1:]]
            expected = fresh_logits(model, condition, True, torch.cat((prefix, tokens)))[:, -len(chain) :]
            torch.testing.assert_close(logits[:, row, chain], expected, atol=1e-4, rtol=0)
        tokens = slots[row, kept] if start >= 0 else slots[row, kept[1:]]
        whole = torch.cat((prefix, tokens, committed[row, 8:]))
        torch.testing.assert_close(
            after[:, row], fresh_logits(model, condition, True, whole)[:, -1:], atol=1e-4, rtol=0
        )


def test_attention_looks_no_further_than_it_is_told(c2i: Any) -> None:
    """A poisoned slot behind the bound must not matter: it is not read, and not merely masked."""
    condition = c2i.class_label(3)
    tokens = torch.randint(256, (1, 3), generator=torch.Generator().manual_seed(0))
    session = c2i.session(condition, 1, True, WINDOW)
    session.cache.values[:, :, 8:] = torch.nan
    assert session.forward(tokens, torch.tensor([2]), furthest=4).isfinite().all()
    assert session.forward(tokens, torch.tensor([2])).isnan().any()
