"""Bad settings get one sentence that says what was given, what is accepted and what to do."""

from __future__ import annotations

import pytest

from speculative_ar.decoders import DecoderOptions, SamplerSettings, generate
from tests.decoders.toy import ToyModel

BAD = [
    ({"decoder": "scd-gumble"}, "'scd-gumble' is not a decoder.*Did you mean scd-gumbel"),
    ({"draft_length": 7}, "draft_length is 7, but a picture of toy has 6 positions: choose a draft_length from 1 to 6"),
    ({"draft_length": -1}, "draft_length is -1"),
    ({"batch_size": 0}, "batch_size is 0: choose 1 or more"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**64}, "seed is 18446744073709551616"),
    ({"guidance_scale": 0.5}, "cfg is 0.5: choose 1"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"top_k": 4}, "top_k is 4, but toy has 3 codes"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"options": DecoderOptions(group_size=0)}, "group_size is 0"),
    ({"options": DecoderOptions(verify="always")}, "verify is 'always': choose one of speculative, grouped, exact"),
    ({"options": DecoderOptions(initialise="below")}, "initialise is 'below': choose one of random, left"),
    ({"options": DecoderOptions(branches=17), "decoder": "seed-exact"}, "branches is 17: choose 1"),
    ({"options": DecoderOptions(branches=2)}, "branches is 2, but sjd with the verifier speculative cannot follow"),
    ({"options": DecoderOptions(branches=2, branch_length=0), "decoder": "seed-exact"}, "branch_length is 0: choose 1"),
    ({"decoder": "draft-model"}, "needs a draft model: connect one"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[str(change) for change, _ in BAD])
def test_bad_settings_are_refused(change: dict, sentence: str) -> None:
    settings = SamplerSettings(**{"decoder": "sjd", "draft_length": 3, **change})
    with pytest.raises(ValueError, match=sentence) as refusal:
        generate(ToyModel(3, 6), None, settings)
    assert "\n" not in str(refusal.value)


def test_plain_ar_ignores_the_draft_length() -> None:
    assert generate(ToyModel(3, 6), None, SamplerSettings(decoder="ar", draft_length=99)).tokens.shape == (1, 6)


def test_draft_model_of_another_vocabulary() -> None:
    settings = SamplerSettings(decoder="draft-model", draft_length=2)
    with pytest.raises(ValueError, match="toy has 4 codes and toy has 3"):
        generate(ToyModel(3, 6), None, settings, draft_model=ToyModel(4, 6))


def test_draft_model_of_another_grid() -> None:
    settings = SamplerSettings(decoder="draft-model", draft_length=2)
    with pytest.raises(ValueError, match="a grid of 1x1x5 codes and toy one of 1x2x3"):
        generate(ToyModel(3, 6), None, settings, draft_model=ToyModel(3, 5))
