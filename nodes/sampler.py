"""The node that everything leads to: conditions in, pictures, tokens and statistics out."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from comfy_api.latest import io

from ..decoders import (
    CHOICES,
    CONTINUOUS_DECODERS,
    DECODERS,
    MAX_SEED,
    ContinuousModel,
    ContinuousOptions,
    DecoderOptions,
    Generation,
    SamplerSettings,
    Statistics,
    check,
    check_continuous,
    generate,
    longest_pass,
    needs_draft_model,
    summary,
)
from . import sockets
from .decode import DecodedTokens, kind_of, to_pictures
from .memory import ManagedModel, decoding_memory, explained_out_of_memory, place_for_sampling
from .progress import RunProgress

MAX_CFG = 30.0
MAX_BATCH = 64
LOGIT_COPIES = 16  # both guidance streams, filtered, sorted, as probabilities, as drafted from, noise
ADVICE = "The sampler ran out of memory: lower batch_size or draft_length, or set cfg to 1."


def shown_widgets() -> dict[str, list[str]]:
    """Which widgets each decoder uses besides those that all use; the page hides the others."""
    only_continuous = CONTINUOUS_DECODERS.keys() - DECODERS.keys()
    return {
        decoder: ["draft_length"] * (decoder != "ar") + ["top_k", "top_p"] * (decoder not in only_continuous)
        for decoder in CHOICES
    }


class SpecARSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARSampler",
            display_name="Speculative AR Sampler",
            category=sockets.CATEGORY,
            description="Decodes pictures token by token, several tokens a forward pass.",
            inputs=[
                sockets.Model.Input("model", tooltip="From Load AR Checkpoint."),
                sockets.Conditioning.Input("conditioning", tooltip="From AR Prompt or AR Class Label."),
                sockets.DraftModel.Input(
                    "draft_model",
                    optional=True,
                    lazy=True,
                    tooltip="From Load AR Draft Model. Only the decoders draft-model and cspd use it.",
                ),
                sockets.Options.Input(
                    "options",
                    optional=True,
                    tooltip="From Speculative Decoder Options, for other decoder parts, or from Continuous Decoder "
                    "Options.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=MAX_SEED,
                    control_after_generate=True,
                    tooltip="Each picture of a batch has its own stream of this seed.",
                ),
                sockets.annotated(
                    io.Combo.Input(
                        "decoder",
                        options=CHOICES,
                        default=CHOICES[0],
                        tooltip="How tokens are found. ar takes one a pass; the others guess ahead and check.",
                    ),
                    speculativear_widgets=shown_widgets(),
                    speculativear_summaries={choice: summary(choice) for choice in CHOICES},
                ),
                io.Int.Input(
                    "draft_length",
                    default=32,
                    min=0,
                    max=1024,
                    tooltip="Positions guessed and checked in one pass. "
                    "0: what is fastest here, by a short measurement; for continuous tokens a good value.",
                ),
                io.Float.Input(
                    "cfg",
                    default=3.0,
                    min=1.0,
                    max=MAX_CFG,
                    step=0.1,
                    tooltip="How strongly the condition steers. 1 turns guidance off and halves the work.",
                ),
                io.Float.Input(
                    "temperature",
                    default=1.0,
                    min=0.0,
                    max=10.0,
                    step=0.05,
                    tooltip="Lower is calmer; 0 always takes the likeliest code.",
                ),
                io.Int.Input(
                    "top_k", default=0, min=0, max=1 << 20, tooltip="Keeps the k likeliest codes; 0 keeps all."
                ),
                io.Float.Input(
                    "top_p",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Keeps the likeliest codes up to this share; 1 keeps all.",
                ),
                io.Int.Input("batch_size", default=1, min=1, max=MAX_BATCH, tooltip="Pictures made in one run."),
                sockets.advanced(
                    io.Int.Input(
                        "preview_every",
                        default=16,
                        min=0,
                        max=4096,
                        tooltip="Tokens between previews of the first picture; 0 turns them off.",
                    )
                ),
            ],
            outputs=[
                io.Image.Output(display_name="image"),
                sockets.Tokens.Output(display_name="tokens"),
                sockets.Statistics.Output(display_name="statistics"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls, decoder: str | None = None, cfg: float | None = None, batch_size: int | None = None
    ) -> bool | str:
        """Checks what the core does not, or words badly; the core compares the other numbers with their limits."""
        if refusal := sockets.not_listed("decoder", decoder, CHOICES):
            return refusal
        if cfg is not None and not 1 <= cfg <= MAX_CFG:
            return f"cfg is {cfg:g}, but guidance goes from 1 (off) to {MAX_CFG:g}. Set it to 1 or more."
        if batch_size is not None and not 1 <= batch_size <= MAX_BATCH:
            return f"batch_size is {batch_size}, but a run makes 1 to {MAX_BATCH} pictures. Set it to 1 or more."
        return True

    @classmethod
    def check_lazy_status(cls, decoder: str, **inputs: Any) -> list[str]:
        """Asks for the draft model only where it is used; one that is not linked is absent from `inputs`."""
        waiting = "draft_model" in inputs and inputs["draft_model"] is None
        return ["draft_model"] if waiting and needs_draft_model(decoder) else []

    @classmethod
    def execute(
        cls,
        model: ManagedModel,
        conditioning: Any,
        seed: int,
        decoder: str,
        draft_length: int,
        cfg: float,
        temperature: float,
        top_k: int,
        top_p: float,
        batch_size: int,
        preview_every: int,
        draft_model: ManagedModel | None = None,
        options: DecoderOptions | ContinuousOptions | None = None,
    ) -> io.NodeOutput:
        settings = SamplerSettings(
            decoder=decoder,
            draft_length=draft_length,
            seed=seed,
            batch_size=batch_size,
            guidance_scale=cfg,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            options=options if isinstance(options, DecoderOptions) else DecoderOptions(),
            continuous=options if isinstance(options, ContinuousOptions) else ContinuousOptions(),
        )
        draft = draft_model if needs_draft_model(decoder) else None
        progress = RunProgress(
            model.model, model.model.layout(conditioning), batch_size, cls.hidden.unique_id, preview_every
        )
        with explained_out_of_memory(ADVICE):
            generation = sample(model, conditioning, settings, draft, progress)
        progress.finish()
        streamed = model.streamed
        begin = time.perf_counter()
        pictures = to_pictures(model, generation.tokens, generation.layout)
        statistics = finished(generation.statistics, streamed, time.perf_counter() - begin)
        tokens = DecodedTokens(generation.tokens.cpu(), generation.layout, model.model.name, kind_of(model.model))
        return io.NodeOutput(pictures, tokens, statistics, ui={"speculativear": [statistics.to_json()]})


def finished(statistics: Statistics, streamed: bool, decode_seconds: float) -> Statistics:
    """Adds what only the node knows: whether weights were streamed, and the time to turn codes into pixels."""
    seconds = statistics.seconds | {
        "decode": decode_seconds,
        "total": statistics.seconds["total"] + decode_seconds,
    }
    return dataclasses.replace(statistics, seconds=seconds, streamed=streamed)


def memory_required(
    target: ManagedModel, draft: ManagedModel | None, conditioning: Any, settings: SamplerSettings
) -> int:
    """Bytes of what the run allocates beside the weights; raises ValueError for settings that cannot be met."""
    draft_model = None if draft is None else draft.model
    models = [target.model] if draft is None else [target.model, draft.model]
    guided, batch_size = settings.guidance_scale > 1, settings.batch_size
    if isinstance(target.model, ContinuousModel):
        continuous, _, completed = check_continuous(target.model, conditioning, settings, draft_model)
        width = continuous.contexts(completed.continuous, completed.draft_length)
        logits = 0
    else:
        decoder, layout = check(target.model, conditioning, settings, draft_model)
        width = longest_pass(decoder, settings, layout)
        logits = LOGIT_COPIES * batch_size * width * target.model.vocabulary * torch.float32.itemsize
    return logits + sum(model.memory_required(conditioning, batch_size, guided, width) for model in models)


def sample(
    target: ManagedModel,
    conditioning: Any,
    settings: SamplerSettings,
    draft: ManagedModel | None,
    progress: RunProgress,
) -> Generation:
    """Places the models with room for what this run allocates, and decodes."""
    needed = memory_required(target, draft, conditioning, settings)
    preview = decoding_memory(target, progress.layout) if progress.preview_every else 0
    place_for_sampling(target, draft, needed + preview)
    return generate(
        target.model,
        conditioning,
        settings,
        draft_model=None if draft is None else draft.model,
        on_step=progress,
    )
