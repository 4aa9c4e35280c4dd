"""What a pass costs, and how much of that is the model: the same windows are fed again with nothing around them.

A first run writes down what the decoder feeds. Then whole runs and bare replays of the list take turns, and the
quickest turn counts: its two halves ran under the same conditions. A busy machine spoils the ratio all the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pack

pack.register()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmark_meters import CudaMeter, TensorMeter  # noqa: E402
from benchmark_models import Subject  # noqa: E402
from speculative_ar.decoders import Progress, SamplerSettings, Statistics, TokenModel, TokenSession, generate  # noqa: E402
from speculative_ar.decoders.capture import recorder_for  # noqa: E402
from speculative_ar.decoders.engine import Bounds  # noqa: E402

COPY_BYTES = 1 << 28


@dataclass(frozen=True)
class Cost:
    """Of one row of the benchmark, beside the counts.

    ms_per_pass: whole run / passes. bare_ms_per_pass: the same session opened and the same windows fed, nothing else.
    host_reads_per_pass: times that the host asked for a value, between the first and the last pass.
    peak_memory_mb: what a run's tensors take at most, weights not counted.
    roofline_share: time to read the weights of a pass at the device's copy bandwidth / ms_per_pass.
    """

    ms_per_pass: float
    bare_ms_per_pass: float
    bare_ratio: float
    host_reads_per_pass: float
    peak_memory_mb: float
    roofline_share: float


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a session's forward."""

    tokens: Tensor
    start: Tensor
    parents: Tensor | None
    furthest: int


class LoggedSession:
    """A session that writes down what is fed to it, and the time that takes. No pass of it is recorded as a graph."""

    resident = False

    def __init__(self, session: TokenSession, log: LoggedModel) -> None:
        self.session, self.log = session, log
        self.prefill_passes = session.prefill_passes

    def forward(self, tokens: Tensor, start: Tensor, parents: Tensor | None = None, furthest: int = -1) -> Tensor:
        """See TokenSession.forward."""
        self.log.calls.append(Call(tokens.clone(), start.clone(), parents, furthest))
        begin = time.perf_counter()
        logits = self.session.forward(tokens, start, parents, furthest)
        self.log.seconds += time.perf_counter() - begin
        return logits

    def keep(self, path: Tensor) -> None:
        """See TokenSession.keep."""
        self.session.keep(path)

    def close(self) -> None:
        """See TokenSession.close."""
        self.session.close()


class LoggedModel:
    """A model whose session is a LoggedSession; everything else is the model's own."""

    def __init__(self, model: TokenModel) -> None:
        self.model = model
        self.arguments: tuple[Any, ...] = ()
        self.calls: list[Call] = []
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def session(self, *arguments: Any) -> LoggedSession:
        """See TokenModel.session."""
        begin = time.perf_counter()
        self.arguments, session = arguments, self.model.session(*arguments)
        self.seconds += time.perf_counter() - begin
        return LoggedSession(session, self)


class Feed:
    """A forward pass from fixed buffers, so that it can be recorded as a graph like a decoder's own pass."""

    def __init__(self, session: TokenSession, call: Call) -> None:
        self.session, self.parents = session, call.parents
        self.tokens, self.start = call.tokens.clone(), call.start.clone()

    def take(self, call: Call) -> None:
        """Sets what is fed next."""
        self.tokens.copy_(call.tokens)
        self.start.copy_(call.start)

    def __call__(self, bounds: Bounds) -> None:
        self.session.forward(self.tokens, self.start, self.parents, bounds.furthest)


@torch.inference_mode()
def replay(log: LoggedModel) -> float:
    """Seconds to open the logged session and to feed it what it was fed, in the way that a decoder runs its passes."""
    if not log.calls:
        return 0.0
    begin = time.perf_counter()
    session = log.model.session(*log.arguments)
    recorder = recorder_for(torch.device(log.model.device), session.resident)
    feeds: dict[int, Feed] = {}
    for call in log.calls:
        feed = feeds.setdefault(call.tokens.shape[1], Feed(session, call))
        feed.take(call)
        recorder(feed, Bounds(call.furthest, entering=0))
    synchronise(log.model.device)
    session.close()
    return time.perf_counter() - begin


def synchronise(device: torch.device) -> None:
    """Waits for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_cost(
    subject: Subject, condition: Any, settings: SamplerSettings, bandwidth: float, repeats: int = 3
) -> tuple[Cost, Statistics]:
    """Runs the settings 2 + 2 * repeats times; of the turns of whole and bare run, the quickest counts."""
    device = torch.device(subject.target.device)
    logs = LoggedModel(subject.target), LoggedModel(subject.draft)
    generate(logs[0], condition, settings, draft_model=logs[1])
    reads, peak = metered(subject, condition, settings)
    turns = []
    for _ in range(repeats):
        begin = time.perf_counter()
        statistics = generate(subject.target, condition, settings, draft_model=subject.draft).statistics
        synchronise(device)
        turns.append((time.perf_counter() - begin, sum(map(replay, logs))))
    passes = statistics.forward_passes
    whole, bare = min(turns, key=sum)
    cost = Cost(
        ms_per_pass=1000 * whole / passes,
        bare_ms_per_pass=1000 * bare / passes,
        bare_ratio=whole / bare,
        host_reads_per_pass=reads,
        peak_memory_mb=peak / 1e6,
        roofline_share=weight_bytes_read(subject, statistics) / bandwidth / whole,
    )
    return cost, statistics


def metered(subject: Subject, condition: Any, settings: SamplerSettings) -> tuple[float, int]:
    """Host reads per pass inside the loop, and the peak of the memory in bytes."""
    device = torch.device(subject.target.device)
    meter: Any = CudaMeter(device) if device.type == "cuda" else TensorMeter()
    seen: list[tuple[int, int]] = []

    def note(progress: Progress) -> None:
        seen.append((progress.forward_passes, meter.reads))

    with meter:
        generate(subject.target, condition, settings, draft_model=subject.draft, on_step=note)
    (first, before), (last, after) = seen[0], seen[-1]
    return (after - before) / max(last - first, 1), meter.peak_bytes


def weight_bytes_read(subject: Subject, statistics: Statistics) -> float:
    """Bytes of weights that all passes of a run read: those of the blocks and the head, embeddings are looked up."""
    passes = ((subject.target, statistics.forward_passes), (subject.draft, statistics.draft_passes))
    return sum(count * weight_bytes(model.network) for model, count in passes)


def weight_bytes(network: nn.Module) -> int:
    """Bytes of all weights but the embeddings."""
    modules = (module for module in network.modules() if not isinstance(module, nn.Embedding))
    return sum(weight.nbytes for module in modules for weight in module.parameters(recurse=False))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy within the device's memory reads and writes, the best of several."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> float:
        synchronise(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        return time.perf_counter() - begin

    return 2 * COPY_BYTES / min(copy() for _ in range(10))
