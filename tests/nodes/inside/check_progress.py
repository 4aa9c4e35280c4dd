"""Progress as the sampler reports it: the bar, the picture so far, and the interrupt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.utils
import numpy as np
import pytest
import tiny
import torch

from speculative_ar.decoders import Progress, SamplerSettings, generate
from speculative_ar.nodes import loaders
from speculative_ar.nodes import progress as module
from speculative_ar.nodes.progress import PREVIEW_SECONDS, RunProgress, picture_so_far


@pytest.fixture
def model(tmp_path: Path) -> Any:
    tiny.write_model(tmp_path / "tiny.safetensors")
    tiny.write_vq(tmp_path)
    return loaders.load(tmp_path / "tiny.safetensors", "auto").model


@pytest.fixture
def bar() -> Any:
    """What reaches ComfyUI: [(value, total, has a preview)]."""
    seen: list[tuple[int, int, bool]] = []
    comfy.utils.set_progress_bar_global_hook(
        lambda value, total, preview, **_: seen.append((value, total, preview is not None))
    )
    yield seen
    comfy.utils.set_progress_bar_global_hook(None)


def run(model: Any, preview_every: int, batch_size: int = 2) -> RunProgress:
    condition = model.class_label(0)
    progress = RunProgress(model, model.layout(condition), batch_size, "3", preview_every)
    generate(model, condition, SamplerSettings(draft_length=8, batch_size=batch_size), on_step=progress)
    return progress


def test_the_bar_climbs_to_the_number_of_tokens(model: Any, bar: list):
    run(model, preview_every=0).finish()
    values = [value for value, _, _ in bar]
    assert values == sorted(set(values))
    assert bar[-1] == (512, 512, False)
    assert not any(preview for _, _, preview in bar)


class Clock:
    """Time as the test says: so many seconds pass with each call of `wait`, and with each preview that is decoded."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def previewed(bar: list) -> list[int]:
    """At how many tokens each preview came."""
    return [value for value, _, preview in bar if preview]


def feed(progress: RunProgress, clock: Clock, seconds_a_token: float) -> None:
    tokens = torch.zeros(1, 256, dtype=torch.long)
    for accepted in range(1, 65):
        clock.wait(seconds_a_token)
        progress(Progress([accepted], 256, accepted, tokens))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def run_progress(model: Any, preview_every: int) -> RunProgress:
    return RunProgress(model, model.layout(model.class_label(0)), 1, "3", preview_every)


def test_a_slow_run_shows_a_preview_whenever_it_is_due(model: Any, bar: list, clock: Clock):
    feed(run_progress(model, preview_every=4), clock, seconds_a_token=PREVIEW_SECONDS)
    assert previewed(bar) == list(range(4, 65, 4))


def test_a_quick_run_waits_a_while_between_previews(model: Any, bar: list, clock: Clock):
    feed(run_progress(model, preview_every=4), clock, seconds_a_token=PREVIEW_SECONDS / 19.5)
    assert previewed(bar) == [4, 24, 44, 64]


def test_previews_take_a_tenth_of_the_time_at_most(
    model: Any, bar: list, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    def slow(*arguments: Any) -> Any:
        clock.wait(1.0)
        return picture_so_far(*arguments)

    monkeypatch.setattr(module, "picture_so_far", slow)
    feed(run_progress(model, preview_every=4), clock, seconds_a_token=0.505)
    assert previewed(bar) == [4, 24, 44, 64]


def test_no_previews_where_they_are_turned_off(model: Any, bar: list, clock: Clock):
    feed(run_progress(model, preview_every=0), clock, seconds_a_token=1.0)
    assert previewed(bar) == []
    assert len(bar) == 64


def test_the_interrupt_stops_before_the_next_pass(model: Any, bar: list):
    mm.interrupt_current_processing(True)
    with pytest.raises(mm.InterruptProcessingException):
        run(model, preview_every=0)
    assert bar == []
    mm.throw_exception_if_processing_interrupted()


def test_cells_that_are_not_decoded_yet_are_grey(model: Any):
    tokens = torch.arange(256)[None] % model.vocabulary
    picture = np.asarray(picture_so_far(model, model.layout(model.class_label(0)), tokens, accepted=16 * 3 + 5))
    whole = np.asarray(picture_so_far(model, model.layout(model.class_label(0)), tokens, accepted=256))
    assert picture.shape == (64, 64, 3)
    assert (picture[:12] == whole[:12]).all()
    assert (picture[12:16, :20] == whole[12:16, :20]).all()
    assert (picture[12:16, 20:] == 128).all()
    assert (picture[16:] == 128).all()
