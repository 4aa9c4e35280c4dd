"""From checkpoint files to models that the decoders can drive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .detect import find_model
from .errors import CheckpointError
from .options import LoadOptions, OnLoad

__all__ = ["CheckpointError", "bundled", "load"]

_BUNDLED = Path(__file__).parent / "bundled"


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    storage: torch.dtype | None = None,
    operations: Any = nn,
    vq_path: str | Path | None = None,
    text_encoder_path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    with_vq: bool = True,
    on_progress: OnLoad | None = None,
) -> Any:
    """Loads the model at a path (a file, a sharded set's index or shard, or a folder) as a TokenModel.

    dtype: precision of the weights and of the computation; None keeps the file's. storage: precision in which the big
    matrices are kept (8-bit floats, say); needs layers that cast at use. operations: where the layer classes come from.
    vq_path, text_encoder_path: companions that do not lie beside the checkpoint. overrides: what no file tells: `size`
    (pixels of the square picture that the model was trained on), `heads`, for LlamaGen `grid` (rows, columns), for
    Janus `roles` (the names of who speaks). with_vq=False leaves out what only a picture needs (draft models).
    on_progress(done, total) is called after each weight of the network and may raise to stop. Raises CheckpointError, a
    ValueError of one sentence, for whatever cannot be loaded.
    """
    options = LoadOptions(
        device=torch.device(device),
        dtype=dtype,
        storage=storage,
        on_progress=on_progress,
        operations=operations,
        vq_path=None if vq_path is None else Path(vq_path),
        text_encoder_path=None if text_encoder_path is None else Path(text_encoder_path),
        overrides=overrides or {},
        with_vq=with_vq,
    )
    family, checkpoint = find_model(Path(path))
    return family.load(checkpoint, options)


def bundled() -> dict[str, Path]:
    """The models that ship with the pack: name -> path."""
    names = ("demo-tokens", "demo-tokens-draft", "demo-continuous", "demo-continuous-draft")
    return {name: _BUNDLED / f"{name}.safetensors" for name in names}
