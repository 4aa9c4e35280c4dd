"""The two loader nodes: a checkpoint, or a small one that drafts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.ops
from comfy_api.latest import io

from .. import model_loaders
from . import folders, sockets
from .memory import ManagedModel, computing_dtype

AUTO = "auto"
DTYPES = [AUTO, "bf16", "fp16", "fp32"]


def load(path: Path, dtype: str, **more: Any) -> ManagedModel:
    """Loads a checkpoint into ordinary memory, built from ComfyUI's layers so that it can be moved and streamed."""
    if refusal := sockets.not_listed("dtype", dtype, DTYPES):
        raise ValueError(refusal)
    model = model_loaders.load(
        path,
        device=mm.unet_offload_device(),
        dtype=computing_dtype(dtype),
        operations=comfy.ops.disable_weight_init,
        **more,
    )
    return ManagedModel.of(model)


def dtype_input() -> io.WidgetInput:
    return sockets.advanced(
        io.Combo.Input(
            "dtype",
            options=DTYPES,
            default=AUTO,
            tooltip="Number format of the weights. auto: what this device is best at.",
        )
    )


def checkpoint_input(default: str) -> io.WidgetInput:
    options = list(folders.checkpoints())
    return io.Combo.Input(
        "checkpoint",
        options=options,
        default=default,
        tooltip="A file or folder in models/ar_models, or one of the demo models that come with the pack.",
    )


def companion_input(name: str, folder: str, tooltip: str) -> io.WidgetInput:
    options = [AUTO, *folders.companions(folder)]
    return sockets.advanced(io.Combo.Input(name, options=options, default=AUTO, tooltip=tooltip))


def companion(name: str | None, folder: str) -> Path | None:
    """The chosen companion's path, or None for auto. Raises ValueError with the folders searched."""
    if name in (AUTO, None):
        return None
    known = folders.companions(folder)
    if name not in known:
        raise ValueError(folders.missing(name, folder))
    return known[name]


def chosen(checkpoint: str | None, vq: str | None = None, text_encoder: str | None = None) -> list[Path]:
    """The paths behind a loader's dropdowns, without those that come over a wire (None until the node runs)."""
    model = None if checkpoint is None else folders.find(checkpoint)
    paths = (model, companion(vq, "vae"), companion(text_encoder, "text_encoders"))
    return [path for path in paths if path is not None]


def refusal(dtype: str | None, *names: str | None) -> bool | str:
    """What validate_inputs returns: True, or the sentence for a name or dtype that is not there."""
    try:
        chosen(*names)
    except ValueError as error:
        return str(error)
    return sockets.not_listed("dtype", dtype, DTYPES) or True


def fingerprint(*names: str | None) -> list[tuple[str, int, int]]:
    return [part for path in chosen(*names) for part in folders.fingerprint(path)]


class SpecARLoadCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARLoadCheckpoint",
            display_name="Load AR Checkpoint",
            category=sockets.CATEGORY,
            description="Loads an autoregressive image model. Its family is read from the file itself.",
            inputs=[
                checkpoint_input("demo tokens"),
                dtype_input(),
                companion_input(
                    "vq",
                    "vae",
                    "The tokenizer that turns codes into pixels. auto: the one in or beside the checkpoint.",
                ),
                companion_input(
                    "text_encoder",
                    "text_encoders",
                    "The text encoder of a text model. auto: the one in or beside the checkpoint.",
                ),
            ],
            outputs=[sockets.Model.Output(display_name="model")],
        )

    @classmethod
    def validate_inputs(
        cls,
        checkpoint: str | None = None,
        dtype: str | None = None,
        vq: str | None = None,
        text_encoder: str | None = None,
    ) -> bool | str:
        return refusal(dtype, checkpoint, vq, text_encoder)

    @classmethod
    def fingerprint_inputs(
        cls, checkpoint: str | None = None, vq: str | None = None, text_encoder: str | None = None, **_: Any
    ) -> Any:
        return fingerprint(checkpoint, vq, text_encoder)

    @classmethod
    def execute(cls, checkpoint: str, dtype: str, vq: str, text_encoder: str) -> io.NodeOutput:
        managed = load(
            folders.find(checkpoint),
            dtype,
            vq_path=companion(vq, "vae"),
            text_encoder_path=companion(text_encoder, "text_encoders"),
        )
        return io.NodeOutput(managed)


class SpecARLoadDraftModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARLoadDraftModel",
            display_name="Load AR Draft Model",
            category=sockets.CATEGORY,
            description="Loads a small model that drafts tokens for a big one. Both must share vocabulary and grid.",
            inputs=[checkpoint_input("demo tokens draft"), dtype_input()],
            outputs=[sockets.DraftModel.Output(display_name="draft_model")],
        )

    @classmethod
    def validate_inputs(cls, checkpoint: str | None = None, dtype: str | None = None) -> bool | str:
        return refusal(dtype, checkpoint)

    @classmethod
    def fingerprint_inputs(cls, checkpoint: str | None = None, **_: Any) -> Any:
        return fingerprint(checkpoint)

    @classmethod
    def execute(cls, checkpoint: str, dtype: str) -> io.NodeOutput:
        return io.NodeOutput(load(folders.find(checkpoint), dtype, with_vq=False))
