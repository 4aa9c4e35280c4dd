"""Chameleon (arXiv 2405.09818) where it was trained to paint: Lumina-mGPT (2408.02657) and Anole (2407.06135)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..decoders.interface import TokenLayout
from .prompted import PromptCondition, PromptedModel, PromptedNetwork
from .text_tokenizer import TextTokenizer, missing_tokenizer
from .transformer import TransformerConfig

CODES = 8192
PIXELS_PER_CODE = 16
CODES_PER_UNIT = 2  # Lumina-mGPT states sizes in units of this many codes
PIXELS_PER_UNIT = PIXELS_PER_CODE * CODES_PER_UNIT
MOST_EXTREME_RATIO = 4
ROW_END, IMAGE_END = CODES, CODES + 1  # Lumina-mGPT's structure between the codes


@dataclass(frozen=True)
class TokenIds:
    """Where a picture's parts stand in the vocabulary. codes: the id of each code; units: the id of each count."""

    codes: tuple[int, ...]
    units: tuple[int, ...]
    end_of_turn: int
    image_begin: int
    image_end: int
    row_end: int
    begin: int = 0


class ChameleonNetwork(PromptedNetwork):
    """The transformer, its head over the codes alone, and a second table of embeddings for codes and structure.

    That copy costs half a percent of the weights. It spares a table of ids, which partial loading would leave behind.
    """

    def __init__(self, config: TransformerConfig, structure: int, operations: Any = nn, **factory: Any) -> None:
        super().__init__(config, operations, **factory)
        self.picture_embeddings = operations.Embedding(CODES + structure, config.dim, **factory)
        self.output = operations.Linear(config.dim, CODES, bias=False, **factory)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """See PromptedNetwork.embed_codes."""
        return self.picture_embeddings(codes)

    def code_logits(self, features: Tensor) -> Tensor:
        """See PromptedNetwork.code_logits."""
        return self.output(features)


class ChameleonModel(PromptedModel):
    """What Lumina-mGPT and Anole share.

    size: the side, in pixels, of the square picture that it was trained on. folder: where its tokenizer is awaited.
    """

    tokenizer_repository = ""

    def __init__(
        self,
        network: ChameleonNetwork,
        *,
        ids: TokenIds,
        size: int,
        folder: Path,
        tokenizer: TextTokenizer | None = None,
        **model: Any,
    ) -> None:
        super().__init__(network, vocabulary=CODES, **model)
        self.ids, self.size = ids, size
        self.folder, self.tokenizer = folder, tokenizer

    def _encoded(self, text: str) -> tuple[int, ...]:
        """A turn of the user: its ids, from the first token of all to the end of the turn."""
        if self.tokenizer is None:
            raise missing_tokenizer(self.name, "tokenizer.json", self.tokenizer_repository, self.folder)
        return (self.ids.begin, *self.tokenizer.encode(text), self.ids.end_of_turn)


class Lumina(ChameleonModel):
    """Lumina-mGPT: the size is part of the prompt, and structure tokens end each row and the picture.

    Its authors sample with guidance 4, temperature 1 and the 2000 likeliest codes.
    """

    family = "lumina-mgpt"
    tokenizer_repository = "Alpha-VLLM/Lumina-mGPT-7B-768"  # the only one of its repositories that holds one

    def prompt(self, text: str, *, negative: str = "", width: int = 0, height: int = 0) -> PromptCondition:
        """Encodes a prompt; raises ValueError for a size that the model does not draw (0 takes its own)."""
        width, height = width or self.size, height or self.size
        if not self._draws(width, height):
            nearest = " x ".join(map(str, self._nearest(width, height)))
            raise ValueError(
                f"{self.name} cannot draw {width} x {height} pixels; the nearest size is {nearest}: both sides are "
                f"multiples of {PIXELS_PER_UNIT}, neither is over {MOST_EXTREME_RATIO} times the other, and the area "
                f"is at most {self.size} x {self.size}."
            )
        size = f"Generate an image of {width}x{height} according to the following prompt:\n"
        opposite = self._encoded(size + negative) if negative.strip() else ()
        units_high, units_wide = height // PIXELS_PER_UNIT, width // PIXELS_PER_UNIT
        return self.condition(self._encoded(size + text), units_high, units_wide, opposite, size + text)

    def condition(
        self, prompt: Sequence[int], height: int, width: int, negative: Sequence[int] = (), text: str = ""
    ) -> PromptCondition:
        """A condition from the ids of a turn and a size in units.

        The image's beginning and its size end both streams, so that the first position is the first code. Without a
        negative prompt the unconditional stream has nothing else.
        """
        begin = (self.ids.image_begin, self.ids.units[height], self.ids.units[width])
        rows, columns = height * CODES_PER_UNIT, width * CODES_PER_UNIT
        forced = torch.tensor([*([-1] * columns + [ROW_END]) * rows, IMAGE_END])
        layout = TokenLayout((1, rows, columns), forced, row_ends=1)
        return PromptCondition((*prompt, *begin), (*negative, *begin), layout, text, self.family)

    def _draws(self, width: int, height: int) -> bool:
        ratio = max(width, height) / min(width, height)
        whole = not (width % PIXELS_PER_UNIT or height % PIXELS_PER_UNIT)
        return whole and ratio <= MOST_EXTREME_RATIO and width * height <= self.size**2

    def _nearest(self, width: int, height: int) -> tuple[int, int]:
        """The size that is drawn and least stretched or scaled against the given one."""
        sides = range(PIXELS_PER_UNIT, self.size * math.isqrt(MOST_EXTREME_RATIO) + 1, PIXELS_PER_UNIT)
        drawn = [(wide, high) for wide in sides for high in sides if self._draws(wide, high)]
        return min(drawn, key=lambda size: math.hypot(math.log(size[0] / width), math.log(size[1] / height)))


class Anole(ChameleonModel):
    """Anole: one size, and nothing between the codes. Guidance 3 and the 2000 likeliest codes are a usual choice."""

    family = "anole"
    tokenizer_repository = "leloy/Anole-7b-v0.1-hf"

    def prompt(self, text: str, *, negative: str = "", width: int = 0, height: int = 0) -> PromptCondition:
        """Encodes a prompt; raises ValueError for a size that the model does not draw (0 takes its own)."""
        if (width or self.size, height or self.size) != (self.size, self.size):
            raise ValueError(
                f"{self.name} cannot draw {width} x {height} pixels; the nearest size, and the only one, is "
                f"{self.size} x {self.size} (0 x 0 means the same)."
            )
        return self.condition(self._encoded(text), self._encoded(negative) if negative.strip() else (), text)

    def condition(self, prompt: Sequence[int], negative: Sequence[int] = (), text: str = "") -> PromptCondition:
        """A condition from the ids of a turn; without a negative prompt the unconditional stream has no turn."""
        side = self.size // PIXELS_PER_CODE
        ids = (*prompt, self.ids.image_begin)
        unconditional = (*(negative or (self.ids.begin,)), self.ids.image_begin)
        return PromptCondition(ids, unconditional, TokenLayout.free(side, side), text, self.family)
