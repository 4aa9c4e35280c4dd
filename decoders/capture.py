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


def cuda_graphs() -> Callable[[Callable[[], None]], Replay]:
    """A recorder of CUDA graphs, which capture the work's kernels without running them.

    The graphs share one pool of memory: what a phase leaves to the next lies in state that was there before. Raises
    RuntimeError where the work does what a graph cannot hold.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay

    return record


class ReplayingRecorder:
    """Runs a phase at its first meeting with some bounds, which warms it up, records it at the second, then replays.

    record: makes a replay of some work without doing it. A refusal ends recording for the rest of the generation.
    """

    def __init__(self, record: Callable[[Callable[[], None]], Replay]) -> None:
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
    return ReplayingRecorder(cuda_graphs()) if usable else run_plainly
