"""The decoders of continuous tokens beside their law: seeds, steps, windows, counts, and how a run is stopped."""

from __future__ import annotations

import pytest
import torch

from speculative_ar.decoders import CONTINUOUS_DECODERS, ContinuousModel, Generation, SamplerSettings, generate
from speculative_ar.decoders.continuous.schedule import Schedule, cosine_bounds, guidance_of
from speculative_ar.decoders.interface import ContinuousOptions, LatentLayout
from tests.decoders.latent_toy import LatentToy

POSITIONS = 12
MODES = {
    "ar": ("ar", {}),
    "seed-exact": ("seed-exact", {"tolerance": 0.05}),
    "head-speculative": ("head-speculative", {}),
    "cspd, released": ("cspd", {"sigma_factor": "released"}),
    "cspd, paper": ("cspd", {"verification": "prefix", "softening": 1.0}),
    "cspd, exact": ("cspd", {"verification": "prefix", "sigma_factor": "off", "softening": 1.0}),
}


def toy(**more: object) -> LatentToy:
    return LatentToy(POSITIONS, in_order=False, **more)


def run(mode: str, length: int = 4, model: LatentToy | None = None, on_step=None, **more: object) -> Generation:
    decoder, options = MODES[mode]
    settings = {"batch_size": 3, "seed": 11, **{key: more.pop(key) for key in list(more) if key in SAMPLER}}
    continuous = ContinuousOptions(**{**options, **more})
    sampler = SamplerSettings(decoder=decoder, draft_length=length, continuous=continuous, **settings)
    return generate(model or toy(), None, sampler, draft_model=toy(bend=0.1), on_step=on_step)


SAMPLER = ("batch_size", "seed", "first_index", "guidance_scale", "temperature")


def test_the_toy_is_a_continuous_model() -> None:
    assert isinstance(toy(), ContinuousModel)


@pytest.mark.parametrize("iterations", [POSITIONS, 5])
@pytest.mark.parametrize("mode", MODES)
def test_a_picture_depends_on_its_seed_and_its_own_index_alone(mode: str, iterations: int) -> None:
    together = run(mode, iterations=iterations, guidance_scale=1.5).tokens
    for index in range(3):
        alone = run(mode, iterations=iterations, guidance_scale=1.5, batch_size=1, first_index=index).tokens
        assert torch.equal(alone[0], together[index])
    assert not torch.equal(run(mode, iterations=iterations, guidance_scale=1.5, seed=12).tokens, together)


@pytest.mark.parametrize("iterations", [POSITIONS, 5, 1])
@pytest.mark.parametrize("length", [1, 4, 30])
@pytest.mark.parametrize("mode", MODES)
def test_every_position_gets_a_token(mode: str, length: int, iterations: int) -> None:
    """The released cspd program leaves zeros where its redraw fails."""
    generation = run(mode, length, iterations=iterations)
    assert (generation.tokens != 0).all()
    statistics = generation.statistics
    assert [sum(sizes) for sizes in statistics.accepted_per_pass] == [POSITIONS] * 3
    assert all(size > 0 for row in statistics.acceptance_map for size in row)
    assert 0 <= statistics.accepted <= statistics.drafted


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("iterations", [POSITIONS, 5])
def test_tolerance_0_is_ar_bit_for_bit_whatever_the_window(length: int, iterations: int) -> None:
    expected = run("ar", iterations=iterations)
    generation = run("seed-exact", length, iterations=iterations, tolerance=0.0)
    assert torch.equal(generation.tokens, expected.tokens)
    assert generation.statistics.promise == "seed-exact"
    assert generation.statistics.forward_passes == expected.statistics.forward_passes == iterations


@pytest.mark.parametrize("iterations", [POSITIONS, 5])
def test_a_tolerance_saves_passes_and_bounds_how_far_a_token_is_from_its_prefix(iterations: int) -> None:
    model = toy(pull=0.02)
    expected = run("ar", iterations=iterations, model=model).tokens
    tight = run("seed-exact", iterations=iterations, tolerance=1e-5, measure_deviation=True, model=model)
    assert torch.allclose(tight.tokens, expected, atol=1e-4)
    assert tight.statistics.audit_residual < 1e-4 and tight.statistics.deviation < 1e-3
    loose = run("seed-exact", iterations=iterations, tolerance=0.1, measure_deviation=True, model=model)
    assert loose.statistics.promise == "seed-exact within tolerance"
    assert loose.statistics.forward_passes < tight.statistics.forward_passes
    assert 0 < loose.statistics.audit_residual < 0.2
    assert loose.statistics.deviation == pytest.approx(float((expected - loose.tokens).norm(dim=-1).max()))


def test_seed_exact_emits_what_the_target_gives_never_a_guess() -> None:
    """Each token is the model's after the tokens before it, drawn again from the finished picture."""
    model, tokens = toy(), run("seed-exact", tolerance=1e-5).tokens
    assert (run("ar").tokens - tokens).norm(dim=-1).max() < 1e-3
    wide = run("seed-exact", length=POSITIONS, tolerance=10.0, model=model).tokens
    assert not torch.allclose(wide, tokens, atol=1e-3), "a tolerance above every distance takes the first answers"


@pytest.mark.parametrize("mode", MODES)
def test_without_guidance_no_unconditional_row_is_computed(mode: str) -> None:
    model = toy()
    run(mode, model=model, guidance_scale=1.0)
    assert (model.unconditional_rows, model.calls > 0) == (0, True)
    run(mode, model=model, guidance_scale=1.5)
    assert model.unconditional_rows > 0


def test_the_head_is_called_less_often_with_longer_drafts() -> None:
    model = toy(steps=40)
    calls = [run("head-speculative", length, model=model).statistics.head_calls for length in (1, 4, 16)]
    assert calls[0] > calls[1] > calls[2]
    assert run("ar", model=model).statistics.head_calls == 40 * POSITIONS


def test_counts_are_those_of_the_calls() -> None:
    model = toy()
    statistics = run("cspd, released", 4, model=model).statistics
    assert statistics.head_calls == model.calls == 4 * statistics.forward_passes
    # One AR step by the target, then eleven drafts, looked at after steps 4, 8 and 11.
    assert (statistics.forward_passes, statistics.draft_passes) == (4, 11)
    assert statistics.draft_head_calls == 4 * statistics.draft_passes


@pytest.mark.parametrize("mode", MODES)
def test_a_listener_may_stop_a_run_before_any_call(mode: str) -> None:
    class Stopped(Exception):
        pass

    def stop_at(call: int):
        calls = []

        def listen(progress) -> None:
            calls.append(progress)
            assert progress.order.shape == (3, POSITIONS) and 0 <= progress.fraction <= 1
            if len(calls) == call:
                raise Stopped

        return listen

    for call in (1, 2, 9):
        with pytest.raises(Stopped):
            run(mode, on_step=stop_at(call))


def test_temperature_0_leaves_the_first_noise_alone() -> None:
    cold = run("ar", temperature=0.0).tokens
    assert torch.equal(cold, run("seed-exact", temperature=0.0, tolerance=0.0).tokens)
    assert not torch.allclose(cold, run("ar").tokens, atol=1e-2)


def test_the_cosine_schedule_makes_one_position_a_step_where_steps_suffice() -> None:
    assert cosine_bounds(16, 16) == tuple(range(17))
    assert cosine_bounds(4, 4) == (0, 1, 2, 3, 4)
    assert cosine_bounds(256, 1) == (0, 256)
    sizes = [after - before for before, after in zip(cosine_bounds(256, 64), cosine_bounds(256, 64)[1:], strict=False)]
    assert (min(sizes), sum(sizes)) == (1, 256)


def test_guidance_grows_as_each_family_lets_it() -> None:
    bounds = cosine_bounds(16, 16)
    assert [guidance_of("constant", 3.0, bounds, step) for step in (0, 15)] == [3.0, 3.0]
    assert [guidance_of("linear", 3.0, bounds, step) for step in (0, 7, 14, 15)] == [1.125, 2.0, 2.875, 2.875]
    xar = Schedule.of(LatentLayout((1, 2, 2), 1024, 4, in_order=True), 4, 2.5, "linear-from-one")
    assert xar.guidance == (1.0, 1.5, 2.0, 2.5)


REFUSED = {
    "a decoder of codes": ({"decoder": "sjd"}, {}, ["sjd decodes codes", "seed-exact, head-speculative, cspd"]),
    "no decoder": ({"decoder": "seed-exacd"}, {}, ["Did you mean seed-exact?"]),
    "too many steps": ({}, {"iterations": 13}, ["iterations is 13", "12 positions", "0 for 12"]),
    "diffusion steps": ({}, {"diffusion_steps": 2000}, ["diffusion_steps is 2000", "1 to 1000"]),
    "top-k": ({"top_k": 5}, {}, ["top_k", "continuous tokens", "set top_k to 0"]),
    "eta": ({}, {"eta": 2.0}, ["eta is 2.0", "0 (no noise) to 1"]),
    "tolerance": ({"decoder": "seed-exact"}, {"tolerance": -1.0}, ["tolerance is -1.0"]),
    "softening": ({"decoder": "cspd"}, {"softening": 0.5}, ["softening is 0.5"]),
    "noise in the last step": ({}, {"noisy_last_step": True}, ["noisy_last_step", "turn it off"]),
    "unknown choice": ({}, {"verification": "tree"}, ["verification is 'tree'", "prefix, block"]),
    "no temperature": ({"temperature": 0.0}, {}, ["temperature is 0", "head-speculative"]),
    "cfg": ({"guidance_scale": 0.5}, {}, ["cfg is 0.5", "1 (no guidance)"]),
}


@pytest.mark.parametrize("settings, options, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_met_is_refused_in_one_sentence(settings: dict, options: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        generate(toy(), None, SamplerSettings(continuous=ContinuousOptions(**options), **settings))
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_cspd_needs_a_draft_model_of_the_same_layout() -> None:
    settings = SamplerSettings(decoder="cspd")
    with pytest.raises(ValueError, match="cspd needs a draft model"):
        generate(toy(), None, settings)
    with pytest.raises(ValueError, match="1 x 3 tokens of 2 numbers and toy 1 x 12 tokens of 2 numbers"):
        generate(toy(), None, settings, draft_model=LatentToy(3))


def test_auto_is_the_lossless_decoder_without_a_draft_model() -> None:
    statistics = generate(toy(), None, SamplerSettings(draft_length=0)).statistics
    assert (statistics.decoder, statistics.promise) == ("head-speculative", "lossless")
    assert statistics.draft_length == CONTINUOUS_DECODERS["head-speculative"].automatic_length
