"""Models that are told in text what to paint: a prompt's token ids first, then the picture's codes, in one sequence.

Janus, Chameleon (Lumina-mGPT, Anole) and Emu3 share this; a family adds its prompt, its sizes and its network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..decoders.interface import TokenLayout
from .rotary import line_rotary_table
from .session import RaggedSession
from .transformer import KeyValueCache, Transformer


@dataclass(frozen=True, eq=False)
class PromptCondition:
    """An encoded prompt.

    ids: what precedes the first code, text and structure alike; unconditional: the same for the unconditional stream,
    of any length. layout: the picture's positions. text: what was encoded, template included. family: whose tokens.
    """

    ids: tuple[int, ...]
    unconditional: tuple[int, ...]
    layout: TokenLayout
    text: str
    family: str


class PromptedNetwork(Transformer):
    """What a family's network adds to the transformer: how codes come in and go out."""

    def embed_codes(self, codes: Tensor) -> Tensor:
        """LongTensor [...] of codes, structure codes from V on -> inputs [..., dim]."""
        raise NotImplementedError

    def code_logits(self, features: Tensor) -> Tensor:
        """Features [..., dim] -> logits [..., V] over the codes that a free position can take."""
        raise NotImplementedError


class PromptedModel:
    """Implements decoders.interface.TokenModel but for `prompt`. `device` is where it computes.

    vq: a module with decode(codes [B, rows, columns]) -> pixels [B, 3, H, W] about -1..1, code_vectors() -> [V, C] and
    config.factor, the pixels a code is wide; None for draft models.
    """

    family = ""
    takes = "a prompt"
    labels: Sequence[str] = ()
    classes = 0
    text_encoder = None

    def __init__(
        self,
        network: PromptedNetwork,
        *,
        name: str,
        vocabulary: int,
        device: torch.device,
        dtype: torch.dtype,
        vq: Any = None,
    ) -> None:
        self.network, self.name, self.vocabulary = network, name, vocabulary
        self.device, self.dtype, self.vq = device, dtype, vq
        self.pass_seconds: dict[Any, dict[int, float]] = {}

    def prompt(self, text: str, *, negative: str = "", width: int = 0, height: int = 0) -> PromptCondition:
        """Encodes a prompt; raises ValueError for a size that the model does not draw (0 takes its own)."""
        raise NotImplementedError

    def class_label(self, label: int | str) -> NoReturn:  # noqa: ARG002  (the same for every label)
        """Raises ValueError: these models take a prompt."""
        raise ValueError(f"{self.name} takes a prompt, not a class label; connect a prompt.")

    def layout(self, condition: Any) -> TokenLayout:
        """See TokenModel.layout; raises ValueError for another family's condition."""
        return self._own(condition).layout

    def session(self, condition: Any, batch_size: int, guided: bool, window: int) -> RaggedSession:
        """See TokenModel.session. The shorter stream is padded on the left; its positions count from its own start."""
        condition = self._own(condition)
        streams = [condition.ids, condition.unconditional] if guided else [condition.ids]
        length = max(map(len, streams))
        ids = torch.tensor([(0,) * (length - len(stream)) + tuple(stream) for stream in streams], device=self.device)
        shifts = torch.tensor([length - len(stream) for stream in streams], device=self.device)
        config = self.network.config
        slots = length + condition.layout.positions + window
        return RaggedSession(
            self.network,
            self.network.tok_embeddings(ids).to(self.dtype),
            torch.arange(length, device=self.device) >= shifts[:, None],
            line_rotary_table(slots, config.head_dim, config.rope_base),
            batch_size,
            window,
            lambda codes: self.network.embed_codes(codes).to(self.dtype),
            self.network.code_logits,
            shifts,
        )

    def _own(self, condition: Any) -> PromptCondition:
        if not isinstance(condition, PromptCondition):
            raise ValueError(f"{self.name} takes a prompt; connect AR Prompt with this model.")
        if condition.family != self.family:
            raise ValueError(
                f"This prompt was encoded for {condition.family} and {self.name} is {self.family}; connect AR Prompt "
                "with this model."
            )
        known = self.network.config.vocabulary
        if max(*condition.ids, *condition.unconditional) >= known:
            raise ValueError(
                f"The tokenizer beside {self.name} is another model's: its ids go beyond the {known} that the weights "
                "know; take the one from the repository of these weights."
            )
        return condition

    def memory_required(self, condition: Any, batch_size: int, guided: bool, window: int) -> int:
        """Bytes of the cache that a session allocates."""
        condition = self._own(condition)
        prefix = max(len(condition.ids), len(condition.unconditional))
        rows = (2 if guided else 1) * batch_size
        slots = prefix + condition.layout.positions + window
        return KeyValueCache.bytes(self.network.config, rows, slots, self.dtype)

    def decode(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """See TokenModel.decode."""
        return ((self.pixels(tokens, layout) + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).float()

    def pixels(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """LongTensor [B, N] -> pictures [B, 3, H, W], about -1..1; decoded one by one to bound the memory."""
        vq = self._vq()
        codes = layout.cells(tokens.to(self.device))[:, 0]
        return torch.cat([vq.decode(picture[None]) for picture in codes])

    def code_embeddings(self) -> Tensor:
        """See TokenModel.code_embeddings."""
        return self._vq().code_vectors().float()

    def _vq(self) -> Any:
        if self.vq is None:
            raise ValueError(f"{self.name} was loaded without its VQ tokenizer, which pictures need; load it with one.")
        return self.vq
