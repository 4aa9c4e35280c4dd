"""Trains the bundled continuous models, MAR's kind, from emoji pictures on a CPU; writes to model_loaders/bundled/.

Run `python tools/train_continuous.py` with what tools/train_demo.py needs. It takes about an hour and a half on one
core with bfloat16, prints its losses and leaves a contact sheet in output/. To train a model for the bundled decoder
without the training that made it, run the stage `encoder` first: `--only encoder draft`, as the bundled draft was.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from emoji_data import EmojiPictures, load_pictures
from pack import register
from training import BUNDLED, ROOT, Descent, Log, chosen_stages, half_precision, picture_loss, save_sheet, store

register()

from speculative_ar.decoders import SamplerSettings, generate  # noqa: E402
from speculative_ar.decoders.continuous.diffusion import TIMES, GaussianDiffusion, cosine_betas  # noqa: E402
from speculative_ar.decoders.interface import ContinuousOptions  # noqa: E402
from speculative_ar.model_loaders import load  # noqa: E402
from speculative_ar.model_loaders.diffusion_head import HeadConfig  # noqa: E402
from speculative_ar.model_loaders.kl_vae import KLConfig, KLDecoder  # noqa: E402
from speculative_ar.model_loaders.latent_model import LATENT_SCALE  # noqa: E402
from speculative_ar.model_loaders.mar import MARConfig, MARNetwork, Seen, asked_rows  # noqa: E402
from speculative_ar.model_loaders.vq import Encoder, VQConfig, taming_sources  # noqa: E402

# Labels whose pictures have a shape that a small model learns in an hour.
NAMES = (
    "smiling face",
    "cat face",
    "heart",
    "flag",
    "clock",
    "moon",
    "tree",
    "car",
    "ball",
    "book",
    "zodiac sign",
    "number",
)
VAE_FILE = BUNDLED / "demo-continuous-vae.safetensors"
ENCODER_FILE = ROOT / ".environment" / "training" / "demo-continuous-encoder.safetensors"  # only training needs it

VIEWS = 12288  # augmented pictures, encoded once
CLASS_DROPOUT = 0.1
EMA_DECAY = 0.998
DIFFUSION_STEPS = 100
ITERATIONS = 32

CHANNELS = 16  # of a token
GRID = 8
BUFFER = 4  # rows that repeat the class before the tokens
WIDTHS = (32, 32, 64, 96)  # of the feature maps, from the full resolution down
DECODER = KLConfig(CHANNELS, CHANNELS, WIDTHS, decoder_blocks=2)
# Of the fields only the encoder's own count; it tells a mean and a log variance of each channel.
ENCODER = VQConfig(0, 0, 2 * CHANNELS, WIDTHS[0], WIDTHS, (), encoder_blocks=1, attention=False)
LOG_VARIANCES = (-30.0, 20.0)


@dataclass(frozen=True)
class Round:
    """Part of the VAE's training. kl_weight: of the mean divergence per number, reached after kl_warmup steps; scale:
    what brings the latents to the unit that the divergence counts in."""

    seed: int
    steps: int
    rate: float
    kl_weight: float
    kl_warmup: int
    scale: float = 1.0


# The first round packs everything into five channels; the second, freer, fills the others and sharpens.
ROUNDS = (
    Round(11, steps=1900, rate=1.5e-3, kl_weight=0.03, kl_warmup=300),
    Round(16, steps=600, rate=1.2e-3, kl_weight=0.01, kl_warmup=1),
)
# An encoder alone, for the stored decoder, whose latents are at MAR's scale.
REFIT = Round(17, steps=900, rate=1.5e-3, kl_weight=0.01, kl_warmup=300, scale=LATENT_SCALE)
VAE_BATCH = 16
COLOUR_WEIGHT = 2.0


class KLAutoencoder(KLDecoder):
    """The decoder with the half that is needed to train it."""

    def __init__(self) -> None:
        super().__init__(DECODER)
        self.encoder = Encoder(ENCODER, nn)
        self.quant_conv = nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 1)

    def posterior(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures [B, 3, H, W] in -1..1 -> mean and standard deviation of their latents, each [B, C, h, w]."""
        mean, log_variance = self.quant_conv(self.encoder(pictures)).float().chunk(2, dim=1)
        return mean, (log_variance.clamp(*LOG_VARIANCES) / 2).exp()


def draw(mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
    """A draw from each posterior."""
    return mean + std * torch.randn(mean.shape, generator=generator)


def train_vae(pictures: EmojiPictures) -> KLAutoencoder:
    """Trains the VAE in ROUNDS and brings its latents to MAR's scale."""
    torch.manual_seed(ROUNDS[0].seed)
    vae = KLAutoencoder()
    for plan in ROUNDS:
        train_vae_round(vae, plan, pictures)
    normalise(vae, pictures)
    return vae.eval().requires_grad_(False)


def train_vae_round(vae: KLAutoencoder, plan: Round, pictures: EmojiPictures) -> None:
    """AdamW and bfloat16 autocast; the posteriors' own noise keeps the latents smooth."""
    generator = torch.Generator().manual_seed(plan.seed)
    trained = [weight for weight in vae.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.rate, betas=(0.9, 0.98), weight_decay=1e-4)
    descend = Descent(vae, plan.steps, optimizer)
    log = Log("vae", plan.steps)
    for step in range(plan.steps):
        batch, _ = pictures.sample(VAE_BATCH, generator)
        with half_precision():
            mean, std = vae.posterior(batch)
            made = vae.decode(draw(mean, std, generator))
        pixels = picture_loss(made.float(), batch, COLOUR_WEIGHT)
        mean, std = plan.scale * mean, plan.scale * std
        divergence = (mean**2 + std**2 - 1).mean() / 2 - std.log().mean()
        descend(step, pixels + plan.kl_weight * min(1.0, step / plan.kl_warmup) * divergence)
        log(step, pixel_loss=pixels, divergence=divergence, deviation=std.mean())


@torch.no_grad()
def normalise(vae: KLAutoencoder, pictures: EmojiPictures) -> None:
    """Folds into the convolutions next to the latents what brings their means to 0 and their scale to MAR's."""
    generator = torch.Generator().manual_seed(12)
    drawn = torch.cat([draw(*vae.posterior(pictures.sample(64, generator)[0]), generator) for _ in range(32)])
    centre = drawn.mean(dim=(0, 2, 3))
    unit = (drawn - centre[:, None, None]).std() * LATENT_SCALE
    inward, outward = vae.quant_conv, vae.post_quant_conv
    inward.bias[:CHANNELS] -= centre
    inward.weight[:CHANNELS] /= unit
    inward.bias[:CHANNELS] /= unit
    inward.bias[CHANNELS:] -= 2 * unit.log()
    outward.bias += outward.weight[:, :, 0, 0] @ centre
    outward.weight *= unit


def refit_encoder(pictures: EmojiPictures) -> KLAutoencoder:
    """Trains an encoder for the stored decoder: the repository has only that half, and a new draft model needs both."""
    torch.manual_seed(REFIT.seed)
    vae = KLAutoencoder()
    vae.load_state_dict(stored_decoder(), strict=False)
    for half in (vae.decoder, vae.post_quant_conv):
        half.requires_grad_(False)
    train_vae_round(vae, REFIT, pictures)
    return vae.eval().requires_grad_(False)


def of_encoder(name: str) -> bool:
    """Whether a weight of the autoencoder belongs to the half that only training needs."""
    return name.startswith(("encoder.", "quant_conv."))


def store_decoder(vae: KLAutoencoder) -> None:
    """The decoding half under its published names, for the pack."""
    own = {name: value for name, value in vae.state_dict().items() if not of_encoder(name)}
    store(VAE_FILE, {published_name(name): value for name, value in own.items()})


def store_encoder(vae: KLAutoencoder) -> None:
    """The other half, for the training of MARs."""
    store(ENCODER_FILE, {name: value for name, value in vae.state_dict().items() if of_encoder(name)})


def stored_decoder() -> dict[str, Tensor]:
    """The decoding half under its own names, in float32."""
    published = load_file(VAE_FILE)
    return {own: published[name].float() for own, (name,) in taming_sources(published).items()}


def published_name(name: str) -> str:
    """A decoder's weight as latent diffusion's files call it; there, level 0 is the full resolution."""
    deepest = len(WIDTHS) - 1
    name = re.sub(r"\.conv_blocks\.(\d+)\.", lambda found: f".up.{deepest - int(found[1])}.", name)
    for own, published in (("mid.0", "mid.block_1"), ("mid.1", "mid.attn_1"), ("mid.2", "mid.block_2")):
        name = name.replace(f".{own}.", f".{published}.")
    return name.replace(".res.", ".block.")


@dataclass(frozen=True)
class MARPlan:
    """What to train and for how long. draws: noisy versions of each hidden token that the head sees in a step."""

    file: str
    config: MARConfig
    seed: int
    steps: int
    batch: int = 32
    draws: int = 4
    matrix_rate: float = 4e-3
    vector_rate: float = 2e-3


def sizes(width: int, depth: int, heads: int, head: tuple[int, int]) -> MARConfig:
    """Of a MAR for this grid and these labels; head: its width and blocks."""
    tokens = GRID * GRID
    return MARConfig(
        width, depth, heads, BUFFER, tokens, len(NAMES), HeadConfig(CHANNELS, width, *head), mlp_width=4 * width
    )


TARGET = MARPlan("demo-continuous", sizes(192, 3, 6, (256, 3)), seed=14, steps=2800)
DRAFT = MARPlan("demo-continuous-draft", sizes(96, 2, 3, (96, 2)), seed=15, steps=2000)


def read_vae() -> KLAutoencoder:
    """The stored VAE, at the precision the finished models use it in."""
    encoder = {name: value.float() for name, value in load_file(ENCODER_FILE).items()}
    vae = KLAutoencoder()
    vae.load_state_dict(stored_decoder() | encoder)
    return vae.eval().requires_grad_(False)


@dataclass(frozen=True)
class Views:
    """What the encoder says of augmented pictures: means and deviations of tokens [N, L, C], and the labels [N]."""

    means: Tensor
    deviations: Tensor
    labels: Tensor

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens [count, L, C] and labels [count], some of them replaced by the null class, one past the last."""
        rows = torch.randint(len(self.labels), (count,), generator=generator)
        dropped = torch.rand(count, generator=generator) < CLASS_DROPOUT
        tokens = draw(self.means[rows].float(), self.deviations[rows].float(), generator)
        return tokens, torch.where(dropped, len(NAMES), self.labels[rows])


@torch.no_grad()
def encode_views(vae: KLAutoencoder, pictures: EmojiPictures) -> Views:
    """Encodes VIEWS augmented pictures."""
    generator = torch.Generator().manual_seed(13)
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
    for _ in range(VIEWS // 64):
        batch, wanted = pictures.sample(64, generator)
        moments = (LATENT_SCALE * value.flatten(2).transpose(1, 2).bfloat16() for value in vae.posterior(batch))
        for part, value in zip(parts, (*moments, wanted), strict=True):
            part.append(value)
    return Views(*map(torch.cat, parts))


class Corruption:
    """The diffusion over all TIMES steps: what a noisy token is, and how far a prediction is from the truth."""

    def __init__(self) -> None:
        self.process = GaussianDiffusion(ContinuousOptions(), range(TIMES), torch.device("cpu"))
        self.signal = (1 - cosine_betas()).cumprod(0).float()

    def noisy(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Tokens [M, C] at times [M]."""
        signal = self.signal[times][:, None]
        return signal.sqrt() * clean + (1 - signal).sqrt() * noise

    def losses(self, output: Tensor, clean: Tensor, noise: Tensor, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Squared error of the noise, and the divergence in bits of a step's law from the true one (improved DDPM).

        The second trains the variance alone: the noise counts as given there.
        """
        error = F.mse_loss(output[:, :CHANNELS], noise)
        known = torch.cat((output[:, :CHANNELS].detach(), output[:, CHANNELS:]), dim=1)
        _, offset, log_std = self.process.transition(self.process.predict(known, x, times), times)
        _, true_offset, true_log_std = self.process.transition(torch.cat((clean, torch.zeros_like(clean)), 1), times)
        ratio = 2 * (true_log_std - log_std)
        apart = (true_offset - offset) ** 2 * (-2 * log_std).exp()
        return error, ((ratio.exp() + apart - 1 - ratio) / 2).mean() / math.log(2)


def masked_share(generator: torch.Generator) -> float:
    """The share of tokens to hide: normal around 1 with a deviation of 0.25, cut off outside 0.7 .. 1 (MAR)."""
    share = torch.empty(())
    nn.init.trunc_normal_(share, 1.0, 0.25, 0.7, 1.0, generator=generator)
    return share.item()


def initialise(network: nn.Module) -> None:
    """As MAR: Xavier's matrices, small embeddings; the head's modulations and its last layer begin at 0."""
    for name, weight in network.named_parameters():
        if "adaLN_modulation" in name or "final_layer" in name or name.endswith("bias"):
            nn.init.zeros_(weight)
        elif weight.ndim == 2:
            nn.init.xavier_uniform_(weight)
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def features(network: MARNetwork, tokens: Tensor, labels: Tensor, order: Tensor, known: int) -> Tensor:
    """What the head is told about the tokens that are not among the first `known` of the order, [B * hidden, D]."""
    seen = Seen.of(order, torch.full((len(order),), known), known)
    said = torch.cat((network.class_emb.weight, network.fake_latent.weight))[labels]
    return asked_rows(network.decode(network.encode(tokens, seen, said), seen), order[:, known:])


def token_losses(
    network: MARNetwork, views: Views, plan: MARPlan, corruption: Corruption, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """See Corruption.losses, of the hidden tokens of a batch."""
    tokens, labels = views.sample(plan.batch, generator)
    order = torch.rand(tokens.shape[:2], generator=generator).argsort(dim=1)
    known = tokens.shape[1] - math.ceil(tokens.shape[1] * masked_share(generator))
    condition = network.head.condition(features(network, tokens, labels, order, known)).repeat(plan.draws, 1)
    clean = asked_rows(tokens, order[:, known:]).repeat(plan.draws, 1)
    noise = torch.randn(clean.shape, generator=generator)
    times = torch.randint(TIMES, (len(clean),), generator=generator)
    x = corruption.noisy(clean, noise, times)
    return corruption.losses(network.head(x, times, condition).float(), clean, noise, x, times)


def train_mar(plan: MARPlan, views: Views) -> MARNetwork:
    """Muon for the matrices of the blocks, AdamW for the rest; bfloat16 autocast; the mean of the late weights."""
    torch.manual_seed(plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    network = MARNetwork(plan.config)
    initialise(network)
    matrices = [weight for name, weight in network.named_parameters() if "blocks" in name and weight.ndim == 2]
    others = [weight for name, weight in network.named_parameters() if "blocks" not in name or weight.ndim != 2]
    descend = Descent(
        network,
        plan.steps,
        torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.01),
    )
    averaged = copy.deepcopy(network).requires_grad_(False)
    corruption, log = Corruption(), Log(plan.file, plan.steps)
    for step in range(plan.steps):
        with half_precision():
            error, divergence = token_losses(network, views, plan, corruption, generator)
        descend(step, error + divergence)
        share = min(1 - 1 / (step + 1), EMA_DECAY)
        torch._foreach_lerp_(list(averaged.parameters()), list(network.parameters()), 1 - share)
        log(step, noise_loss=error, divergence=divergence)
    return averaged.eval()


# Weights that MAR's files keep loose, with leading axes of size 1.
LOOSE = {
    "fake_latent.weight": ("fake_latent", 0),
    "mask_token.weight": ("mask_token", 1),
    "encoder_positions.weight": ("encoder_pos_embed_learned", 1),
    "decoder_positions.weight": ("decoder_pos_embed_learned", 1),
    "head_positions.weight": ("diffusion_pos_embed_learned", 1),
}


def published_weights(network: MARNetwork) -> dict[str, Tensor]:
    """The state dict as MAR's files have it."""
    weights = {}
    for name, value in network.state_dict().items():
        published, axes = LOOSE.get(name, (re.sub(r"^head\.", "diffloss.net.", name), 0))
        weights[published] = value[(None,) * axes]
    return weights


def store_mar(plan: MARPlan, network: MARNetwork) -> None:
    """Adds what the shapes do not tell: heads, label names, display name, how to sample, and the VAE's file."""
    store(
        BUNDLED / f"{plan.file}.safetensors",
        published_weights(network),
        heads=plan.config.heads,
        grid=[GRID, GRID],
        labels=list(NAMES),
        name=plan.file.replace("-", " "),
        vae=VAE_FILE.name,
        diffusion_steps=DIFFUSION_STEPS,
        iterations=ITERATIONS,
        guidance_schedule="linear",
        respacing="strided",
    )


def contact_sheet(guidance: float = 3.0, columns: int = 6) -> None:
    """Draws a row of pictures for each label with the finished target model, in the order of NAMES."""
    model = load(BUNDLED / f"{TARGET.file}.safetensors", dtype=torch.float32)
    settings = SamplerSettings(decoder="ar", batch_size=columns, guidance_scale=guidance)
    batches = [generate(model, model.class_label(label), settings).decode() for label in NAMES]
    save_sheet(ROOT / "output" / "demo-continuous.png", batches)


def main() -> None:
    stages = chosen_stages(__doc__, ("vae", "encoder", "target", "draft", "sheet"), skipped=("encoder",))
    pictures = load_pictures(NAMES)
    print(f"{len(pictures.labels)} pictures, {len(NAMES)} labels", flush=True)
    if "vae" in stages:
        vae = train_vae(pictures)
        store_decoder(vae)
        store_encoder(vae)
    if "encoder" in stages:
        store_encoder(refit_encoder(pictures))
    plans = [plan for stage, plan in (("target", TARGET), ("draft", DRAFT)) if stage in stages]
    if plans:
        views = encode_views(read_vae(), pictures)
        for plan in plans:
            store_mar(plan, train_mar(plan, views))
    if "sheet" in stages:
        contact_sheet()


if __name__ == "__main__":
    main()
