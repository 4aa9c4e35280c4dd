"""A window of 0: measured once on the device, chosen by cost and gain, said in the statistics, and no token changed."""

from __future__ import annotations

import torch

from speculative_ar.decoders import DECODERS, DecoderOptions, Progress, SamplerSettings, generate, tuning
from tests.decoders.toy import ToyModel


def settings_of(decoder: str, **options: int) -> SamplerSettings:
    return SamplerSettings(decoder, draft_length=0, seed=4, batch_size=2, options=DecoderOptions(**options))


def chosen(seconds: dict[int, float], settings: SamplerSettings, positions: int = 400) -> SamplerSettings:
    """What is chosen for passes that take so long, by positions fed."""
    model = ToyModel(8, positions)
    layout = model.layout(None)
    model.pass_seconds[torch.device("cpu"), model.dtype, settings.batch_size, False, positions] = seconds
    return tuning.tuned(model, None, settings, DECODERS[settings.decoder], layout, lambda progress: None)[0]


def test_a_device_with_room_takes_the_widest_pass_and_a_busy_one_the_narrowest() -> None:
    every = tuning.shapes(DECODERS["seed-exact"], settings_of("seed-exact", branches=0), ToyModel(8, 400).layout(None))
    free = chosen({shape.slots: 1.0 for shape in every}, settings_of("seed-exact", branches=0))
    assert (free.draft_length, free.options.branches) == (64, 8)
    proportional = chosen({shape.slots: float(shape.slots) for shape in every}, settings_of("seed-exact", branches=0))
    assert (proportional.draft_length, proportional.options.branches) == (8, 1)


def test_only_what_the_user_left_open_is_chosen() -> None:
    free = dict.fromkeys((8, 16, 32, 64, 20, 32, 48), 1.0)
    assert chosen(free, settings_of("scd-gumbel")).draft_length == 64
    assert chosen(free, settings_of("seed-exact")).options.branches == 1
    fixed = SamplerSettings("seed-exact", draft_length=20, batch_size=2, options=DecoderOptions(branches=0))
    assert chosen(free, fixed).draft_length == 20
    assert chosen(free, settings_of("seed-exact"), positions=5).draft_length == 5


def test_a_generation_measures_once_and_says_so() -> None:
    model, seen = ToyModel(8, 80, seed=1), []
    first = generate(model, None, settings_of("seed-exact", branches=0), on_step=seen.append)
    measured = [told for told in seen if told.forward_passes == 0]
    lengths = {
        shape.slots
        for shape in tuning.shapes(DECODERS["seed-exact"], settings_of("seed-exact", branches=0), model.layout(None))
    }
    assert len(measured) == 1 + tuning.REPEATS * len(lengths)
    assert first.statistics.window_choice.startswith(f"window {first.statistics.draft_length}")
    assert "ms a pass" in first.statistics.window_choice

    again: list[Progress] = []
    second = generate(model, None, settings_of("seed-exact", branches=0), on_step=again.append)
    assert len(again) == second.statistics.forward_passes
    plain = generate(model, None, SamplerSettings("ar", seed=4, batch_size=2))
    assert torch.equal(first.tokens, plain.tokens) and torch.equal(second.tokens, plain.tokens)
    assert plain.statistics.window_choice == ""


def test_a_draft_model_drafts_few() -> None:
    model = ToyModel(8, 40, seed=1)
    statistics = generate(model, None, settings_of("draft-model"), draft_model=ToyModel(8, 40, seed=2)).statistics
    assert statistics.draft_length == tuning.DRAFT_MODEL_LENGTH
    assert statistics.window_choice == f"{tuning.DRAFT_MODEL_LENGTH} drafts a round"
