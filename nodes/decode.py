"""Tokens on a wire, and the node that turns them into a picture again without sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..decoders import ContinuousModel
from . import sockets
from .memory import Layout, ManagedModel, explained_out_of_memory, place_for_decoding

ADVICE = "The tokens are done, but their picture did not fit: close other programs that use the device."


@dataclass(frozen=True)
class DecodedTokens:
    """SPECAR_TOKENS: codes LongTensor [B, N] or continuous tokens float32 [B, N, C] in ordinary memory, where they sit,
    which model made them, and what its tokens are."""

    tokens: Tensor
    layout: Layout
    model_name: str
    kind: str


def kind_of(model: Any) -> str:
    """What a model's tokens are: two models that say the same can read one another's."""
    continuous = isinstance(model, ContinuousModel)
    return f"continuous tokens of {model.channels} numbers" if continuous else f"{model.vocabulary} codes"


def to_pictures(managed: ManagedModel, tokens: Tensor, layout: Layout) -> Tensor:
    """Codes [B, N] or continuous tokens [B, N, C] to float32 [B * frames, H, W, 3] in 0..1, in ordinary memory."""
    with explained_out_of_memory(ADVICE):
        place_for_decoding(managed, layout)
        return managed.model.decode(tokens.to(managed.model.device), layout).cpu()


class SpecARDecodeTokens(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARDecodeTokens",
            display_name="Decode AR Tokens",
            category=sockets.CATEGORY,
            description="Turns a sampler's tokens into pictures, for example with another tokenizer file.",
            inputs=[
                sockets.Model.Input("model", tooltip="From Load AR Checkpoint; the model that made the tokens."),
                sockets.Tokens.Input("tokens", tooltip="From Speculative AR Sampler."),
            ],
            outputs=[io.Image.Output(display_name="image")],
        )

    @classmethod
    def execute(cls, model: ManagedModel, tokens: DecodedTokens) -> io.NodeOutput:
        own = kind_of(model.model)
        if own != tokens.kind:
            raise ValueError(
                f"These tokens come from {tokens.model_name}, which makes {tokens.kind}, but {model.model.name} makes "
                f"{own}. Connect the checkpoint that made them."
            )
        return io.NodeOutput(to_pictures(model, tokens.tokens, tokens.layout))
