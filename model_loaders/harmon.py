"""Harmon (arXiv 2503.21979): MAR's encoder, a language model that reads the prompt and the tokens, MAR's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decoders.interface import LatentLayout
from .latent_model import LatentModel
from .mar import MARConfig, MARNetwork, Seen, all_rows, asked_rows
from .rotary import line_rotary_table
from .text_tokenizer import TextTokenizer, missing_tokenizer
from .transformer import CachedRows, KeyValueCache, Transformer, TransformerConfig

TOKENIZER_REPOSITORY = "Qwen/Qwen2.5-0.5B-Instruct"
TURN = "<|im_start|>"
_TEMPLATE = TURN + "user\n{}<|im_end|>\n" + TURN + "assistant\n"
_ASK, _ASK_FOR_ANY = "Generate an image: {}", "Generate an image."


@dataclass(frozen=True)
class HarmonConfig:
    """A language model and the MAR around it."""

    language: TransformerConfig
    mar: MARConfig


@dataclass(frozen=True, eq=False)
class HarmonCondition:
    """An encoded prompt. ids, unconditional: of the two streams. grid: rows and columns of tokens. text: what was
    encoded, template included."""

    ids: tuple[int, ...]
    unconditional: tuple[int, ...]
    grid: tuple[int, int]
    text: str = ""


class HarmonNetwork(nn.Module):
    """All weights that painting needs."""

    def __init__(self, config: HarmonConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.config = config
        dim, width = config.language.dim, config.mar.width

        def perceptron(inputs: int, outputs: int) -> nn.Sequential:
            first = operations.Linear(inputs, dim, **factory)
            return nn.Sequential(first, nn.SiLU(), operations.Linear(dim, outputs, **factory))

        self.llm = Transformer(config.language, operations, **factory)
        self.mar = MARNetwork(config.mar, operations, **factory)
        self.proj_in, self.proj_out = perceptron(width, dim), perceptron(dim, width)


class PromptCache:
    """Implements transformer.Cache: what the prompts left, before whatever a pass brings; nothing is kept of that.

    keys, values: [layers, G, P, H, hd], one row a stream.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def write(self, layer: int, cached: CachedRows, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See Cache.write; the rows of a pass are the streams', each as often as the pass needs it."""
        count = len(cached.visible) // self.keys.shape[1]
        before = (kept[layer].repeat_interleave(count, dim=0) for kept in (self.keys, self.values))
        return torch.cat((next(before), key), dim=1), torch.cat((next(before), value), dim=1)


@dataclass(frozen=True, eq=False)
class Places:
    """The position tables for a grid: of encoder and decoder [buffer + N, D], of the head [N, D]."""

    encoder: Tensor
    decoder: Tensor
    head: Tensor

    @staticmethod
    def of(network: MARNetwork, grid: tuple[int, int], device: torch.device) -> Places:
        buffer = network.config.buffer

        def fitted(table: nn.Embedding, buffer: int) -> Tensor:
            rows = all_rows(table, device)
            return torch.cat((rows[:buffer], resized(rows[buffer:], grid)))

        return Places(
            fitted(network.encoder_positions, buffer),
            fitted(network.decoder_positions, buffer),
            fitted(network.head_positions, 0),
        )


def resized(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """A table of a square of positions [n * n, D], bilinearly for another grid [rows * columns, D]."""
    side = round(len(table) ** 0.5)
    if grid == (side, side):
        return table
    square = table.float().T.unflatten(1, (side, side))[None]
    return F.interpolate(square, grid, mode="bilinear", align_corners=False)[0].flatten(1).T.to(table.dtype)


class HarmonSession:
    """Implements decoders.interface.LatentSession. Features are what the head is told, [G, M, width].

    The prompts' keys and values are computed once. Those of tokens are not kept: a token in the middle moves all that
    come after it.
    """

    def __init__(self, model: Harmon, condition: HarmonCondition, guided: bool) -> None:
        self.network, self.dtype = model.network, model.dtype
        streams = [condition.ids, condition.unconditional] if guided else [condition.ids]
        self.lengths = torch.tensor([len(ids) for ids in streams], device=model.device)
        self.prompt_length = max(map(len, streams))
        config = self.network.config
        slots = self.prompt_length + config.mar.buffer + condition.grid[0] * condition.grid[1]
        language = config.language
        self.turns = tuple(
            table.to(model.device) for table in line_rotary_table(slots, language.head_dim, language.rope_base)
        )
        self.places = Places.of(self.network.mar, condition.grid, model.device)
        self.cache = self._read(streams)

    def _read(self, streams: Sequence[Sequence[int]]) -> PromptCache:
        """Runs the language model over the prompts, padded behind their ends."""
        length, language = self.prompt_length, self.network.config.language
        device = self.lengths.device
        ids = torch.tensor([(*ids, *[0] * (length - len(ids))) for ids in streams], device=device)
        cache = KeyValueCache(language, len(streams), length, device, self.dtype)
        places = torch.arange(length, device=device)
        rows = torch.arange(len(streams), device=device)[:, None]
        causal = (places[:, None] >= places).expand(len(streams), -1, -1)
        cached = CachedRows(cache, rows, places.expand(len(streams), -1), causal)
        cos, sin = (table[None, :length] for table in self.turns)
        self.network.llm.hidden(self.network.llm.tok_embeddings(ids).to(self.dtype), cos, sin, cached)
        return PromptCache(cache.keys, cache.values)

    def features(self, tokens: Tensor, order: Tensor, known: Tensor, longest: int, asked: Tensor) -> Tensor:
        """See LatentSession.features."""
        mar, streams, rows = self.network.mar, len(self.lengths), len(tokens)
        seen = Seen.of(order, known, longest)
        said = mar.unconditional_rows(rows, tokens.device).to(self.dtype)
        encoded = mar.encode(tokens, seen, said, self.places.encoder)
        x = encoded + self.network.proj_out(self._understood(self.network.proj_in(encoded), seen)).unflatten(
            0, (streams, rows)
        )
        both = Seen(seen.positions.repeat(streams, 1), seen.real.repeat(streams, 1))
        z = mar.decode(x.flatten(0, 1), both, self.places.decoder, self.places.head)
        return mar.head.condition(asked_rows(z, asked.repeat(streams, 1))).unflatten(0, (streams, -1))

    def _understood(self, x: Tensor, seen: Seen) -> Tensor:
        """The language model's features of rows [R, buffer + T, dim] after each stream's prompt, [G * R, .., dim].

        It reads the tokens in raster order and the buffer after them.
        """
        buffer, streams = self.network.config.mar.buffer, len(self.lengths)
        length = seen.real.shape[1]
        x = torch.cat((x[:, buffer:], x[:, :buffer]), dim=1).repeat(streams, 1, 1)
        real = torch.cat((seen.real, seen.real.new_ones(len(seen.real), buffer)), dim=1).repeat(streams, 1)
        own = torch.arange(length + buffer, device=x.device)
        after = self.lengths.repeat_interleave(len(seen.real))
        positions = after[:, None] + real.long().cumsum(1) - 1
        prompt = torch.arange(self.prompt_length, device=x.device) < after[:, None]
        visible = torch.cat(
            (
                prompt[:, None].expand(-1, len(own), -1),
                (real[:, None] | torch.eye(len(own), dtype=torch.bool, device=x.device)) & (own[:, None] >= own),
            ),
            dim=-1,
        )
        cos, sin = (table[positions.clamp(min=0)] for table in self.turns)
        cached = CachedRows(self.cache, positions[:, :1], positions, visible)
        hidden = self.network.llm.hidden(x, cos, sin, cached)
        return torch.cat((hidden[:, length:], hidden[:, :length]), dim=1)

    def denoise(self, x: Tensor, time: Tensor, features: Tensor, guidance: Tensor) -> Tensor:
        """See LatentSession.denoise."""
        return self.network.mar.head.guided(x, time, features, guidance)

    def close(self) -> None:
        """See LatentSession.close."""
        del self.cache


class Harmon(LatentModel):
    """Harmon 0.5B and 1.5B, and any other size.

    native: tokens along the picture that the weights were made for; side: of the picture drawn where no size is asked
    for. pixels: that a token is wide. folder: where its tokenizer is awaited.
    """

    family = "harmon"
    takes = "a prompt"
    network: HarmonNetwork

    def __init__(
        self,
        network: HarmonNetwork,
        *,
        native: int,
        side: int,
        token_pixels: int,
        iterations: int,
        folder: Path,
        tokenizer: TextTokenizer | None = None,
        **model: Any,
    ) -> None:
        mar, language = network.config.mar, network.config.language
        super().__init__(network, channels=mar.channels, width=max(mar.width, language.dim), **model)
        self.native, self.side, self.token_pixels, self.iterations = native, side, token_pixels, iterations
        self.folder, self.tokenizer = folder, tokenizer

    def prompt(self, text: str, *, negative: str = "", width: int = 0, height: int = 0) -> HarmonCondition:
        """Encodes a prompt; raises ValueError for a size that the model does not draw (0 takes its own)."""
        grid = self._tokens_along(height, width, height), self._tokens_along(width, width, height)
        if self.tokenizer is None:
            raise missing_tokenizer(self.name, "tokenizer.json", TOKENIZER_REPOSITORY, self.folder)
        asked = _TEMPLATE.format(_ASK.format(text.strip()))
        unasked = _TEMPLATE.format(_ASK.format(negative.strip()) if negative.strip() else _ASK_FOR_ANY)
        ids, unconditional = (tuple(self.tokenizer.encode(words)) for words in (asked, unasked))
        return HarmonCondition(ids, unconditional, grid, asked)

    def _tokens_along(self, asked: int, width: int, height: int) -> int:
        tokens, rest = divmod(asked or self.side * self.token_pixels, self.token_pixels)
        if rest or not self.native <= tokens <= 2 * self.native:
            smallest, largest = (sides * self.native * self.token_pixels for sides in (1, 2))
            raise ValueError(
                f"{self.name} cannot draw {width} x {height} pixels; each side is a multiple of {self.token_pixels} "
                f"from {smallest} to {largest} (0 means {self.side * self.token_pixels})."
            )
        return tokens

    def class_label(self, label: int | str) -> NoReturn:  # noqa: ARG002  (the same for every label)
        """Raises ValueError: the model takes a prompt."""
        raise ValueError(f"{self.name} takes a prompt, not a class label; connect a prompt.")

    def layout(self, condition: Any) -> LatentLayout:
        """See ContinuousModel.layout; raises ValueError for another family's condition."""
        if not isinstance(condition, HarmonCondition):
            raise ValueError(f"{self.name} takes a prompt encoded for it; connect AR Prompt with this model.")
        known = self.network.config.language.vocabulary
        if max(*condition.ids, *condition.unconditional) >= known:
            raise ValueError(
                f"The tokenizer beside {self.name} is another model's: its ids go beyond the {known} that the weights "
                f"know; take tokenizer.json from {TOKENIZER_REPOSITORY}."
            )
        positions = condition.grid[0] * condition.grid[1]
        return LatentLayout((1, *condition.grid), self.channels, min(self.iterations, positions), "constant")

    def latent_session(self, condition: Any, batch_size: int, guided: bool) -> HarmonSession:  # noqa: ARG002
        """See ContinuousModel.latent_session."""
        self.layout(condition)
        return HarmonSession(self, condition, guided)

    def memory_required(self, condition: Any, batch_size: int, guided: bool, contexts: int) -> int:
        """See LatentModel.memory_required; here the masks of the language model come on top."""
        rows = (2 if guided else 1) * batch_size * contexts
        length = self.layout(condition).positions + self.network.config.mar.buffer
        masks = rows * length * (length + len(condition.ids))
        return super().memory_required(condition, batch_size, guided, contexts) + masks * (1 + self.dtype.itemsize)
