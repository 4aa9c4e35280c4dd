"""Janus (arXiv 2410.13848) and Janus-Pro (2501.17811): a language model with an image embedding and head of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..decoders.interface import TokenLayout
from .prompted import PromptCondition, PromptedModel, PromptedNetwork
from .text_tokenizer import TextTokenizer, missing_tokenizer
from .transformer import TransformerConfig

PIXELS_PER_CODE = 16
TOKENIZER_REPOSITORY = "deepseek-ai/Janus-Pro-7B"
IMAGE_BEGIN = "<begin_of_image>"


@dataclass(frozen=True)
class JanusConfig:
    """A transformer and its image side: how many codes there are, and the channels of their embedding."""

    transformer: TransformerConfig
    codes: int
    code_channels: int


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """How a prompt is spelt: the tokenizer, the ids around the text, and the names of the two who speak."""

    tokenizer: TextTokenizer
    begin: int
    pad: int
    image_begin: int
    roles: tuple[str, str]

    def encode(self, text: str) -> tuple[str, tuple[int, ...]]:
        """The text in its template, and the ids of that from the first token of all to the image's beginning."""
        user, assistant = self.roles
        turns = f"{user}: {text.strip()}\n\n{assistant}:"
        return turns + IMAGE_BEGIN, (self.begin, *self.tokenizer.encode(turns), self.image_begin)


class JanusNetwork(PromptedNetwork):
    """The transformer between two small perceptrons: one makes inputs of codes, the other logits of features."""

    def __init__(self, config: JanusConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__(config.transformer, operations, **factory)
        dim, channels = config.transformer.dim, config.code_channels

        def perceptron(inputs: int, outputs: int) -> nn.Sequential:
            first = operations.Linear(inputs, dim, **factory)
            return nn.Sequential(first, nn.GELU(), operations.Linear(dim, outputs, **factory))

        self.gen_embed = operations.Embedding(config.codes, channels, **factory)
        self.gen_aligner = perceptron(channels, dim)
        self.gen_head = perceptron(dim, config.codes)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """See PromptedNetwork.embed_codes."""
        return self.gen_aligner(self.gen_embed(codes))

    def code_logits(self, features: Tensor) -> Tensor:
        """See PromptedNetwork.code_logits."""
        return self.gen_head(features)


class Janus(PromptedModel):
    """Janus and Janus-Pro: one size, and nothing between the codes.

    size: the picture's side in pixels. folder: where its tokenizer is awaited.
    Its authors sample with guidance 5 and temperature 1 from all codes.
    """

    family = "janus"

    def __init__(
        self, network: JanusNetwork, *, size: int, folder: Path, tokens: PromptTokens | None = None, **model: Any
    ) -> None:
        super().__init__(network, **model)
        self.size, self.folder, self.tokens = size, folder, tokens

    def prompt(self, text: str, *, negative: str = "", width: int = 0, height: int = 0) -> PromptCondition:
        """Encodes a prompt; raises ValueError for a size that the model does not draw (0 takes its own)."""
        if (width or self.size, height or self.size) != (self.size, self.size):
            raise ValueError(
                f"{self.name} cannot draw {width} x {height} pixels; the nearest size, and the only one, is "
                f"{self.size} x {self.size} (0 x 0 means the same)."
            )
        if self.tokens is None:
            raise missing_tokenizer(self.name, "tokenizer.json", TOKENIZER_REPOSITORY, self.folder)
        spelt, ids = self.tokens.encode(text)
        opposite = self.tokens.encode(negative)[1] if negative.strip() else ()
        return self.condition(ids, self.tokens.pad, opposite, spelt)

    def condition(self, ids: Sequence[int], pad: int, negative: Sequence[int] = (), text: str = "") -> PromptCondition:
        """A condition from the ids of a prompt, its first token and the image's beginning included.

        Without a negative prompt the unconditional stream is as long, with padding for the words. The padding is seen
        like any other token: the model was trained that way.
        """
        unconditional = negative or (ids[0], *[pad] * (len(ids) - 2), ids[-1])
        side = self.size // PIXELS_PER_CODE
        return PromptCondition(tuple(ids), tuple(unconditional), TokenLayout.free(side, side), text, self.family)
