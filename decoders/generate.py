"""The single entry: check the settings, run the decoder, hand back tokens, picture and statistics."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .branches import Tree
from .capture import Recorder, recorder_for
from .checks import check, drafts_per_pass
from .continuous.generate import generate_latents
from .engine import DraftModelIteration, Iteration, JacobiIteration
from .interface import (
    ContinuousModel,
    LatentLayout,
    OnStep,
    Progress,
    SamplerSettings,
    TokenLayout,
    TokenModel,
    TokenSession,
)
from .loop import NotFinite, decode
from .statistics import Statistics, Trace
from .table import Decoder
from .tuning import is_open, tuned


@dataclass(frozen=True, eq=False)
class Generation:
    """A finished run. tokens: LongTensor [B, N], or float32 [B, N, C] of a continuous model."""

    tokens: Tensor
    layout: TokenLayout | LatentLayout
    statistics: Statistics
    model: Any

    def decode(self) -> Tensor:
        """float32 [B * frames, H, W, 3] in 0..1; its time enters the statistics."""
        begin = time.perf_counter()
        pictures = self.model.decode(self.tokens, self.layout)
        elapsed, seconds = time.perf_counter() - begin, self.statistics.seconds
        seconds["total"] += elapsed - seconds["decode"]
        seconds["decode"] = elapsed
        return pictures


@torch.inference_mode()
def generate(
    model: TokenModel | ContinuousModel,
    condition: Any,
    settings: SamplerSettings,
    *,
    draft_model: Any = None,
    on_step: OnStep | None = None,
) -> Generation:
    """Generates settings.batch_size pictures' tokens under one condition.

    on_step is called before each forward pass, those of a draft model and of a denoiser too, and may raise to stop:
    what it raises propagates unchanged and the caches are freed. Raises ValueError with one sentence for settings that
    cannot be met, and for a model whose outputs overflow in its number format.
    """
    if isinstance(model, ContinuousModel):
        return Generation(*generate_latents(model, condition, settings, draft_model, on_step or _ignore), model)
    decoder, layout = check(model, condition, settings, draft_model)
    begin, on_step, choice = time.perf_counter(), on_step or _ignore, ""
    if is_open(decoder, settings):
        settings, choice = tuned(model, condition, settings, decoder, layout, on_step)
    drafts = drafts_per_pass(decoder, settings, layout) if decoder.speculative else 0
    trace = Trace(layout, settings.batch_size, drafts, torch.device(model.device))
    with ExitStack() as held:
        iteration, recorder = _open(model, condition, settings, decoder, draft_model, layout, trace, held)
        try:
            tokens = decode(iteration, trace, on_step, recorder)
        except NotFinite:
            raise ValueError(
                f"{model.name} gives logits that are not finite in {model.dtype}; load it with the dtype bf16 or fp32."
            ) from None
    trace.finish(time.perf_counter() - begin)
    statistics = trace.summary(
        decoder.id,
        decoder.promise,
        draft_length=settings.draft_length if decoder.speculative else 1,
        dtype=model.dtype,
        seed=settings.seed,
        branches=settings.options.branches if decoder.follows_branches else 1,
        parts=decoder.named_parts,
        prompt=getattr(condition, "text", ""),
        window_choice=choice,
    )
    return Generation(tokens, layout, statistics, model)


def _open(
    model: TokenModel,
    condition: Any,
    settings: SamplerSettings,
    decoder: Decoder,
    draft_model: TokenModel | None,
    layout: TokenLayout,
    trace: Trace,
    held: ExitStack,
) -> tuple[Iteration, Recorder]:
    """Opens the sessions, which `held` will close, and sets up what runs on them."""
    device, guided = torch.device(model.device), settings.guidance_scale > 1
    parts = decoder.parts(model, settings.options)
    length = drafts_per_pass(decoder, settings, layout) + 1
    tree = None
    if decoder.follows_branches:
        tree = Tree.of(length, settings.options.branches, settings.options.branch_length, device)

    def opened(of: TokenModel, window: int) -> TokenSession:
        session = of.session(condition, settings.batch_size, guided, window)
        held.callback(session.close)
        return session

    with trace.timed("prefill"):
        session = opened(model, tree.slots if tree else length)
        trace.prefill_passes = session.prefill_passes
        recorder = recorder_for(device, session.resident)
        if not decoder.needs_draft_model:
            iteration = JacobiIteration(session, layout, settings, length, parts, model.vocabulary, device, tree)
            return iteration, recorder
        assert draft_model is not None  # see check
        draft_session = opened(draft_model, length)
        return DraftModelIteration(session, draft_session, layout, settings, parts, model.vocabulary, device), recorder


def _ignore(progress: Progress) -> None:
    """Without a listener."""
