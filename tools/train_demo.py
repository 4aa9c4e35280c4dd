"""Trains the bundled demo models from emoji pictures on a CPU and writes them to model_loaders/bundled/.

Run `python tools/train_demo.py` with torch (2.9 or newer, for its Muon), numpy, Pillow, safetensors and npm (once, for
the pictures). It takes under an hour on two cores, prints its losses and leaves a contact sheet in output/.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from emoji_data import LABELS, EmojiPictures, load_pictures
from pack import register

register()

from speculative_ar.decoders import SamplerSettings, generate  # noqa: E402
from speculative_ar.model_loaders import load  # noqa: E402
from speculative_ar.model_loaders.llamagen import LlamaGenConfig, LlamaGenNetwork  # noqa: E402
from speculative_ar.model_loaders.rotary import grid_rotary_table  # noqa: E402
from speculative_ar.model_loaders.transformer import TransformerConfig  # noqa: E402
from speculative_ar.model_loaders.vq import VQConfig, VQTokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "model_loaders" / "bundled"
GRID = 16
TOKENIZER_FILE = "demo-tokens-vq"
CODES = 512
# Codes are drawn from a softmax over cosine similarity at these temperatures while training: near-synonym codes stay
# interchangeable, as they are in large tokenizers, and the decoder learns to absorb the difference.
CODE_TEMPERATURE = 0.02
TOKEN_TEMPERATURE = 0.01

VQ = VQConfig(CODES, 8, 64, 32, (32, 64, 64), (32, 64, 64), encoder_blocks=1, decoder_blocks=2)
VQ_BATCH = 16
LATENT_NOISE = 0.08  # about the quantisation error per channel


@dataclass(frozen=True)
class Round:
    """Steps without quantisation, then with codes, then for the decoder alone; noise and colour weight of the first."""

    seed: int
    free: int
    joint: int
    decoder: int
    rate: float
    latent_noise: float
    colour_weight: float

    @property
    def steps(self) -> int:
        return self.free + self.joint + self.decoder


# The first round learns shapes but hardly any red or green; the second frees the latents again to make room for them.
ROUNDS = (
    Round(1, free=150, joint=850, decoder=300, rate=1.5e-3, latent_noise=0.0, colour_weight=0.0),
    Round(5, free=300, joint=0, decoder=300, rate=1.2e-3, latent_noise=LATENT_NOISE, colour_weight=4.0),
)

VIEWS = 12288  # augmented pictures, encoded once
CLASS_DROPOUT = 0.1


@dataclass(frozen=True)
class TransformerPlan:
    """What to train and for how long."""

    file: str
    config: TransformerConfig
    seed: int
    steps: int
    batch: int = 24
    matrix_rate: float = 5e-3
    vector_rate: float = 3e-3


TARGET = TransformerPlan("demo-tokens", TransformerConfig(5, 8, 256, 704, CODES), seed=2, steps=1500)
DRAFT = TransformerPlan("demo-tokens-draft", TransformerConfig(2, 4, 112, 320, CODES), seed=3, steps=1400)


def draw_codes(latents: Tensor, vectors: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Latents [..., 8] -> codes [...], drawn by similarity to the code vectors [CODES, 8] (Gumbel maximum)."""
    uniform = torch.rand(*latents.shape[:-1], len(vectors), generator=generator).clamp_min(1e-20)
    return (latents @ vectors.T / temperature - (-uniform.log()).log()).argmax(dim=-1)


def picture_loss(made: Tensor, wanted: Tensor, colour_weight: float) -> Tensor:
    """Mean absolute error of pixels and of their differences, which keeps edges sharp; squared error of 4 x 4 means."""
    loss = F.l1_loss(made, wanted)
    for dim in (2, 3):
        loss = loss + F.l1_loss(made.diff(dim=dim), wanted.diff(dim=dim))
    return loss + colour_weight * F.mse_loss(F.avg_pool2d(made, 4), F.avg_pool2d(wanted, 4))


def learning_rate(step: int, steps: int, peak: float, warmup: int = 50) -> float:
    """Linear warm-up, then linear decay to zero."""
    return peak * min((step + 1) / warmup, (steps - step) / (steps - warmup), 1.0)


def place_codes(tokenizer: VQTokenizer, pictures: EmojiPictures, generator: torch.Generator) -> None:
    """Sets the code vectors by spherical k-means over latents of 512 pictures."""
    batches = [pictures.sample(64, generator)[0] for _ in range(8)]
    with torch.no_grad():
        points = torch.cat([tokenizer.latents(batch).flatten(0, 2) for batch in batches])
        centres = points[torch.randperm(len(points), generator=generator)[:CODES]]
        for _ in range(12):
            nearest = (points @ centres.T).argmax(dim=1)
            sums = torch.zeros_like(centres).index_add_(0, nearest, points)
            empty = sums.norm(dim=1) == 0
            sums[empty] = points[torch.randperm(len(points), generator=generator)[: int(empty.sum())]]
            centres = F.normalize(sums, dim=1)
        tokenizer.quantize.embedding.weight.copy_(centres)


def train_vq(pictures: EmojiPictures) -> VQTokenizer:
    """Trains the tokenizer in ROUNDS."""
    torch.manual_seed(ROUNDS[0].seed)
    tokenizer = VQTokenizer(VQ)
    for plan in ROUNDS:
        train_vq_round(tokenizer, plan, pictures)
    return tokenizer.eval().requires_grad_(False)


def train_vq_round(tokenizer: VQTokenizer, plan: Round, pictures: EmojiPictures) -> None:
    """Autoencoder first, then with codes, then the decoder alone; bfloat16 autocast."""
    generator = torch.Generator().manual_seed(plan.seed)
    tokenizer.requires_grad_(True)
    optimizer = torch.optim.AdamW(tokenizer.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=1e-4)
    log = Log("tokenizer", plan.steps)
    for step in range(plan.steps):
        if step == plan.free:
            place_codes(tokenizer, pictures, generator)
        if step == plan.free + plan.joint:
            for part in (tokenizer.encoder, tokenizer.quant_conv, tokenizer.quantize):
                part.requires_grad_(False)
        optimizer.param_groups[0]["lr"] = learning_rate(step, plan.steps, plan.rate)
        batch, _ = pictures.sample(VQ_BATCH, generator)
        with torch.autocast("cpu", torch.bfloat16):
            latents = tokenizer.latents(batch).float()
            if step < plan.free:
                vectors, matching = noisy(latents, plan.latent_noise, generator), torch.zeros(())
            else:
                vectors, matching = quantised(tokenizer, latents, generator)
            made = tokenizer.decode_vectors(vectors)
        pixels = picture_loss(made.float(), batch, plan.colour_weight)
        optimizer.zero_grad(set_to_none=True)
        (pixels + matching).backward()
        nn.utils.clip_grad_norm_(tokenizer.parameters(), 1.0)
        optimizer.step()
        log(step, pixel_loss=pixels, code_loss=matching)


def noisy(latents: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Unit vectors near the latents: the decoder meets something like quantisation error, and the sphere fills up."""
    return F.normalize(latents + noise * torch.randn(latents.shape, generator=generator), dim=-1)


def quantised(tokenizer: VQTokenizer, latents: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Drawn code vectors with a straight-through gradient to the latents, and the loss that pulls the two together."""
    known = tokenizer.quantize.vectors(latents.device).detach()
    drawn = draw_codes(latents.detach(), known, CODE_TEMPERATURE, generator)
    vectors = tokenizer.quantize(drawn)
    matching = F.mse_loss(vectors, latents.detach()) + 0.25 * F.mse_loss(latents, vectors.detach())
    return latents + (vectors - latents).detach(), matching


@dataclass(frozen=True)
class Views:
    """Latents [N, 256, 8] of augmented pictures, the code vectors [CODES, 8], and the labels [N]."""

    latents: Tensor
    vectors: Tensor
    labels: Tensor

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Codes [count, 256] and labels [count], some of them replaced by the null class."""
        rows = torch.randint(len(self.labels), (count,), generator=generator)
        dropped = torch.rand(count, generator=generator) < CLASS_DROPOUT
        labels = torch.where(dropped, len(LABELS), self.labels[rows])
        return draw_codes(self.latents[rows], self.vectors, TOKEN_TEMPERATURE, generator), labels


def encode_views(tokenizer: VQTokenizer, pictures: EmojiPictures) -> Views:
    """Encodes VIEWS augmented pictures."""
    generator = torch.Generator().manual_seed(4)
    latents, labels = [], []
    with torch.no_grad():
        for _ in range(VIEWS // 64):
            batch, wanted = pictures.sample(64, generator)
            latents.append(tokenizer.latents(batch).flatten(1, 2))
            labels.append(wanted)
        return Views(torch.cat(latents), tokenizer.quantize.vectors(latents[0].device), torch.cat(labels))


def token_loss(network: LlamaGenNetwork, codes: Tensor, labels: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats of codes [B, 256] under labels [B]."""
    prefix = network.cls_embedding.embedding_table(labels)[:, None]
    inputs = torch.cat((prefix, network.tok_embeddings(codes[:, :-1])), dim=1)
    logits = network.output(network.hidden(inputs, *rotary))
    return F.cross_entropy(logits.flatten(0, 1).float(), codes.flatten())


def train_transformer(plan: TransformerPlan, views: Views) -> LlamaGenNetwork:
    """Muon for the matrices of the blocks, AdamW for embeddings, norms and head; bfloat16 autocast."""
    torch.manual_seed(plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    network = LlamaGenNetwork(LlamaGenConfig(plan.config, classes=len(LABELS)))
    for layer in (network.tok_embeddings, network.cls_embedding.embedding_table, network.output):
        nn.init.normal_(layer.weight, std=0.02)
    matrices = [weight for weight in network.layers.parameters() if weight.ndim == 2]
    vectors = [weight for name, weight in network.named_parameters() if weight.ndim == 1 or "layers" not in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.01),
    )
    table = grid_rotary_table(GRID, GRID, plan.config.head_dim, plan.config.rope_base, prefix=1)
    rotary = (table[0][:-1], table[1][:-1])
    log = Log(plan.file, plan.steps)
    for step in range(plan.steps):
        for optimizer, peak in zip(optimizers, (plan.matrix_rate, plan.vector_rate), strict=True):
            optimizer.param_groups[0]["lr"] = learning_rate(step, plan.steps, peak)
            optimizer.zero_grad(set_to_none=True)
        codes, labels = views.sample(plan.batch, generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss(network, codes, labels, rotary)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        log(step, token_loss=loss)
    return network.eval().requires_grad_(False)


def store(module: nn.Module, file: str, **metadata: object) -> None:
    """Writes half-precision weights to the bundled folder; the loader reads the metadata as JSON."""
    weights = {key: value.half().contiguous() for key, value in official_weights(module).items()}
    path = BUNDLED / f"{file}.safetensors"
    save_file(weights, path, metadata={key: json.dumps(value) for key, value in metadata.items()})
    parameters = sum(value.numel() for value in weights.values())
    print(f"{path.name}: {parameters:,} parameters, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def official_weights(module: nn.Module) -> dict[str, Tensor]:
    """The state dict as LlamaGen's files have it: gate and up apart."""
    weights = {}
    for key, value in module.state_dict().items():
        if ".w13." in key:
            weights[key.replace("w13", "w1")], weights[key.replace("w13", "w3")] = value.chunk(2)
        else:
            weights[key] = value
    return weights


def store_transformer(plan: TransformerPlan, network: LlamaGenNetwork) -> None:
    """Adds what the shapes do not tell: heads, grid, label names, display name and the tokenizer's file."""
    store(
        network,
        plan.file,
        heads=plan.config.heads,
        grid=[GRID, GRID],
        labels=list(LABELS),
        name=plan.file.replace("-", " "),
        vq=TOKENIZER_FILE + ".safetensors",
    )


def contact_sheet(path: Path, guidance: float = 3.0, columns: int = 6) -> None:
    """Draws a row of pictures for each label with the finished target model, in LABELS' order."""
    model = load(BUNDLED / f"{TARGET.file}.safetensors", dtype=torch.float32)
    rows = []
    for label in LABELS:
        settings = SamplerSettings(decoder="scd-gumbel", batch_size=columns, guidance_scale=guidance)
        rows.append(torch.cat(generate(model, model.class_label(label), settings).decode().unbind(), dim=1))
    half = (len(rows) + 1) // 2
    rows += [torch.ones_like(rows[0])] * (2 * half - len(rows))
    sheet = torch.cat((torch.cat(rows[:half]), torch.cat(rows[half:])), dim=1)
    path.parent.mkdir(exist_ok=True)
    Image.fromarray((sheet * 255).round().byte().numpy()).save(path)
    print(f"contact sheet: {path}", flush=True)


def read_tokenizer() -> VQTokenizer:
    """The stored tokenizer, at the precision the finished models use it in."""
    weights = load_file(BUNDLED / f"{TOKENIZER_FILE}.safetensors")
    tokenizer = VQTokenizer(VQ)
    tokenizer.load_state_dict({key: value.float() for key, value in weights.items()})
    return tokenizer.eval().requires_grad_(False)


class Log:
    """Prints running means every fifty steps."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.started = name, steps, time.monotonic()
        self.sums: dict[str, float] = {}

    def __call__(self, step: int, **losses: Tensor) -> None:
        for name, value in losses.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.item() / 50
        if (step + 1) % 50 == 0:
            means = "  ".join(f"{name} {value:.4f}" for name, value in self.sums.items())
            print(f"{self.name} {step + 1}/{self.steps}  {means}  {time.monotonic() - self.started:.0f} s", flush=True)
            self.sums = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    stages = ("tokenizer", "target", "draft", "sheet")
    parser.add_argument("--only", nargs="+", choices=stages, default=stages, help="stages to run; others are kept")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    BUNDLED.mkdir(exist_ok=True)
    pictures = load_pictures()
    print(f"{len(pictures.labels)} pictures, {len(LABELS)} labels", flush=True)
    if "tokenizer" in chosen.only:
        store(train_vq(pictures), TOKENIZER_FILE)
    plans = [plan for stage, plan in (("target", TARGET), ("draft", DRAFT)) if stage in chosen.only]
    if plans:
        views = encode_views(read_tokenizer(), pictures)
        for plan in plans:
            store_transformer(plan, train_transformer(plan, views))
    if "sheet" in chosen.only:
        contact_sheet(ROOT / "output" / "demo-models.png")


if __name__ == "__main__":
    main()
