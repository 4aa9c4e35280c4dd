"""The room that knows ComfyUI: schemas, validation, progress, memory, and errors worded for people.

extension.py gathers the nodes; each other module holds one topic.
"""

from .extension import SpeculativeARExtension

__all__ = ["SpeculativeARExtension"]
