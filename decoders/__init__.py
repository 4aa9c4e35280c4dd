"""The decoding algorithms. Plain torch: this room knows no model family and no ComfyUI."""

from .catalogue import CHOICES, needs_draft_model, summary
from .checks import MAX_BRANCHES, MAX_SEED, check
from .continuous.checks import check as check_continuous
from .continuous.table import CONTINUOUS_DECODERS, ContinuousDecoder
from .generate import Generation, generate
from .interface import (
    ContinuousModel,
    ContinuousOptions,
    DecoderOptions,
    LatentLayout,
    LatentSession,
    Progress,
    ReverseProcess,
    SamplerSettings,
    TokenLayout,
    TokenModel,
    TokenSession,
)
from .statistics import Statistics
from .table import AUTO, DECODERS, Decoder
from .tuning import longest_pass

__all__ = [
    "AUTO",
    "CHOICES",
    "CONTINUOUS_DECODERS",
    "DECODERS",
    "MAX_BRANCHES",
    "MAX_SEED",
    "ContinuousDecoder",
    "ContinuousModel",
    "ContinuousOptions",
    "Decoder",
    "DecoderOptions",
    "Generation",
    "LatentLayout",
    "LatentSession",
    "Progress",
    "ReverseProcess",
    "SamplerSettings",
    "Statistics",
    "TokenLayout",
    "TokenModel",
    "TokenSession",
    "check",
    "check_continuous",
    "generate",
    "longest_pass",
    "needs_draft_model",
    "summary",
]
