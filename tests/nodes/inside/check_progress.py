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
from speculative_ar.nodes.progress import RunProgress, picture_so_far


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


def test_previews_are_throttled(model: Any, bar: list):
    progress = RunProgress(model, model.layout(None), 1, "3", preview_every=4)
    tokens = torch.zeros(1, 256, dtype=torch.long)
    for accepted in range(64):
        progress(Progress([accepted], 256, accepted, tokens))
    assert sum(preview for _, _, preview in bar) <= 3


def test_the_interrupt_stops_before_the_next_pass(model: Any, bar: list):
    mm.interrupt_current_processing(True)
    with pytest.raises(mm.InterruptProcessingException):
        run(model, preview_every=0)
    assert bar == []
    mm.throw_exception_if_processing_interrupted()


def test_cells_that_are_not_decoded_yet_are_grey(model: Any):
    tokens = torch.arange(256)[None] % model.vocabulary
    picture = np.asarray(picture_so_far(model, model.layout(None), tokens, accepted=16 * 3 + 5))
    whole = np.asarray(picture_so_far(model, model.layout(None), tokens, accepted=256))
    assert picture.shape == (64, 64, 3)
    assert (picture[:12] == whole[:12]).all()
    assert (picture[12:16, :20] == whole[12:16, :20]).all()
    assert (picture[12:16, 20:] == 128).all()
    assert (picture[16:] == 128).all()
