"""Filling a network, built without memory on the meta device, with the tensors of a checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .checkpoint_files import Checkpoint
from .errors import CheckpointError
from .options import OnLoad

# Tables that the code computes itself, and leftovers of training.
_NEEDLESS = re.compile(
    r"(?:^|\.)(?:freqs_cis|causal_mask|inv_freq|_extra_state|codebook_used|num_batches_tracked)$|kv_cache|^loss\."
)

_BLOCK_MATRIX = re.compile(
    r"^(?:llm\.|mar\.)?"
    r"(?:layers\.\d+\.(?:attention|feed_forward)\.w\w+|(?:en|de)coder_blocks\.\d+\.(?:attn|mlp)\.\w+)\.weight$"
)

Sources = Mapping[str, Sequence[str]]
Reshape = Mapping[str, Callable[[Tensor], Tensor]]


def needed(names: Iterable[str]) -> list[str]:
    """The names that stand for weights."""
    return [name for name in names if not _NEEDLESS.search(name)]


def fill(
    network: nn.Module,
    checkpoint: Checkpoint,
    sources: Sources,
    device: torch.device,
    dtype: torch.dtype | None,
    reshape: Reshape | None = None,
    *,
    storage: torch.dtype | None = None,
    precise: str = "",
    on_progress: OnLoad | None = None,
) -> None:
    """Puts each tensor in its place, cast one at a time; dtype None keeps the file's precision.

    sources: name in the network -> names in the checkpoint, whose rows follow one another. reshape: name in the network
    -> what is done to its tensor (rows picked, axes dropped). storage: precision of the blocks' matrices, nearly all of
    a big model; its layers must cast at use. precise: how names begin whose weights stay float32. on_progress is told
    the elements read so far and in all, and may raise to stop: nothing stays. Raises CheckpointError where the two
    sides do not hold the same names and shapes.
    """
    reshape = reshape or {}
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    check_fit(str(checkpoint.path), expected, checkpoint.shapes, sources, reshape)
    state = {}
    done, total = 0, sum(map(math.prod, expected.values()))
    # In the order of the files, so that each is opened once; a weight of two files comes between the two.
    for name in sorted(expected, key=lambda name: sorted(map(checkpoint.position, sources[name]), reverse=True)):
        names = sources[name]
        kept = storage if storage and _BLOCK_MATRIX.search(name) else dtype
        if precise and name.startswith(precise):
            kept = torch.float32
        tensor = checkpoint.tensor(names[0]) if len(names) == 1 else _joined(checkpoint, names, device, kept)
        if name in reshape:
            tensor = reshape[name](tensor)
        # A copy, so that a checkpoint file that is replaced or deleted takes no loaded weight with it, and can be let
        # go once it is read. What was joined is one.
        state[name] = tensor.to(device, kept, copy=len(names) == 1)
        done += math.prod(expected[name])
        if on_progress:
            on_progress(done, total)
    network.load_state_dict(state, assign=True)
    network.requires_grad_(False).eval()


def _joined(checkpoint: Checkpoint, names: Sequence[str], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """The rows of several tensors after one another, without a second copy of any on the way."""
    shapes = [checkpoint.shapes[name] for name in names]
    rows = [shape[0] for shape in shapes]
    dtype = dtype or checkpoint.tensor(names[0]).dtype
    whole = torch.empty((sum(rows), *shapes[0][1:]), device=device, dtype=dtype)
    for place, name in zip(whole.split(rows), names, strict=True):
        place.copy_(checkpoint.tensor(name))
    return whole


def check_fit(
    title: str,
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    sources: Sources,
    reshape: Reshape | None = None,
) -> None:
    """Raises CheckpointError unless sources give every expected tensor in its shape, and nothing else."""
    reshape = reshape or {}
    if missing := [name for name in expected if name not in sources]:
        raise CheckpointError(f"{title} is incomplete: {_some(missing)} missing; download it again.")
    if foreign := [name for name in sources if name not in expected]:
        raise CheckpointError(
            f"{title} does not fit its family: {_some(foreign)} unknown; give an unchanged checkpoint."
        )
    for name, shape in expected.items():
        parts = [shapes[part] for part in sources[name]]
        given = parts[0] if len(parts) == 1 else (sum(part[0] for part in parts), *parts[0][1:])
        if name in reshape:
            given = tuple(reshape[name](torch.empty(given, device="meta")).shape)
        if given != shape:
            raise CheckpointError(
                f"{title} is damaged: {name} has the shape {list(given)}, its other weights ask for {list(shape)}."
            )


def _some(names: list[str], shown: int = 3) -> str:
    listed = ", ".join(names[:shown])
    more = len(names) - shown
    return f"{listed} and {more} more are" if more > 0 else f"{listed} {'is' if len(names) == 1 else 'are'}"
