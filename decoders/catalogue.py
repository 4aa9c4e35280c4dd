"""What a user can choose from: the decoders of codes and those of continuous tokens, in one list."""

from __future__ import annotations

from .continuous.table import AUTO_CONTINUOUS_DECODER, CONTINUOUS_DECODERS
from .interface import ContinuousOptions
from .table import AUTO, AUTO_DECODER, DECODERS

CHOICES = [AUTO, *dict.fromkeys((*DECODERS, *CONTINUOUS_DECODERS))]


def needs_draft_model(decoder: str) -> bool:
    """Whether the decoder of this id drafts with a second model."""
    row = DECODERS.get(decoder) or CONTINUOUS_DECODERS.get(decoder)
    return row is not None and row.needs_draft_model


def summary(choice: str) -> str:
    """One line on what a choice promises and how it works, for both kinds of model where it takes both."""
    if choice == AUTO:
        return f"auto takes {AUTO_DECODER} for codes and {AUTO_CONTINUOUS_DECODER} for continuous tokens."
    lines = []
    if row := DECODERS.get(choice):
        lines.append(f"{row.title} ({row.promise}). {row.summary}")
    if continuous := CONTINUOUS_DECODERS.get(choice):
        promise = continuous.promise(ContinuousOptions())
        lead = "For continuous tokens" if lines else continuous.title
        lines.append(f"{lead} ({promise}). {continuous.summary}")
    return " ".join(lines)
