"""The workflows that ship with the pack. Those of the demo models run as they are, on a machine without a GPU.

test_families.py runs the others on tiny checkpoints.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

import comfyui
from comfyui_client import Client
from workflow import to_graph

WORKFLOWS = sorted((comfyui.ROOT / "workflows").glob("*.json"))
DEMOS = [path for path in WORKFLOWS if re.search("demo (tokens|continuous)", path.read_text(encoding="utf-8"))]


def test_there_is_a_quick_start_and_one_with_a_draft_model_for_each_kind_of_token():
    assert {path.stem for path in DEMOS} == {"quick_start", "draft_model", "continuous", "continuous_draft_model"}


@pytest.mark.parametrize("path", DEMOS, ids=lambda path: path.stem)
def test_a_workflow_runs_and_saves_its_pictures(client: Client, path: Path):
    graph = to_graph(json.loads(path.read_text(encoding="utf-8")), client.object_info())
    (sampler,) = (node for node, entry in graph.items() if entry["class_type"] == "SpecARSampler")
    run = client.run(graph)
    assert run.succeeded, run.error
    pictures = [Image.open(io.BytesIO(data)) for data in client.images(run.prompt_id)]
    assert len(pictures) == graph[sampler]["inputs"]["batch_size"]
    assert {picture.size for picture in pictures} == {(256, 256)}
    assert all(low < high for picture in pictures for low, high in [picture.convert("L").getextrema()])
    progress = run.progress(sampler)
    assert [value for value, _ in progress] == sorted(value for value, _ in progress)
    assert progress[-1][0] == progress[-1][1]
    (shown,) = run.shown[sampler]["speculativear"]
    assert shown["forward_passes"] < shown["positions"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_offered_as_a_template_with_a_picture(client: Client, path: Path):
    assert path.stem in client.get("/workflow_templates")[comfyui.PACK]
    served = client.get(f"/api/workflow_templates/{comfyui.PACK}/{path.name}")
    assert served == json.loads(path.read_text(encoding="utf-8"))
    thumbnail = client.get(f"/api/workflow_templates/{comfyui.PACK}/{path.stem}.jpg")
    assert Image.open(io.BytesIO(thumbnail)).format == "JPEG"
