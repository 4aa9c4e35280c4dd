"""Recorded iterations: what is replayed gives the same tokens, and a phase asks nothing of the host.

Without a GPU a tape of tensor operations stands in for the CUDA graph: like a graph it repeats the very same operations
on the same memory, so a value that the host had put in would be repeated too and the tokens would differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from speculative_ar.decoders import DECODERS, DecoderOptions, SamplerSettings, TokenModel, generate
from speculative_ar.decoders.capture import ReplayingRecorder
from speculative_ar.model_loaders import bundled, load
from tests.decoders.toy import ToyModel

HOST_QUESTIONS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Tape(TorchDispatchMode):
    """Writes down every operation with its arguments and result."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in HOST_QUESTIONS:
            raise RuntimeError(f"{operation} asks the host")
        result = operation(*args, **(kwargs or {}))
        self.steps.append((operation, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        made: dict[int, torch.Tensor] = {}

        def current(tensor: torch.Tensor) -> torch.Tensor:
            return made.get(id(tensor), tensor)

        for operation, args, kwargs, recorded in self.steps:
            args, kwargs = tree_map_only(torch.Tensor, current, (args, kwargs))
            result = operation(*args, **kwargs)
            recorded_parts = recorded if isinstance(recorded, list | tuple) else [recorded]
            parts = result if isinstance(result, list | tuple) else [result]
            made.update({id(old): new for old, new in zip(recorded_parts, parts, strict=True)})


def record_on_tape(work: Callable[[], None]) -> Callable[[], None]:
    """Does the work at once, which a graph would not, and so leaves out the first replay."""
    tape = Tape()
    with tape:
        work()
    done = iter([lambda: None])
    return lambda: next(done, tape.play)()


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[ReplayingRecorder]:
    made: list[ReplayingRecorder] = []

    def recorder_for(device: torch.device, resident: bool) -> ReplayingRecorder:
        made.append(ReplayingRecorder(record_on_tape))
        return made[-1]

    monkeypatch.setattr(sys.modules["speculative_ar.decoders.generate"], "recorder_for", recorder_for)
    return made


def tokens_of(target: TokenModel, condition: Any, draft: TokenModel, settings: SamplerSettings) -> torch.Tensor:
    return generate(target, condition, settings, draft_model=draft).tokens


def settings_of(decoder: str, **options: Any) -> SamplerSettings:
    return SamplerSettings(
        decoder=decoder,
        draft_length=6,
        seed=3,
        batch_size=2,
        guidance_scale=2.0,
        top_k=7,
        top_p=0.95,
        options=DecoderOptions(**options),
    )


CASES = [
    *((decoder, {}) for decoder in DECODERS),
    ("gsd", {"grouping": "static", "group_size": 2}),
    ("seed-exact", {"branches": 3, "branch_length": 2}),
    *(("scd-gumbel", {"initialise": name}) for name in ("left", "above-likeliest", "neighbour", "neighbour-above")),
]


@pytest.mark.parametrize(("decoder", "options"), CASES)
def test_a_replayed_iteration_gives_the_same_tokens(
    decoder: str, options: dict[str, Any], recorders: list[ReplayingRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = ToyModel(8, 40, seed=7), ToyModel(8, 40, seed=8)
    replayed = tokens_of(target, None, draft, settings_of(decoder, **options))
    assert recorders[0].recording and any(recorders[0].replays.values())
    monkeypatch.undo()
    assert torch.equal(replayed, tokens_of(target, None, draft, settings_of(decoder, **options)))


@pytest.mark.parametrize(
    ("decoder", "options"), [("scd-maximal", {}), ("draft-model", {}), ("seed-exact", {"branches": 4})]
)
def test_a_real_models_pass_is_recorded_with_it(
    decoder: str, options: dict[str, Any], recorders: list[ReplayingRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = bundled()
    target = load(paths["demo-tokens"], dtype=torch.float32)
    draft = load(paths["demo-tokens-draft"], dtype=torch.float32, with_vq=False)
    arguments = target, target.class_label(5), draft, settings_of(decoder, **options)
    replayed = tokens_of(*arguments)
    assert recorders[0].recording and any(recorders[0].replays.values())
    monkeypatch.undo()
    assert torch.equal(replayed, tokens_of(*arguments))


def test_what_cannot_be_recorded_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    ran: list[int] = []
    recorder = ReplayingRecorder(refuse)
    for furthest in (64, 64, 64, 128, 128):
        recorder(ran.append, furthest)
    assert ran == [64, 64, 64, 128, 128]
    assert not recorder.recording
    assert caplog.messages == ["Passes run without a CUDA graph: operation not permitted when stream is capturing"]
