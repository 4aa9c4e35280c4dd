"""MAR's diffusion head (arXiv 2406.11838, section 3.2): a small network that says which noise is in a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TIME_CHANNELS = 256
_LONGEST_PERIOD = 10_000


@dataclass(frozen=True)
class HeadConfig:
    """channels: numbers of a token. condition: width of what the trunk says. width, depth: of the head's own blocks."""

    channels: int
    condition: int
    width: int
    depth: int


def time_channels(time: Tensor) -> Tensor:
    """Times [...] -> cosines, then sines at 128 frequencies, [..., 256]."""
    half = TIME_CHANNELS // 2
    places = torch.arange(half, dtype=torch.float32, device=time.device)
    angles = time.float()[..., None] * torch.exp(places * (-math.log(_LONGEST_PERIOD) / half))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimeEmbedding(nn.Module):
    def __init__(self, width: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        first = operations.Linear(TIME_CHANNELS, width, **factory)
        self.mlp = nn.Sequential(first, nn.SiLU(), operations.Linear(width, width, **factory))

    def forward(self, time: Tensor, dtype: torch.dtype) -> Tensor:
        return self.mlp(time_channels(time).to(dtype))


class HeadBlock(nn.Module):
    def __init__(self, width: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.in_ln = operations.LayerNorm(width, eps=1e-6, **factory)
        self.mlp = nn.Sequential(
            operations.Linear(width, width, **factory), nn.SiLU(), operations.Linear(width, width, **factory)
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), operations.Linear(width, 3 * width, **factory))

    def forward(self, h: Tensor, said: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(said).chunk(3, dim=-1)
        return h + gate * self.mlp(self.in_ln(h) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    def __init__(self, config: HeadConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm_final = operations.LayerNorm(config.width, elementwise_affine=False, eps=1e-6, **factory)
        self.linear = operations.Linear(config.width, 2 * config.channels, **factory)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), operations.Linear(config.width, 2 * config.width, **factory))

    def forward(self, h: Tensor, said: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(said).chunk(2, dim=-1)
        return self.linear(self.norm_final(h) * (1 + scale) + shift)


class DiffusionHead(nn.Module):
    """Computes in float32: the first reverse step multiplies an error of its output by up to 316 (dossier 1.6)."""

    def __init__(self, config: HeadConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(config.width, operations, **factory)
        self.cond_embed = operations.Linear(config.condition, config.width, **factory)
        self.input_proj = operations.Linear(config.channels, config.width, **factory)
        self.res_blocks = nn.ModuleList(HeadBlock(config.width, operations, **factory) for _ in range(config.depth))
        self.final_layer = FinalLayer(config, operations, **factory)

    def condition(self, z: Tensor) -> Tensor:
        """What the trunk says of a token [..., D], as every call takes it: [..., width]."""
        return self.cond_embed(z.float())

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """States [..., C] at original times [...] under a condition [..., width] -> noise and variance, [..., 2C]."""
        said = self.time_embed(time, x.dtype) + condition
        h = self.input_proj(x)
        for block in self.res_blocks:
            h = block(h, said)
        return self.final_layer(h, said)

    def guided(self, x: Tensor, time: Tensor, conditions: Tensor, guidance: Tensor) -> Tensor:
        """States [M, K, C] at times [M, K] under each stream's conditions [G, M, width] -> one output, [M, K, 2C]."""
        states = x.expand(len(conditions), -1, -1, -1)
        return guided_noise(self(states, time.expand(states.shape[:-1]), conditions[:, :, None]), guidance)


def guided_noise(output: Tensor, guidance: Tensor) -> Tensor:
    """Outputs [G, M, K, 2C] of the streams -> [M, K, 2C]: noise guided by [M], the conditional stream's variance."""
    if len(output) == 1:
        return output[0]
    noise, place = output.chunk(2, dim=-1)
    return torch.cat((noise[1] + guidance[:, None, None] * (noise[0] - noise[1]), place[0]), dim=-1)
