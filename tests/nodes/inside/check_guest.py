"""The pack as a guest: importing it changes nothing for the others, and its classes are what tools look for."""

from __future__ import annotations

import ast
import random
import warnings
from pathlib import Path

import comfy.options  # noqa: F401
import folder_paths
import torch

ROOT = Path(__file__).resolve().parents[3]


def settings() -> dict[str, object]:
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "random": torch.random.get_rng_state().tolist(),
        "python random": random.getstate(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": (
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.benchmark,
        ),
        "gradients": torch.is_grad_enabled(),
        "warnings": list(warnings.filters),
    }


def test_importing_the_nodes_changes_no_global_setting():
    import comfy.ops  # noqa: F401
    import server  # noqa: F401
    from comfy_api.latest import io  # noqa: F401

    before, folders_before = settings(), dict(folder_paths.folder_names_and_paths)
    from speculative_ar import nodes

    assert nodes.SpeculativeARExtension
    assert settings() == before
    assert folder_paths.folder_names_and_paths == folders_before


def test_registries_can_read_the_node_ids_without_running_anything():
    """ComfyUI-Manager finds the pack of a missing node by literals in classes that derive from io.ComfyNode."""
    found = set()
    for file in (ROOT / "nodes").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["io.ComfyNode"]:
                literals = [k.value.value for k in ast.walk(node) if isinstance(k, ast.keyword) and k.arg == "node_id"]
                assert literals == [node.name]
                found.add(node.name)
    assert found == {
        *("SpecARLoadCheckpoint", "SpecARLoadDraftModel", "SpecARPrompt", "SpecARClassLabel"),
        *("SpecARDecoderOptions", "SpecARContinuousOptions", "SpecARSampler", "SpecARDecodeTokens"),
    }
