"""The contracts of the pack: what a model offers to a decoder, how a run is set up, what it reports while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Promise = Literal["reference", "seed-exact", "lossless", "approximate"]
Initialise = Literal["random", "left", "left-likeliest", "above", "above-likeliest", "neighbour", "neighbour-above"]
Redraft = Literal["independent", "gumbel", "maximal"]
Verify = Literal["speculative", "grouped", "exact"]
Grouping = Literal["dynamic", "static"]


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of one picture sit.

    grid: (frames, rows, columns) of the code grid.
    forced: LongTensor [N] on the CPU; the code that a position must take (structure, or given by the user), or -1.
    Structure codes are numbered from the model's vocabulary on. row_ends: structure positions behind each grid row.
    """

    grid: tuple[int, int, int]
    forced: Tensor
    row_ends: int = 0

    @property
    def positions(self) -> int:
        """N, the positions in generation order, structure positions included."""
        return self.forced.shape[0]

    @property
    def end(self) -> int:
        """One past the last free position: what follows is known and needs no pass."""
        free = (self.forced < 0).nonzero()
        return int(free[-1]) + 1 if len(free) else 0

    @property
    def longest_forced_run(self) -> int:
        """The most forced positions in a row, those behind the end aside."""
        longest = run = 0
        for code in self.forced[: self.end].tolist():
            run = run + 1 if code >= 0 else 0
            longest = max(longest, run)
        return longest

    @property
    def row_length(self) -> int:
        """Positions from one grid row to the next, structure positions at the row's end included."""
        return self.grid[2] + self.row_ends

    def cells(self, tokens: Tensor) -> Tensor:
        """The codes of the grid without structure: [B, N] -> [B, frames, rows, columns]."""
        frames, rows, columns = self.grid
        return tokens[:, : frames * rows * self.row_length].unflatten(1, (frames, rows, -1))[..., :columns]

    @staticmethod
    def free(rows: int, columns: int) -> TokenLayout:
        """A plain raster of rows x columns codes without structure positions."""
        return TokenLayout((1, rows, columns), torch.full((rows * columns,), -1))


class TokenSession(Protocol):
    """One generation's view of a model: its condition, its cache, its rows.

    resident: whether every weight stays on the device, so that a pass can be recorded and replayed.
    """

    prefill_passes: int
    resident: bool

    def forward(self, tokens: Tensor, start: Tensor, parents: Tensor | None = None, furthest: int = -1) -> Tensor:
        """Feeds a window and predicts the position after each token.

        tokens: LongTensor [B, T], at positions start[b] .. start[b] + T - 1 of row b.
        start: LongTensor [B]; -1 stands for the last condition row (its token is ignored), which predicts position 0.
        parents: LongTensor [T] makes the window a tree: slot t follows slot parents[t] (-1: the committed prefix), sees
        its ancestors alone, and stands as many positions after start as it has ancestors. `keep` must follow.
        furthest: the host's bound on start, so that attention need not look at the whole cache; -1: none is known.
        Returns float32 logits [G, B, T, V], G = 2 when guided (0 conditional, 1 unconditional), else 1. The cache is
        written from start[b] on: rolling back is calling with a smaller start.
        """

    def keep(self, path: Tensor) -> None:
        """After a tree: the slots path [B, S], a chain from slot 0, become the cache's first S positions from start."""

    def close(self) -> None:
        """Frees the cache; the session cannot be used again."""


class TokenModel(Protocol):
    """A next-token image model (LlamaGen and its kind).

    pass_seconds: empty at first; keeps what tuning.py measured about the model on its device.
    """

    name: str
    vocabulary: int
    device: torch.device
    dtype: torch.dtype
    pass_seconds: dict[Any, dict[int, float]]

    def layout(self, condition: Any) -> TokenLayout:
        """The positions that one picture under this condition has."""

    def session(self, condition: Any, batch_size: int, guided: bool, window: int) -> TokenSession:
        """Allocates the cache for batch_size rows and windows of up to `window` positions, and runs the prefill."""

    def decode(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """LongTensor [B, N] -> float32 pictures [B * frames, H, W, 3] in 0..1."""

    def code_embeddings(self) -> Tensor:
        """float32 [V, C]: vectors whose distance says how alike two codes look (used by grouped verification)."""


@dataclass(frozen=True)
class DecoderOptions:
    """Overrides of a decoder's parts; None keeps what the decoder's row of the table says."""

    redraft: Redraft | None = None
    verify: Verify | None = None
    initialise: Initialise | None = None
    grouping: Grouping = "dynamic"
    group_size: int = 14
    group_probability_gap: float = 0.15
    group_distance: float = 0.0  # times the median nearest-neighbour distance of the codes; 0 sets no limit
    branches: int = 1  # first drafts tried in a pass, the main chain's included, 0: as measured; equality only
    branch_length: int = 4  # positions of each branch beside the main chain


@dataclass(frozen=True)
class SamplerSettings:
    """How to sample. draft_length is W, the positions fed in one pass (for draft-model: gamma, the tokens drafted);
    0 takes the one that is fastest here, by a short measurement.

    Image b of a batch has the random stream (seed, first_index + b). top_k = 0 keeps every code, top_p = 1 as well;
    temperature = 0 takes the likeliest code; guidance_scale = 1 runs the model without the unconditional stream.
    """

    decoder: str = "auto"
    draft_length: int = 32
    seed: int = 0
    batch_size: int = 1
    guidance_scale: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    options: DecoderOptions = field(default_factory=DecoderOptions)
    first_index: int = 0


@dataclass(frozen=True)
class Progress:
    """A running generation, told before each forward pass.

    accepted: final positions of each row so far. tokens: LongTensor [B, N] on the device; row b is final up to
    accepted[b], guesses after that.
    """

    accepted: list[int]
    positions: int
    forward_passes: int
    tokens: Tensor

    @property
    def fraction(self) -> float:
        return sum(self.accepted) / (self.positions * len(self.accepted))


OnStep = Callable[[Progress], None]
