"""What every decoder of continuous tokens works with: the models' parts, the canvas, the noise, and who counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .canvas import Canvas
from .chain import Chains, Denoiser
from .noise import LatentNoise
from .trace import LatentTrace


@dataclass(frozen=True, eq=False)
class Run:
    """One generation. target, draft: the models' parts; draft is None where no decoder needs it."""

    canvas: Canvas
    noise: LatentNoise
    target: Denoiser
    trace: LatentTrace
    draft: Denoiser | None = None

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.canvas.order)

    def lockstep(self, step: int) -> Tensor:
        """LongTensor [B, 1]: the same AR step for every image."""
        return torch.full((self.batch_size, 1), step, device=self.canvas.order.device)

    def chains(self, model: Denoiser, asked: tuple[Tensor, Tensor], known: Tensor, longest: int) -> Chains:
        """One pass of a model's trunk over the canvas: the chains of the asked positions, see Canvas.asked.

        known: LongTensor [B, W], how many positions of the order each of the W contexts sees, at most `longest`.
        """
        positions, guidance = asked
        contexts = positions.shape[1]
        self.trace.trunk(model is self.draft)
        features = model.session.features(
            self.canvas.tokens.repeat_interleave(contexts, dim=0),
            self.canvas.order.repeat_interleave(contexts, dim=0),
            known.flatten(),
            longest,
            positions.flatten(0, 1),
        )
        return Chains(features, positions.flatten(1), guidance.flatten())

    def finish_steps(self, before: list[int], after: Tensor) -> list[int]:
        """Tells the trace how far each row's AR steps [B, 1] are, and gives them to the host: its one look a pass."""
        bounds, reached = self.canvas.schedule.bounds, after.flatten().tolist()
        self.trace.commit([bounds[new] - bounds[old] for old, new in zip(before, reached, strict=True)])
        return reached
