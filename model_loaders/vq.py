"""VQ tokenizers: pictures to grids of codes and back, under the key names of LlamaGen's checkpoints.

The demo models use the same module at a small size, and tools/train_demo.py trains it. Generation needs its second half
alone, `VQDecoder`, which also decodes for the VQGANs with taming-transformers' names (`taming_sources`). The KL VAE of
the continuous models (kl_vae.py) has the same Decoder.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import CheckpointError

NORM_GROUPS = 32
NORM_EPS = 1e-6


class DecoderSizes(Protocol):
    """What a Decoder is built by: see VQConfig."""

    @property
    def z_channels(self) -> int: ...

    @property
    def decoder_channels(self) -> tuple[int, ...]: ...

    @property
    def decoder_blocks(self) -> int: ...

    @property
    def attention(self) -> bool: ...


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a VQ tokenizer. Channel tuples run from full resolution to the deepest level; each level halves.

    attention: whether the blocks of the deepest level attend, and not the middle alone. normalised: whether code
    vectors are brought to unit length. A decoder alone has no encoder_channels.
    """

    codebook_size: int
    embed_dim: int
    z_channels: int
    base_channels: int
    encoder_channels: tuple[int, ...]
    decoder_channels: tuple[int, ...]
    encoder_blocks: int = 2
    decoder_blocks: int = 3
    attention: bool = True
    normalised: bool = True

    @property
    def factor(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.decoder_channels) - 1)

    @property
    def full_size_channels(self) -> int:
        """Channels of the widest map that the decoder makes at full resolution."""
        return max(self.decoder_channels[:2])

    @staticmethod
    def from_state_dict(shapes: Mapping[str, Sequence[int]]) -> VQConfig:
        """Reads the sizes from the shape of each tensor (key -> shape); raises ValueError where a part is missing."""
        _require(shapes, "quantize.embedding.weight", "encoder.conv_in.weight", "decoder.conv_in.weight")
        widths, blocks = levels(shapes, "encoder")
        return replace(
            VQConfig.of_decoder(shapes),
            base_channels=shapes["encoder.conv_in.weight"][0],
            encoder_channels=tuple(widths),
            encoder_blocks=blocks,
        )

    @staticmethod
    def of_decoder(shapes: Mapping[str, Sequence[int]], normalised: bool = True) -> VQConfig:
        """As from_state_dict for a VQDecoder: what the encoder would be is neither read nor needed."""
        _require(shapes, "quantize.embedding.weight", "decoder.conv_in.weight")
        codebook_size, embed_dim = shapes["quantize.embedding.weight"]
        widths, blocks = levels(shapes, "decoder")
        return VQConfig(
            codebook_size=codebook_size,
            embed_dim=embed_dim,
            z_channels=shapes["decoder.conv_in.weight"][1],
            base_channels=0,
            encoder_channels=(),
            decoder_channels=tuple(reversed(widths)),
            encoder_blocks=0,
            decoder_blocks=blocks,
            attention="decoder.conv_blocks.0.attn.0.norm.weight" in shapes,
            normalised=normalised,
        )


def _require(shapes: Mapping[str, Sequence[int]], *names: str) -> None:
    for name in names:
        if name not in shapes:
            raise CheckpointError(f"The VQ weights have no `{name}`; give the complete file, as it was published.")


def levels(shapes: Mapping[str, Sequence[int]], side: str) -> tuple[list[int], int]:
    """Width of each level in stored order, and residual blocks per level."""

    def key(level: int, block: int) -> str:
        return f"{side}.conv_blocks.{level}.res.{block}.conv1.weight"

    widths: list[int] = []
    while (first := key(len(widths), 0)) in shapes:
        widths.append(shapes[first][0])
    blocks = 0
    while key(0, blocks) in shapes:
        blocks += 1
    return widths, blocks


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm1 = operations.GroupNorm(NORM_GROUPS, inputs, eps=NORM_EPS, **factory)
        self.conv1 = operations.Conv2d(inputs, outputs, 3, padding=1, **factory)
        self.norm2 = operations.GroupNorm(NORM_GROUPS, outputs, eps=NORM_EPS, **factory)
        self.conv2 = operations.Conv2d(outputs, outputs, 3, padding=1, **factory)
        self.nin_shortcut = nn.Identity() if inputs == outputs else operations.Conv2d(inputs, outputs, 1, **factory)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class SpatialAttention(nn.Module):
    """Single-head self attention over the cells of a feature map."""

    def __init__(self, channels: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.norm = operations.GroupNorm(NORM_GROUPS, channels, eps=NORM_EPS, **factory)
        self.q, self.k, self.v, self.proj_out = (operations.Conv2d(channels, channels, 1, **factory) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (layer(normed).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        return x + self.proj_out(mixed.transpose(1, 2).unflatten(2, x.shape[2:]))


class Downsample(nn.Module):
    def __init__(self, channels: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.conv = operations.Conv2d(channels, channels, 3, stride=2, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.conv = operations.Conv2d(channels, channels, 3, padding=1, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention where it attends, then a change of resolution."""

    def __init__(self, inputs: int, outputs: int, blocks: int, attends: bool, operations: Any, **factory: Any) -> None:
        super().__init__()
        widths = [inputs] + [outputs] * blocks
        self.res = nn.ModuleList(
            ResidualBlock(before, after, operations, **factory) for before, after in itertools.pairwise(widths)
        )
        attentions = blocks if attends else 0
        self.attn = nn.ModuleList(SpatialAttention(outputs, operations, **factory) for _ in range(attentions))
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.res):
            x = block(x)
            if self.attn:
                x = self.attn[index](x)
        return self.upsample(self.downsample(x))


def _middle(channels: int, operations: Any, **factory: Any) -> nn.ModuleList:
    return nn.ModuleList(
        (
            ResidualBlock(channels, channels, operations, **factory),
            SpatialAttention(channels, operations, **factory),
            ResidualBlock(channels, channels, operations, **factory),
        )
    )


class Encoder(nn.Module):
    """Pictures [B, 3, H, W] -> features [B, z_channels, H / factor, W / factor]."""

    def __init__(self, config: VQConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        widths = (config.base_channels, *config.encoder_channels)
        last = len(config.encoder_channels) - 1
        self.conv_in = operations.Conv2d(3, config.base_channels, 3, padding=1, **factory)
        self.conv_blocks = nn.ModuleList(
            Level(before, after, config.encoder_blocks, config.attention and index == last, operations, **factory)
            for index, (before, after) in enumerate(itertools.pairwise(widths))
        )
        for level, width in zip(list(self.conv_blocks)[:-1], config.encoder_channels[:-1], strict=True):
            level.downsample = Downsample(width, operations, **factory)
        self.mid = _middle(widths[-1], operations, **factory)
        self.norm_out = operations.GroupNorm(NORM_GROUPS, widths[-1], eps=NORM_EPS, **factory)
        self.conv_out = operations.Conv2d(widths[-1], config.z_channels, 3, padding=1, **factory)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for layer in (*self.conv_blocks, *self.mid):
            x = layer(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """Features [B, z_channels, h, w] -> pictures [B, 3, h * factor, w * factor]; levels run from the deepest."""

    def __init__(self, config: DecoderSizes, operations: Any, **factory: Any) -> None:
        super().__init__()
        widths = tuple(reversed(config.decoder_channels))
        self.conv_in = operations.Conv2d(config.z_channels, widths[0], 3, padding=1, **factory)
        self.mid = _middle(widths[0], operations, **factory)
        self.conv_blocks = nn.ModuleList(
            Level(before, after, config.decoder_blocks, config.attention and index == 0, operations, **factory)
            for index, (before, after) in enumerate(itertools.pairwise((widths[0], *widths)))
        )
        for level, width in zip(list(self.conv_blocks)[:-1], widths[:-1], strict=True):
            level.upsample = Upsample(width, operations, **factory)
        self.norm_out = operations.GroupNorm(NORM_GROUPS, widths[-1], eps=NORM_EPS, **factory)
        self.conv_out = operations.Conv2d(widths[-1], 3, 3, padding=1, **factory)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for layer in (*self.mid, *self.conv_blocks):
            x = layer(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Codebook(nn.Module):
    """Code vectors, brought to unit length at every use where the configuration says so."""

    def __init__(self, config: VQConfig, operations: Any, **factory: Any) -> None:
        super().__init__()
        self.embedding = operations.Embedding(config.codebook_size, config.embed_dim, **factory)
        self.size, self.normalised = config.codebook_size, config.normalised

    def forward(self, codes: Tensor) -> Tensor:
        """Codes [...] -> vectors [..., embed_dim]."""
        vectors = self.embedding(codes)
        return F.normalize(vectors, dim=-1) if self.normalised else vectors

    def vectors(self, device: torch.device) -> Tensor:
        """All vectors [codebook_size, embed_dim]."""
        return self(torch.arange(self.size, device=device))


class VQDecoder(nn.Module):
    """Code grids to pictures about -1..1: what generation needs of a VQ tokenizer."""

    def __init__(self, config: VQConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config, operations, **factory)
        self.quantize = Codebook(config, operations, **factory)
        self.post_quant_conv = operations.Conv2d(config.embed_dim, config.z_channels, 1, **factory)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, h, w] -> pictures [B, 3, h * factor, w * factor], about -1..1."""
        return self.decode_vectors(self.quantize(codes))

    def decode_vectors(self, vectors: Tensor) -> Tensor:
        """Code vectors [B, h, w, embed_dim] -> pictures, as in `decode`; training sends its gradient through here."""
        return self.decoder(self.post_quant_conv(vectors.permute(0, 3, 1, 2)))

    def code_vectors(self) -> Tensor:
        """The vector of each code as it is decoded, [codebook_size, embed_dim], where the weights are."""
        return self.quantize.vectors(self.quantize.embedding.weight.device)


class VQTokenizer(VQDecoder):
    """Pictures in -1..1 to code grids and back, by vectors of unit length (LlamaGen, arXiv 2406.06525, section 2.1)."""

    def __init__(self, config: VQConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__(config, operations, **factory)
        self.encoder = Encoder(config, operations, **factory)
        self.quant_conv = operations.Conv2d(config.z_channels, config.embed_dim, 1, **factory)

    def latents(self, pictures: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] -> unit vectors before quantisation [B, h, w, embed_dim]."""
        return F.normalize(self.quant_conv(self.encoder(pictures)).permute(0, 2, 3, 1), dim=-1)

    def encode(self, pictures: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in -1..1 -> codes LongTensor [B, H / factor, W / factor], the nearest vectors."""
        latents = self.latents(pictures)
        return (latents @ self.quantize.vectors(latents.device).T).argmax(dim=-1)


_DECODING_HALF = ("decoder.", "post_quant_conv.", "quantize.embedding.")
_TAMING_MIDDLE = {"block_1": "0", "attn_1": "1", "block_2": "2"}


def taming_sources(names: Iterable[str]) -> dict[str, list[str]]:
    """A VQDecoder's names -> taming-transformers' names among those given.

    Skipped are the encoder, quant_conv and what training left: the loss with its discriminator, moving averages. There,
    level 0 is the full resolution and decoding begins at the last level; here it begins at level 0.
    """
    names = list(names)
    levels = {int(found[1]) for name in names if (found := re.match(r"decoder\.up\.(\d+)\.", name))}
    return {_from_taming(name, max(levels)): [name] for name in names if name.startswith(_DECODING_HALF)}


def _from_taming(name: str, deepest: int) -> str:
    name = re.sub(r"^decoder\.up\.(\d+)\.", lambda found: f"decoder.conv_blocks.{deepest - int(found[1])}.", name)
    name = re.sub(
        r"^decoder\.mid\.(\w+)\.", lambda found: f"decoder.mid.{_TAMING_MIDDLE.get(found[1], found[1])}.", name
    )
    return name.replace(".block.", ".res.")
