"""xAR (arXiv 2502.20388): a transformer that turns noise into one 8 x 8 cell of latents after another, by a flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decoders.continuous.flow import StraightFlow
from ..decoders.interface import ContinuousOptions
from .class_labels import ClassCondition
from .diffusion_head import TimeEmbedding
from .kl_vae import LATENT_CHANNELS
from .latent_model import ClassLatentModel
from .mar import all_rows
from .transformer import attend, rotate

EPSILON = 1e-6
CELLS = 2  # along each side of a picture
_ROPE_BASE = 10_000
_TIMES = 1000  # the network is told whole thousandths

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class XARConfig:
    """Sizes. depth: blocks of the encoder and of the decoder each. side: latents along a cell. classes: without the
    one that stands for none, which comes last."""

    width: int
    depth: int
    decoder_depth: int
    heads: int
    mlp_width: int
    side: int
    classes: int

    @property
    def cell(self) -> int:
        """Latents of a cell, the rows that it takes."""
        return self.side**2


class Attention(nn.Module):
    def __init__(self, config: XARConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = operations.Linear(config.width, 3 * config.width, **factory)
        self.proj = operations.Linear(config.width, config.width, **factory)

    def forward(self, x: Tensor, seen: Surroundings, layer: int) -> tuple[Tensor, KeysValues]:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key = (rotate(part, *seen.turns, "interleaved") for part in (query, key))
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*(*seen.before(layer), (key, value)), strict=True))
        return self.proj(attend(query, keys, values, seen.visible).flatten(-2)), (key, value)


class MLP(nn.Module):
    """Gated by an exact GELU."""

    def __init__(self, config: XARConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.fc1_g = operations.Linear(config.width, config.mlp_width, **factory)
        self.fc1_x = operations.Linear(config.width, config.mlp_width, **factory)
        self.fc2 = operations.Linear(config.mlp_width, config.width, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1_g(x)) * self.fc1_x(x))


class Block(nn.Module):
    def __init__(self, config: XARConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.attn = Attention(config, operations, **factory)
        self.mlp = MLP(config, operations, **factory)
        self.ada_lin = nn.Sequential(nn.SiLU(), operations.Linear(config.width, 6 * config.width, **factory))

    def forward(self, x: Tensor, said: Tensor, seen: Surroundings, layer: int) -> tuple[Tensor, KeysValues]:
        gate_a, gate_m, scale_a, scale_m, shift_a, shift_m = self.ada_lin(said).chunk(6, dim=-1)
        mixed, cached = self.attn(plain_norm(x) * (1 + scale_a) + shift_a, seen, layer)
        x = x + gate_a * mixed
        return x + gate_m * self.mlp(plain_norm(x) * (1 + scale_m) + shift_m), cached


def plain_norm(x: Tensor) -> Tensor:
    """Root mean square norm without a weight, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=EPSILON).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What the T rows of a call see beside themselves. turns: cos and sin of their rotations, [R or 1, T, hd/2].
    visible: bool [R, T, P + T] over the cells before and the rows; cells: keys and values [R, P, H, hd] of each block.
    """

    turns: KeysValues
    visible: Tensor
    cells: tuple[KeysValues, ...] = ()

    def before(self, layer: int) -> tuple[KeysValues, ...]:
        return self.cells[layer : layer + 1]


class XARNetwork(nn.Module):
    """All weights of an xAR model; its position tables, loose in the checkpoints, sit in embeddings."""

    def __init__(self, config: XARConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.config = config
        width, rows = config.width, CELLS**2 * config.cell
        linear, norm = operations.Linear, operations.RMSNorm
        self.class_emb = operations.Embedding(config.classes + 1, width, **factory)
        self.time_embed = TimeEmbedding(width, operations, **factory)
        self.encoder_positions = operations.Embedding(rows, width, **factory)
        self.decoder_positions = operations.Embedding(rows, width, **factory)
        self.z_proj = linear(LATENT_CHANNELS, width, **factory)
        self.z_proj_ln = norm(width, eps=EPSILON, **factory)
        self.encoder_blocks = nn.ModuleList(Block(config, operations, **factory) for _ in range(config.depth))
        self.encoder_norm = norm(width, eps=EPSILON, **factory)
        self.decoder_embed = linear(width, width, **factory)
        self.decoder_blocks = nn.ModuleList(Block(config, operations, **factory) for _ in range(config.decoder_depth))
        self.decoder_norm = norm(width, eps=EPSILON, **factory)
        self.pred = linear(width, LATENT_CHANNELS, **factory)

    def rotations(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos, sin [rows, hd/2]: half of the turns go by a latent's row, half by its column; rows cell by cell."""
        quarter, side = self.config.width // self.config.heads // 4, self.config.side
        frequencies = _ROPE_BASE ** (-torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
        places = torch.arange(CELLS * side, device=device, dtype=torch.float32)
        grid = torch.stack(torch.meshgrid(places, places, indexing="ij"), dim=-1)
        cells = grid.unflatten(1, (CELLS, side)).unflatten(0, (CELLS, side)).transpose(1, 2).flatten(0, 3)
        angles = (cells[:, :, None] * frequencies).flatten(1)
        return angles.cos(), angles.sin()

    def forward(
        self, latents: Tensor, places: Tensor, said: Tensor, seen: Surroundings
    ) -> tuple[Tensor, list[KeysValues]]:
        """Velocities [R, T, 16] of latents [R, T, 16] at places [R or 1, T], and each block's keys and values.

        said: [R, T or 1, D], the class and the time of every row.
        """
        cached = []
        tables = (all_rows(table, latents.device)[places] for table in (self.encoder_positions, self.decoder_positions))
        x = self.z_proj_ln(self.z_proj(latents.to(said.dtype)) + next(tables).to(said.dtype))
        for layer, block in enumerate(self.encoder_blocks):
            x, own = block(x, said, seen, layer)
            cached.append(own)
        x = self.decoder_embed(self.encoder_norm(x)) + next(tables).to(said.dtype)
        for layer, block in enumerate(self.decoder_blocks, start=len(self.encoder_blocks)):
            x, own = block(x, said, seen, layer)
            cached.append(own)
        return self.pred(self.decoder_norm(x)), cached


@dataclass(frozen=True, eq=False)
class CellFeatures:
    """What the network has to know of G * M chains. cell: LongTensor [M], which each makes. before: keys and values
    [G * M, P, H, hd] of each block; visible: bool [G * M, P], which of them the chain sees."""

    cell: Tensor
    before: tuple[KeysValues, ...]
    visible: Tensor


def repeated(cells: tuple[KeysValues, ...], count: int) -> tuple[KeysValues, ...]:
    """Keys and values of each row, count times after one another."""
    return tuple((keys.repeat_interleave(count, 0), values.repeat_interleave(count, 0)) for keys, values in cells)


class XARSession:
    """Implements decoders.interface.LatentSession. A token is a cell, its numbers channel, row and column."""

    def __init__(self, model: XAR, condition: ClassCondition, guided: bool) -> None:
        self.network, self.dtype, self.device = model.network, model.dtype, model.device
        config = model.network.config
        classes = [condition.label] + ([config.classes] if guided else [])
        self.classes = torch.tensor(classes, device=model.device)
        self.turns = self.network.rotations(model.device)

    @property
    def streams(self) -> int:
        """G."""
        return len(self.classes)

    def features(self, tokens: Tensor, order: Tensor, known: Tensor, longest: int, asked: Tensor) -> CellFeatures:  # noqa: ARG002
        """See LatentSession.features; the order is always the raster."""
        size, count = self.network.config.cell, asked.shape[1]
        length = longest * size
        cells = torch.arange(length, device=tokens.device) // size
        before = self._clean(tokens[:, :longest], cells) if longest else ()
        visible = (cells < known[:, None]).repeat(self.streams, 1).repeat_interleave(count, dim=0)
        return CellFeatures(asked.flatten(), repeated(before, count), visible)

    def _clean(self, tokens: Tensor, cells: Tensor) -> tuple[KeysValues, ...]:
        """Keys and values of finished cells [R, P, C], each of which sees itself and those before it."""
        places = torch.arange(len(cells), device=tokens.device)
        latents = self._latents(tokens).flatten(1, 2).repeat(self.streams, 1, 1)
        causal = (cells[:, None] >= cells).expand(len(latents), -1, -1)
        cos, sin = (turn[None, : len(cells)] for turn in self.turns)
        seen = Surroundings((cos, sin), causal)
        now = torch.zeros(len(latents), device=tokens.device)
        return tuple(self.network(latents, places[None], self._said(now), seen)[1])

    def denoise(self, x: Tensor, time: Tensor, features: CellFeatures, guidance: Tensor) -> Tensor:
        """See LatentSession.denoise."""
        states = x.shape[1]
        size, rows = self.network.config.cell, self.streams * x.shape[0] * states
        latents = self._latents(x).flatten(0, 1).repeat(self.streams, 1, 1)
        places = features.cell[:, None] * size + torch.arange(size, device=x.device)
        places = places.repeat_interleave(states, dim=0).repeat(self.streams, 1)
        before = features.visible.repeat_interleave(states, dim=0)[:, None].expand(-1, size, -1)
        visible = torch.cat((before, before.new_ones(rows, size, size)), dim=-1)
        cos, sin = (turn[places] for turn in self.turns)
        seen = Surroundings((cos, sin), visible, repeated(features.before, states))
        velocity = self.network(latents, places, self._said(time.flatten().repeat(self.streams)), seen)[0].float()
        streams = velocity.transpose(1, 2).reshape(self.streams, *x.shape)
        return streams[0] if self.streams == 1 else streams[1] + guidance[:, None, None] * (streams[0] - streams[1])

    def _said(self, time: Tensor) -> Tensor:
        """[G * n, 1, D]: each stream's class and the times [G * n] of its rows."""
        classes = self.network.class_emb(self.classes).to(self.dtype)
        classes = classes.repeat_interleave(len(time) // self.streams, dim=0)
        return (classes + self.network.time_embed((_TIMES * time).trunc(), self.dtype))[:, None]

    def _latents(self, cells: Tensor) -> Tensor:
        """Tokens [..., C] -> latents [..., 64, 16]."""
        return cells.unflatten(-1, (LATENT_CHANNELS, -1)).transpose(-1, -2)

    def close(self) -> None:
        """See LatentSession.close: a session holds nothing."""


class XAR(ClassLatentModel):
    """Class-conditional xAR, B to H and any other size."""

    network: XARNetwork
    family = "xar"

    def process(self, options: ContinuousOptions) -> StraightFlow:
        """See ContinuousModel.process; ddim with eta 0 is Euler's method on the flow without noise."""
        deterministic = options.diffusion_sampler == "ddim"
        if deterministic and options.eta:
            raise ValueError(
                f"{self.name} walks a flow, of which eta is no part, and eta is {options.eta:g}: choose 0 for its path "
                "without noise, or ddpm for the one with noise."
            )
        return StraightFlow(options.diffusion_steps or self.diffusion_steps, deterministic, self.device)

    def latent_session(self, condition: Any, batch_size: int, guided: bool) -> XARSession:  # noqa: ARG002
        """See ContinuousModel.latent_session."""
        self.layout(condition)
        return XARSession(self, condition, guided)

    def memory_required(self, condition: Any, batch_size: int, guided: bool, contexts: int) -> int:
        """See LatentModel.memory_required; here the keys and values of the cells before come on top, twice."""
        config, rows = self.network.config, (2 if guided else 1) * batch_size * contexts
        cached = 2 * (config.depth + config.decoder_depth) * (CELLS**2 - 1) * config.cell * config.width
        activations = super().memory_required(condition, batch_size, guided, contexts)
        return activations + 2 * rows * cached * self.dtype.itemsize
