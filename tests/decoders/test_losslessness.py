"""Every decoder that promises the model's distribution, against the exact law of a model small enough to enumerate.

Power: with 40,000 sequences a chi-square test at 1e-4 sees a total variation of 0.04; a smaller defect gets ten times
as many.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from scipy.stats import chi2

from speculative_ar.decoders import DECODERS, DecoderOptions, SamplerSettings, engine, generate, redraft, verify
from speculative_ar.decoders.interface import Initialise
from speculative_ar.decoders.noise import Purpose
from speculative_ar.decoders.window import Window, residual_draw, take_slots
from tests.decoders.toy import ToyModel

SEQUENCES = 40_000
SIGNIFICANCE = 1e-4
LOSSLESS = [row.id for row in DECODERS.values() if row.promise in ("lossless", "seed-exact", "reference")]
SETTINGS = {
    "plain": {},
    "guided": {"guidance_scale": 1.6, "temperature": 1.2},
    "filtered": {"top_k": 2, "temperature": 1.5},
    "nucleus": {"top_p": 0.8, "guidance_scale": 1.3},
}


def p_value(model: ToyModel, settings: SamplerSettings) -> float:
    """Of the chi-square test of generated sequences against the exact law; cells that expect under 5 are pooled."""
    tokens = generate(model, None, settings, draft_model=distorted(model)).tokens
    law, counts = model.probabilities(settings), model.counts(tokens).double()
    assert counts[law == 0].sum() == 0, "a sequence outside the support was generated"
    expected = law * len(tokens)
    rare = expected < 5
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    cells = expected > 0
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum().item()
    return float(chi2.sf(statistic, int(cells.sum()) - 1))


def distorted(model: ToyModel) -> ToyModel:
    """A draft model that is near the target, not equal to it."""
    draft = ToyModel(model.vocabulary, model.positions, seed=99, forced=forced_of(model))
    draft.tables = model.tables + 0.6 * draft.tables
    return draft


def forced_of(model: ToyModel) -> dict[int, int]:
    return {position: int(code) for position, code in enumerate(model.forced) if code >= 0}


def settings_for(decoder: str, draft_length: int, batch_size: int = SEQUENCES, **more: object) -> SamplerSettings:
    return SamplerSettings(decoder=decoder, draft_length=draft_length, batch_size=batch_size, seed=3, **more)


@pytest.mark.parametrize("draft_length", [1, 3, 6])
@pytest.mark.parametrize("decoder", LOSSLESS)
def test_keeps_the_distribution(decoder: str, draft_length: int) -> None:
    assert p_value(ToyModel(3, 6), settings_for(decoder, draft_length)) > SIGNIFICANCE


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("decoder", LOSSLESS)
def test_keeps_the_distribution_that_the_settings_ask_for(decoder: str, name: str) -> None:
    assert p_value(ToyModel(3, 6, seed=1), settings_for(decoder, 4, **SETTINGS[name])) > SIGNIFICANCE


@pytest.mark.parametrize("forced", [{0: 1}, {2: 0, 3: 2}, {5: 1}], ids=str)
@pytest.mark.parametrize("decoder", LOSSLESS)
def test_keeps_the_distribution_around_forced_positions(decoder: str, forced: dict[int, int]) -> None:
    assert p_value(ToyModel(3, 6, seed=2, forced=forced), settings_for(decoder, 4)) > SIGNIFICANCE


@pytest.mark.parametrize("initialise", get_args(Initialise))
@pytest.mark.parametrize("verifier", ["speculative", "exact"])
@pytest.mark.parametrize("coupling", ["independent", "gumbel", "maximal"])
def test_any_pairing_of_lossless_parts_keeps_the_distribution(coupling: str, verifier: str, initialise: str) -> None:
    options = DecoderOptions(redraft=coupling, verify=verifier, initialise=initialise)
    assert p_value(ToyModel(3, 6, seed=4), settings_for("sjd", 4, options=options)) > SIGNIFICANCE


def test_runner_up_branches_keep_the_distribution() -> None:
    options = DecoderOptions(branches=3, branch_length=2)
    assert p_value(ToyModel(3, 6, seed=6), settings_for("seed-exact", 4, options=options)) > SIGNIFICANCE


def test_draft_model_under_equality_keeps_the_distribution() -> None:
    options = DecoderOptions(verify="exact")
    assert p_value(ToyModel(3, 6, seed=5), settings_for("draft-model", 3, options=options)) > SIGNIFICANCE


@pytest.mark.parametrize("grouping", ["dynamic", "static"])
@pytest.mark.parametrize("decoder", ["gsd", "draft-model"])
def test_grouped_verification_is_told_apart(decoder: str, grouping: str) -> None:
    options = DecoderOptions(verify="grouped", grouping=grouping, group_size=3, group_probability_gap=1.0)
    assert p_value(ToyModel(3, 6), settings_for(decoder, 4, options=options)) < SIGNIFICANCE


@pytest.mark.parametrize("decoder", ["sjd", "scd-gumbel", "scd-maximal", "draft-model"])
def test_a_lenient_accept_rule_is_told_apart(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "speculative", lambda window: window.ratio_accepts | (window.uniforms < 0.3))
    assert p_value(ToyModel(3, 6), settings_for(decoder, 4)) < SIGNIFICANCE


@pytest.mark.parametrize("decoder", ["sjd", "scd-gumbel", "draft-model"])
def test_resampling_from_the_target_row_is_told_apart(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verify, "residual_draw", lambda target, source, gumbel: residual_draw(target, torch.zeros_like(source), gumbel)
    )
    assert p_value(ToyModel(3, 6), settings_for(decoder, 4)) < SIGNIFICANCE


def test_reusing_the_drafting_noise_for_the_residual_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def reuse(window: Window, slot: torch.Tensor) -> torch.Tensor:
        noise = window.noise.gumbel(Purpose.DRAFT, take_slots(window.positions, slot), window.vocabulary)
        target, source = take_slots(window.probabilities, slot), take_slots(window.sources, slot)
        return residual_draw(target, source, noise)

    monkeypatch.setattr(verify, "resample_residual", reuse)
    assert p_value(ToyModel(3, 6), settings_for("scd-gumbel", 4, 10 * SEQUENCES)) < SIGNIFICANCE


def test_keeping_the_old_row_in_maximal_coupling_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect of the released SCD-Maximal code: a kept draft keeps the row of the pass before."""
    kept_rows: dict[str, torch.Tensor] = {}

    def keep_old_rows(window: Window) -> torch.Tensor:
        rows = window.probabilities.clone()
        rows[:, :-1] = torch.where(window.ratio_accepts[..., None], window.sources, rows[:, :-1])
        kept_rows["rows"] = rows
        return redraft_maximal(window)

    redraft_maximal, shift = redraft.maximal, engine._shift
    monkeypatch.setattr(redraft, "maximal", keep_old_rows)
    monkeypatch.setattr(engine, "_shift", lambda rows, advanced: shift(kept_rows.get("rows", rows), advanced))
    assert p_value(ToyModel(3, 6), settings_for("scd-maximal", 4)) < SIGNIFICANCE
