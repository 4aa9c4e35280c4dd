"""Replays a recorded phase in place of running it: on a GPU a whole iteration becomes one launch.

A phase changes its state in place and its shapes depend on its bounds alone, so one recording for each value of them
serves the whole generation. What cannot be recorded runs as it is, with the same tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from .engine import Bounds, Phase

Replay = Callable[[], None]


class Recorder(Protocol):
    """Runs a phase, by whatever way."""

    def __call__(self, phase: Phase, bounds: Bounds) -> None: ...


def run_plainly(phase: Phase, bounds: Bounds) -> None:
    """The fallback: the phase itself."""
    phase(bounds)


def record_cuda_graph(work: Callable[[], None]) -> Replay:
    """Captures the work's kernels without running them; raises RuntimeError where it does what a graph cannot hold."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class ReplayingRecorder:
    """Runs a phase at its first meeting with some bounds, which warms it up, records it at the second, then replays.

    record: makes a replay of some work without doing it. A refusal ends recording for the rest of the generation.
    """

    def __init__(self, record: Callable[[Callable[[], None]], Replay] = record_cuda_graph) -> None:
        self._record = record
        self.replays: dict[tuple[Phase, Bounds], Replay | None] = {}
        self.recording = True

    def __call__(self, phase: Phase, bounds: Bounds) -> None:
        key = phase, bounds
        if self.recording and key in self.replays and self.replays[key] is None:
            self._try_to_record(key)
        replay = self.replays.setdefault(key, None)
        if replay is None:
            phase(bounds)
        else:
            replay()

    def _try_to_record(self, key: tuple[Phase, Bounds]) -> None:
        phase, bounds = key
        try:
            self.replays[key] = self._record(lambda: phase(bounds))
        except RuntimeError as error:
            self.recording = False
            logging.getLogger(__name__).warning("Passes run without a CUDA graph: %s", str(error).partition("\n")[0])


def recorder_for(device: torch.device, resident: bool) -> Recorder:
    """CUDA graphs where the device has them and every weight stays on it (ROCm's are left out: untested)."""
    usable = device.type == "cuda" and torch.version.hip is None and resident
    return ReplayingRecorder() if usable else run_plainly
