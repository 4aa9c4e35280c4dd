"""What the loaders raise when a file cannot be used: one sentence that a person can act on."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit; the message says what was given and what to do."""
