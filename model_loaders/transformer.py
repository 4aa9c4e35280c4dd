"""The one decoder-only transformer behind every token family; a family is a configuration, a key map and a prompt.

SwiGLU, no biases but Qwen2's, one projection for query, key and value and one for gate and up. Module names follow
LlamaGen's checkpoints. Every parameter sits on a leaf layer made by `operations`: ComfyUI streams those layers when a
model does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RotaryPairing = Literal["interleaved", "halves"]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and kind of a transformer.

    ffn_dim: width inside the SwiGLU. vocabulary: rows of the embedding. kv_heads: key and value heads, 0 for as many as
    heads. rope_pairing: which channels turn together. qk_norm: whether each head's query and key are normalised (mean
    and variance, with scale and bias). qkv_bias: whether the projection to query, key and value has one. norm_after:
    whether a block norms its branches' outputs and not their inputs.
    """

    layers: int
    heads: int
    dim: int
    ffn_dim: int
    vocabulary: int
    norm_eps: float = 1e-5
    rope_base: float = 1e4
    kv_heads: int = 0
    rope_pairing: RotaryPairing = "interleaved"
    qk_norm: bool = False
    qkv_bias: bool = False
    norm_after: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def cached_heads(self) -> int:
        """Heads of the key-value cache."""
        return self.kv_heads or self.heads


class Cache(Protocol):
    """What gives a pass's attention the keys and values of earlier ones."""

    def write(self, layer: int, cached: CachedRows, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Takes in key and value [R, T, H, hd]; returns all that the layer's queries look at, [R, S, H, hd]."""


class KeyValueCache:
    """Keys and values of every row, written by slot; one allocation for the whole generation.

    What a query may see is decided by the mask that comes with it, so going back is writing again.
    """

    def __init__(
        self, config: TransformerConfig, rows: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.layers, rows, slots, config.cached_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    @staticmethod
    def bytes(config: TransformerConfig, rows: int, slots: int, dtype: torch.dtype) -> int:
        """What the constructor will allocate."""
        return 2 * config.layers * rows * slots * config.cached_heads * config.head_dim * dtype.itemsize

    def write(self, layer: int, cached: CachedRows, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value [R, T, H, hd] at cached.slots; returns what the layer's queries look at, [R, S, H, hd].

        S is the width of the mask: slots behind it are not read.
        """
        keys, values, filled = self.keys[layer], self.values[layer], cached.visible.shape[-1]
        keys[cached.rows, cached.slots] = key
        values[cached.rows, cached.slots] = value
        return keys[:, :filled], values[:, :filled]

    def move(self, rows: Tensor, origin: Tensor, target: Tensor) -> None:
        """Copies slots origin [R, S] to slots target [R, S] in every layer."""
        self.keys[:, rows, target] = self.keys[:, rows, origin]
        self.values[:, rows, target] = self.values[:, rows, origin]


@dataclass(frozen=True)
class CachedRows:
    """Where a pass writes and what it sees: rows LongTensor [R, 1], slots LongTensor [R, T], visible bool [R, T, S]."""

    cache: Cache
    rows: Tensor
    slots: Tensor
    visible: Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: RotaryPairing) -> Tensor:
    """Rotary embedding in float32, on adjacent channels or on halves. x [R, T, H, hd]; cos, sin [R or 1, T, hd/2]."""
    axis = -1 if pairing == "interleaved" else -2
    a, b = x.float().unflatten(-1, (-1, 2) if pairing == "interleaved" else (2, -1)).unbind(axis)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=axis).flatten(-2).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of query [R, T, H, hd] over key and value [R, S, K, hd], H a multiple of K -> [R, T, H, hd].

    visible: bool [R, T, S]; None is causal over T = S. Query heads that share a key head are laid one after the other
    along T, so that no key is copied.
    """
    heads, kv_heads, length = query.shape[2], key.shape[2], query.shape[1]
    shared = heads // kv_heads
    if visible is None:
        key, value = (tensor.repeat_interleave(shared, dim=2) for tensor in (key, value))
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return mixed.transpose(1, 2)
    grouped = query.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = visible.repeat(1, shared, 1)[:, None]
    mixed = F.scaled_dot_product_attention(grouped, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask)
    return mixed.unflatten(2, (shared, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.sizes = [heads * config.head_dim for heads in (config.heads, config.cached_heads, config.cached_heads)]
        self.wqkv = operations.Linear(config.dim, sum(self.sizes), bias=config.qkv_bias, **factory)
        self.wo = operations.Linear(self.sizes[0], config.dim, bias=False, **factory)
        # Group normalisation with a group per head is layer normalisation per head with a scale and bias for each.
        if config.qk_norm:
            self.q_norm = operations.GroupNorm(config.heads, self.sizes[0], eps=1e-5, **factory)
            self.k_norm = operations.GroupNorm(config.cached_heads, self.sizes[1], eps=1e-5, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, cached: CachedRows | None) -> Tensor:
        query, key, value = self.wqkv(x).split(self.sizes, dim=-1)
        if self.config.qk_norm:
            query = self.q_norm(query.flatten(0, 1)).view_as(query)
            key = self.k_norm(key.flatten(0, 1)).view_as(key)
        query, key, value = (part.unflatten(-1, (-1, self.config.head_dim)) for part in (query, key, value))
        query, key = (rotate(part, cos, sin, self.config.rope_pairing) for part in (query, key))
        if cached is not None:
            key, value = cached.cache.write(layer, cached, key, value)
        mixed = attend(query, key, value, None if cached is None else cached.visible)
        return self.wo(mixed.flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.w13 = operations.Linear(config.dim, 2 * config.ffn_dim, bias=False, **factory)  # gate and up
        self.w2 = operations.Linear(config.ffn_dim, config.dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: TransformerConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm_after = config.norm_after
        self.attention = Attention(config, operations, **factory)
        self.feed_forward = FeedForward(config, operations, **factory)
        self.attention_norm = operations.RMSNorm(config.dim, eps=config.norm_eps, **factory)
        self.ffn_norm = operations.RMSNorm(config.dim, eps=config.norm_eps, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, cached: CachedRows | None) -> Tensor:
        if self.norm_after:
            x = x + self.attention_norm(self.attention(x, cos, sin, layer, cached))
            return x + self.ffn_norm(self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), cos, sin, layer, cached)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Token embedding, blocks and final norm; the head is the family's own."""

    def __init__(self, config: TransformerConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = operations.Embedding(config.vocabulary, config.dim, **factory)
        self.layers = nn.ModuleList(Block(config, operations, **factory) for _ in range(config.layers))
        self.norm = operations.RMSNorm(config.dim, eps=config.norm_eps, **factory)

    def hidden(self, x: Tensor, cos: Tensor, sin: Tensor, cached: CachedRows | None = None) -> Tensor:
        """Embedded inputs [R, T, dim] -> normed features of the same shape; causal over T alone without a cache."""
        for index, block in enumerate(self.layers):
            x = block(x, cos, sin, index, cached)
        return self.norm(x)
