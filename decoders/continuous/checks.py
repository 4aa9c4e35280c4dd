"""Refuses settings that continuous models cannot meet, in words, before anything is computed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from ..checks import MAX_SEED
from ..interface import (
    ContinuousModel,
    DecoderOptions,
    DiffusionSampler,
    GuidanceSchedule,
    LatentLayout,
    Respacing,
    SamplerSettings,
    SigmaFactor,
    Verification,
)
from ..table import AUTO, DECODERS
from .diffusion import TIMES
from .table import AUTO_CONTINUOUS_DECODER, CONTINUOUS_DECODERS, ContinuousDecoder

_CHOICES = {
    "respacing": Respacing,
    "diffusion_sampler": DiffusionSampler,
    "guidance_schedule": GuidanceSchedule,
    "verification": Verification,
    "sigma_factor": SigmaFactor,
}


def check(
    model: ContinuousModel, condition: Any, settings: SamplerSettings, draft_model: Any = None
) -> tuple[ContinuousDecoder, LatentLayout, SamplerSettings]:
    """The decoder, the layout, and the settings with the model's own numbers where 0 or None asked for them.

    Raises ValueError with one sentence for what cannot be met.
    """
    decoder = _resolve(model, settings)
    layout = model.layout(condition)
    settings = _completed(model, layout, decoder, settings)
    for failed, sentence in _refusals(model, layout, decoder, settings):
        if failed:
            raise ValueError(sentence)
    process = model.process(settings.continuous)
    if process.deterministic and decoder.promise(settings.continuous) in ("lossless", "approximate"):
        raise ValueError(
            f"{decoder.id} compares the noise of two samplers, and ddim with eta 0 has none: choose ddpm, an eta above "
            "0, or the decoder ar or seed-exact."
        )
    if decoder.needs_draft_model:
        _check_draft(draft_model, model, condition, layout)
    return decoder, layout, settings


def _resolve(model: ContinuousModel, settings: SamplerSettings) -> ContinuousDecoder:
    name = AUTO_CONTINUOUS_DECODER if settings.decoder == AUTO else settings.decoder
    known = ", ".join((AUTO, *CONTINUOUS_DECODERS))
    if name in CONTINUOUS_DECODERS:
        return CONTINUOUS_DECODERS[name]
    if name in DECODERS:
        raise ValueError(f"{name} decodes codes, and {model.name} makes continuous tokens: choose one of {known}.")
    nearest = difflib.get_close_matches(name, CONTINUOUS_DECODERS, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    raise ValueError(f"{name!r} is not a decoder: choose one of {known}.{hint}")


def _completed(
    model: ContinuousModel, layout: LatentLayout, decoder: ContinuousDecoder, settings: SamplerSettings
) -> SamplerSettings:
    options = settings.continuous
    options = replace(
        options,
        iterations=options.iterations or layout.iterations,
        diffusion_steps=options.diffusion_steps or model.diffusion_steps,
        respacing=options.respacing or model.respacing,
        guidance_schedule=options.guidance_schedule or layout.guidance_schedule,
    )
    return replace(settings, continuous=options, draft_length=settings.draft_length or decoder.automatic_length)


def _refusals(
    model: ContinuousModel, layout: LatentLayout, decoder: ContinuousDecoder, settings: SamplerSettings
) -> Iterator[tuple[bool, str]]:
    options, positions = settings.continuous, layout.positions
    name = model.name
    yield (
        not 0 <= settings.draft_length <= TIMES,
        f"draft_length is {settings.draft_length}: choose 1 to {TIMES}, or 0.",
    )
    yield settings.batch_size < 1, f"batch_size is {settings.batch_size}: choose 1 or more."
    yield not 0 <= settings.seed <= MAX_SEED, f"seed is {settings.seed}: choose a seed from 0 to {MAX_SEED}."
    yield settings.guidance_scale < 1, f"cfg is {settings.guidance_scale}: choose 1 (no guidance) or more."
    yield settings.temperature < 0, f"temperature is {settings.temperature}: choose 0 (no noise but the first) or more."
    yield (
        settings.temperature == 0 and decoder.promise(options) in ("lossless", "approximate"),
        f"temperature is 0, which leaves {decoder.id} no noise to compare: choose more, or the decoder ar.",
    )
    yield (
        settings.top_k > 0 or settings.top_p < 1,
        f"top_k and top_p choose among codes, and {name} makes continuous tokens: set top_k to 0 and top_p to 1.",
    )
    yield (
        settings.options != DecoderOptions(),
        f"These decoder options are for models of codes, and {name} makes continuous tokens: connect Continuous "
        "Decoder Options instead.",
    )
    yield (
        not 1 <= options.iterations <= positions,
        f"iterations is {options.iterations}, but a picture of {name} has {positions} positions: choose 1 to "
        f"{positions}, or 0 for {layout.iterations}.",
    )
    yield (
        layout.in_order and options.iterations != positions,
        f"iterations is {options.iterations}, but {name} makes its {positions} positions one by one: set it to 0.",
    )
    yield (
        not 1 <= options.diffusion_steps <= TIMES,
        f"diffusion_steps is {options.diffusion_steps}: choose 1 to {TIMES}, or 0 for {model.diffusion_steps}.",
    )
    yield not 0 <= options.eta <= 1, f"eta is {options.eta}: choose 0 (no noise) to 1."
    yield options.tolerance < 0, f"tolerance is {options.tolerance}: choose 0 (none) or more."
    yield options.softening < 1, f"softening is {options.softening}: choose 1 (none) or more."
    yield not 0 <= options.prefill_ratio <= 1, f"prefill_ratio is {options.prefill_ratio}: choose 0 to 1."
    yield (
        options.noisy_last_step and decoder.id != "ar",
        f"noisy_last_step is for the decoder ar, and {decoder.id} decides itself: turn it off.",
    )
    for field, kind in _CHOICES.items():
        given, accepted = getattr(options, field), get_args(kind)
        yield given not in accepted, f"{field} is {given!r}: choose one of {', '.join(accepted)}."


def _check_draft(draft_model: Any, model: ContinuousModel, condition: Any, layout: LatentLayout) -> None:
    if draft_model is None:
        raise ValueError("The decoder cspd needs a draft model: connect one, or choose another decoder.")
    if not isinstance(draft_model, ContinuousModel):
        raise ValueError(
            f"The draft model {draft_model.name} makes codes and {model.name} continuous tokens: use a draft model of "
            "the same kind."
        )
    own, target = draft_model.layout(condition), layout
    if (own.grid, own.channels) != (target.grid, target.channels):
        raise ValueError(
            f"The draft model {draft_model.name} makes {_tokens(own)} and {model.name} {_tokens(target)}: use a draft "
            "model for the same picture size and VAE."
        )


def _tokens(layout: LatentLayout) -> str:
    _, rows, columns = layout.grid
    return f"{rows} x {columns} tokens of {layout.channels} numbers"
