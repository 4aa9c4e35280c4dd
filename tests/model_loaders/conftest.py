"""The tiny LlamaGen models with random weights, and what LlamaGen's own code computed for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculative_ar import model_loaders

FOLDER = Path(__file__).parents[1] / "golden" / "llamagen"
STATED = {"heads": 4, "grid": (4, 4)}


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return FOLDER


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensor]:
    return load_file(FOLDER / "golden.safetensors")


@pytest.fixture(scope="session")
def load() -> Any:
    """model_loaders.load with the two things that no file of the tiny models tells."""

    def loader(path: Path, **more: Any) -> Any:
        return model_loaders.load(path, overrides=STATED, **more)

    return loader


@pytest.fixture(scope="session")
def c2i(load: Any) -> Any:
    return load(FOLDER / "c2i_tiny_256.pt")


@pytest.fixture(scope="session")
def t2i(load: Any) -> Any:
    return load(FOLDER / "t2i_tiny_stage1.pt")


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """The class-conditional model's state dict."""
    return torch.load(FOLDER / "c2i_tiny_256.pt", weights_only=True)["model"]
