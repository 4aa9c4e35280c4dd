"""The VQ tokenizer against numbers from LlamaGen's own code, and its key layout against the released files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculative_ar.model_loaders.vq import VQConfig, VQDecoder, VQTokenizer
from tests.model_loaders.manifests import shapes_of

GOLDEN = Path(__file__).parents[1] / "golden" / "llamagen"
BOOKKEEPING = "quantize.codebook_used"


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def tokenizer() -> VQTokenizer:
    weights = torch.load(GOLDEN / "vq_tiny.pt", weights_only=True)["model"]
    weights.pop(BOOKKEEPING)
    tokenizer = VQTokenizer(VQConfig.from_state_dict({key: tuple(value.shape) for key, value in weights.items()}))
    tokenizer.load_state_dict(weights)
    return tokenizer.eval().requires_grad_(False)


def test_sizes_are_read_from_the_weights(tokenizer: VQTokenizer) -> None:
    assert tokenizer.config == VQConfig(256, 8, 32, 32, (32, 64, 32, 32), (32, 64, 32, 32), 2, 3)
    assert tokenizer.config.factor == 8


def test_encode_gives_the_codes_of_the_official_code(tokenizer: VQTokenizer, golden: dict[str, torch.Tensor]) -> None:
    assert torch.equal(tokenizer.encode(golden["vq.encode_input"]), golden["vq.encode_indices"])


def test_quantised_vectors(tokenizer: VQTokenizer, golden: dict[str, torch.Tensor]) -> None:
    vectors = tokenizer.quantize(golden["vq.encode_indices"]).permute(0, 3, 1, 2)
    torch.testing.assert_close(vectors, golden["vq.encode_quant"], atol=1e-5, rtol=0)


def test_reconstruction(tokenizer: VQTokenizer, golden: dict[str, torch.Tensor]) -> None:
    picture = tokenizer.decode(golden["vq.encode_indices"])
    torch.testing.assert_close(picture, golden["vq.reconstruction_from_encode"], atol=2e-3, rtol=0)


def test_decoded_picture(tokenizer: VQTokenizer, golden: dict[str, torch.Tensor]) -> None:
    picture = tokenizer.decode(golden["c2i.tokens_greedy_cfg4"].unflatten(1, (4, 4)))
    torch.testing.assert_close(picture, golden["c2i.image"], atol=2e-3, rtol=0)


def test_the_decoding_half_alone_draws_the_same_picture(
    tokenizer: VQTokenizer, golden: dict[str, torch.Tensor]
) -> None:
    halves = ("decoder.", "quantize.", "post_quant_conv.")
    weights = {name: tensor for name, tensor in tokenizer.state_dict().items() if name.startswith(halves)}
    alone = VQDecoder(VQConfig.of_decoder({name: tuple(tensor.shape) for name, tensor in weights.items()}))
    alone.load_state_dict(weights)
    codes = golden["vq.encode_indices"]
    assert torch.equal(alone.eval().decode(codes), tokenizer.decode(codes))
    assert torch.equal(alone.code_vectors(), tokenizer.code_vectors())
    assert alone.config.factor == tokenizer.config.factor


@pytest.mark.parametrize(("name", "factor"), [("llamagen_vq_ds16", 16), ("llamagen_vq_ds8", 8)])
def test_released_layout(name: str, factor: int) -> None:
    expected = {key: shape for key, shape in shapes_of(name).items() if key != BOOKKEEPING}
    config = VQConfig.from_state_dict(expected)
    module = VQTokenizer(config, device="meta")
    assert {key: tuple(value.shape) for key, value in module.state_dict().items()} == expected
    assert config.factor == factor


def test_missing_part_is_named() -> None:
    with pytest.raises(ValueError, match=r"no `encoder\.conv_in\.weight`"):
        VQConfig.from_state_dict({"quantize.embedding.weight": (256, 8)})
