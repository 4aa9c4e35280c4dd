"""The committed positions as the host last saw them: one small copy a pass, and on a GPU one pass late."""

from __future__ import annotations

import torch
from torch import Tensor


class Mirror:
    """committed: positions of each row; sound: whether every pass seen so far had finite logits; furthest_advance: the
    most positions that a row gained in the last pass, 0 where the host does not know yet.

    A GPU runs ahead: the copy of a pass is read after the next pass has been queued, so the host never waits for work
    that it has just given out, and never runs more than one pass ahead. Elsewhere the copy is read at once.
    """

    def __init__(self, batch_size: int, end: int, device: torch.device) -> None:
        self.committed, self.sound, self._end = [0] * batch_size, True, end
        self.furthest_advance = 0
        self._late: list[tuple[Tensor, torch.cuda.Event]] = []
        self._on_gpu = device.type == "cuda"

    @property
    def finished(self) -> bool:
        return all(done >= self._end for done in self.committed)

    @property
    def passes_ahead(self) -> int:
        """Passes that are queued and not seen yet."""
        return len(self._late)

    def post(self, committed: Tensor, sound: Tensor) -> None:
        """Tells of a pass: committed LongTensor [B], sound bool [1]."""
        state = torch.cat((committed, sound.long()))
        if not self._on_gpu:
            before = self.committed
            self._take(state)
            self.furthest_advance = max(now - then for now, then in zip(self.committed, before, strict=True))
            return
        copied = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
        copied.copy_(state, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._late.append((copied, event))
        if len(self._late) > 1:
            earlier, done = self._late.pop(0)
            done.synchronize()
            self._take(earlier)

    def _take(self, state: Tensor) -> None:
        *self.committed, sound = state.tolist()
        self.sound = bool(sound)
