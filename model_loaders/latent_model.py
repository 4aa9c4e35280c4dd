"""What the models of continuous tokens share: MAR, Harmon and xAR draw latents that one VAE turns into pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..decoders.continuous.diffusion import GaussianDiffusion, kept_times
from ..decoders.interface import ContinuousOptions, LatentLayout, Respacing, ReverseProcess
from .class_labels import ClassCondition, ClassLabels
from .kl_vae import LATENT_CHANNELS

LATENT_SCALE = 0.2325  # latents of the KL-16 VAE times this have a standard deviation of about 1
ACTIVATIONS = 24  # rows of the trunk's width that a token takes while a block runs: its input, queries, keys, ...


class LatentModel:
    """Implements what decoders.interface.ContinuousModel asks of every family. `device` is where it computes.

    vae: a kl_vae.KLDecoder, or None for draft models. width: channels of the trunk, for the memory that a pass takes.
    """

    text_encoder = None
    labels: Sequence[str] = ()
    classes = 0

    def __init__(
        self,
        network: nn.Module,
        *,
        name: str,
        channels: int,
        width: int,
        diffusion_steps: int,
        respacing: Respacing = "even",
        device: torch.device,
        dtype: torch.dtype,
        vae: Any = None,
    ) -> None:
        self.network, self.name, self.channels, self.width = network, name, channels, width
        self.diffusion_steps, self.respacing = diffusion_steps, respacing
        self.device, self.dtype, self.vae = device, dtype, vae

    def layout(self, condition: Any) -> LatentLayout:
        """See ContinuousModel.layout; raises ValueError for another family's condition."""
        raise NotImplementedError

    def process(self, options: ContinuousOptions) -> ReverseProcess:
        """See ContinuousModel.process; here that of a diffusion head."""
        times = kept_times(options.diffusion_steps or self.diffusion_steps, options.respacing or self.respacing)
        return GaussianDiffusion(options, times, self.device)

    def memory_required(self, condition: Any, batch_size: int, guided: bool, contexts: int) -> int:
        """Bytes that a pass over so many contexts of each picture takes, beside the weights."""
        rows = (2 if guided else 1) * batch_size * contexts
        tokens = math.prod(self.layout(condition).grid) * self.channels // LATENT_CHANNELS
        return rows * tokens * self.width * ACTIVATIONS * self.dtype.itemsize

    def decode(self, latents: Tensor, layout: LatentLayout) -> Tensor:
        """See ContinuousModel.decode."""
        return ((self.pixels(latents, layout) + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).float()

    def pixels(self, latents: Tensor, layout: LatentLayout) -> Tensor:
        """Tokens [B, N, C] -> pictures [B, 3, H, W], about -1..1; decoded one by one to bound the memory."""
        if self.vae is None:
            raise ValueError(f"{self.name} was loaded without its VAE, which pictures need; load it with one.")
        maps = self.latent_maps(latents.to(self.device).float(), layout) / LATENT_SCALE
        return torch.cat([self.vae.decode(picture[None]) for picture in maps])

    def latent_maps(self, latents: Tensor, layout: LatentLayout) -> Tensor:
        """Tokens [B, N, C] -> latents [B, 16, h, w]. A token's numbers are channel, row and column of its patch."""
        _, rows, columns = layout.grid
        side = math.isqrt(self.channels // LATENT_CHANNELS)
        cells = latents.unflatten(1, (rows, columns)).unflatten(-1, (LATENT_CHANNELS, side, side))
        return cells.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class ClassLatentModel(ClassLabels, LatentModel):
    """The class-conditional ones: MAR and xAR."""

    takes = "a class label"

    def __init__(
        self, network: nn.Module, *, layout: LatentLayout, classes: int, labels: Sequence[str] = (), **model: Any
    ) -> None:
        super().__init__(network, channels=layout.channels, **model)
        self.classes, self.labels, self._layout = classes, list(labels)[:classes], layout

    def prompt(self, text: str, *, negative: str = "", width: int = 0, height: int = 0) -> NoReturn:  # noqa: ARG002
        """Raises ValueError: the model takes a class label."""
        raise self._takes("a class label", "a prompt")

    def layout(self, condition: Any) -> LatentLayout:
        """See ContinuousModel.layout; raises ValueError for a condition of another kind or of other classes."""
        if not isinstance(condition, ClassCondition):
            raise self._takes("a class label", "a prompt")
        self.class_label(condition.label)
        return self._layout
