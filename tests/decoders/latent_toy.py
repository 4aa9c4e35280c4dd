"""A model of continuous tokens that is linear throughout: the law of its pictures is a Gaussian known exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from speculative_ar.decoders.interface import ContinuousOptions, LatentLayout

CHANNELS = 2


class LinearProcess:
    """Steps whose spread depends on what the network says, as in a diffusion head with learned variances."""

    deterministic = False

    def __init__(self, steps: int, spread: float) -> None:
        self.steps = steps
        self.factor = torch.linspace(0.6, 0.9, steps)
        self.share = torch.linspace(0.5, 0.2, steps)
        self.log_spread = torch.linspace(0.0, 0.6, steps) + torch.tensor(spread).log()

    def time(self, step: Tensor) -> Tensor:
        return step.float()

    def predict(self, output: Tensor, x: Tensor, step: Tensor) -> Tensor:
        return output

    def guess(self, x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:-1], 2 * x.shape[-1])

    def transition(self, prediction: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        clean, place = prediction.chunk(2, dim=-1)
        log_std = self.log_spread[step][..., None] + place
        return self.factor[step][..., None], self.share[step][..., None] * clean, log_std


class LatentToy:
    """Implements decoders.interface.ContinuousModel. Each row is computed by itself, whatever the batch.

    bend: what the network adds to every clean token; differing bends make a target and a draft. pull: how much a token
    depends on those before it.
    """

    name, device, dtype, channels, respacing = "toy", torch.device("cpu"), torch.float32, CHANNELS, "even"

    def __init__(
        self, positions: int = 3, steps: int = 4, bend: float = 0.0, in_order: bool = True, pull: float = 0.5
    ) -> None:
        self.diffusion_steps, self._in_order, self._positions = steps, in_order, positions
        generator = torch.Generator().manual_seed(5)
        self.own = 0.4 * torch.randn(CHANNELS, CHANNELS, generator=generator)
        self.context = pull * torch.randn(CHANNELS, CHANNELS, generator=generator)
        self.bias = torch.randn(positions, CHANNELS, generator=generator) + bend
        self.bend, self.spread, self.calls, self.unconditional_rows = bend, 0.5, 0, 0

    def layout(self, condition: object) -> LatentLayout:
        return LatentLayout((1, 1, self._positions), CHANNELS, self._positions, in_order=self._in_order)

    def process(self, options: ContinuousOptions) -> LinearProcess:
        return LinearProcess(options.diffusion_steps, self.spread)

    def latent_session(self, condition: object, batch_size: int, guided: bool) -> ToySession:
        return ToySession(self, guided)

    def decode(self, latents: Tensor, layout: LatentLayout) -> Tensor:
        return latents[:, None].expand(-1, 4, -1, -1)[..., [0, 0, 0]]

    def place(self, time: Tensor) -> Tensor:
        """The spread's share that the network asks for, which changes from step to step and with the model."""
        return 0.25 * torch.sin(1.7 * time) + self.bend

    def law(
        self, steps: int, scale: float = 1.0, temperature: float = 1.0, noisy_last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Mean [N * C] and covariance of a whole picture, generated in raster order, one position a step."""
        process = LinearProcess(steps, self.spread)
        through, gain = torch.eye(CHANNELS).double(), torch.zeros(CHANNELS, CHANNELS).double()
        noise = torch.eye(CHANNELS).double()
        for step in reversed(range(steps)):
            share = process.share[step].double()
            map_ = process.factor[step].double() * torch.eye(CHANNELS) + share * self.own.double()
            through, gain, noise = map_ @ through, map_ @ gain + share * torch.eye(CHANNELS), map_ @ noise @ map_.T
            if step or noisy_last:
                std = (process.log_spread[step] + self.place(torch.tensor(float(step)))).double().exp() * temperature
                noise = noise + std**2 * torch.eye(CHANNELS)
        count = self._positions
        earlier = torch.kron(torch.tril(torch.ones(count, count), -1).double(), scale * gain @ self.context.T.double())
        solve = torch.linalg.inv(torch.eye(count * CHANNELS).double() - earlier)
        mean = solve @ torch.cat([gain @ row for row in self.bias.double()])
        return mean, solve @ torch.kron(torch.eye(count).double(), noise) @ solve.T


class ToySession:
    """The context is a linear function of the visible tokens' sum; the unconditional stream sees no token at all."""

    def __init__(self, model: LatentToy, guided: bool) -> None:
        self.model, self.guided = model, guided

    def features(self, tokens: Tensor, order: Tensor, known: Tensor, longest: int, asked: Tensor) -> Tensor:
        assert int(known.max()) <= longest
        ranks = torch.arange(order.shape[1]).expand_as(order)
        visible = torch.zeros_like(order).scatter(1, order, (ranks < known[:, None]).long()).bool()
        seen = torch.where(visible[..., None], tokens, 0.0).sum(1)
        context = (seen[:, None, :, None] * self.model.context).sum(2)
        unconditional = self.model.bias[asked].flatten(0, 1)
        conditional = unconditional + context.expand(-1, asked.shape[1], -1).flatten(0, 1)
        return torch.stack((conditional, unconditional)) if self.guided else conditional[None]

    def denoise(self, x: Tensor, time: Tensor, features: Tensor, guidance: Tensor) -> Tensor:
        self.model.calls += 1
        self.model.unconditional_rows += len(x) * (len(features) - 1)
        condition = features[0]
        if self.guided:
            condition = features[1] + guidance[:, None] * (features[0] - features[1])
        clean = (x[..., None, :] * self.model.own).sum(-1) + condition[:, None]
        return torch.cat((clean, self.model.place(time)[..., None].expand_as(clean)), dim=-1)

    def close(self) -> None:
        pass
