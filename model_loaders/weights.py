"""Filling a network, built without memory on the meta device, with the tensors of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from .checkpoint_files import Checkpoint
from .errors import CheckpointError

# Tables that the code computes itself, and leftovers of training.
_NEEDLESS = re.compile(
    r"(?:^|\.)(?:freqs_cis|causal_mask|inv_freq|_extra_state|codebook_used|num_batches_tracked)$|kv_cache|^loss\."
)

Sources = Mapping[str, Sequence[str]]


def needed(names: Iterable[str]) -> list[str]:
    """The names that stand for weights."""
    return [name for name in names if not _NEEDLESS.search(name)]


def fill(
    network: nn.Module, checkpoint: Checkpoint, sources: Sources, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Puts each tensor in its place, cast one at a time; dtype None keeps the file's precision.

    sources: name in the network -> names in the checkpoint, whose rows follow one another. Raises CheckpointError where
    the two sides do not hold the same names and shapes.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    check_fit(str(checkpoint.path), expected, checkpoint.shapes, sources)
    state = {}
    for name in expected:
        # A copy, so that a checkpoint file that is replaced or deleted takes no loaded weight with it.
        parts = [checkpoint.tensor(part).to(device, dtype, copy=True) for part in sources[name]]
        state[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    network.load_state_dict(state, assign=True)
    network.requires_grad_(False).eval()


def check_fit(
    title: str,
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    sources: Sources,
) -> None:
    """Raises CheckpointError unless sources give every expected tensor in its shape, and nothing else."""
    if missing := [name for name in expected if name not in sources]:
        raise CheckpointError(f"{title} is incomplete: {_some(missing)} missing; download it again.")
    if foreign := [name for name in sources if name not in expected]:
        raise CheckpointError(
            f"{title} does not fit its family: {_some(foreign)} unknown; give an unchanged checkpoint."
        )
    for name, shape in expected.items():
        parts = [shapes[part] for part in sources[name]]
        given = parts[0] if len(parts) == 1 else (sum(part[0] for part in parts), *parts[0][1:])
        if given != shape:
            raise CheckpointError(
                f"{title} is damaged: {name} has the shape {list(given)}, its other weights ask for {list(shape)}."
            )


def _some(names: list[str], shown: int = 3) -> str:
    listed = ", ".join(names[:shown])
    more = len(names) - shown
    return f"{listed} and {more} more are" if more > 0 else f"{listed} {'is' if len(names) == 1 else 'are'}"
