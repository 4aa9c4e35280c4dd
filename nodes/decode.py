"""Tokens on a wire, and the node that turns them into a picture again without sampling."""

from __future__ import annotations

from dataclasses import dataclass

from comfy_api.latest import io
from torch import Tensor

from ..decoders import TokenLayout
from . import sockets
from .memory import ManagedModel, explained_out_of_memory, place_for_decoding

ADVICE = "The codes are done, but their picture did not fit: close other programs that use the device."


@dataclass(frozen=True)
class DecodedTokens:
    """SPECAR_TOKENS: codes LongTensor [B, N] in ordinary memory, where they sit, and which model made them."""

    codes: Tensor
    layout: TokenLayout
    model_name: str
    vocabulary: int


def to_pictures(managed: ManagedModel, codes: Tensor, layout: TokenLayout) -> Tensor:
    """LongTensor [B, N] to float32 [B * frames, H, W, 3] in 0..1, in ordinary memory."""
    with explained_out_of_memory(ADVICE):
        place_for_decoding(managed, layout)
        return managed.model.decode(codes.to(managed.model.device), layout).cpu()


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
        if model.model.vocabulary != tokens.vocabulary:
            raise ValueError(
                f"These tokens come from {tokens.model_name} with {tokens.vocabulary} codes, but {model.model.name} "
                f"has {model.model.vocabulary}. Connect the checkpoint that made them."
            )
        return io.NodeOutput(to_pictures(model, tokens.codes, tokens.layout))
