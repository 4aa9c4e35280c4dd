"""The two decoding loops: a Jacobi window that drafts for itself, and a window drafted by a smaller model.

Tokens live in one board by position, so committing is moving a counter: nothing is shifted, and rows of a batch advance
at their own pace. An iteration is tensor code of fixed shape with one small copy to the host at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .distributions import filter_logits, guide
from .initialise import Entry
from .interface import OnStep, Progress, SamplerSettings, TokenLayout, TokenSession
from .noise import Noise, Purpose
from .statistics import Trace
from .window import Window, draw


@dataclass(frozen=True)
class Parts:
    """The interchangeable pieces of a decoder, see redraft.py, verify.py and initialise.py."""

    initialise: Callable[[Entry], tuple[Tensor, Tensor]]
    redraft: Callable[[Window], Tensor]
    accepts: Callable[[Window], Tensor]
    resample: Callable[[Window, Tensor], Tensor]
    needs_rows: bool  # False where no part looks at Q, so that no softmax is taken and no row kept


class Board:
    """The codes of every row by position, final below `committed` and drafted above it.

    tokens: LongTensor [B, N + W]; committed: LongTensor [B]. Forced positions hold their code from the start. A row is
    finished at `end`, one past its last free position.
    """

    def __init__(self, layout: TokenLayout, batch_size: int, window: int, device: torch.device) -> None:
        forced = torch.cat((layout.forced, torch.full((window,), -1))).to(device)
        self.end = layout.end
        self.positions = layout.positions
        self.forced = forced.expand(batch_size, -1)
        self.tokens = self.forced.clamp(min=0).clone()
        self.committed = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.slots = torch.arange(window, device=device)

    def window_positions(self) -> Tensor:
        """LongTensor [B, W]: the positions that the slots of the next pass predict."""
        return self.committed[:, None] + self.slots

    def read(self, positions: Tensor) -> Tensor:
        return self.tokens.gather(1, positions.clamp(min=0))

    def write(self, positions: Tensor, codes: Tensor) -> None:
        """Writes codes [B, S] at positions [B, S], except where a code is forced."""
        forced = self.forced.gather(1, positions)
        self.tokens.scatter_(1, positions, torch.where(forced >= 0, forced, codes))

    def accepted_prefix(self, window: Window, accepts: Tensor) -> Tensor:
        """LongTensor [B, 1]: how many drafts are accepted before the first that is not; forced ones always are."""
        forced = self.forced.gather(1, window.positions[:, :-1]) >= 0
        return (accepts | forced).cumprod(-1).sum(-1, keepdim=True)

    def commit(self, window: Window, prefix: Tensor, resampled: Tensor, redrafts: Tensor) -> Tensor:
        """Keeps the accepted prefix [B, 1], the resampled code [B, 1] behind it, and redrafts [B, W] for the rest.

        Returns LongTensor [B, 2] for the host: committed positions, and the drafts among them that were accepted.
        """
        codes = torch.where(self.slots == prefix, resampled, redrafts)
        self.write(window.positions, torch.where(self.slots < prefix, self.read(window.positions), codes))
        accepted = torch.minimum(prefix[:, 0], (self.end - self.committed).clamp(min=0))
        self.committed = (self.committed + prefix[:, 0] + 1).clamp(max=self.end)
        return torch.stack((self.committed, accepted), dim=1)


def decode_by_jacobi(
    session: TokenSession,
    layout: TokenLayout,
    settings: SamplerSettings,
    window_length: int,
    parts: Parts,
    vocabulary: int,
    trace: Trace,
    on_step: OnStep,
    device: torch.device,
) -> Tensor:
    """The Jacobi window (arXiv 2410.01699, Algorithm 1, with the coupling of arXiv 2510.24211) -> LongTensor [B, N]."""
    batch, length = settings.batch_size, window_length
    noise = Noise(settings.seed, settings.first_index, batch, device)
    board = Board(layout, batch, length, device)
    frontier = torch.zeros(batch, 1, dtype=torch.long, device=device)
    rows = torch.full((batch, length, vocabulary), 1 / vocabulary, device=device)
    advanced = passes = torch.zeros(batch, dtype=torch.long, device=device)
    while not trace.finished:
        on_step(Progress(trace.committed, board.positions, trace.passes, board.tokens[:, : board.positions]))
        positions = board.window_positions()
        drafted = positions[:, :-1]
        entry = Entry(drafted, frontier, board.tokens, rows[:, -1:], layout.row_length, noise)
        entry_codes, entry_rows = parts.initialise(entry)
        fresh = drafted >= frontier
        board.write(drafted, torch.where(fresh, entry_codes, board.read(drafted)))
        sources = torch.where(fresh[..., None], entry_rows, _shift(rows, advanced)) if parts.needs_rows else entry_rows

        logits = session.forward(board.read(positions - 1), board.committed - 1)
        logits = _sampled(logits, settings)
        window = Window(logits, board.read(drafted), sources, positions, passes, noise)
        before = board.committed
        report = _settle(board, window, parts, parts.redraft(window))
        rows = window.probabilities if parts.needs_rows else rows
        frontier, advanced, passes = before[:, None] + length, board.committed - before, passes + 1
        trace.record(report.tolist())
    return board.tokens[:, : board.positions]


def decode_by_draft_model(
    session: TokenSession,
    draft_session: TokenSession,
    layout: TokenLayout,
    settings: SamplerSettings,
    parts: Parts,
    trace: Trace,
    on_step: OnStep,
    device: torch.device,
) -> Tensor:
    """Speculative sampling with a draft model (Leviathan et al. 2023, Chen et al. 2023) -> LongTensor [B, N].

    The draft model draws with the position's own Gumbel vector, so the same drafts serve equality verification.
    """
    batch, draft_length = settings.batch_size, settings.draft_length
    noise = Noise(settings.seed, settings.first_index, batch, device)
    board = Board(layout, batch, draft_length + 1, device)
    passes = torch.zeros(batch, dtype=torch.long, device=device)
    while not trace.finished:
        positions = board.window_positions()
        sources = []
        for step in range(draft_length):
            on_step(Progress(trace.committed, board.positions, trace.passes, board.tokens[:, : board.positions]))
            with trace.drafting():
                catch_up = step == 0 and trace.passes > 0
                position = positions[:, step : step + 1]
                sources.append(_draft_one(draft_session, board, position, catch_up, settings, noise))
        on_step(Progress(trace.committed, board.positions, trace.passes, board.tokens[:, : board.positions]))
        logits = session.forward(board.read(positions - 1), board.committed - 1)
        logits = _sampled(logits, settings)
        drafts = board.read(positions[:, :-1])
        window = Window(logits, drafts, torch.cat(sources, dim=1), positions, passes, noise)
        report = _settle(board, window, parts, window.coupled_draws)
        passes = passes + 1
        trace.record(report.tolist())
    return board.tokens[:, : board.positions]


def _settle(board: Board, window: Window, parts: Parts, redrafts: Tensor) -> Tensor:
    """Verifies, resamples and commits; returns the report of Board.commit."""
    prefix = board.accepted_prefix(window, parts.accepts(window))
    code, drafted = window.bonus, window.drafts.shape[1]
    if drafted:
        code = torch.where(prefix < drafted, parts.resample(window, prefix.clamp(max=drafted - 1)), code)
    return board.commit(window, prefix, code, redrafts)


def _draft_one(
    session: TokenSession, board: Board, position: Tensor, catch_up: bool, settings: SamplerSettings, noise: Noise
) -> Tensor:
    """Drafts one position [B, 1] onto the board; returns the row it was drawn from, float32 [B, 1, V].

    catch_up also feeds the token before the last: after a full accept the draft model has not seen it.
    """
    fed = torch.cat((position - 2, position - 1), dim=1) if catch_up else position - 1
    logits = _sampled(session.forward(board.read(fed), fed[:, 0])[..., -1:, :], settings)
    gumbel = noise.gumbel(Purpose.DRAFT, position, logits.shape[-1])
    board.write(position, draw(logits, gumbel))
    return logits.softmax(-1)


def _shift(rows: Tensor, advanced: Tensor) -> Tensor:
    """rows [B, W, V] by last pass's slots -> [B, W - 1, V] by this pass's; slots without an old row repeat the last."""
    last = rows.shape[1] - 1
    slots = torch.arange(last, device=rows.device) + advanced[:, None]
    return torch.take_along_dim(rows, slots.clamp(max=last)[..., None], dim=1)


def _sampled(logits: Tensor, settings: SamplerSettings) -> Tensor:
    guided = guide(logits, settings.guidance_scale)
    return filter_logits(guided, settings.temperature, settings.top_k, settings.top_p)
