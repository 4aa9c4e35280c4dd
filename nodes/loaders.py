"""The two loader nodes: a checkpoint, or a small one that drafts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.ops
import comfy.utils
import torch
from comfy_api.latest import io

from .. import model_loaders
from ..model_loaders.companions import find_text_encoder, vq_candidates
from ..model_loaders.llamagen import PIXELS_PER_CODE
from . import folders, sockets
from .memory import ManagedModel, computing_dtype

AUTO = "auto"
EIGHT_BIT = "fp8"
DTYPES = [AUTO, "bf16", "fp16", "fp32", EIGHT_BIT]
LARGEST_PICTURE = 1024  # pixels


def load(path: Path, dtype: str, picture_size: int = 0, **more: Any) -> ManagedModel:
    """Loads a checkpoint into ordinary memory, built from ComfyUI's layers so that it can be moved and streamed."""
    if sentence := sockets.not_listed("dtype", dtype, DTYPES) or not_drawable(picture_size):
        raise ValueError(sentence)
    eight_bit = dtype == EIGHT_BIT
    model = model_loaders.load(
        path,
        device=mm.unet_offload_device(),
        dtype=computing_dtype(AUTO if eight_bit else dtype),
        storage=torch.float8_e4m3fn if eight_bit else None,
        operations=comfy.ops.manual_cast if eight_bit else comfy.ops.disable_weight_init,
        overrides={"size": picture_size} if picture_size else {},
        on_progress=LoadingProgress(),
        **more,
    )
    return ManagedModel.of(model)


class LoadingProgress:
    """Fills the node's bar while weights are read; raises ComfyUI's interrupt when the user cancelled."""

    def __init__(self) -> None:
        self.bar = comfy.utils.ProgressBar(100)

    def __call__(self, done: int, total: int) -> None:
        mm.throw_exception_if_processing_interrupted()
        percent = 100 * done // total
        if percent != self.bar.current:
            self.bar.update_absolute(percent)


def dtype_input() -> io.WidgetInput:
    return sockets.advanced(
        io.Combo.Input(
            "dtype",
            options=DTYPES,
            default=AUTO,
            tooltip="Number format of the weights. auto: what this device is best at. fp8: stored in half the memory "
            "of bf16, computed as auto does; a little less exact.",
        )
    )


def picture_size_input() -> io.WidgetInput:
    """Optional, and last in its node: graphs from before it existed stay valid."""
    return sockets.advanced(
        io.Int.Input(
            "picture_size",
            default=0,
            min=0,
            max=LARGEST_PICTURE,
            step=PIXELS_PER_CODE,
            optional=True,
            tooltip="For files whose name does not tell the size that they were trained for (LlamaGen, Lumina-mGPT): "
            "the side of that square in pixels, such as 256, 384, 512 or 768. 0: what the file tells.",
        )
    )


def not_drawable(picture_size: int | None) -> str | None:
    """A sentence for a picture_size that no model has; None is a value that comes over a wire."""
    if picture_size is None or (0 <= picture_size <= LARGEST_PICTURE and picture_size % PIXELS_PER_CODE == 0):
        return None
    return (
        f"picture_size is {picture_size}, but a picture is a multiple of {PIXELS_PER_CODE} pixels wide, at most "
        f"{LARGEST_PICTURE}. Set it to what the model was trained for, or to 0 for what the file tells."
    )


def checkpoint_input(default: str) -> io.WidgetInput:
    options = list(folders.listed(folders.CHECKPOINT))
    return io.Combo.Input(
        "checkpoint",
        options=options,
        default=default,
        tooltip="A file or folder in models/ar_models, or one of the demo models that come with the pack.",
    )


def companion_input(name: str, kind: folders.Kind, tooltip: str) -> io.WidgetInput:
    options = [AUTO, *folders.listed(kind)]
    return sockets.advanced(io.Combo.Input(name, options=options, default=AUTO, tooltip=tooltip))


def companion(name: str | None, kind: folders.Kind) -> Path | None:
    """The chosen companion's path, or None for auto. Raises ValueError with the folders searched."""
    return None if name is None or name == AUTO else folders.find(name, kind)


def chosen(checkpoint: str | None, vq: str | None = None, text_encoder: str | None = None) -> list[Path]:
    """The paths behind a loader's dropdowns, without those that come over a wire (None until the node runs)."""
    model = None if checkpoint is None else folders.find(checkpoint, folders.CHECKPOINT)
    paths = (model, companion(vq, folders.VQ), companion(text_encoder, folders.TEXT_ENCODER))
    return [path for path in paths if path is not None]


def taken_by_auto(checkpoint: Path, vq: bool, text_encoder: bool) -> list[Path]:
    """What lies beside a checkpoint and decides what `auto` takes."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    encoder = find_text_encoder(folder) if text_encoder else None
    return [*(vq_candidates(checkpoint) if vq else ()), *([encoder] if encoder else ())]


def refusal(dtype: str | None, picture_size: int | None, *names: str | None) -> bool | str:
    """What validate_inputs returns: True, or the sentence for a name, dtype or size that does not exist."""
    try:
        chosen(*names)
    except ValueError as error:
        return str(error)
    return sockets.not_listed("dtype", dtype, DTYPES) or not_drawable(picture_size) or True


def fingerprint(
    checkpoint: str | None, vq: str | None = None, text_encoder: str | None = None
) -> list[tuple[str, int, int]]:
    """Changes when a file changes that the loader reads, chosen or found by `auto`; no tensor is read for it."""
    paths = chosen(checkpoint, vq, text_encoder)
    if checkpoint is not None:
        paths += taken_by_auto(folders.find(checkpoint, folders.CHECKPOINT), vq == AUTO, text_encoder == AUTO)
    return [part for path in paths for part in folders.fingerprint(path)]


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
                    folders.VQ,
                    "The tokenizer that turns codes into pixels. auto: the one in or beside the checkpoint.",
                ),
                companion_input(
                    "text_encoder",
                    folders.TEXT_ENCODER,
                    "The text encoder of a text model, a folder. auto: the one in or beside the checkpoint.",
                ),
                picture_size_input(),
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
        picture_size: int | None = None,
    ) -> bool | str:
        return refusal(dtype, picture_size, checkpoint, vq, text_encoder)

    @classmethod
    def fingerprint_inputs(
        cls, checkpoint: str | None = None, vq: str | None = None, text_encoder: str | None = None, **_: Any
    ) -> Any:
        return fingerprint(checkpoint, vq, text_encoder)

    @classmethod
    def execute(cls, checkpoint: str, dtype: str, vq: str, text_encoder: str, picture_size: int = 0) -> io.NodeOutput:
        managed = load(
            folders.find(checkpoint, folders.CHECKPOINT),
            dtype,
            picture_size,
            vq_path=companion(vq, folders.VQ),
            text_encoder_path=companion(text_encoder, folders.TEXT_ENCODER),
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
            inputs=[checkpoint_input("demo tokens draft"), dtype_input(), picture_size_input()],
            outputs=[sockets.DraftModel.Output(display_name="draft_model")],
        )

    @classmethod
    def validate_inputs(
        cls, checkpoint: str | None = None, dtype: str | None = None, picture_size: int | None = None
    ) -> bool | str:
        return refusal(dtype, picture_size, checkpoint)

    @classmethod
    def fingerprint_inputs(cls, checkpoint: str | None = None, **_: Any) -> Any:
        return fingerprint(checkpoint)

    @classmethod
    def execute(cls, checkpoint: str, dtype: str, picture_size: int = 0) -> io.NodeOutput:
        path = folders.find(checkpoint, folders.CHECKPOINT)
        return io.NodeOutput(load(path, dtype, picture_size, with_vq=False))
