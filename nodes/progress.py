"""What a user sees while tokens are decoded: the bar, the picture so far, and live numbers on the node."""

from __future__ import annotations

import time
from typing import Any

import comfy.model_management as mm
import comfy.utils
import torch
from PIL import Image
from server import PromptServer
from torch import Tensor

from ..decoders import Progress
from .memory import Layout

MESSAGE_SECONDS = 0.25
PREVIEW_SECONDS = 0.35
PREVIEW_SHARE = 0.1  # of the run that previews may take
PREVIEW_SIZE = 512
BLANK = 0.5  # grey of a cell that is not decoded yet


class RunProgress:
    """Called before each forward pass; raises ComfyUI's interrupt when the user cancelled.

    node_id: where the page shows the numbers. preview_every: tokens of the first picture between previews, 0 for none.
    """

    def __init__(self, model: Any, layout: Layout, batch_size: int, node_id: str, preview_every: int) -> None:
        self.model, self.layout, self.node_id = model, layout, node_id
        self.preview_every = preview_every
        self.total = layout.positions * batch_size
        self.bar = comfy.utils.ProgressBar(self.total)
        self.started = time.perf_counter()
        self.next_message = self.next_preview = 0.0
        self.previewed = 0

    def __call__(self, progress: Progress) -> None:
        mm.throw_exception_if_processing_interrupted()
        accepted = sum(progress.accepted)
        preview = self._preview(progress)
        if accepted != self.bar.current or preview is not None:
            self.bar.update_absolute(accepted, self.total, preview)
        self._message(accepted, progress.forward_passes)

    def finish(self) -> None:
        """Fills the bar: the last pass has no call after it."""
        self.bar.update_absolute(self.total, self.total)

    def _message(self, accepted: int, passes: int) -> None:
        now = time.perf_counter()
        server = getattr(PromptServer, "instance", None)
        if now < self.next_message or server is None:
            return
        self.next_message = now + MESSAGE_SECONDS
        numbers = {
            "node": self.node_id,
            "accepted": accepted,
            "positions": self.total,
            "pictures": self.total // self.layout.positions,
            "forward_passes": passes,
            "seconds": now - self.started,
        }
        server.send_sync("speculativear.progress", numbers, server.client_id)

    def _preview(self, progress: Progress) -> tuple[str, Image.Image, int] | None:
        accepted, now = progress.accepted[0], time.perf_counter()
        due = self.preview_every and accepted >= self.previewed + self.preview_every
        if not due or now < self.next_preview:
            return None
        order = None if progress.order is None else progress.order[0]
        picture = picture_so_far(self.model, self.layout, progress.tokens[:1], accepted, order)
        done = time.perf_counter()
        self.previewed = accepted
        self.next_preview = done + max(PREVIEW_SECONDS, (done - now) / PREVIEW_SHARE)
        return "JPEG", picture, PREVIEW_SIZE


def picture_so_far(
    model: Any, layout: Layout, tokens: Tensor, accepted: int, order: Tensor | None = None
) -> Image.Image:
    """Decodes one row of tokens [1, N] or [1, N, C] whose first `accepted` in the order of generation are final; the
    other cells are grey."""
    frames, rows, columns = layout.grid
    known = torch.arange(layout.positions) < accepted
    if order is not None:
        known = torch.zeros_like(known).scatter(0, order.cpu(), known)
    cells = known[: frames * rows * layout.row_length].view(frames, rows, -1)[0, :, :columns]
    pixels = model.decode(tokens, layout)[0].cpu()
    height, width, _ = pixels.shape
    mask = cells.repeat_interleave(height // rows, 0).repeat_interleave(width // columns, 1)
    pixels = torch.where(mask[..., None], pixels, torch.tensor(BLANK))
    return Image.fromarray((pixels * 255).round().to(torch.uint8).numpy())
