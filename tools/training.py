"""What the two trainings of bundled models share: stages to choose, a log, losses, rates, files and contact sheets."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "model_loaders" / "bundled"


def chosen_stages(about: str | None, stages: Sequence[str], skipped: Sequence[str] = ()) -> Sequence[str]:
    """Reads the command line: which stages to run, on how many threads; skipped: those that run only when named."""
    parser = argparse.ArgumentParser(description=about)
    default = [stage for stage in stages if stage not in skipped]
    parser.add_argument("--only", nargs="+", choices=stages, default=default, help="stages to run; others are kept")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    return chosen.only


def half_precision() -> torch.autocast:
    """bfloat16 where this CPU computes in it; elsewhere it would be forty times slower than float32."""
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast("cpu", torch.bfloat16, enabled=native)


class Log:
    """Prints running means every fifty steps."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.started = name, steps, time.monotonic()
        self.sums: dict[str, float] = {}

    def __call__(self, step: int, **losses: Tensor) -> None:
        for name, value in losses.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.item() / 50
        if (step + 1) % 50 == 0:
            means = "  ".join(f"{name} {value:.4f}" for name, value in self.sums.items())
            print(f"{self.name} {step + 1}/{self.steps}  {means}  {time.monotonic() - self.started:.0f} s", flush=True)
            self.sums = {}


def learning_rate(step: int, steps: int, peak: float, warmup: int = 50) -> float:
    """Linear warm-up, then linear decay to zero."""
    return peak * min((step + 1) / warmup, (steps - step) / (steps - warmup), 1.0)


def picture_loss(made: Tensor, wanted: Tensor, colour_weight: float) -> Tensor:
    """Mean absolute error of pixels and of their differences, which keeps edges sharp; squared error of 4 x 4 means."""
    loss = F.l1_loss(made, wanted)
    for dim in (2, 3):
        loss = loss + F.l1_loss(made.diff(dim=dim), wanted.diff(dim=dim))
    return loss + colour_weight * F.mse_loss(F.avg_pool2d(made, 4), F.avg_pool2d(wanted, 4))


class Descent:
    """Steps of one or more optimizers, whose rates warm up and decay, along a clipped gradient."""

    def __init__(self, network: nn.Module, steps: int, *optimizers: torch.optim.Optimizer) -> None:
        self.network, self.steps, self.optimizers = network, steps, optimizers
        self.peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

    def __call__(self, step: int, loss: Tensor) -> None:
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            optimizer.param_groups[0]["lr"] = learning_rate(step, self.steps, peak)
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()


def store(path: Path, weights: Mapping[str, Tensor], **metadata: object) -> None:
    """Writes weights in half precision; the loader reads the metadata as JSON."""
    halved = {key: value.half().contiguous() for key, value in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(halved, path, metadata={key: json.dumps(value) for key, value in metadata.items()})
    parameters = sum(value.numel() for value in halved.values())
    print(f"{path.name}: {parameters:,} parameters, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def save_sheet(path: Path, batches: Sequence[Tensor]) -> None:
    """Draws pictures, one batch [columns, H, W, 3] a row, in two columns of rows."""
    rows = [torch.cat(batch.unbind(), dim=1) for batch in batches]
    half = (len(rows) + 1) // 2
    rows += [torch.ones_like(rows[0])] * (2 * half - len(rows))
    sheet = torch.cat((torch.cat(rows[:half]), torch.cat(rows[half:])), dim=1)
    path.parent.mkdir(exist_ok=True)
    Image.fromarray((sheet * 255).round().byte().numpy()).save(path)
    print(f"contact sheet: {path}", flush=True)
