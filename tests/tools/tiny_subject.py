"""Random weights in Lumina's shape, as small as they come, for tests of the tools."""

from __future__ import annotations

import torch

from benchmark_models import Shape, Subject, lumina, synthetic

SHAPE = Shape(lumina(layers=2, heads=2, dim=32, ffn_dim=48, vocabulary=8300), rows=4, columns=5, has_reference=True)


def tiny_subject() -> Subject:
    return synthetic("tiny", SHAPE, torch.device("cpu"), torch.float32)
