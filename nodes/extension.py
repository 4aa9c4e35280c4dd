"""What ComfyUI asks the pack for: its list of nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import folders
from .conditioning import SpecARClassLabel, SpecARPrompt
from .continuous_options import SpecARContinuousOptions
from .decode import SpecARDecodeTokens
from .loaders import SpecARLoadCheckpoint, SpecARLoadDraftModel
from .options import SpecARDecoderOptions
from .sampler import SpecARSampler


class SpeculativeARExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        folders.register()
        return [
            SpecARLoadCheckpoint,
            SpecARLoadDraftModel,
            SpecARPrompt,
            SpecARClassLabel,
            SpecARDecoderOptions,
            SpecARContinuousOptions,
            SpecARSampler,
            SpecARDecodeTokens,
        ]
