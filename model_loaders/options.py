"""What a user may say about a load beyond the path; every family's loader takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

OnLoad = Callable[[int, int], None]


@dataclass(frozen=True)
class LoadOptions:
    """See model_loaders.load."""

    device: torch.device
    dtype: torch.dtype | None = None
    storage: torch.dtype | None = None
    on_progress: OnLoad | None = None
    operations: Any = nn
    vq_path: Path | None = None
    text_encoder_path: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    with_vq: bool = True
