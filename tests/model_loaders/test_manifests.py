"""Every released LlamaGen file against the network at full size: the same names and shapes on both sides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speculative_ar.model_loaders.detect import family_of
from speculative_ar.model_loaders.llamagen import LlamaGenNetwork
from speculative_ar.model_loaders.llamagen_files import key_map, read_config
from speculative_ar.model_loaders.weights import check_fit
from tests.model_loaders.manifests import shapes_of
from tests.model_loaders.repacking import repacked

SIZES = {  # layers, heads, dim, ffn: the table of the paper and its code
    "llamagen_B_c2i": (12, 12, 768, 2048),
    "llamagen_L_c2i": (24, 16, 1024, 2816),
    "llamagen_XL_c2i": (36, 20, 1280, 3584),
    "llamagen_XXL_c2i": (48, 24, 1536, 4096),
    "llamagen_3B_c2i": (24, 32, 3200, 8704),
    "llamagen_XL_t2i_256": (36, 20, 1280, 3584),
    "llamagen_XL_t2i_512": (36, 20, 1280, 3584),
}


def repacked_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {name: tuple(tensor.shape) for name, tensor in repacked(weights).items()}


@pytest.mark.parametrize("layout", [dict, repacked_shapes])
@pytest.mark.parametrize("name", SIZES)
def test_a_released_file_fits_the_network(name: str, layout: type) -> None:
    shapes = layout(shapes_of(name))
    sources = key_map(shapes, name)
    config = read_config(shapes, sources, {}, name)
    network = LlamaGenNetwork(config, nn, device="meta")
    check_fit(name, {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}, shapes, sources)
    assert sum(map(len, sources.values())) == len(shapes)
    transformer = config.transformer
    assert (transformer.layers, transformer.heads, transformer.dim, transformer.ffn_dim) == SIZES[name]
    assert config.classes == (0 if "t2i" in name else 1000)
    assert config.prefix_length == (120 if "t2i" in name else 1)
    family = family_of(shapes)
    assert family is not None and family.title.startswith("LlamaGen, text" if "t2i" in name else "LlamaGen, class")
    assert all(tensor.device == torch.device("meta") for tensor in network.state_dict().values())
