"""The two nodes that say what to paint: a text, or a class of the training data."""

from __future__ import annotations

from comfy_api.latest import io

from . import sockets
from .memory import ManagedModel, explained_out_of_memory, place_text_encoder


class SpecARPrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARPrompt",
            display_name="AR Prompt",
            category=sockets.CATEGORY,
            description="Describes the picture in words, for models that were trained on text.",
            inputs=[
                sockets.Model.Input("model", tooltip="From Load AR Checkpoint."),
                io.String.Input("text", multiline=True, dynamic_prompts=True, tooltip="What the picture shows."),
                sockets.advanced(
                    io.String.Input(
                        "negative",
                        multiline=True,
                        default="",
                        tooltip="What to steer away from, for the families that take it.",
                    )
                ),
                sockets.advanced(
                    io.Int.Input("width", default=0, min=0, max=4096, step=8, tooltip="0: the checkpoint's own size.")
                ),
                sockets.advanced(
                    io.Int.Input("height", default=0, min=0, max=4096, step=8, tooltip="0: the checkpoint's own size.")
                ),
            ],
            outputs=[sockets.Conditioning.Output(display_name="conditioning")],
        )

    @classmethod
    def execute(cls, model: ManagedModel, text: str, negative: str, width: int, height: int) -> io.NodeOutput:
        with explained_out_of_memory("The text encoder did not fit: close other programs that use the device."):
            place_text_encoder(model)
            return io.NodeOutput(model.model.prompt(text, negative=negative, width=width, height=height))


class SpecARClassLabel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARClassLabel",
            display_name="AR Class Label",
            category=sockets.CATEGORY,
            description="Picks a class, for models that were trained on labelled pictures.",
            inputs=[
                sockets.Model.Input("model", tooltip="From Load AR Checkpoint."),
                io.String.Input(
                    "label",
                    default="0",
                    tooltip="A class number, or a name if the checkpoint brings names. "
                    "An unknown name is answered with the nearest ones.",
                ),
            ],
            outputs=[sockets.Conditioning.Output(display_name="conditioning")],
        )

    @classmethod
    def execute(cls, model: ManagedModel, label: str) -> io.NodeOutput:
        return io.NodeOutput(model.model.class_label(label))
