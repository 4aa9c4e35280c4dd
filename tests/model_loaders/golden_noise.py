"""The noise of the golden runs, tensor by tensor, in place of the pack's own: what the official code drew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculative_ar.decoders import ContinuousModel, ContinuousOptions
from speculative_ar.decoders.continuous.canvas import Canvas
from speculative_ar.decoders.continuous.chain import Denoiser
from speculative_ar.decoders.continuous.run import Run
from speculative_ar.decoders.continuous.schedule import Schedule
from speculative_ar.decoders.continuous.trace import LatentTrace


class GoldenNoise:
    """What a LatentNoise gives, from x_T [B, N, C] and eps [T, B, N, C] by position.

    uniforms [B, N] decide the acceptance; normals [R, B, N, C] and tries [R, B, N] are the proposals of a redraw.
    """

    def __init__(self, x_T: Tensor, eps: Tensor, uniforms: Tensor | None = None) -> None:
        self.x_T, self.eps, self.uniforms = x_T, eps, uniforms
        self.normals: Tensor | None = None
        self.tries: Tensor | None = None

    def start(self, positions: Tensor) -> Tensor:
        return at(self.x_T, positions)

    def steps(self, positions: Tensor) -> Tensor:
        return torch.stack([at(noise, positions) for noise in self.eps.float()])

    def accept(self, positions: Tensor) -> Tensor:
        assert self.uniforms is not None
        return self.uniforms.gather(1, positions)[None]

    def residual(self, positions: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        assert self.normals is not None and self.tries is not None
        return (
            torch.stack([at(normal, positions) for normal in self.normals]),
            torch.stack([uniform.gather(1, positions) for uniform in self.tries]),
        )


def at(values: Tensor, positions: Tensor) -> Tensor:
    """[B, N, C] at positions [B, S]."""
    return values.gather(1, positions[..., None].expand(-1, -1, values.shape[-1]))


def golden_run(
    model: ContinuousModel,
    condition: Any,
    order: Tensor,
    noise: Any,
    *,
    cfg: float = 1.0,
    temperature: float = 1.0,
    draft_model: ContinuousModel | None = None,
    options: ContinuousOptions,
) -> Run:
    """A run as `generate` sets it up, with the golden's order and noise; options state every number."""
    layout = model.layout(condition)
    growth = options.guidance_schedule or layout.guidance_schedule
    schedule = Schedule.of(layout, options.iterations or layout.iterations, cfg, growth)
    canvas = Canvas(order, layout.channels, schedule)
    trace = LatentTrace(canvas, lambda progress: None, torch.device("cpu"))

    def denoiser(of: ContinuousModel) -> Denoiser:
        session = of.latent_session(condition, len(order), cfg > 1)
        return Denoiser(session, of.process(options), lambda: None, temperature)

    return Run(canvas, noise, denoiser(model), trace, denoiser(draft_model) if draft_model else None)
