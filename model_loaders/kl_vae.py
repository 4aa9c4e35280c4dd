"""The KL VAE of MAR, xAR and Harmon: grids of continuous tokens to pictures.

Latent diffusion's autoencoder (arXiv 2112.10752) at a stride of 16. Its convolutions are those of the VQ tokenizers
(vq.py); what differs is that nothing is looked up in a code book. Generation needs the decoding half alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .errors import CheckpointError
from .vq import Decoder, levels, taming_sources

INSIDE = "vae."  # what a model's file writes before its VAE's names
LATENT_CHANNELS = 16


def is_kl_vae(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a KL VAE is among these weights, be it a file of its own or inside a model's."""
    return any(
        f"{prefix}decoder.up.0.block.0.norm1.weight" in shapes
        and f"{prefix}post_quant_conv.weight" in shapes
        and f"{prefix}quantize.embedding.weight" not in shapes
        for prefix in ("", INSIDE)
    )


@dataclass(frozen=True)
class KLConfig:
    """Sizes of the decoding half. latent_channels: of a continuous token. The rest is as in VQConfig."""

    latent_channels: int
    z_channels: int
    decoder_channels: tuple[int, ...]
    decoder_blocks: int = 3
    attention: bool = False

    @property
    def factor(self) -> int:
        """Pixels per token along one side."""
        return 2 ** (len(self.decoder_channels) - 1)

    @property
    def full_size_channels(self) -> int:
        """Channels of the widest map that the decoder makes at full resolution."""
        return max(self.decoder_channels[:2])

    @staticmethod
    def from_state_dict(shapes: Mapping[str, Sequence[int]]) -> KLConfig:
        """Reads the sizes from the shape of each tensor under its published name; raises where a part is missing."""
        for name in ("decoder.conv_in.weight", "decoder.up.0.block.0.conv1.weight", "post_quant_conv.weight"):
            if name not in shapes:
                raise CheckpointError(f"The VAE has no `{name}`; give the complete file, as it was published.")
        own = {name: shapes[source] for name, (source,) in taming_sources(shapes).items()}
        widths, blocks = levels(own, "decoder")
        return KLConfig(
            latent_channels=own["post_quant_conv.weight"][1],
            z_channels=own["decoder.conv_in.weight"][1],
            decoder_channels=tuple(reversed(widths)),
            decoder_blocks=blocks,
            attention="decoder.conv_blocks.0.attn.0.norm.weight" in own,
        )


class KLDecoder(nn.Module):
    """Latents to pictures."""

    def __init__(self, config: KLConfig, operations: Any = nn, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config, operations, **factory)
        self.post_quant_conv = operations.Conv2d(config.latent_channels, config.z_channels, 1, **factory)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, h, w], already divided by their scale -> pictures [B, 3, H, W], about -1..1."""
        return self.decoder(self.post_quant_conv(latents))
