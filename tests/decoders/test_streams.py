"""A seed shared in a workflow gives the same picture in every version: the tokens of every decoder, written down.

On a model of eight codes, whose logits come from a table, so that no machine's rounding of a network matters. A change
of streams.json is a change for users, and the changelog says why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from speculative_ar.decoders import DECODERS, DecoderOptions, SamplerSettings, generate
from speculative_ar.decoders.interface import Initialise
from tests.decoders.toy import ToyModel

FILE = Path(__file__).with_name("streams.json")
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"seed": 0},
    "filtered": {"seed": 2**63 + 1, "guidance_scale": 2.0, "temperature": 0.9, "top_k": 6, "top_p": 0.95},
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((decoder, {}) for decoder in DECODERS),
    ("gsd", {"grouping": "static", "group_size": 2}),
    ("scd-maximal", {"verify": "exact"}),
    ("draft-model", {"verify": "exact"}),
    *(("scd-gumbel", {"initialise": name}) for name in get_args(Initialise)),
]
CASES = {
    " ".join((decoder, *map(str, options.values()), name)): (decoder, options, more)
    for decoder, options in OPTIONS
    for name, more in SAMPLING.items()
}


def stream(case: str) -> list[str]:
    """The tokens of a batch of two, a digit each."""
    decoder, options, more = CASES[case]
    settings = SamplerSettings(decoder, 6, batch_size=2, options=DecoderOptions(**options), **more)
    tokens = generate(ToyModel(8, 40, seed=7), None, settings, draft_model=ToyModel(8, 40, seed=8)).tokens
    return ["".join(map(str, row)) for row in tokens.tolist()]


@pytest.mark.parametrize("case", CASES)
def test_a_seed_keeps_its_tokens(case: str) -> None:
    assert stream(case) == json.loads(FILE.read_text(encoding="utf-8"))[case]
