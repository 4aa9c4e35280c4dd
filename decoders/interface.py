"""The contracts of the pack: what a model offers to a decoder, how a run is set up, what it reports while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Promise = Literal["reference", "seed-exact", "seed-exact within tolerance", "lossless", "approximate"]
Initialise = Literal["random", "left", "left-likeliest", "above", "above-likeliest", "neighbour", "neighbour-above"]
Redraft = Literal["independent", "gumbel", "maximal"]
Verify = Literal["speculative", "grouped", "exact"]
Grouping = Literal["dynamic", "static"]
Respacing = Literal["even", "strided"]
DiffusionSampler = Literal["ddpm", "ddim"]
GuidanceSchedule = Literal["constant", "linear", "linear-from-one"]
Verification = Literal["prefix", "block"]
SigmaFactor = Literal["off", "paper", "released"]


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
class LatentLayout:
    """Where the continuous tokens of one picture sit.

    grid: (frames, rows, columns) of positions. channels: numbers that a token has. iterations: the AR steps that the
    model's authors take. guidance_schedule: how their guidance grows over the steps. in_order: positions are generated
    one by one in raster order, for models that know no other; else in a random order, several a step where there are
    fewer steps than positions.
    """

    grid: tuple[int, int, int]
    channels: int
    iterations: int
    guidance_schedule: GuidanceSchedule = "constant"
    in_order: bool = False

    @property
    def positions(self) -> int:
        """N."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def row_length(self) -> int:
        """Positions from one grid row to the next."""
        return self.grid[2]


class ReverseProcess(Protocol):
    """The Gaussian steps that turn noise into a token, each affine in the state; pure functions of tensors.

    Steps count down: step T - 1 is the first, step 0 the last. `step` is a LongTensor of any shape [...], `x` and what
    the network says about it have one more axis. steps: T. deterministic: every step has a standard deviation of 0.
    """

    steps: int
    deterministic: bool

    def time(self, step: Tensor) -> Tensor:
        """float32 [...]: what the network is told about a step."""

    def predict(self, output: Tensor, x: Tensor, step: Tensor) -> Tensor:
        """The part of a network's output [..., P] at x [..., C] that a later step can go by as well: [..., Q]."""

    def guess(self, x: Tensor) -> Tensor:
        """What stands for a prediction before the network said anything, of states x [..., C]: [..., Q]."""

    def transition(self, prediction: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """factor [..., 1], offset [..., C], log std [..., C]: x goes to factor x + offset, with noise of that std."""


class LatentSession(Protocol):
    """One generation's view of a continuous model. G is 2 when guided (0 conditional, 1 unconditional), else 1."""

    def features(self, tokens: Tensor, order: Tensor, known: Tensor, longest: int, asked: Tensor) -> Any:
        """One pass of the trunk: what the denoiser has to know about asked positions.

        tokens: float32 [R, N, C]. order: LongTensor [R, N], the positions of each row in the order of generation; of
        these the first known[r] (LongTensor [R]) are visible, whatever the other tokens hold. longest: the host's bound
        on known, which no longer row exceeds. asked: LongTensor [R, S], positions to predict.
        Returns what `denoise` takes for the M = R * S positions, rows first.
        """

    def denoise(self, x: Tensor, time: Tensor, features: Any, guidance: Tensor) -> Tensor:
        """One call of the denoiser: states float32 [M, K, C] at times [M, K] -> float32 outputs [M, K, P].

        guidance: float32 [M], the scale of each position; without effect when the session is not guided.
        """

    def close(self) -> None:
        """Frees what the session holds; it cannot be used again."""


@runtime_checkable
class ContinuousModel(Protocol):
    """A model whose tokens are vectors, drawn by a diffusion head or a flow (MAR, xAR, Harmon).

    channels: C, the numbers of a token. diffusion_steps: the T that its authors take. respacing: which of the
    diffusion's times these are.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    channels: int
    diffusion_steps: int
    respacing: Respacing

    def layout(self, condition: Any) -> LatentLayout:
        """The positions that one picture under this condition has."""

    def process(self, options: ContinuousOptions) -> ReverseProcess:
        """The steps from noise to a token; raises ValueError for those that the model does not know."""

    def latent_session(self, condition: Any, batch_size: int, guided: bool) -> LatentSession:
        """Computes what all passes share (a prompt's cache). Rows R of `features` are batch_size times any number,
        images first: row r belongs to image r // (R / batch_size)."""

    def decode(self, latents: Tensor, layout: LatentLayout) -> Tensor:
        """float32 [B, N, C] -> float32 pictures [B * frames, H, W, 3] in 0..1."""


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
class ContinuousOptions:
    """How models of continuous tokens are sampled; 0 and None take the model's own way.

    iterations: AR steps, at most one a position. diffusion_steps: T, steps from noise to a token. respacing: which of
    the diffusion's 1,000 times these are, `even` over all of them or `strided` from 0 on ("100" and "ddim100" in the
    official code). diffusion_sampler, eta: DDPM, or DDIM with eta times its largest noise. noisy_last_step: adds the
    last step's noise too, which the official samplers leave out.
    The other fields belong to one decoder each: to seed-exact how far apart two tokens may be (their Euclidean
    distance) to count as one, and whether `ar` runs too to tell how far the result is from it; to cspd what is read in
    decoders/continuous/cspd.py.
    """

    iterations: int = 0
    diffusion_steps: int = 0
    respacing: Respacing | None = None
    diffusion_sampler: DiffusionSampler = "ddpm"
    eta: float = 0.0
    guidance_schedule: GuidanceSchedule | None = None
    noisy_last_step: bool = False
    tolerance: float = 0.02
    measure_deviation: bool = False
    verification: Verification = "block"
    sigma_factor: SigmaFactor = "paper"
    softening: float = 42.0
    prefill_ratio: float = 0.05


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
    continuous: ContinuousOptions = field(default_factory=ContinuousOptions)
    first_index: int = 0


@dataclass(frozen=True)
class Progress:
    """A running generation, told before each forward pass.

    accepted: final positions of each row so far. tokens: LongTensor [B, N] on the device, float32 [B, N, C] of a
    continuous model; row b is final up to accepted[b], guesses after that. order: LongTensor [B, N], the positions in
    the order of generation; None: as they are numbered.
    """

    accepted: list[int]
    positions: int
    forward_passes: int
    tokens: Tensor
    order: Tensor | None = None

    @property
    def fraction(self) -> float:
        return sum(self.accepted) / (self.positions * len(self.accepted))


OnStep = Callable[[Progress], None]
