"""The training of the bundled continuous models: its files have MAR's names, its losses vanish where they must."""

from __future__ import annotations

import torch

import train_continuous
from speculative_ar.model_loaders.kl_vae_files import published_names
from speculative_ar.model_loaders.mar import MARNetwork
from speculative_ar.model_loaders.mar_files import is_mar, key_map, read_config, reshapes
from speculative_ar.model_loaders.weights import check_fit
from train_continuous import CHANNELS, Corruption, KLAutoencoder, masked_share, of_encoder, published_name


def test_a_trained_network_is_stored_under_mars_names() -> None:
    config = train_continuous.sizes(48, 1, 4, (32, 1))
    network = MARNetwork(config)
    shapes = {name: tuple(value.shape) for name, value in train_continuous.published_weights(network).items()}
    assert is_mar(shapes)
    assert read_config(shapes, {"heads": 4}, "trained").positions == 64
    own = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    check_fit("trained", own, shapes, key_map(shapes), reshapes())


def test_the_decoder_is_stored_under_latent_diffusions_names() -> None:
    names = [name for name in KLAutoencoder().state_dict() if not of_encoder(name)]
    stored = {published_name(name): name for name in names}
    assert "decoder.up.3.block.0.conv1.weight" in stored and "decoder.mid.attn_1.q.weight" in stored
    assert published_names(stored) == {own: name for name, own in stored.items()}


def test_the_losses_of_the_truth_are_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    corruption = Corruption()
    clean, noise = (torch.randn(500, CHANNELS, generator=generator) for _ in range(2))
    times = torch.randint(300, 700, (500,), generator=generator)
    x = corruption.noisy(clean, noise, times)
    truth = torch.cat((noise, -torch.ones_like(noise)), dim=1)  # -1: the posterior's own variance
    error, divergence = corruption.losses(truth, clean, noise, x, times)
    assert error == 0 and abs(divergence) < 1e-3
    wrong, apart = corruption.losses(truth + 0.3, clean, noise, x, times)
    assert wrong > 0.08 and apart > 0


def test_most_tokens_are_hidden_in_training() -> None:
    generator = torch.Generator().manual_seed(2)
    shares = [masked_share(generator) for _ in range(500)]
    assert min(shares) >= 0.7 and max(shares) <= 1.0 and sum(shares) / 500 > 0.8
