"""The single entry: check the settings, run the decoder, hand back tokens, picture and statistics."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from .engine import decode_by_draft_model, decode_by_jacobi
from .interface import (
    DecoderOptions,
    Grouping,
    Initialise,
    OnStep,
    Progress,
    Redraft,
    SamplerSettings,
    TokenLayout,
    TokenModel,
    Verify,
)
from .statistics import Statistics, Trace
from .table import AUTO, AUTO_DECODER, DECODERS, Decoder

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, eq=False)
class Generation:
    """A finished run. tokens: LongTensor [B, N]."""

    tokens: Tensor
    layout: TokenLayout
    statistics: Statistics
    model: TokenModel

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
    model: TokenModel,
    condition: Any,
    settings: SamplerSettings,
    *,
    draft_model: TokenModel | None = None,
    on_step: OnStep | None = None,
) -> Generation:
    """Generates settings.batch_size pictures' tokens under one condition.

    on_step is called before each forward pass, the draft model's too, and may raise to stop: what it raises propagates
    unchanged and the caches are freed. Raises ValueError with one sentence for settings that cannot be met.
    """
    decoder, layout = check(model, condition, settings, draft_model)
    drafts = _drafts_per_pass(decoder, settings)
    trace = Trace(layout, settings.batch_size, drafts)
    with trace.timed("total"):
        tokens = _decode(model, condition, settings, decoder, draft_model, layout, trace, on_step or _ignore)
    trace.seconds["verify"] = trace.seconds["total"] - trace.seconds["prefill"] - trace.seconds["draft"]
    draft_length = drafts if decoder.needs_draft_model else drafts + 1
    statistics = trace.summary(
        decoder.id, decoder.promise, settings.seed, draft_length, torch.device(model.device), model.dtype
    )
    return Generation(tokens, layout, statistics, model)


def _decode(
    model: TokenModel,
    condition: Any,
    settings: SamplerSettings,
    decoder: Decoder,
    draft_model: TokenModel | None,
    layout: TokenLayout,
    trace: Trace,
    on_step: OnStep,
) -> Tensor:
    device = torch.device(model.device)
    guided = settings.guidance_scale > 1
    parts = decoder.parts(model, settings.options)
    window = _drafts_per_pass(decoder, settings) + 1
    sessions = []
    try:
        with trace.timed("prefill"):
            session = model.session(condition, settings.batch_size, guided, window)
            sessions.append(session)
            if draft_model is not None and decoder.needs_draft_model:
                sessions.append(draft_model.session(condition, settings.batch_size, guided, window))
        trace.prefill_passes = session.prefill_passes
        if decoder.needs_draft_model:
            return decode_by_draft_model(session, sessions[1], layout, settings, parts, trace, on_step, device)
        return decode_by_jacobi(session, layout, settings, window, parts, model.vocabulary, trace, on_step, device)
    finally:
        for opened in sessions:
            opened.close()


def check(
    model: TokenModel, condition: Any, settings: SamplerSettings, draft_model: TokenModel | None = None
) -> tuple[Decoder, TokenLayout]:
    """The decoder and the layout of a run; raises ValueError as `generate` does, before anything is computed."""
    decoder = _resolve(settings)
    layout = model.layout(condition)
    _check_settings(settings, decoder, model, layout)
    if decoder.needs_draft_model:
        _check_draft(draft_model, model, condition, layout)
    return decoder, layout


def _check_settings(settings: SamplerSettings, decoder: Decoder, model: TokenModel, layout: TokenLayout) -> None:
    length, positions, vocabulary = settings.draft_length, layout.positions, model.vocabulary
    checks = (
        (
            decoder.speculative and not 1 <= length <= positions,
            f"draft_length is {length}, but a picture of {model.name} has {positions} positions: "
            f"choose a draft_length from 1 to {positions}.",
        ),
        (settings.batch_size < 1, f"batch_size is {settings.batch_size}: choose 1 or more."),
        (not 0 <= settings.seed <= MAX_SEED, f"seed is {settings.seed}: choose a seed from 0 to {MAX_SEED}."),
        (settings.guidance_scale < 1, f"cfg is {settings.guidance_scale}: choose 1 (no guidance) or more."),
        (settings.temperature < 0, f"temperature is {settings.temperature}: choose 0 (the likeliest code) or more."),
        (
            not 0 <= settings.top_k <= vocabulary,
            f"top_k is {settings.top_k}, but {model.name} has {vocabulary} codes: "
            f"choose 0 (all codes) or a top_k from 1 to {vocabulary}.",
        ),
        (not 0 < settings.top_p <= 1, f"top_p is {settings.top_p}: choose a top_p above 0 and up to 1."),
        (settings.options.group_size < 1, f"group_size is {settings.options.group_size}: choose 1 or more."),
    )
    for failed, sentence in (*checks, *_unknown_options(settings.options)):
        if failed:
            raise ValueError(sentence)


def _unknown_options(options: DecoderOptions) -> Iterator[tuple[bool, str]]:
    for name, kind in (("redraft", Redraft), ("verify", Verify), ("initialise", Initialise), ("grouping", Grouping)):
        given, accepted = getattr(options, name), get_args(kind)
        yield given is not None and given not in accepted, f"{name} is {given!r}: choose one of {', '.join(accepted)}."


def _resolve(settings: SamplerSettings) -> Decoder:
    name = AUTO_DECODER if settings.decoder == AUTO else settings.decoder
    if name not in DECODERS:
        known = [AUTO, *DECODERS]
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(f"{name!r} is not a decoder: choose one of {', '.join(known)}.{hint}")
    return DECODERS[name].with_options(settings.options)


def _drafts_per_pass(decoder: Decoder, settings: SamplerSettings) -> int:
    if not decoder.speculative:
        return 0
    return settings.draft_length if decoder.needs_draft_model else settings.draft_length - 1


def _check_draft(draft_model: TokenModel | None, model: TokenModel, condition: Any, layout: TokenLayout) -> None:
    if draft_model is None:
        raise ValueError("The decoder draft-model needs a draft model: connect one, or choose another decoder.")
    if draft_model.vocabulary != model.vocabulary:
        raise ValueError(
            f"The draft model {draft_model.name} has {draft_model.vocabulary} codes and {model.name} has "
            f"{model.vocabulary}: use a draft model that was trained on the same image tokenizer."
        )
    draft_grid = draft_model.layout(condition).grid
    if draft_grid != layout.grid:
        raise ValueError(
            f"The draft model {draft_model.name} makes a grid of {_times(draft_grid)} codes and {model.name} one of "
            f"{_times(layout.grid)}: use a draft model for the same picture size."
        )


def _times(grid: tuple[int, int, int]) -> str:
    return "x".join(str(side) for side in grid)


def _ignore(progress: Progress) -> None:
    """Without a listener."""
