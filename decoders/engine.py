"""The two iterations: a Jacobi window that drafts for itself, and a window drafted by a smaller model.

Tokens live in one board by position, so committing is moving a counter: nothing is shifted, and rows of a batch advance
at their own pace. An iteration is tensor code of fixed shape that changes its state in place and never asks the host:
loop.py runs it, and capture.py can record it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .branches import Tree
from .distributions import filter_logits, guide
from .initialise import Entry, Memory, Remembered
from .interface import SamplerSettings, TokenLayout, TokenSession
from .noise import Noise, NoiseRing
from .window import Window, draw, take_slots


@dataclass(frozen=True)
class Parts:
    """The interchangeable pieces of a decoder, see redraft.py, verify.py and initialise.py."""

    initialise: Callable[[Entry], tuple[Tensor, Tensor]]
    redraft: Callable[[Window], Tensor]
    accepts: Callable[[Window], Tensor]
    resample: Callable[[Window, Tensor], Tensor]
    needs_rows: bool  # False where no part looks at Q, so that no softmax is taken and no row kept
    remembered: Remembered = "nothing"  # what the initialiser looks at


class Board:
    """The codes of every row by position, final below `committed` and drafted above it.

    tokens: LongTensor [B, N + W]; committed: LongTensor [B]; passes: LongTensor [B], the passes of each row so far.
    reports: LongTensor [N + 2, B, 2], by pass: committed positions, and the drafts among them that were accepted.
    sound: bool [1], False after a pass whose logits were not finite. Forced positions hold their code from the start. A
    row is finished at `end`, one past its last free position.
    """

    def __init__(
        self, layout: TokenLayout, batch_size: int, window: int, vocabulary: int, device: torch.device
    ) -> None:
        forced = torch.cat((layout.forced, torch.full((window,), -1))).to(device)
        self.end = layout.end
        self.positions = layout.positions
        self.vocabulary = vocabulary
        self.forced = forced.expand(batch_size, -1)
        self.tokens = self.forced.clamp(min=0).clone()
        self.committed = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.passes = torch.zeros_like(self.committed)
        self.slots = torch.arange(window, device=device)
        self.reports = torch.zeros(layout.positions + 2, batch_size, 2, dtype=torch.long, device=device)
        self.sound = torch.ones(1, dtype=torch.bool, device=device)

    def window_positions(self) -> Tensor:
        """LongTensor [B, W]: the positions that the slots of the next pass predict."""
        return self.committed[:, None] + self.slots

    def read(self, positions: Tensor) -> Tensor:
        """What to feed at positions [B, S]."""
        return self.tokens.gather(1, positions.clamp(min=0))

    def drafts(self, positions: Tensor) -> Tensor:
        """The drafts at positions [B, S] as codes of a free position; what stands for structure does not matter."""
        return self.read(positions).clamp(max=self.vocabulary - 1)

    def is_forced(self, positions: Tensor) -> Tensor:
        """bool [B, S] for positions [B, S]."""
        return self.forced.gather(1, positions) >= 0

    def write(self, positions: Tensor, codes: Tensor) -> None:
        """Writes codes [B, S] at positions [B, S], except where a code is forced."""
        forced = self.forced.gather(1, positions)
        self.tokens.scatter_(1, positions, torch.where(forced >= 0, forced, codes))

    def accepted_prefix(self, window: Window, accepts: Tensor, reach: Tensor | None) -> Tensor:
        """LongTensor [B, 1]: how many drafts are accepted before the first that is not, or that is out of reach.

        Forced ones are accepted, but not out of reach: what follows them was computed on another branch.
        """
        accepts = accepts | self.is_forced(window.positions[:, :-1])
        if reach is not None:
            accepts = accepts & (self.slots[:-1] < reach)
        return accepts.cumprod(-1).sum(-1, keepdim=True)

    def settle(self, window: Window, parts: Parts, reach: Tensor | None = None) -> None:
        """Verifies, resamples, redrafts and commits. reach: LongTensor [B, 1], how many drafts count at most."""
        prefix = self.accepted_prefix(window, parts.accepts(window), reach)
        code, drafted = window.bonus, window.drafts.shape[1]
        if drafted:
            code = torch.where(prefix < drafted, parts.resample(window, prefix.clamp(max=drafted - 1)), code)
        codes = torch.where(self.slots == prefix, code, parts.redraft(window))
        codes = torch.where(self.slots < prefix, self.read(window.positions), codes)
        self.write(window.positions, codes)
        self._advance(prefix[:, 0])

    def _advance(self, prefix: Tensor) -> None:
        accepted = torch.minimum(prefix, (self.end - self.committed).clamp(min=0))
        self.committed.copy_((self.committed + prefix + 1).clamp(max=self.end))
        report = torch.stack((self.committed, accepted), dim=1)[None]
        self.reports.index_copy_(0, self.passes[:1].clamp(max=len(self.reports) - 1), report)
        self.passes.add_(1)


@dataclass(frozen=True)
class Bounds:
    """What the host knows of a pass beforehand; its shapes depend on nothing else.

    furthest: see TokenSession.forward. entering: the most positions that enter any row's window in this pass.
    """

    furthest: int
    entering: int


class Phase(Protocol):
    """A part of an iteration with one forward pass in it."""

    def __call__(self, bounds: Bounds) -> None: ...


class Iteration(Protocol):
    """What one round of a decoder does to its board: phases of the draft model, if any, and the target's one."""

    board: Board

    def drafting(self) -> Sequence[Phase]:
        """The draft model's passes of the coming round, in order."""

    def verify(self, bounds: Bounds) -> None:
        """The target's pass."""


class JacobiIteration:
    """The Jacobi window (arXiv 2410.01699, Algorithm 1, with the coupling of arXiv 2510.24211).

    With a tree, runner-up branches are checked in the same pass, see branches.py.
    """

    def __init__(
        self,
        session: TokenSession,
        layout: TokenLayout,
        settings: SamplerSettings,
        window_length: int,
        parts: Parts,
        vocabulary: int,
        device: torch.device,
        tree: Tree | None = None,
    ) -> None:
        batch = settings.batch_size
        self.session, self.settings, self.parts, self.tree = session, settings, parts, tree
        self.noise = Noise(settings.seed, settings.first_index, batch, device)
        self.ring = NoiseRing(self.noise, batch, window_length, vocabulary, device)
        self.board = Board(layout, batch, window_length, vocabulary, device)
        self.row_length = layout.row_length
        self.frontier = torch.zeros(batch, 1, dtype=torch.long, device=device)
        rows = (batch, window_length if parts.needs_rows else 1, vocabulary)
        self.rows = torch.full(rows, 1 / vocabulary, device=device)
        self.memory = Memory.of(parts.remembered, layout, batch, window_length, vocabulary, device)
        self.advanced = torch.zeros(batch, dtype=torch.long, device=device)
        self.first_row = torch.zeros(batch, vocabulary if tree else 0, device=device)

    def drafting(self) -> Sequence[Phase]:
        """See Iteration."""
        return ()

    def verify(self, bounds: Bounds) -> None:
        """See Iteration."""
        board = self.board
        positions = board.window_positions()
        self.ring.enter(positions[:, -bounds.entering :])
        drafted = positions[:, :-1]
        sources = self._initialise(drafted, min(bounds.entering, drafted.shape[1]))

        logits, reach = self._forward(positions, bounds.furthest)
        window = Window(logits, board.drafts(drafted), sources, positions, board.passes, self.noise, self.ring)
        self.frontier.copy_(board.committed[:, None] + positions.shape[1])
        self.advanced.copy_(-board.committed)
        board.settle(window, self.parts, reach)
        self.advanced.add_(board.committed)
        self._remember(window)

    def _initialise(self, drafted: Tensor, entering: int) -> Tensor:
        """Drafts what entered the window, at most its last `entering` slots; returns the rows of all drafts, Q."""
        board, held = self.board, drafted.shape[1] - entering
        entered = drafted[:, held:]
        known = self.frontier, board.tokens, self.rows[:, -1:], self.memory, self.row_length
        codes, entry_rows = self.parts.initialise(Entry(entered, *known, self.noise, self.ring))
        fresh = entered >= self.frontier
        board.write(entered, torch.where(fresh, codes, board.read(entered)))
        if not self.parts.needs_rows:
            return self.rows.expand(-1, drafted.shape[1], -1)
        sources = _shift(self.rows, self.advanced)
        sources[:, held:] = torch.where(fresh[..., None], entry_rows, sources[:, held:])
        return sources

    def _forward(self, positions: Tensor, furthest: int) -> tuple[Tensor, Tensor | None]:
        """Filtered logits float32 [B, W, V] and how many of the window's drafts count at most, [B, 1] or None."""
        board, tree = self.board, self.tree
        chain = board.read(positions - 1)
        if tree is None:
            logits = self.session.forward(chain, board.committed - 1, None, furthest)
            return _sampled(logits, self.settings, board), None
        first = positions[:, :1]
        gumbel = self.ring.at(first)[:, 0]
        first_drafts = tree.first_drafts(board.drafts(first), self.first_row + gumbel)
        fed = tree.feed(chain, first_drafts)
        logits = _sampled(self.session.forward(fed, board.committed - 1, tree.parents, furthest), self.settings, board)
        followed = tree.follow(logits[:, 0], gumbel, first_drafts).masked_fill(board.is_forced(first)[:, 0], 0)
        board.write(first, first_drafts.gather(1, followed[:, None]))
        path = tree.paths[followed]
        self.session.keep(path[:, : tree.length + 1])
        return take_slots(logits, path), tree.reach[followed, None]

    def _remember(self, window: Window) -> None:
        """Keeps of this pass what the next one looks at."""
        if self.parts.needs_rows:
            self.rows.copy_(window.probabilities)
        self.memory.store(window)
        if self.tree is not None:
            last = window.logits.shape[1] - 1
            self.first_row.copy_(take_slots(window.logits, self.advanced[:, None].clamp(max=last))[:, 0])


@dataclass(frozen=True)
class DraftStep:
    """The phase that drafts one slot; equal steps are one recording, and the iteration itself holds none of them."""

    iteration: DraftModelIteration
    slot: int
    catch_up: bool

    def __call__(self, bounds: Bounds) -> None:
        self.iteration.draft(self.slot, self.catch_up, bounds)


class DraftModelIteration:
    """Speculative sampling with a draft model (Leviathan et al. 2023, Chen et al. 2023).

    The draft model draws with the position's own Gumbel vector, so the same drafts serve equality verification.
    """

    def __init__(
        self,
        session: TokenSession,
        draft_session: TokenSession,
        layout: TokenLayout,
        settings: SamplerSettings,
        parts: Parts,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        batch, drafts = settings.batch_size, settings.draft_length
        self.session, self.draft_session, self.settings, self.parts = session, draft_session, settings, parts
        self.noise = Noise(settings.seed, settings.first_index, batch, device)
        self.ring = NoiseRing(self.noise, batch, drafts + 1, vocabulary, device)
        self.board = Board(layout, batch, drafts + 1, vocabulary, device)
        self.sources = torch.zeros(batch, drafts, vocabulary if parts.needs_rows else 1, device=device)
        self._begun = False

    def drafting(self) -> Sequence[Phase]:
        """See Iteration. In a later round the first draft catches up: a full accept ended on a token not yet seen."""
        steps = [DraftStep(self, slot, slot == 0 and self._begun) for slot in range(self.settings.draft_length)]
        self._begun = True
        return steps

    def draft(self, slot: int, catch_up: bool, bounds: Bounds) -> None:
        """Drafts the window's slot onto the board; catch_up also feeds the token before the last."""
        position = self.board.committed[:, None] + slot
        fed = torch.cat((position - 2, position - 1), dim=1) if catch_up else position - 1
        logits = self.draft_session.forward(self.board.read(fed), fed[:, 0], None, bounds.furthest + slot)[..., -1:, :]
        logits = _sampled(logits, self.settings, self.board)
        self.ring.enter(position)
        self.board.write(position, draw(logits, self.ring.at(position)))
        if self.parts.needs_rows:
            self.sources[:, slot] = logits[:, 0].softmax(-1)

    def verify(self, bounds: Bounds) -> None:
        """See Iteration."""
        board = self.board
        positions = board.window_positions()
        self.ring.enter(positions[:, -1:])
        drafts = board.drafts(positions[:, :-1])
        logits = self.session.forward(board.read(positions - 1), board.committed - 1, None, bounds.furthest)
        logits = _sampled(logits, self.settings, board)
        window = Window(logits, drafts, self.sources, positions, board.passes, self.noise, self.ring)
        board.settle(window, self.parts)


def _shift(rows: Tensor, advanced: Tensor) -> Tensor:
    """rows [B, W, V] by last pass's slots -> [B, W - 1, V] by this pass's; slots without an old row repeat the last."""
    last = rows.shape[1] - 1
    slots = torch.arange(last, device=rows.device) + advanced[:, None]
    return take_slots(rows, slots.clamp(max=last))


def _sampled(logits: Tensor, settings: SamplerSettings, board: Board) -> Tensor:
    """Raw logits [G, B, T, V] -> filtered [B, T, V]; notes on the board whether they were finite."""
    guided = guide(logits, settings.guidance_scale)
    board.sound.logical_and_(guided.sum().isfinite())
    return filter_logits(guided, settings.temperature, settings.top_k, settings.top_p)
