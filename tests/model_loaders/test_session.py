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
        logits = session.forward(tokens, start)
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
        assert cache.keys.nbytes + cache.values.nbytes == model.memory_required(3, True, WINDOW)


def test_only_a_caption_needs_a_prefill(c2i: Any, t2i: Any, golden: dict[str, Tensor]) -> None:
    pair = golden["t2i.t5_embeddings_right_padded"][0], golden["t2i.t5_mask_right_padded"][0]
    assert c2i.session(c2i.class_label(0), 1, True, 1).prefill_passes == 0
    assert t2i.session(t2i.caption(*pair), 1, True, 1).prefill_passes == 1
