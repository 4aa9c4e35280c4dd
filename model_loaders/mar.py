"""MAR (arXiv 2406.11838): a masked encoder and decoder over a set of continuous tokens, and a diffusion head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .class_labels import ClassCondition
from .diffusion_head import DiffusionHead, HeadConfig
from .latent_model import ClassLatentModel

EPSILON = 1e-6


@dataclass(frozen=True)
class MARConfig:
    """Sizes. depth: blocks of the encoder and of the decoder each. buffer: rows before the tokens that repeat the
    class. positions: tokens of a picture. classes: 0 for a trunk that is told by the buffer alone (Harmon)."""

    width: int
    depth: int
    heads: int
    buffer: int
    positions: int
    classes: int
    head: HeadConfig
    decoder_depth: int = 0
    mlp_width: int = 0

    @property
    def channels(self) -> int:
        """Numbers of a token."""
        return self.head.channels


class Attention(nn.Module):
    def __init__(self, config: MARConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = operations.Linear(config.width, 3 * config.width, **factory)
        self.proj = operations.Linear(config.width, config.width, **factory)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: MARConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.fc1 = operations.Linear(config.width, config.mlp_width, **factory)
        self.fc2 = operations.Linear(config.mlp_width, config.width, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, config: MARConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm1 = operations.LayerNorm(config.width, eps=EPSILON, **factory)
        self.attn = Attention(config, operations, **factory)
        self.norm2 = operations.LayerNorm(config.width, eps=EPSILON, **factory)
        self.mlp = MLP(config, operations, **factory)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), visible)
        return x + self.mlp(self.norm2(x))


@dataclass(frozen=True, eq=False)
class Seen:
    """The visible tokens of R rows in raster order. positions: LongTensor [R, T], padded with masked ones at the end;
    real: bool [R, T], False for that padding."""

    positions: Tensor
    real: Tensor

    @staticmethod
    def of(order: Tensor, known: Tensor, longest: int) -> Seen:
        """Of each row of order [R, N] the first known [R], which are `longest` at most."""
        ranks = order.argsort(dim=1)
        hidden = ranks >= known[:, None]
        raster = torch.arange(order.shape[1], device=order.device)
        positions = (hidden * order.shape[1] + raster).argsort(dim=1)[:, :longest]
        return Seen(positions, torch.arange(longest, device=order.device) < known[:, None])


class MARNetwork(nn.Module):
    """All weights of a MAR model. What its checkpoints keep loose (mask token, position tables) sits in embeddings."""

    def __init__(self, config: MARConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.config = config
        width, rows = config.width, config.buffer + config.positions
        embedding, norm = operations.Embedding, operations.LayerNorm
        if config.classes:
            self.class_emb = embedding(config.classes, width, **factory)
        self.fake_latent = embedding(1, width, **factory)
        self.mask_token = embedding(1, width, **factory)
        self.encoder_positions = embedding(rows, width, **factory)
        self.decoder_positions = embedding(rows, width, **factory)
        self.head_positions = embedding(config.positions, width, **factory)
        self.z_proj = operations.Linear(config.channels, width, **factory)
        self.z_proj_ln = norm(width, eps=EPSILON, **factory)
        self.encoder_blocks = nn.ModuleList(Block(config, operations, **factory) for _ in range(config.depth))
        self.encoder_norm = norm(width, eps=EPSILON, **factory)
        self.decoder_embed = operations.Linear(width, width, **factory)
        decoder_depth = config.decoder_depth or config.depth
        self.decoder_blocks = nn.ModuleList(Block(config, operations, **factory) for _ in range(decoder_depth))
        self.decoder_norm = norm(width, eps=EPSILON, **factory)
        self.head = DiffusionHead(config.head, operations, **factory)

    def class_rows(self, classes: Tensor) -> Tensor:
        """LongTensor [R] -> what the buffer repeats, [R, D]."""
        return self.class_emb(classes)

    def unconditional_rows(self, rows: int, device: torch.device) -> Tensor:
        """[R, D]: what the buffer repeats where there is no class."""
        return all_rows(self.fake_latent, device).expand(rows, -1)

    def encode(self, tokens: Tensor, seen: Seen, said: Tensor, positions: Tensor | None = None) -> Tensor:
        """The buffer's rows, then the visible tokens' [R, buffer + T, D].

        tokens: [R, N, C]. said: [R, D], what the buffer repeats. positions: [buffer + N, D] in place of the own table.
        """
        table, buffer = (
            all_rows(self.encoder_positions, tokens.device) if positions is None else positions,
            self.config.buffer,
        )
        visible = tokens.gather(1, seen.positions[..., None].expand(-1, -1, tokens.shape[-1]))
        rows = torch.cat((said[:, None].expand(-1, buffer, -1), self.z_proj(visible.to(said.dtype))), dim=1)
        places = torch.cat((table[:buffer].expand(len(rows), -1, -1), table[buffer:][seen.positions]), dim=1)
        x = self.z_proj_ln(rows + places.to(rows.dtype))
        mask = self._key_mask(seen)
        for block in self.encoder_blocks:
            x = block(x, mask)
        return self.encoder_norm(x)

    def _key_mask(self, seen: Seen) -> Tensor:
        buffer = seen.real.new_ones(len(seen.real), self.config.buffer)
        return torch.cat((buffer, seen.real), dim=1)[:, None, None]

    def decode(
        self, encoded: Tensor, seen: Seen, positions: Tensor | None = None, head: Tensor | None = None
    ) -> Tensor:
        """What the head is told of every position [R, N, D], from the encoder's rows.

        positions, head: [buffer + N, D] and [N, D] in place of the own tables.
        """
        table = all_rows(self.decoder_positions, encoded.device) if positions is None else positions
        places, buffer = all_rows(self.head_positions, encoded.device) if head is None else head, self.config.buffer
        y, mask = self.decoder_embed(encoded), all_rows(self.mask_token, encoded.device).to(encoded.dtype)
        # Padding stands at masked positions, so that it must leave the mask token there.
        known = torch.where(seen.real[..., None], y[:, buffer:], mask)
        whole = mask.expand(len(y), len(places), -1)
        whole = whole.scatter(1, seen.positions[..., None].expand_as(known), known)
        x = torch.cat((y[:, :buffer], whole), dim=1) + table.to(y.dtype)
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, buffer:] + places.to(y.dtype)


def all_rows(table: nn.Embedding, device: torch.device) -> Tensor:
    """An embedding's whole table, through the layer, so that a table which rests elsewhere is brought along."""
    return table(torch.arange(table.num_embeddings, device=device))


def asked_rows(z: Tensor, asked: Tensor) -> Tensor:
    """Of each row's positions [R, N, D] the asked [R, S] -> [R * S, D]."""
    return z.gather(1, asked[..., None].expand(-1, -1, z.shape[-1])).flatten(0, 1)


class MARSession:
    """Implements decoders.interface.LatentSession. Features are what the head is told, [G, M, width]."""

    def __init__(self, model: MAR, condition: ClassCondition, guided: bool) -> None:
        self.network, self.dtype, self.device = model.network, model.dtype, model.device
        self.label, self.guided = torch.tensor([condition.label], device=model.device), guided

    def features(self, tokens: Tensor, order: Tensor, known: Tensor, longest: int, asked: Tensor) -> Tensor:
        """See LatentSession.features."""
        seen = Seen.of(order, known, longest)
        network, rows = self.network, len(tokens)
        said = [network.class_rows(self.label).expand(rows, -1)]
        if self.guided:
            said.append(network.unconditional_rows(rows, tokens.device))
        streams = len(said)
        both = Seen(seen.positions.repeat(streams, 1), seen.real.repeat(streams, 1))
        encoded = network.encode(tokens.repeat(streams, 1, 1), both, torch.cat(said).to(self.dtype))
        z = network.decode(encoded, both)
        return network.head.condition(asked_rows(z, asked.repeat(streams, 1))).unflatten(0, (streams, -1))

    def denoise(self, x: Tensor, time: Tensor, features: Tensor, guidance: Tensor) -> Tensor:
        """See LatentSession.denoise."""
        return self.network.head.guided(x, time, features, guidance)

    def close(self) -> None:
        """See LatentSession.close: a session holds nothing."""


class MAR(ClassLatentModel):
    """Class-conditional MAR, B to H and any other size."""

    network: MARNetwork
    family = "mar"

    def latent_session(self, condition: Any, batch_size: int, guided: bool) -> MARSession:  # noqa: ARG002
        """See ContinuousModel.latent_session."""
        self.layout(condition)
        return MARSession(self, condition, guided)
