"""What the benchmark measures: the bundled demo models, and random weights in the shape of models too big to ship.

Random weights cost what trained ones cost. So that decoders also accept and reject as with a trained model, the codes
share a part of their embedding (one code then says little about the next) and the head gives logits of a trained
model's spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pack

pack.register()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from speculative_ar import model_loaders  # noqa: E402
from speculative_ar.decoders import TokenLayout, TokenModel  # noqa: E402
from speculative_ar.model_loaders.prompted import PromptCondition, PromptedModel, PromptedNetwork  # noqa: E402
from speculative_ar.model_loaders.transformer import TransformerConfig  # noqa: E402

CODES = 8192  # that a free position can take, out of the vocabulary
SHARED = 0.8  # of the energy of a code's embedding
SPREAD = 2.4  # standard deviation of the logits before guidance
PROMPT, EMPTY_PROMPT = 32, 4  # token ids before the first code
FIRST_CODE = 4  # the id of code 0 in Chameleon's vocabulary; all codes follow one another


@dataclass(frozen=True)
class Subject:
    """A target model, its draft model, and what they are asked to draw: (name, condition) pairs."""

    target: TokenModel
    draft: TokenModel
    conditions: list[tuple[str, Any]]

    def with_grid(self, rows: int, columns: int) -> Subject:
        """The same models drawing grids of another size; raises ValueError where they can draw only one."""
        if not isinstance(self.target, SyntheticModel):
            raise ValueError(f"{self.target.name} draws one size only: choose a model with --synthetic.")
        drawn = [(name, self.target.condition(index, rows, columns)) for index, (name, _) in enumerate(self.conditions)]
        return replace(self, conditions=drawn)


@dataclass(frozen=True)
class Shape:
    """A synthetic model: its transformer, and the grid of codes that it draws.

    has_reference: whether it is small enough to be built a second time with transformers.
    """

    config: TransformerConfig
    rows: int
    columns: int
    has_reference: bool = False


def lumina(layers: int, heads: int, dim: int, ffn_dim: int, vocabulary: int = 65536) -> TransformerConfig:
    """The transformer of Lumina-mGPT in any size."""
    return TransformerConfig(layers, heads, dim, ffn_dim, vocabulary, rope_pairing="halves", qk_norm=True)


SHAPES = {
    "lumina-80m": Shape(lumina(4, 8, 512, 1376), 12, 12, has_reference=True),
    "lumina-7b": Shape(lumina(32, 32, 4096, 11008), 48, 48),
}


class SyntheticNetwork(PromptedNetwork):
    """Chameleon's: its head is restricted to the codes, and their embeddings are a second table."""

    def __init__(self, config: TransformerConfig, **factory: Any) -> None:
        super().__init__(config, nn, **factory)
        self.picture_embeddings = nn.Embedding(CODES, config.dim, **factory)
        self.output = nn.Linear(config.dim, CODES, bias=False, **factory)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """See PromptedNetwork.embed_codes."""
        return self.picture_embeddings(codes)

    def code_logits(self, features: Tensor) -> Tensor:
        """See PromptedNetwork.code_logits."""
        return self.output(features)


class SyntheticModel(PromptedModel):
    """A TokenModel with random weights; its pictures mean nothing, so it has no VQ tokenizer."""

    family = "synthetic"

    def condition(self, index: int, rows: int, columns: int) -> PromptCondition:
        """The index-th of a row of random prompts."""
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(FIRST_CODE + CODES, self.network.config.vocabulary, (PROMPT,), generator=generator).tolist()
        layout = TokenLayout.free(rows, columns)
        return PromptCondition(tuple(ids), tuple(ids[-EMPTY_PROMPT:]), layout, f"prompt {index}", self.family)

    def code_embeddings(self) -> Tensor:
        """See TokenModel.code_embeddings."""
        return self.network.picture_embeddings.weight[:, :8].float()


def demo(device: torch.device, dtype: torch.dtype) -> Subject:
    """The trained models that ship with the pack, asked for each of their labels."""
    paths: dict[str, Path] = model_loaders.bundled()
    target = model_loaders.load(paths["demo-tokens"], device=device, dtype=dtype)
    draft = model_loaders.load(paths["demo-tokens-draft"], device=device, dtype=dtype, with_vq=False)
    return Subject(target, draft, [(label, target.class_label(label)) for label in target.labels])


def synthetic(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Subject:
    """Random weights, made on the device. The draft model is the target's own first layers with its head."""
    network = random_network(shape.config, device, dtype)
    options = {"vocabulary": CODES, "device": device, "dtype": dtype}
    target = SyntheticModel(network, name=name, **options)
    draft = SyntheticModel(first_layers(network, max(1, shape.config.layers // 8)), name=f"{name} draft", **options)
    conditions = [(f"prompt {index}", target.condition(index, shape.rows, shape.columns)) for index in range(24)]
    return Subject(target, draft, conditions)


def random_network(config: TransformerConfig, device: torch.device, dtype: torch.dtype) -> SyntheticNetwork:
    """Seeded; each matrix keeps the size of what passes through it, as a trained one does."""
    network = SyntheticNetwork(config, device=torch.device("meta"), dtype=dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=module.in_features**-0.5, generator=generator)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(generator=generator)
        elif isinstance(module, nn.RMSNorm | nn.GroupNorm):
            module.reset_parameters()
    codes = network.picture_embeddings.weight.data
    codes.mul_((1 - SHARED) ** 0.5).add_(SHARED**0.5 * torch.randn(config.dim, generator=generator, device=device))
    network.output.weight.data.mul_(SPREAD)
    return network.requires_grad_(False).eval()


def first_layers(network: SyntheticNetwork, layers: int) -> SyntheticNetwork:
    """A network of the first layers, which shares the weights."""
    shallow = SyntheticNetwork(replace(network.config, layers=layers), device=torch.device("meta"))
    weights = network.state_dict()
    shallow.load_state_dict({name: weights[name] for name in shallow.state_dict()}, assign=True)
    return shallow.requires_grad_(False).eval()
