"""The KL VAE against numbers from MAR's own code; where it is found, and what is refused in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from speculative_ar.model_loaders import CheckpointError, load
from speculative_ar.model_loaders.checkpoint_files import Checkpoint
from speculative_ar.model_loaders.companions import vq_candidates
from speculative_ar.model_loaders.kl_vae import KLConfig, KLDecoder, is_kl_vae
from speculative_ar.model_loaders.kl_vae_files import (
    SKIPPED,
    decoding_shapes,
    find_kl_vae,
    load_kl_vae,
    published_names,
)
from speculative_ar.model_loaders.weights import check_fit
from tests.model_loaders.manifests import shapes_of

GOLDEN = Path(__file__).parents[1] / "golden" / "continuous" / "kl16_vae"
VQ = Path(__file__).parents[1] / "golden" / "llamagen" / "vq_tiny.pt"
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def weights() -> Weights:
    stored = torch.load(GOLDEN / "kl16.ckpt", weights_only=True)["model"]
    return {name: tensor.contiguous() for name, tensor in stored.items()}  # the encoder's are stored as one zero each


@pytest.fixture(scope="module")
def golden() -> Weights:
    return load_file(GOLDEN / "io.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    """What stands for a model whose latents want decoding: of no VAE's business but where it lies."""
    return checkpoint(tmp_path / "model" / "mar.safetensors")


def checkpoint(path: Path, weights: Weights | None = None, **metadata: str) -> Checkpoint:
    path.parent.mkdir(exist_ok=True)
    content = {"mar.encoder_blocks.0.norm1.weight": torch.ones(4), **(weights or {})}
    save_file(content, path, metadata={key: json.dumps(value) for key, value in metadata.items()})
    return Checkpoint([path])


def loaded(model: Checkpoint, path: Path | None = None) -> KLDecoder:
    return load_kl_vae(model, path, torch.device("cpu"), nn)


def check(vae: KLDecoder, golden: Weights) -> None:
    torch.testing.assert_close(vae.decode(golden["decode_in"]), golden["decode_out"], atol=1e-5, rtol=0)


def test_the_published_file_decodes_as_the_official_code(model: Checkpoint, golden: Weights) -> None:
    vae = loaded(model, GOLDEN / "kl16.ckpt")
    check(vae, golden)
    assert vae.config == KLConfig(16, 16, (64, 32), decoder_blocks=2)
    assert (vae.config.factor, vae.config.full_size_channels) == (2, 64)
    assert not any(weight.requires_grad for weight in vae.parameters())


def test_it_is_float32_whatever_the_file_is(model: Checkpoint, weights: Weights, tmp_path: Path) -> None:
    save_file({name: value.bfloat16() for name, value in weights.items()}, tmp_path / "kl16.safetensors")
    assert {value.dtype for value in loaded(model, tmp_path).state_dict().values()} == {torch.float32}


def test_it_is_found_inside_the_models_own_file(weights: Weights, golden: Weights, tmp_path: Path) -> None:
    inside = {f"vae.{name}": value for name, value in weights.items()}
    own = checkpoint(tmp_path / "harmon.safetensors", inside)
    torch.save({"model": {name: torch.zeros_like(value) for name, value in weights.items()}}, tmp_path / "kl16.ckpt")
    check(loaded(own), golden)
    other = checkpoint(tmp_path / "elsewhere" / "mar.safetensors")
    check(loaded(other, tmp_path / "harmon.safetensors"), golden)


@pytest.mark.parametrize("place", ["model/kl16.ckpt", "model/vae/kl16.ckpt", "vae/kl16.ckpt"])
def test_it_is_found_near_the_model(model: Checkpoint, weights: Weights, tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    torch.save({"model": weights}, path)
    assert find_kl_vae(model, None).path.resolve() == path
    assert [found.resolve() for found in vq_candidates(model.path)] == [path]


def test_it_is_found_where_mars_own_download_puts_it(weights: Weights, tmp_path: Path) -> None:
    (tmp_path / "mar" / "mar_base").mkdir(parents=True)
    (tmp_path / "vae").mkdir()
    torch.save({"model": weights}, tmp_path / "vae" / "kl16.ckpt")
    model = checkpoint(tmp_path / "mar" / "mar_base" / "checkpoint-last.safetensors")
    assert find_kl_vae(model, None).path.resolve() == tmp_path / "vae" / "kl16.ckpt"


def test_it_is_known_by_its_content_alone(model: Checkpoint, weights: Weights, golden: Weights) -> None:
    """Neither a VQ, another VAE nor damage passes for it, whatever the names say."""
    torch.save({"model": weights}, model.folder / "vq_ds16_c2i.pt")
    torch.save(torch.load(VQ, weights_only=True), model.folder / "vae.ckpt")
    save_file(narrowed(weights), model.folder / "sd-vae.safetensors")
    (model.folder / "damaged.pt").write_bytes(b"PK\x03\x04")
    check(loaded(model), golden)


def narrowed(weights: Weights, channels: int = 4) -> Weights:
    """The same VAE for latents of fewer channels."""
    return {**weights, "post_quant_conv.weight": weights["post_quant_conv.weight"][:, :channels].contiguous()}


def test_of_several_the_published_name_decides(model: Checkpoint, weights: Weights, golden: Weights) -> None:
    save_file(weights, model.folder / "a.safetensors")
    other = {name: torch.zeros_like(value) for name, value in weights.items()}
    save_file(other, model.folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"several VAEs \(a\.safetensors, b\.safetensors\); choose the one for"):
        loaded(model)
    (model.folder / "a.safetensors").rename(model.folder / "kl16.safetensors")
    check(loaded(model), golden)


def test_the_one_that_the_metadata_name(weights: Weights, golden: Weights, tmp_path: Path) -> None:
    own = checkpoint(tmp_path / "demo.safetensors", vae="demo-vae.safetensors")
    torch.save({"model": {name: torch.zeros_like(value) for name, value in weights.items()}}, tmp_path / "kl16.ckpt")
    with pytest.raises(CheckpointError, match=r"needs its VAE demo-vae\.safetensors, which is not in .*; put it back"):
        loaded(own)
    save_file(weights, tmp_path / "demo-vae.safetensors")
    check(loaded(own), golden)
    assert vq_candidates(own.path) == [tmp_path / "demo-vae.safetensors"]


def test_refusals_say_what_to_choose(model: Checkpoint, weights: Weights, tmp_path: Path) -> None:
    cases: dict[str, Weights] = {
        "is something else, not the VAE": {"quantize.embedding.weight": torch.ones(4, 4)},
        "is a model, not the VAE": {"layers.0.weight": torch.ones(1), "tok_embeddings.weight": torch.ones(1)},
        r"decodes latents of 4 channels, those of mar\.safetensors have 16": narrowed(weights),
        r"has no `decoder\.conv_in\.weight`": without(weights, "decoder.conv_in.weight"),
        r"is incomplete: decoder\.norm_out\.bias is missing": without(weights, "decoder.norm_out.bias"),
        r"does not fit its family: decoder\.extra is unknown": {**weights, "decoder.extra": torch.ones(1)},
        r"does not fit its family: extra\.weight is unknown": {**weights, "extra.weight": torch.ones(1)},
    }
    for sentence, content in cases.items():
        save_file(content, tmp_path / "given.safetensors")
        with pytest.raises(CheckpointError, match=sentence):
            loaded(model, tmp_path / "given.safetensors")
    with pytest.raises(CheckpointError, match=r"without the VAE .*; put kl16\.ckpt from wusize/harmon.* into .*model"):
        loaded(model)


def without(weights: Weights, name: str) -> Weights:
    return {key: value for key, value in weights.items() if key != name}


def test_a_vae_is_no_model(weights: Weights, tmp_path: Path) -> None:
    save_file(weights, tmp_path / "kl16.safetensors")
    with pytest.raises(CheckpointError, match=r"is a VAE, which turns latents into pictures, not a model"):
        load(tmp_path / "kl16.safetensors")


def test_every_weight_of_the_published_file_is_used_or_skipped_by_name() -> None:
    shapes = shapes_of("kl16_vae")
    assert is_kl_vae(shapes)
    decoding = decoding_shapes(shapes)
    assert len(shapes) == 312 and all(name in decoding or name.startswith(SKIPPED) for name in shapes)
    config = KLConfig.from_state_dict(decoding)
    assert config == KLConfig(16, 16, (128, 128, 256, 256, 512), decoder_blocks=3) and config.factor == 16
    sources = {own: [name] for own, name in published_names(decoding).items()}
    expected = {name: tuple(value.shape) for name, value in KLDecoder(config, device="meta").state_dict().items()}
    check_fit("kl16", expected, shapes, sources)
    assert len(sources) == len(decoding)
