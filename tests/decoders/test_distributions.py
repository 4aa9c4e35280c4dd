"""The sampling contract: order of the steps, exactly k survivors, and agreement with LlamaGen's official filter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculative_ar.decoders.distributions import filter_logits, guide, top_k_mask

GOLDEN = Path(__file__).parents[1] / "golden" / "llamagen" / "golden.safetensors"


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 1.0), (0, 0.9), (50, 0.8)])
def test_filter_keeps_what_the_official_code_keeps(top_k: int, top_p: float) -> None:
    golden = load_file(GOLDEN)
    kept = filter_logits(golden["sampling.logits"], 1.0, top_k, top_p) > -torch.inf
    assert torch.equal(kept, golden[f"sampling.keep_topk{top_k}_topp{top_p}"].bool())


def test_guidance_moves_away_from_the_unconditional_stream() -> None:
    conditional, unconditional = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    assert guide(torch.stack((conditional, unconditional)), 3.0).tolist() == [3.0, -2.0]
    assert torch.equal(guide(conditional[None], 3.0), conditional)


def test_exactly_k_survive_ties_and_the_lowest_index_wins() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    assert top_k_mask(logits, 3).int().tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert top_k_mask(logits, 2).int().tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]


def test_a_row_does_not_depend_on_the_window_it_came_in() -> None:
    logits = torch.randn(2, 33, 200, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    together = filter_logits(logits, 0.7, 50, 0.9)
    alone = torch.stack([filter_logits(row, 0.7, 50, 0.9) for row in logits.flatten(0, 1)]).view_as(logits)
    assert torch.equal(together, alone)


def test_temperature_zero_keeps_the_likeliest_code() -> None:
    kept = filter_logits(torch.tensor([0.5, 3.0, 3.0, -1.0]), 0, 0, 1.0) > -torch.inf
    assert kept.tolist() == [False, True, False, False]


def test_temperature_comes_before_top_p() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    assert (filter_logits(logits, 10.0, 0, 0.6) > -torch.inf).sum() == 2
    assert (filter_logits(logits, 0.1, 0, 0.6) > -torch.inf).sum() == 1
