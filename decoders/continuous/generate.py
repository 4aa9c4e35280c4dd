"""Sets up a run of a continuous model, lets the decoder fill the canvas, and sums up."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..interface import ContinuousModel, LatentLayout, OnStep, SamplerSettings
from ..noise import Noise
from ..statistics import Statistics
from .autoregressive import autoregressive
from .canvas import Canvas, generation_order
from .chain import Denoiser
from .checks import check
from .noise import LatentNoise
from .run import Run
from .schedule import Schedule
from .table import ContinuousDecoder
from .trace import LatentTrace


def generate_latents(
    model: ContinuousModel, condition: Any, settings: SamplerSettings, draft_model: Any, on_step: OnStep
) -> tuple[torch.Tensor, LatentLayout, Statistics]:
    """See decoders.generate: the tokens float32 [B, N, C], where they sit, and what was measured."""
    decoder, layout, settings = check(model, condition, settings, draft_model)
    begin, options = time.perf_counter(), settings.continuous
    with ExitStack() as held:
        run = _open(model, condition, settings, decoder, draft_model, layout, on_step, held)
        decoder.run(run, options, settings.draft_length)
        if not bool(run.canvas.tokens.isfinite().all()):
            raise ValueError(
                f"{model.name} gives tokens that are not finite in {model.dtype}; load it as bf16 or fp32."
            )
        run.trace.finish(time.perf_counter() - begin)
        if options.measure_deviation:
            run.trace.deviation = _deviation(run)
    statistics = run.trace.summary(
        decoder.id, decoder.promise(options), settings.draft_length, dtype=model.dtype, seed=settings.seed
    )
    return run.canvas.tokens, layout, replace(statistics, prompt=getattr(condition, "text", ""))


def _open(
    model: ContinuousModel,
    condition: Any,
    settings: SamplerSettings,
    decoder: ContinuousDecoder,
    draft_model: Any,
    layout: LatentLayout,
    on_step: OnStep,
    held: ExitStack,
) -> Run:
    """Opens the sessions, which `held` will close, and sets up what runs on them."""
    options, device, batch_size = settings.continuous, torch.device(model.device), settings.batch_size
    assert options.guidance_schedule is not None  # see checks
    schedule = Schedule.of(layout, options.iterations, settings.guidance_scale, options.guidance_schedule)
    source = Noise(settings.seed, settings.first_index, batch_size, device)
    noise = LatentNoise(source, options.diffusion_steps, layout.channels, device)
    order = generation_order(noise, batch_size, layout.positions, layout.in_order, device)
    canvas = Canvas(order, layout.channels, schedule)
    trace = LatentTrace(canvas, on_step, device)

    def denoiser(of: ContinuousModel, draft: bool) -> Denoiser:
        session = of.latent_session(condition, batch_size, settings.guidance_scale > 1)
        held.callback(session.close)
        noisy = decoder.adds_last_noise(options)
        return Denoiser(session, of.process(options), partial(trace.head, draft), settings.temperature, noisy)

    with trace.timed("prefill"):
        target = denoiser(model, False)
        draft = denoiser(draft_model, True) if decoder.needs_draft_model else None
    return Run(canvas, noise, target, trace, draft)


def _deviation(run: Run) -> float:
    """The largest distance between a token and that of `ar` with the same noise, which is drawn for it."""
    reference = Canvas(run.canvas.order, run.canvas.tokens.shape[-1], run.canvas.schedule)
    quiet = LatentTrace(reference, lambda _progress: None, reference.order.device)
    target = replace(run.target, noisy_last=False, before_call=partial(quiet.head, False))
    autoregressive(Run(reference, run.noise, target, quiet))
    return float((reference.tokens - run.canvas.tokens).norm(dim=-1).max())
