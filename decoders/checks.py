"""Refuses settings that cannot be met, in words, before anything is computed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from .continuous.table import CONTINUOUS_DECODERS
from .interface import (
    ContinuousOptions,
    DecoderOptions,
    Grouping,
    Initialise,
    Redraft,
    SamplerSettings,
    TokenLayout,
    TokenModel,
    Verify,
)
from .table import AUTO, AUTO_DECODER, DECODERS, Decoder

MAX_SEED = 2**64 - 1
MAX_BRANCHES = 16


def check(
    model: TokenModel, condition: Any, settings: SamplerSettings, draft_model: TokenModel | None = None
) -> tuple[Decoder, TokenLayout]:
    """The decoder and the layout of a run; raises ValueError as `generate` does, before anything is computed."""
    decoder = _resolve(model, settings)
    layout = model.layout(condition)
    _check_settings(settings, decoder, model, layout)
    if decoder.needs_draft_model:
        _check_draft(draft_model, model, condition, layout)
    return decoder, layout


def _check_settings(settings: SamplerSettings, decoder: Decoder, model: TokenModel, layout: TokenLayout) -> None:
    length, positions, vocabulary = settings.draft_length, layout.positions, model.vocabulary
    options = settings.options
    checks = (
        (
            decoder.speculative and not 0 <= length <= positions,
            f"draft_length is {length}, but a picture of {model.name} has {positions} positions: "
            f"choose a draft_length from 1 to {positions}, or 0 for the fastest here.",
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
        (options.group_size < 1, f"group_size is {options.group_size}: choose 1 or more."),
        (
            not 0 <= options.branches <= MAX_BRANCHES,
            f"branches is {options.branches}: choose 1 (none beside the main chain) to {MAX_BRANCHES}, "
            "or 0 for what is fastest here.",
        ),
        (options.branch_length < 1, f"branch_length is {options.branch_length}: choose 1 or more."),
        (
            options.branches > 1 and not decoder.follows_branches,
            f"branches is {options.branches}, but {decoder.id} with the verifier {decoder.verify} cannot follow "
            "branches: set it to 1, or choose the decoder seed-exact.",
        ),
    )
    kind = (
        settings.continuous != ContinuousOptions(),
        f"These options are for models of continuous tokens, and {model.name} makes codes: connect Speculative Decoder "
        "Options instead.",
    )
    for failed, sentence in (kind, *checks, *_unknown_options(options)):
        if failed:
            raise ValueError(sentence)


def _unknown_options(options: DecoderOptions) -> Iterator[tuple[bool, str]]:
    for name, kind in (("redraft", Redraft), ("verify", Verify), ("initialise", Initialise), ("grouping", Grouping)):
        given, accepted = getattr(options, name), get_args(kind)
        yield given is not None and given not in accepted, f"{name} is {given!r}: choose one of {', '.join(accepted)}."


def _resolve(model: TokenModel, settings: SamplerSettings) -> Decoder:
    name = AUTO_DECODER if settings.decoder == AUTO else settings.decoder
    if name in CONTINUOUS_DECODERS and name not in DECODERS:
        raise ValueError(
            f"{name} decodes continuous tokens, and {model.name} makes codes: choose one of "
            f"{', '.join((AUTO, *DECODERS))}."
        )
    if name not in DECODERS:
        known = [AUTO, *DECODERS]
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(f"{name!r} is not a decoder: choose one of {', '.join(known)}.{hint}")
    return DECODERS[name].with_options(settings.options)


def drafts_per_pass(decoder: Decoder, settings: SamplerSettings, layout: TokenLayout) -> int:
    """Positions that one pass spans behind the one it always finds; plain AR spans those that are forced."""
    if not decoder.speculative:
        return layout.longest_forced_run
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
