"""Speculative AR, a ComfyUI node pack: autoregressive image models, decoded several positions per forward pass.

ComfyUI imports this file and calls `comfy_entrypoint`. Nothing heavy is imported before that, so that the decoders and
the loaders can be used without ComfyUI.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> ComfyExtension:
    """Gives ComfyUI the pack's nodes."""
    try:
        from .nodes.extension import SpeculativeARExtension
    except Exception:
        # ComfyUI prints one line without a traceback.
        logging.exception("Speculative AR could not be loaded")
        raise
    return SpeculativeARExtension()
