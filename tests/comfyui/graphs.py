"""Graphs in API form for the tests: loader, class label or prompt, sampler, saved picture."""

from __future__ import annotations

from typing import Any

from comfyui_client import Client, Graph, Refused

LOAD, LABEL, SAMPLE, SAVE, DRAFT, PROBE = "1", "2", "3", "4", "5", "6"
# Without picture_size: graphs from before that input existed stay valid.
LOADER_DEFAULTS = {"dtype": "auto", "vq": "auto", "text_encoder": "auto"}
SAMPLER_DEFAULTS = {
    "seed": 7,
    "decoder": "auto",
    "draft_length": 16,
    "cfg": 3.0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "batch_size": 1,
    "preview_every": 16,
}


def picture(*, checkpoint: str = "tiny.safetensors", label: str = "star", draft: str = "", **sampler: Any) -> Graph:
    """One run of the sampler. `draft` links a draft model; further arguments replace the sampler's values."""
    graph: Graph = {
        LOAD: {"class_type": "SpecARLoadCheckpoint", "inputs": {"checkpoint": checkpoint, **LOADER_DEFAULTS}},
        LABEL: {"class_type": "SpecARClassLabel", "inputs": {"model": [LOAD, 0], "label": label}},
        SAMPLE: {
            "class_type": "SpecARSampler",
            "inputs": {"model": [LOAD, 0], "conditioning": [LABEL, 0], **SAMPLER_DEFAULTS, **sampler},
        },
        SAVE: {"class_type": "SaveImage", "inputs": {"images": [SAMPLE, 0], "filename_prefix": "test"}},
        PROBE: {"class_type": "ProbeTokens", "inputs": {"tokens": [SAMPLE, 1], "statistics": [SAMPLE, 2]}},
    }
    if draft:
        graph[DRAFT] = {"class_type": "SpecARLoadDraftModel", "inputs": {"checkpoint": draft, "dtype": "auto"}}
        graph[SAMPLE]["inputs"]["draft_model"] = [DRAFT, 0]
    return graph


def prompted(text: str, *, checkpoint: str, negative: str = "", width: int = 0, height: int = 0, **more: Any) -> Graph:
    """As `picture`, for a model that takes a text."""
    graph = picture(checkpoint=checkpoint, **more)
    said = {"text": text, "negative": negative, "width": width, "height": height}
    graph[LABEL] = {"class_type": "SpecARPrompt", "inputs": {"model": [LOAD, 0], **said}}
    return graph


def refusal(client: Client, graph: Graph) -> tuple[str, str]:
    """Queues a graph that must fail; returns the node and what the user reads."""
    try:
        run = client.run(graph)
    except Refused as refused:
        ((node, sentences),) = refused.errors.items()
        return node, "\n".join(sentences)
    assert run.error is not None, run.outcome
    assert run.error["exception_type"].split(".")[-1] in ("ValueError", "CheckpointError")
    return run.error["node_id"], run.error["exception_message"]
