"""Trains the bundled demo models from emoji pictures on a CPU and writes them to model_loaders/bundled/.

Run `python tools/train_demo.py` with torch (2.9 or newer, for its Muon), numpy, Pillow, safetensors and npm (once, for
the pictures). It takes under an hour on two cores, prints its losses and leaves a contact sheet in output/.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from emoji_data import LABELS, EmojiPictures, load_pictures
from pack import register
from training import BUNDLED, ROOT, Descent, Log, chosen_stages, half_precision, picture_loss, save_sheet, store

register()

from speculative_ar.decoders import SamplerSettings, generate  # noqa: E402
from speculative_ar.model_loaders import load  # noqa: E402
from speculative_ar.model_loaders.llamagen import LlamaGenConfig, LlamaGenNetwork  # noqa: E402
from speculative_ar.model_loaders.rotary import grid_rotary_table  # noqa: E402
from speculative_ar.model_loaders.transformer import TransformerConfig  # noqa: E402
from speculative_ar.model_loaders.vq import VQConfig, VQTokenizer  # noqa: E402

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
    descend = Descent(tokenizer, plan.steps, optimizer)
    log = Log("tokenizer", plan.steps)
    for step in range(plan.steps):
        if step == plan.free:
            place_codes(tokenizer, pictures, generator)
        if step == plan.free + plan.joint:
            for part in (tokenizer.encoder, tokenizer.quant_conv, tokenizer.quantize):
                part.requires_grad_(False)
        batch, _ = pictures.sample(VQ_BATCH, generator)
        with half_precision():
            latents = tokenizer.latents(batch).float()
            if step < plan.free:
                vectors, matching = noisy(latents, plan.latent_noise, generator), torch.zeros(())
            else:
                vectors, matching = quantised(tokenizer, latents, generator)
            made = tokenizer.decode_vectors(vectors)
        pixels = picture_loss(made.float(), batch, plan.colour_weight)
        descend(step, pixels + matching)
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
    descend = Descent(
        network,
        plan.steps,
        torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.01),
    )
    table = grid_rotary_table(GRID, GRID, plan.config.head_dim, plan.config.rope_base, prefix=1)
    rotary = (table[0][:-1], table[1][:-1])
    log = Log(plan.file, plan.steps)
    for step in range(plan.steps):
        codes, labels = views.sample(plan.batch, generator)
        with half_precision():
            loss = token_loss(network, codes, labels, rotary)
        descend(step, loss)
        log(step, token_loss=loss)
    return network.eval().requires_grad_(False)


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
        BUNDLED / f"{plan.file}.safetensors",
        official_weights(network),
        heads=plan.config.heads,
        grid=[GRID, GRID],
        labels=list(LABELS),
        name=plan.file.replace("-", " "),
        vq=TOKENIZER_FILE + ".safetensors",
    )


def contact_sheet(guidance: float = 3.0, columns: int = 6) -> None:
    """Draws a row of pictures for each label with the finished target model, in LABELS' order."""
    model = load(BUNDLED / f"{TARGET.file}.safetensors", dtype=torch.float32)
    settings = SamplerSettings(decoder="scd-gumbel", batch_size=columns, guidance_scale=guidance)
    batches = [generate(model, model.class_label(label), settings).decode() for label in LABELS]
    save_sheet(ROOT / "output" / "demo-models.png", batches)


def read_tokenizer() -> VQTokenizer:
    """The stored tokenizer, at the precision the finished models use it in."""
    weights = load_file(BUNDLED / f"{TOKENIZER_FILE}.safetensors")
    tokenizer = VQTokenizer(VQ)
    tokenizer.load_state_dict({key: value.float() for key, value in weights.items()})
    return tokenizer.eval().requires_grad_(False)


def main() -> None:
    stages = chosen_stages(__doc__, ("tokenizer", "target", "draft", "sheet"))
    pictures = load_pictures()
    print(f"{len(pictures.labels)} pictures, {len(LABELS)} labels", flush=True)
    if "tokenizer" in stages:
        store(BUNDLED / f"{TOKENIZER_FILE}.safetensors", train_vq(pictures).state_dict())
    plans = [plan for stage, plan in (("target", TARGET), ("draft", DRAFT)) if stage in stages]
    if plans:
        views = encode_views(read_tokenizer(), pictures)
        for plan in plans:
            store_transformer(plan, train_transformer(plan, views))
    if "sheet" in stages:
        contact_sheet()


if __name__ == "__main__":
    main()
