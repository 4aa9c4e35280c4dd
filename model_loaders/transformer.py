"""The one decoder-only transformer behind every token family; a family is a configuration, a key map and a prompt.

Pre-norm, no biases, SwiGLU, fused query-key-value projection. Module names are those of LlamaGen's checkpoints, so that
its key map is the identity. Every parameter sits on a leaf layer made by `operations`: ComfyUI streams those layers
when a model does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a transformer. ffn_dim is the width inside the SwiGLU, vocabulary the rows of embedding and head."""

    layers: int
    heads: int
    dim: int
    ffn_dim: int
    vocabulary: int
    norm_eps: float = 1e-5
    rope_base: float = 1e4

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class KeyValueCache:
    """Keys and values of every row, written by slot; one allocation for the whole generation.

    What a query may see is decided by its own slot (keys at or before it), so going back is writing again.
    """

    def __init__(
        self, config: TransformerConfig, rows: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.layers, rows, slots, config.heads, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    @staticmethod
    def bytes(config: TransformerConfig, rows: int, slots: int, dtype: torch.dtype) -> int:
        """What the constructor will allocate."""
        return 2 * config.layers * rows * slots * config.heads * config.head_dim * dtype.itemsize

    def write(self, layer: int, rows: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value [R, T, H, hd] at slots [R, T]; returns the layer's [R, S, H, hd]."""
        self.keys[layer][rows, slots] = key
        self.values[layer][rows, slots] = value
        return self.keys[layer], self.values[layer]


@dataclass(frozen=True)
class CachedRows:
    """Where this pass writes and what it sees: slots LongTensor [R, T], visible bool [R, 1, T, S]."""

    cache: KeyValueCache
    rows: Tensor
    slots: Tensor
    visible: Tensor


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on adjacent channel pairs, in float32. x [R, T, H, hd]; cos, sin [R or 1, T, hd/2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.wqkv = operations.Linear(config.dim, 3 * config.dim, bias=False, **factory)
        self.wo = operations.Linear(config.dim, config.dim, bias=False, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, cached: CachedRows | None) -> Tensor:
        query, key, value = self.wqkv(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
        query, key = rotate_interleaved(query, cos, sin), rotate_interleaved(key, cos, sin)
        if cached is not None:
            key, value = cached.cache.write(layer, cached.rows, cached.slots, key, value)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if cached is None else cached.visible,
            is_causal=cached is None,
        )
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.w1 = operations.Linear(config.dim, config.ffn_dim, bias=False, **factory)
        self.w3 = operations.Linear(config.dim, config.ffn_dim, bias=False, **factory)
        self.w2 = operations.Linear(config.ffn_dim, config.dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: TransformerConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.attention = Attention(config, operations, **factory)
        self.feed_forward = FeedForward(config, operations, **factory)
        self.attention_norm = operations.RMSNorm(config.dim, eps=config.norm_eps, **factory)
        self.ffn_norm = operations.RMSNorm(config.dim, eps=config.norm_eps, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, cached: CachedRows | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, layer, cached)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Token embedding, blocks, final norm and output head."""

    def __init__(self, config: TransformerConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = operations.Embedding(config.vocabulary, config.dim, **factory)
        self.layers = nn.ModuleList(Block(config, operations, **factory) for _ in range(config.layers))
        self.norm = operations.RMSNorm(config.dim, eps=config.norm_eps, **factory)
        self.output = operations.Linear(config.dim, config.vocabulary, bias=False, **factory)

    def hidden(self, x: Tensor, cos: Tensor, sin: Tensor, cached: CachedRows | None = None) -> Tensor:
        """Embedded inputs [R, T, dim] -> normed features of the same shape; causal over T alone without a cache."""
        for index, block in enumerate(self.layers):
            x = block(x, cos, sin, index, cached)
        return self.norm(x)
