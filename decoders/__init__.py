"""The decoding algorithms. Plain torch: this room knows no model family and no ComfyUI."""

from .checks import MAX_BRANCHES, MAX_SEED, check
from .generate import Generation, generate
from .interface import DecoderOptions, Progress, SamplerSettings, TokenLayout, TokenModel, TokenSession
from .statistics import Statistics
from .table import AUTO, DECODERS, Decoder
from .tuning import longest_pass

__all__ = [
    "AUTO",
    "DECODERS",
    "MAX_BRANCHES",
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
    "longest_pass",
]
