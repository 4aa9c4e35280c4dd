"""What the decoding loops promise beside the distribution: seeds, independent rows, honest counts, clean stops."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from typing import get_args

import pytest
import torch

from speculative_ar.decoders import DECODERS, DecoderOptions, Progress, SamplerSettings, generate
from speculative_ar.decoders.interface import Initialise
from tests.decoders.toy import ToyModel

DECODER_IDS = list(DECODERS)


def model(positions: int = 40, **more: object) -> ToyModel:
    return ToyModel(8, positions, seed=7, **more)


def draft() -> ToyModel:
    other = ToyModel(8, 40, seed=8)
    other.tables = model().tables + 0.5 * other.tables
    return other


def run(decoder: str, target: ToyModel | None = None, **more: object):
    settings = SamplerSettings(decoder=decoder, **{"draft_length": 8, **more})
    return generate(target or model(), None, settings, draft_model=draft())


@pytest.mark.parametrize("draft_length", [1, 2, 7, 39, 40])
@pytest.mark.parametrize("initialise", get_args(Initialise))
@pytest.mark.parametrize("redraft", ["independent", "gumbel", "maximal"])
def test_equality_verification_returns_the_tokens_of_ar(redraft: str, initialise: str, draft_length: int) -> None:
    options = DecoderOptions(redraft=redraft, initialise=initialise)
    reference = run("ar", seed=11, batch_size=5, guidance_scale=1.5, top_k=6)
    exact = run(
        "seed-exact", seed=11, batch_size=5, guidance_scale=1.5, top_k=6, draft_length=draft_length, options=options
    )
    assert torch.equal(exact.tokens, reference.tokens)


@pytest.mark.parametrize(
    ("draft_length", "branches", "branch_length"), [(1, 3, 4), (2, 2, 1), (8, 4, 4), (40, 7, 3), (5, 8, 9)]
)
@pytest.mark.parametrize("forced", [{}, {0: 3, 7: 2, 8: 1, 39: 0}], ids=["free", "forced"])
def test_runner_up_branches_return_the_tokens_of_ar(
    draft_length: int, branches: int, branch_length: int, forced: dict[int, int]
) -> None:
    options = DecoderOptions(branches=branches, branch_length=branch_length)
    target = model(forced=forced)
    plain = run("seed-exact", target, seed=4, batch_size=6, draft_length=draft_length)
    result = run("seed-exact", target, seed=4, batch_size=6, draft_length=draft_length, options=options)
    assert torch.equal(result.tokens, run("ar", target, seed=4, batch_size=6).tokens)
    assert draft_length == 1 or result.statistics.forward_passes < plain.statistics.forward_passes


@pytest.mark.parametrize("draft_length", [1, 3, 40])
def test_draft_model_under_equality_returns_the_tokens_of_ar(draft_length: int) -> None:
    exact = run("draft-model", seed=2, batch_size=3, draft_length=draft_length, options=DecoderOptions(verify="exact"))
    assert torch.equal(exact.tokens, run("ar", seed=2, batch_size=3).tokens)
    assert exact.statistics.promise == "seed-exact"


@pytest.mark.parametrize("decoder", DECODER_IDS)
def test_an_image_does_not_depend_on_its_batch(decoder: str) -> None:
    together = run(decoder, seed=5, batch_size=4)
    for index in range(4):
        alone = run(decoder, seed=5, first_index=index)
        assert torch.equal(alone.tokens[0], together.tokens[index])
        assert alone.statistics.accepted_per_pass[0] == together.statistics.accepted_per_pass[index]
    assert together.statistics.forward_passes == max(map(len, together.statistics.accepted_per_pass))


@pytest.mark.parametrize("decoder", DECODER_IDS)
def test_seeds_repeat_and_differ(decoder: str) -> None:
    runs = [run(decoder, seed=seed).tokens for seed in (0, 0, 1, 2**32, 2**64 - 1)]
    assert torch.equal(runs[0], runs[1])
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(runs[1:], 2))


@pytest.mark.parametrize("decoder", DECODER_IDS)
def test_statistics_add_up(decoder: str) -> None:
    forced = {0: 1, 10: 2, 11: 2, 38: 0, 39: 5}
    statistics = run(decoder, model(forced=forced), batch_size=3).statistics
    free, end = 35, 38
    assert statistics.free_positions == free and statistics.positions == 40
    assert all(sum(row) == end for row in statistics.accepted_per_pass)
    assert all(len(row) == 40 and row[end:] == [0, 0] for row in statistics.acceptance_map)
    assert statistics.accepted <= statistics.drafted
    assert statistics.acceptance_rate == statistics.accepted / max(statistics.drafted, 1)
    assert statistics.pass_reduction == free / statistics.forward_passes
    assert statistics.draft_passes == (8 * statistics.forward_passes if decoder == "draft-model" else 0)
    assert statistics.draft_length == (1 if decoder == "ar" else 8)
    assert statistics.seconds["total"] >= statistics.seconds["verify"] > 0
    assert json.loads(json.dumps(statistics.to_json()))["decoder"] == decoder


def test_plain_ar_takes_a_pass_for_each_free_position_and_drafts_nothing() -> None:
    statistics = run("ar").statistics
    assert (statistics.forward_passes, statistics.drafted, statistics.accepted) == (40, 0, 0)
    assert statistics.accepted_per_pass == [[1] * 40]


@pytest.mark.parametrize("decoder", DECODER_IDS)
def test_forced_positions_hold_their_code_and_trailing_ones_cost_nothing(decoder: str) -> None:
    forced = {3: 7, 4: 8, 39: 5}  # 8 is a structure code, which no free position can take
    result = run(decoder, model(forced=forced), batch_size=2)
    assert all((result.tokens[:, position] == code).all() for position, code in forced.items())
    assert sum(result.statistics.accepted_per_pass[0]) == 39


def test_plain_ar_takes_no_pass_for_a_forced_position() -> None:
    forced = {0: 1, 7: 8, 8: 8, 9: 8, 20: 2, 39: 5}
    statistics = run("ar", model(forced=forced), batch_size=2).statistics
    assert statistics.forward_passes == statistics.free_positions == 34
    assert statistics.drafted == statistics.accepted == 0


def test_a_wholly_forced_picture_needs_no_pass() -> None:
    result = run("seed-exact", ToyModel(8, 4, forced={0: 1, 1: 2, 2: 3, 3: 4}), draft_length=2)
    assert result.tokens.tolist() == [[1, 2, 3, 4]]
    assert result.statistics.forward_passes == 0


def test_a_deterministic_model_is_accepted_whole() -> None:
    """Temperature 0: every code is certain, so passes run at the window's full length once drafts have settled."""
    for decoder in ("sjd", "scd-gumbel", "scd-maximal", "seed-exact"):
        reference = run("ar", temperature=0)
        result = run(decoder, temperature=0)
        assert torch.equal(result.tokens, reference.tokens)
        assert result.statistics.forward_passes < 40
    same = generate(model(), None, SamplerSettings(decoder="draft-model", draft_length=7), draft_model=model())
    assert same.statistics.accepted_per_pass == [[8] * 5]
    assert same.statistics.acceptance_rate == 1


@pytest.mark.parametrize("decoder", DECODER_IDS)
def test_progress_rises_and_is_told_before_each_pass(decoder: str) -> None:
    seen: list[list[int]] = []

    def listen(progress: Progress) -> None:
        assert progress.tokens.shape == (2, 40)
        seen.append(progress.accepted.copy())

    settings = SamplerSettings(decoder=decoder, draft_length=8, batch_size=2)
    statistics = generate(model(), None, settings, draft_model=draft(), on_step=listen).statistics
    assert len(seen) == statistics.forward_passes + statistics.draft_passes
    totals = [sum(accepted) for accepted in seen]
    assert totals[0] == 0 and totals == sorted(totals) and totals[-1] < 80


class Stop(Exception):
    pass


@pytest.mark.parametrize("decoder", ["seed-exact", "draft-model"])
def test_what_on_step_raises_propagates_and_frees_the_cache(decoder: str) -> None:
    caches = []
    target = model()
    open_session = target.session

    def watch(*args: object):
        session = open_session(*args)
        caches.append(weakref.ref(session.fed))
        return session

    target.session = watch

    def stop_at_third(progress: Progress) -> None:
        if progress.forward_passes == 3:
            raise Stop

    with pytest.raises(Stop) as caught:
        settings = SamplerSettings(decoder=decoder, draft_length=8)
        generate(target, None, settings, draft_model=draft(), on_step=stop_at_third)
    gc.collect()
    assert len(caches) == 1 and caches[0]() is None, "the cache must go although the exception is still held"
    assert caught.value is not None
