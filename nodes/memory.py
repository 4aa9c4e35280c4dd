"""Weights under ComfyUI's memory management, and what an out-of-memory error tells the user.

Each network sits in a ModelPatcher, so eviction, low memory and /free work without a line of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.model_management as mm
import torch
from comfy.model_patcher import ModelPatcher
from torch import nn

from ..decoders import ContinuousModel, LatentLayout, TokenLayout

DECODE_MAPS = 5  # float32 maps that a VQ decoder holds at once at full resolution
Layout = TokenLayout | LatentLayout


@dataclass(frozen=True)
class ManagedModel:
    """A loaded checkpoint (SPECAR_MODEL, SPECAR_DRAFT): the model and the patchers that move its weights.

    vq: what turns tokens into pixels, a VQ tokenizer or, of a continuous model, a VAE.
    """

    model: Any
    network: ModelPatcher
    vq: ModelPatcher | None
    text_encoder: ModelPatcher | None

    @staticmethod
    def of(model: Any) -> ManagedModel:
        vq = model.vae if isinstance(model, ContinuousModel) else model.vq
        return ManagedModel(model, _patcher(model.network), _patcher(vq), _patcher(model.text_encoder))

    @property
    def streamed(self) -> bool:
        """True when the network did not fit and its layers are copied in as they are used."""
        return bool(self.network.model.model_lowvram)


def _patcher(module: nn.Module | None) -> ModelPatcher | None:
    return None if module is None else ModelPatcher(module, mm.get_torch_device(), mm.unet_offload_device())


def place_for_sampling(target: ManagedModel, draft: ManagedModel | None, memory_required: int) -> None:
    """Brings target, tokenizer and draft to the device in one call: two calls could evict the first."""
    models = [target] if draft is None else [target, draft]
    patchers = [part for managed in models for part in (managed.network, managed.vq) if part is not None]
    mm.load_models_gpu(patchers, memory_required=memory_required)
    for managed in models:
        managed.model.device = managed.network.load_device


def decoding_memory(target: ManagedModel, layout: Layout) -> int:
    """Bytes of the tokenizer's activations while it turns the tokens of one picture into pixels."""
    if target.vq is None:
        return 0
    config = target.vq.model.config
    cells = math.prod(layout.grid)
    if isinstance(layout, LatentLayout):
        cells = cells * layout.channels // config.latent_channels
    pixels = cells * config.factor**2
    return pixels * config.full_size_channels * torch.float32.itemsize * DECODE_MAPS


def place_for_decoding(target: ManagedModel, layout: Layout) -> None:
    """Brings the tokenizer to the device with room for decoding one picture."""
    if target.vq is not None:
        mm.load_models_gpu([target.vq], memory_required=decoding_memory(target, layout))
    target.model.device = target.network.load_device


def place_text_encoder(target: ManagedModel) -> None:
    """Brings the text encoder to the device, whole: a transformers class cannot stream its layers."""
    if target.text_encoder is not None:
        mm.load_models_gpu([target.text_encoder], force_full_load=True)
    target.model.device = target.network.load_device


def computing_dtype(choice: str) -> torch.dtype:
    """What a dtype widget means on this machine; auto is bf16 where the device is good at it, else fp16, else fp32."""
    chosen = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if choice != "auto":
        return chosen[choice]
    device = mm.get_torch_device()
    if mm.should_use_bf16(device):
        return torch.bfloat16
    return torch.float16 if mm.should_use_fp16(device) else torch.float32


@contextmanager
def explained_out_of_memory(advice: str) -> Iterator[None]:
    """Adds what to lower to an out-of-memory error and lets it go on: ComfyUI knows it by its type and unloads."""
    try:
        yield
    except mm.OOM_EXCEPTION as error:
        error.args = (f"{error}\n{advice}",)
        raise
