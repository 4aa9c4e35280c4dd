"""The decoders of continuous tokens by id: what each promises and what it runs. A new method is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..interface import ContinuousOptions, Promise
from . import cspd
from .autoregressive import autoregressive
from .jacobi import AUDITED_STEPS, seed_exact
from .run import Run
from .speculative_head import speculative_sample


@dataclass(frozen=True)
class ContinuousDecoder:
    """A row of the table. promise: what the decoder guarantees under given options.

    run: fills a Run's canvas; the number is the draft length. automatic_length: what stands for a draft length of 0.
    contexts: how many contexts of a picture the target's trunk sees in one pass of a draft length.
    """

    id: str
    title: str
    summary: str
    promise: Callable[[ContinuousOptions], Promise]
    run: Callable[[Run, ContinuousOptions, int], None]
    automatic_length: int = 1
    contexts: Callable[[ContinuousOptions, int], int] = lambda _options, _length: 1
    needs_draft_model: bool = False
    adds_last_noise: Callable[[ContinuousOptions], bool] = lambda options: options.noisy_last_step


def _exact_cspd(options: ContinuousOptions) -> bool:
    return options.verification == "prefix" and options.sigma_factor == "off" and options.softening == 1


def _seed_exact(options: ContinuousOptions) -> Promise:
    return "seed-exact within tolerance" if options.tolerance else "seed-exact"


def _always(promise: Promise) -> Callable[[ContinuousOptions], Promise]:
    return lambda _options: promise


def _run_head(run: Run, _options: ContinuousOptions, drafts: int) -> None:
    window = min(drafts, run.target.process.steps)
    autoregressive(run, partial(speculative_sample, window=window, count=run.trace.judge))


AUTO_CONTINUOUS_DECODER = "head-speculative"

CONTINUOUS_DECODERS: dict[str, ContinuousDecoder] = {
    decoder.id: decoder
    for decoder in (
        ContinuousDecoder(
            "ar",
            "Autoregressive",
            "The model's own sampler, AR step after AR step: the reference.",
            promise=_always("reference"),
            run=lambda run, _options, _length: autoregressive(run),
        ),
        ContinuousDecoder(
            "seed-exact",
            "Seed-exact",
            "Several AR steps a pass with each position's own noise; a step counts once the tokens before it repeat "
            "within the tolerance: the picture of ar for the same seed, as near as the statistics say.",
            promise=_seed_exact,
            run=lambda run, options, length: seed_exact(run, length, options.tolerance),
            automatic_length=8,
            contexts=lambda options, length: max(length, AUDITED_STEPS) if options.tolerance else 1,
        ),
        ContinuousDecoder(
            "head-speculative",
            "Speculative head",
            "Several diffusion steps a call of the head, kept by maximal coupling: the model's own distribution.",
            promise=_always("lossless"),
            run=_run_head,
            automatic_length=20,
        ),
        ContinuousDecoder(
            "cspd",
            "Continuous Speculative Decoding",
            "A draft model draws tokens with the target's noise, and those near the target's own are kept.",
            promise=lambda options: "lossless" if _exact_cspd(options) else "approximate",
            run=cspd.run,
            automatic_length=8,
            contexts=lambda options, length: length + 1 if options.verification == "prefix" else 1,
            needs_draft_model=True,
            adds_last_noise=lambda options: options.verification == "prefix",
        ),
    )
}
