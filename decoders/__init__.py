"""The decoding algorithms. Plain torch: this room knows no model family and no ComfyUI."""

from .generate import MAX_SEED, Generation, check, generate
from .interface import DecoderOptions, Progress, SamplerSettings, TokenLayout, TokenModel, TokenSession
from .statistics import Statistics
from .table import AUTO, DECODERS, Decoder

__all__ = [
    "AUTO",
    "DECODERS",
    "MAX_SEED",
    "Decoder",
    "DecoderOptions",
    "Generation",
    "Progress",
    "SamplerSettings",
    "Statistics",
    "TokenLayout",
    "TokenModel",
    "TokenSession",
    "check",
    "generate",
]
