"""LlamaGen (arXiv 2406.06525): class- and text-conditional models over a raster of VQ codes, as a TokenModel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decoders.interface import TokenLayout
from .class_labels import ClassCondition, ClassLabels
from .rotary import grid_rotary_table
from .session import RaggedSession
from .text_encoder import REPOSITORY as TEXT_ENCODER_REPOSITORY
from .text_encoder import TextEncoder
from .transformer import KeyValueCache, Transformer, TransformerConfig
from .vq import VQTokenizer

PIXELS_PER_CODE = 16


@dataclass(frozen=True)
class LlamaGenConfig:
    """A transformer and what conditions it: a number of classes, or captions of so many rows and channels."""

    transformer: TransformerConfig
    classes: int = 0
    caption_length: int = 0
    caption_dim: int = 0

    @property
    def prefix_length(self) -> int:
        """Condition rows before the first code."""
        return 1 if self.classes else self.caption_length


@dataclass(frozen=True)
class CaptionCondition:
    """An encoded prompt: features [P, C] with the text at the right end, visible bool [P], False for padding.

    negative holds the same two for the unconditional stream; None takes the model's learned empty caption, under the
    mask of the prompt.
    """

    features: Tensor
    visible: Tensor
    negative: tuple[Tensor, Tensor] | None = None
    text: str = ""


Condition = ClassCondition | CaptionCondition


class ClassEmbedding(nn.Module):
    """One row per class and, last, the row of the unconditional stream."""

    def __init__(self, config: LlamaGenConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.embedding_table = operations.Embedding(config.classes + 1, config.transformer.dim, **factory)


class CaptionProjection(nn.Module):
    """Text features to condition rows; without biases, so that zero padding stays zero."""

    def __init__(self, config: LlamaGenConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.fc1 = operations.Linear(config.caption_dim, config.transformer.dim, bias=False, **factory)
        self.fc2 = operations.Linear(config.transformer.dim, config.transformer.dim, bias=False, **factory)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))


class CaptionEmbedding(nn.Module):
    """The projection and the learned empty caption, which an embedding layer holds so that partial loading moves it."""

    def __init__(self, config: LlamaGenConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.cap_proj = CaptionProjection(config, operations, **factory)
        self.uncond_embedding = operations.Embedding(config.caption_length, config.caption_dim, **factory)


class LlamaGenNetwork(Transformer):
    """All weights of a LlamaGen model under the names of its checkpoints."""

    def __init__(self, config: LlamaGenConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__(config.transformer, operations, **factory)
        self.output = operations.Linear(config.transformer.dim, config.transformer.vocabulary, bias=False, **factory)
        kind = ClassEmbedding if config.classes else CaptionEmbedding
        self.cls_embedding: Any = kind(config, operations, **factory)


class LlamaGen(ClassLabels):
    """Implements decoders.interface.TokenModel. `device` is where it computes, wherever its weights rest.

    labels: names of the first classes, as many as there are; a class beyond them has its number only.
    """

    def __init__(
        self,
        config: LlamaGenConfig,
        network: LlamaGenNetwork,
        *,
        name: str,
        grid: tuple[int, int],
        labels: Sequence[str] = (),
        device: torch.device,
        dtype: torch.dtype,
        vq: VQTokenizer | None = None,
        text_encoder: TextEncoder | None = None,
    ) -> None:
        self.config, self.network = config, network
        self.name, self.grid, self.labels = name, grid, list(labels)[: config.classes]
        self.device, self.dtype = device, dtype
        self.vq, self.text_encoder = vq, text_encoder
        self.pass_seconds: dict[Any, dict[int, float]] = {}
        self.classes = config.classes
        self.family = "llamagen-c2i" if config.classes else "llamagen-t2i"
        self.vocabulary = config.transformer.vocabulary

    def class_label(self, label: int | str) -> ClassCondition:
        """See ClassLabels.class_label; raises ValueError where the model takes a prompt."""
        if not self.classes:
            raise self._takes("a prompt", "a class label")
        return super().class_label(label)

    def prompt(self, text: str, *, negative: str = "", width: int = 0, height: int = 0) -> CaptionCondition:
        """Encodes a prompt; raises ValueError for a size that the model does not draw (0 takes its own)."""
        if self.classes:
            raise self._takes("a class label", "a prompt")
        own_height, own_width = (side * self._pixels_per_code for side in self.grid)
        width, height = width or own_width, height or own_height
        if (width, height) != (own_width, own_height):
            raise ValueError(
                f"{self.name} cannot draw {width} x {height} pixels; the nearest size, and the only one, is "
                f"{own_width} x {own_height} (0 x 0 means the same)."
            )
        if self.text_encoder is None:
            raise ValueError(
                f"{self.name} needs the text encoder {TEXT_ENCODER_REPOSITORY}; put a copy of that folder, named "
                "flan-t5-xl, beside the checkpoint, or choose it in the loader."
            )
        encode = self.text_encoder.encode
        opposite = self.caption(*encode(negative, self.config.caption_length)) if negative.strip() else None
        condition = self.caption(*encode(text, self.config.caption_length), text=text)
        if opposite is None:
            return condition
        return CaptionCondition(condition.features, condition.visible, (opposite.features, opposite.visible), text)

    def caption(self, features: Tensor, mask: Tensor, text: str = "") -> CaptionCondition:
        """A condition from text features [P, C] and their mask [P]: text moves to the right end, the rest is zero."""
        text_rows = features[mask.bool()]
        padding = features.shape[0] - text_rows.shape[0]
        visible = torch.arange(features.shape[0], device=features.device) >= padding
        return CaptionCondition(F.pad(text_rows, (0, 0, padding, 0)), visible, text=text)

    @property
    def _pixels_per_code(self) -> int:
        return self.vq.config.factor if self.vq is not None else PIXELS_PER_CODE

    def layout(self, condition: Condition) -> TokenLayout:
        """See TokenModel.layout; raises ValueError as `session` does."""
        self._check(condition)
        return TokenLayout.free(*self.grid)

    def _check(self, condition: Condition) -> None:
        """Raises ValueError for a condition that a model of another kind made, or of other classes or captions."""
        if isinstance(condition, ClassCondition):
            self.class_label(condition.label)
        elif self.classes:
            raise self._takes("a class label", "a prompt")
        else:
            rows, channels = self.config.caption_length, self.config.caption_dim
            if not isinstance(condition, CaptionCondition) or condition.features.shape != (rows, channels):
                raise ValueError(
                    f"{self.name} takes prompts encoded as {rows} rows of {channels} channels, and this one was not: "
                    f"connect AR Prompt with {self.name}; as a draft model choose one with its target's text encoder."
                )

    def session(self, condition: Condition, batch_size: int, guided: bool, window: int) -> RaggedSession:
        """See TokenModel.session; raises ValueError for a condition that another kind of model made."""
        if isinstance(condition, ClassCondition):
            prefix, visible = self._class_rows(condition, guided)
        elif self.classes:
            raise self._takes("a class label", "a prompt")
        else:
            prefix, visible = self._caption_rows(condition, guided)
        rotary = grid_rotary_table(
            *self.grid,
            self.config.transformer.head_dim,
            self.config.transformer.rope_base,
            self.config.prefix_length,
            padding=window,
        )
        return RaggedSession(
            self.network, prefix.to(self.dtype), visible, rotary, batch_size, window, self._embed, self.network.output
        )

    def _class_rows(self, condition: ClassCondition, guided: bool) -> tuple[Tensor, Tensor]:
        self.class_label(condition.label)  # raises where the condition comes from a model of other classes
        labels = [condition.label, self.classes] if guided else [condition.label]
        rows = self.network.cls_embedding.embedding_table(torch.tensor(labels, device=self.device)[:, None])
        return rows, torch.ones(rows.shape[:2], dtype=torch.bool, device=self.device)

    def _caption_rows(self, condition: CaptionCondition, guided: bool) -> tuple[Tensor, Tensor]:
        self._check(condition)
        embedding = self.network.cls_embedding
        captions, visible = [condition.features], [condition.visible]
        if guided:
            empty = embedding.uncond_embedding(torch.arange(self.config.caption_length, device=self.device))
            features, mask = condition.negative or (empty, condition.visible)
            captions.append(features)
            visible.append(mask)
        features = torch.stack([caption.to(self.device, self.dtype) for caption in captions])
        return embedding.cap_proj(features), torch.stack([mask.to(self.device) for mask in visible])

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.network.tok_embeddings(tokens).to(self.dtype)

    def memory_required(self, condition: Condition, batch_size: int, guided: bool, window: int) -> int:  # noqa: ARG002
        """Bytes of the cache that a session allocates."""
        rows = (2 if guided else 1) * batch_size
        slots = self.config.prefix_length + self.grid[0] * self.grid[1] + window
        return KeyValueCache.bytes(self.config.transformer, rows, slots, self.dtype)

    def decode(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """See TokenModel.decode."""
        return ((self.pixels(tokens, layout) + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).float()

    def pixels(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """LongTensor [B, N] -> pictures [B, 3, H, W], about -1..1; decoded one by one to bound the memory."""
        vq = self._vq()
        codes = tokens.to(self.device).unflatten(1, layout.grid[1:])
        return torch.cat([vq.decode(picture[None]) for picture in codes])

    def code_embeddings(self) -> Tensor:
        """See TokenModel.code_embeddings: the unit vectors of the code book."""
        return self._vq().quantize.vectors(self.device).float()

    def _vq(self) -> VQTokenizer:
        if self.vq is None:
            raise ValueError(f"{self.name} was loaded without its VQ tokenizer, which pictures need; load it with one.")
        return self.vq
