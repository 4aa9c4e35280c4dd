"""The decoder of Emu3's vision tokenizer, which is of the MoVQ kind (arXiv 2209.09002) and was trained on video.

Every norm of it is scaled and shifted by the code map. It makes four frames of a map of codes, each from what came
before, and a picture is the first: nothing comes before that, so all that is left of a convolution over time is its
last tap. The network here is that first frame alone, a quarter of the work and without a third dimension.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vq import NORM_EPS, NORM_GROUPS, Upsample
from .weights import needed

_TIME_NORM_EPS = 1e-5
SKIPPED = ("encoder.", "quant_conv.")  # the half that turns pictures into codes
TELLS_SIZES = ("code_book.weight", "decoder.time_res_stack.0.conv1.weight", "decoder.up.0.block.0.conv1.weight")


@dataclass(frozen=True)
class Emu3VQConfig:
    """Sizes of the decoder. widths: channels of each level, from full resolution to the deepest; each level halves.

    channels: of a code's vector. blocks: residual blocks a level. attending: the levels whose blocks attend.
    time_blocks, time_convs: length of the two parts that mixed frames.
    """

    codebook_size: int
    channels: int
    widths: tuple[int, ...]
    blocks: int
    attending: tuple[int, ...]
    time_blocks: int
    time_convs: int

    @property
    def factor(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.widths) - 1)

    @property
    def full_size_channels(self) -> int:
        """Channels of the widest map that the decoder makes at full resolution."""
        return max(self.widths[:2])

    @staticmethod
    def of_decoder(shapes: Mapping[str, tuple[int, ...]]) -> Emu3VQConfig:
        """Reads the sizes from the shape of each tensor, by the names of this module; all of TELLS_SIZES are there."""

        def count(key: str) -> int:
            return next(number for number in itertools.count() if key.format(number) not in shapes)

        codebook_size, channels = shapes["code_book.weight"]
        levels = range(count("decoder.up.{}.block.0.conv1.weight"))
        return Emu3VQConfig(
            codebook_size=codebook_size,
            channels=channels,
            widths=tuple(shapes[f"decoder.up.{level}.block.0.conv1.weight"][0] for level in levels),
            blocks=count("decoder.up.0.block.{}.conv1.weight"),
            attending=tuple(level for level in levels if f"decoder.up.{level}.attn.0.q.weight" in shapes),
            time_blocks=count("decoder.time_res_stack.{}.conv1.weight"),
            time_convs=count("decoder.time_conv.{}.weight"),
        )


class ConditionedNorm(nn.Module):
    """Group normalisation, then a scale and a shift for every code's square of pixels."""

    def __init__(self, width: int, channels: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm_layer = operations.GroupNorm(NORM_GROUPS, width, eps=NORM_EPS, **factory)
        self.conv_y = operations.Conv2d(channels, width, 1, **factory)
        self.conv_b = operations.Conv2d(channels, width, 1, **factory)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        """x [B, width, h * f, w * f], cells [B, channels, h, w]; what is one a code is never made one a pixel."""
        rows, columns = cells.shape[2:]
        scale, shift = (layer(cells)[:, :, :, None, :, None] for layer in (self.conv_y, self.conv_b))
        tiles = self.norm_layer(x).unflatten(3, (columns, -1)).unflatten(2, (rows, -1))
        return torch.addcmul(shift, tiles, scale).flatten(4).flatten(2, 3)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, channels: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm1 = ConditionedNorm(inputs, channels, operations, **factory)
        self.conv1 = operations.Conv2d(inputs, outputs, 3, padding=1, **factory)
        self.norm2 = ConditionedNorm(outputs, channels, operations, **factory)
        self.conv2 = operations.Conv2d(outputs, outputs, 3, padding=1, **factory)
        self.nin_shortcut = nn.Identity() if inputs == outputs else operations.Conv2d(inputs, outputs, 1, **factory)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x, cells)))
        return self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(hidden, cells)))


class SpatialAttention(nn.Module):
    """Single-head self attention over the cells of a feature map."""

    def __init__(self, width: int, channels: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm = ConditionedNorm(width, channels, operations, **factory)
        self.q, self.k, self.v, self.proj_out = (operations.Linear(width, width, **factory) for _ in range(4))

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        normed = self.norm(x, cells).flatten(2).transpose(1, 2)
        query, key, value = (layer(normed)[:, None] for layer in (self.q, self.k, self.v))
        mixed = self.proj_out(F.scaled_dot_product_attention(query, key, value)[:, 0])
        return x + mixed.transpose(1, 2).unflatten(2, x.shape[2:])


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention where the level attends, then twice the size."""

    def __init__(
        self, widths: list[int], channels: int, attends: bool, enlarges: bool, operations: Any, **factory: Any
    ) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResidualBlock(before, after, channels, operations, **factory)
            for before, after in itertools.pairwise(widths)
        )
        attentions = widths[1:] if attends else ()
        self.attn = nn.ModuleList(SpatialAttention(width, channels, operations, **factory) for width in attentions)
        self.upsample = Upsample(widths[-1], operations, **factory) if enlarges else nn.Identity()

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        for index, block in enumerate(self.block):
            x = block(x, cells)
            if self.attn:
                x = self.attn[index](x, cells)
        return self.upsample(x)


class Middle(nn.Module):
    def __init__(self, width: int, channels: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(width, width, channels, operations, **factory)
        self.attn_1 = SpatialAttention(width, channels, operations, **factory)
        self.block_2 = ResidualBlock(width, width, channels, operations, **factory)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x, cells), cells), cells)


class TimeBlock(nn.Module):
    """A residual block over the code map. A norm with stored statistics is a scale and a shift of each channel."""

    def __init__(self, channels: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = (operations.Conv2d(channels, channels, 1, groups=channels, **factory) for _ in "12")
        self.conv1, self.conv2 = (operations.Conv2d(channels, channels, 3, padding=1, **factory) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(hidden)))


class Decoder(nn.Module):
    """Features and code vectors, both [B, channels, h, w] -> pictures [B, 3, h * factor, w * factor]."""

    def __init__(self, config: Emu3VQConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        channels, widths, deepest = config.channels, config.widths, config.widths[-1]
        self.time_res_stack = nn.ModuleList(
            TimeBlock(channels, operations, **factory) for _ in range(config.time_blocks)
        )
        self.time_conv = nn.ModuleList(
            operations.Conv2d(channels, channels, 3, padding=1, **factory) for _ in range(config.time_convs)
        )
        self.conv_in = operations.Conv2d(channels, deepest, 3, padding=1, **factory)
        self.mid = Middle(deepest, channels, operations, **factory)
        self.up = nn.ModuleList(
            Level(
                [before, *[width] * config.blocks],
                channels,
                level in config.attending,
                level > 0,
                operations,
                **factory,
            )
            for level, (width, before) in enumerate(itertools.pairwise((*widths, deepest)))
        )
        self.norm_out = ConditionedNorm(widths[0], channels, operations, **factory)
        self.conv_out = operations.Conv2d(widths[0], 3, 3, padding=1, **factory)

    def forward(self, features: Tensor, vectors: Tensor) -> Tensor:
        both = torch.cat((features, vectors))
        for block in self.time_res_stack:
            both = block(both)
        for conv in self.time_conv:
            both = F.silu(conv(both))
        features, cells = both.chunk(2)
        x = self.mid(self.conv_in(features), cells)
        for level in reversed(self.up):
            x = level(x, cells)
        return self.conv_out(F.silu(self.norm_out(x, cells)))


class Emu3VQ(nn.Module):
    """Code grids to pictures about -1..1."""

    def __init__(self, config: Emu3VQConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.code_book = operations.Embedding(config.codebook_size, config.channels, **factory)
        self.post_quant_conv = operations.Conv2d(config.channels, config.channels, 1, **factory)
        self.decoder = Decoder(config, operations, **factory)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, h, w] -> pictures [B, 3, h * factor, w * factor], about -1..1."""
        vectors = self.code_book(codes).permute(0, 3, 1, 2)
        return self.decoder(self.post_quant_conv(vectors), vectors)

    def code_vectors(self) -> Tensor:
        """The vector of each code, [codebook_size, channels], where the weights are."""
        return self.code_book(torch.arange(self.config.codebook_size, device=self.code_book.weight.device))


# How transformers names what the official file names otherwise, and how both name what is simpler here.
_RENAMES = (
    (r"\.up_block\.up\.", ".up."),
    (r"\.middle_block\.attn_norm\.", ".mid.attn_1.norm."),
    (r"\.middle_block\.", ".mid."),
    (r"\.attn_norms\.(\d+)\.", r".attn.\1.norm."),
    (r"\.([qkv])_proj\.", r".\1."),
    (r"\.out_proj\.", ".proj_out."),
    (r"^quantize\.embedding\.", "code_book."),
    (r"((?:^post_quant_|\.time_)conv(?:\.\d+)?)(?:\.conv)+\.", r"\1."),
    (r"(\.time_res_stack\.\d+\.conv[12])\.conv\.", r"\1."),
)


def vq_sources(names: Iterable[str], prefix: str = "") -> dict[str, list[str]]:
    """Name in an Emu3VQ -> names in the file, official or transformers', where the VQ's names begin with prefix.

    Left out are the encoder and quant_conv.
    """
    sources: dict[str, list[str]] = {}
    for name in needed(names):
        own = name.removeprefix(prefix)
        if not name.startswith(prefix) or own.startswith(SKIPPED):
            continue
        for pattern, replacement in _RENAMES:
            own = re.sub(pattern, replacement, own)
        sources[own] = [name]
    for norm in [name.removesuffix(".running_var") for name in sources if name.endswith(".running_var")]:
        kinds = ("weight", "running_var", "bias", "running_mean")
        weight, variance, bias, mean = (sources.pop(f"{norm}.{kind}", []) for kind in kinds)
        sources[f"{norm}.weight"] = weight + variance
        sources[f"{norm}.bias"] = weight + variance + bias + mean
    return sources


def vq_reshapes(names: Iterable[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is done to the tensors of these names, as weights.fill takes it."""
    reshape: dict[str, Callable[[Tensor], Tensor]] = {}
    for name in names:
        if re.search(r"\.time_res_stack\.\d+\.norm[12]\.", name):
            reshape[name] = _norm_scale if name.endswith("weight") else _norm_shift
        elif re.search(r"(?:^post_quant_|\.time_)conv\.(?:\d+\.)?weight|\.time_res_stack\.\d+\.conv[12]\.weight", name):
            reshape[name] = _last_tap
        elif re.search(r"\.attn(?:_1|\.\d+)\.(?:q|k|v|proj_out)\.weight", name):
            reshape[name] = _matrix
    return reshape


def _last_tap(kernel: Tensor) -> Tensor:
    """A kernel [O, I, T, h, w] where all earlier frames are zero."""
    return kernel[:, :, -1]


def _matrix(kernel: Tensor) -> Tensor:
    """[O, I] of a kernel [O, I, 1, 1], or of what is a matrix."""
    return kernel.flatten(1)


def _norm_scale(parts: Tensor) -> Tensor:
    """The factor of each channel, as a kernel [C, 1, 1, 1], from weight and variance in a line."""
    weight, variance = parts.chunk(2)
    return (weight / (variance + _TIME_NORM_EPS).sqrt())[:, None, None, None]


def _norm_shift(parts: Tensor) -> Tensor:
    """What is added to each channel, from weight, variance, bias and mean in a line."""
    weight, variance, bias, mean = parts.chunk(4)
    return bias - mean * weight / (variance + _TIME_NORM_EPS).sqrt()
