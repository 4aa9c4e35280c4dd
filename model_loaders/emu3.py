"""Emu3 (arXiv 2409.18869): text, picture codes and structure in one vocabulary, pictures of any ratio near one area."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..decoders.interface import TokenLayout
from .emu3_tokenizer import FILE as TOKENIZER_FILE
from .prompted import PromptCondition, PromptedModel, PromptedNetwork
from .text_tokenizer import TextTokenizer, missing_tokenizer
from .transformer import TransformerConfig

PIXELS_PER_CODE = 8
REPOSITORY = "BAAI/Emu3-Gen"
# What Emu3's demo adds to every prompt, and what it steers away from.
QUALITY = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
BEGIN, IMAGE_BEGIN, IMAGE = "<|extra_203|>", "<|image start|>", "<|image token|>"


@dataclass(frozen=True)
class TokenIds:
    """Where a picture's parts stand in the vocabulary. first_code: the first of the codes, which follow one another."""

    begin: int
    image_begin: int
    image: int
    row_end: int
    frame_end: int
    image_end: int
    end: int
    first_code: int

    @property
    def structure(self) -> tuple[int, ...]:
        """The ids of the structure codes, which are numbered from the vocabulary of codes on."""
        return self.row_end, self.frame_end, self.image_end, self.end


class Emu3Network(PromptedNetwork):
    """The transformer, and its head over the codes alone."""

    def __init__(
        self, config: TransformerConfig, ids: TokenIds, codes: int, operations: Any = nn, **factory: Any
    ) -> None:
        super().__init__(config, operations, **factory)
        self.ids, self.codes = ids, codes
        self.output = operations.Linear(config.dim, codes, bias=False, **factory)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """See PromptedNetwork.embed_codes."""
        ids = codes + self.ids.first_code
        for place, structure in enumerate(self.ids.structure):
            ids = torch.where(codes == self.codes + place, structure, ids)
        return self.tok_embeddings(ids)

    def code_logits(self, features: Tensor) -> Tensor:
        """See PromptedNetwork.code_logits."""
        return self.output(features)


class Emu3(PromptedModel):
    """Emu3-Gen: the size is part of the prompt, and structure tokens end each row and the picture.

    Its authors sample with guidance 3, temperature 1 and the 2048 likeliest codes. area: of a picture, in pixels.
    quality: what follows every prompt. folder: where its tokenizer is awaited.
    """

    family = "emu3"
    network: Emu3Network

    def __init__(
        self,
        network: Emu3Network,
        *,
        area: int,
        folder: Path,
        quality: str = QUALITY,
        tokenizer: TextTokenizer | None = None,
        **model: Any,
    ) -> None:
        super().__init__(network, vocabulary=network.codes, **model)
        self.area, self.quality = area, quality
        self.folder, self.tokenizer = folder, tokenizer

    def prompt(self, text: str, *, negative: str = "", width: int = 0, height: int = 0) -> PromptCondition:
        """Encodes a prompt; raises ValueError for a size that the model does not draw (0 takes its own).

        What Emu3's demo does is the default: its words for quality follow the text, and without a negative prompt the
        unconditional stream has the demo's, NEGATIVE. Both streams end with the size.
        """
        rows, columns = self._grid(width, height)
        size = f"{rows}*{columns}"
        words = text.strip() + self.quality
        return self.condition(
            self._encoded(words, size),
            self._encoded(negative.strip() or NEGATIVE, size),
            rows,
            columns,
            f"{BEGIN}{words}{IMAGE_BEGIN}{size}{IMAGE}",
        )

    def condition(
        self, prompt: Sequence[int], negative: Sequence[int], rows: int, columns: int, text: str = ""
    ) -> PromptCondition:
        """A condition from the ids of both streams, first token and size included, and a size in codes."""
        row_end, *tail = range(self.vocabulary, self.vocabulary + len(self.network.ids.structure))
        forced = torch.tensor([*([-1] * columns + [row_end]) * rows, *tail])
        layout = TokenLayout((1, rows, columns), forced, row_ends=1)
        return PromptCondition(tuple(prompt), tuple(negative), layout, text, self.family)

    def _encoded(self, words: str, size: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise missing_tokenizer(self.name, TOKENIZER_FILE, REPOSITORY, self.folder)
        ids, encode = self.network.ids, self.tokenizer.encode
        return ids.begin, *encode(words), ids.image_begin, *encode(size), ids.image

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of codes for a picture of that many pixels."""
        own_rows, own_columns = self._drawn(1, 1)
        width, height = width or own_columns * PIXELS_PER_CODE, height or own_rows * PIXELS_PER_CODE
        rows, columns = height // PIXELS_PER_CODE, width // PIXELS_PER_CODE
        whole = not (width % PIXELS_PER_CODE or height % PIXELS_PER_CODE)
        # What the rule gives for some ratio: the line of all ratios crosses the square that rounds to this grid.
        cells = self.area / PIXELS_PER_CODE**2
        if not (whole and (rows - 0.5) * (columns - 0.5) <= cells <= (rows + 0.5) * (columns + 0.5)):
            nearest_rows, nearest_columns = self._drawn(width, height)
            side = round(math.sqrt(self.area))
            raise ValueError(
                f"{self.name} cannot draw {width} x {height} pixels; the nearest size is "
                f"{nearest_columns * PIXELS_PER_CODE} x {nearest_rows * PIXELS_PER_CODE}: both sides are multiples of "
                f"{PIXELS_PER_CODE}, and the area is about that of {side} x {side}."
            )
        return rows, columns

    def _drawn(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of codes that Emu3 draws for a ratio, by its authors' rule."""
        scale = math.sqrt(self.area / (width * height)) / PIXELS_PER_CODE
        return round(height * scale), round(width * scale)
