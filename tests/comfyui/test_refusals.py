"""Bad input through the server: each gets one sentence that says what was given, what is accepted and what to do."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

import comfyui
from comfyui_client import Client
from tests.comfyui import tiny
from tests.comfyui.graphs import DRAFT, LABEL, LOAD, SAMPLE, picture, prompted, refusal


@pytest.fixture(scope="module", autouse=True)
def models(server: comfyui.Server) -> None:
    tiny.write_family(server.models / "ar_models")


DRAFTING: dict[str, Any] = {"decoder": "draft-model", "draft_length": 4}
CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "draft model of another vocabulary": (
        {**DRAFTING, "draft": "other-codes.safetensors"},
        SAMPLE,
        ["other-codes has 64 codes", "tiny has 96", "same image tokenizer"],
    ),
    "draft model of another grid": (
        {**DRAFTING, "draft": "other-grid.safetensors"},
        SAMPLE,
        ["1x8x8", "1x16x16", "same picture size"],
    ),
    "no draft model": (DRAFTING, SAMPLE, ["needs a draft model", "connect one"]),
    "window longer than the picture": (
        {"draft_length": 257},
        SAMPLE,
        ["draft_length is 257", "256 positions", "from 1 to 256"],
    ),
    "class number out of range": ({"label": "4"}, LABEL, ["4", "0 to 3"]),
    "negative class number": ({"label": "-1"}, LABEL, ["-1", "0 to 3"]),
    "unknown class name": ({"label": "stra"}, LABEL, ["stra", "nearest are: star"]),
    "class name like no other": ({"label": "xqzw"}, LABEL, ["xqzw", "some are: star"]),
    "top-k beyond the vocabulary": ({"top_k": 97}, SAMPLE, ["top_k is 97", "96 codes"]),
    "guidance below 1": ({"cfg": 0.5}, SAMPLE, ["cfg is 0.5", "1 or more"]),
    "batch of 0": ({"batch_size": 0}, SAMPLE, ["batch_size is 0", "1 to 64", "1 or more"]),
    "unknown decoder": ({"decoder": "medusa"}, SAMPLE, ["'medusa'", "seed-exact", "draft-model"]),
    "seed beyond 64 bits": ({"seed": 2**64}, SAMPLE, [str(2**64), str(2**64 - 1)]),
    "negative temperature": ({"temperature": -0.1}, SAMPLE, ["-0.1", "min of 0"]),
    "top-p of 0": ({"top_p": 0.0}, SAMPLE, ["top_p is 0", "above 0"]),
    "checkpoint that never was": ({"checkpoint": "nothing"}, LOAD, ["'nothing' is not in", "ar_models", "press R"]),
    "path out of the folder": ({"checkpoint": "../vae/x.safetensors"}, LOAD, ["is not in", "ar_models"]),
    "tokenizer in place of a model": ({"checkpoint": "vq-96.safetensors"}, LOAD, ["vq-96.safetensors"]),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_values_get_a_sentence(client: Client, case: str):
    changes, culprit, fragments = CASES[case]
    node, sentence = refusal(client, picture(**changes))
    assert node == culprit
    for fragment in fragments:
        assert fragment in sentence


WIRED = [
    (SAMPLE, "batch_size", "0", "batch_size is 0"),
    (SAMPLE, "decoder", "medusa", "'medusa' is not a decoder"),
    (LOAD, "checkpoint", "nothing", "'nothing' is not in"),
    (LOAD, "dtype", "int4", "dtype is 'int4'"),
]


@pytest.mark.parametrize(("culprit", "name", "value", "fragment"), WIRED)
def test_values_from_a_wire_are_checked_when_the_node_runs(
    client: Client, culprit: str, name: str, value: str, fragment: str
):
    graph = picture()
    graph["7"] = {"class_type": "ProbeWire", "inputs": {"value": value}}
    graph[culprit]["inputs"][name] = ["7", 0]
    if name == "batch_size":
        graph["7"] = {"class_type": "PrimitiveInt", "inputs": {"value": int(value)}}
    node, sentence = refusal(client, graph)
    assert node == culprit
    assert fragment in sentence


@pytest.mark.parametrize("loader", [LOAD, DRAFT])
@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("size", [-16, 250, 1040])
def test_picture_sizes_that_no_model_has(client: Client, loader: str, wired: bool, size: int):
    graph = picture(draft="tiny-draft.safetensors", **DRAFTING)
    graph[loader]["inputs"]["picture_size"] = ["7", 0] if wired else size
    if wired:
        graph["7"] = {"class_type": "PrimitiveInt", "inputs": {"value": size}}
    node, sentence = refusal(client, graph)
    assert node == loader
    for fragment in (f"picture_size is {size}", "multiple of 16", "at most 1024", "0 for what the file tells"):
        assert fragment in sentence


def test_a_picture_size_for_a_model_that_knows_its_own(client: Client):
    graph = picture()
    graph[LOAD]["inputs"]["picture_size"] = 384
    node, sentence = refusal(client, graph)
    assert node == LOAD
    assert "tiny was made for 16 x 16 codes, as its file says, and cannot draw 24 x 24" in sentence
    assert "leave the picture size at 0" in sentence


@pytest.mark.parametrize(
    ("name", "folder", "form"),
    [("vq", "vae", "the VQ tokenizer's file"), ("text_encoder", "text_encoders", "the text encoder's folder")],
)
def test_a_companion_that_never_was(client: Client, name: str, folder: str, form: str):
    graph = picture()
    graph[LOAD]["inputs"][name] = "nothing"
    node, sentence = refusal(client, graph)
    assert node == LOAD
    for fragment in ("'nothing' is not in", folder, "ar_models", form, "press R"):
        assert fragment in sentence


def test_good_values_from_a_wire_are_taken(client: Client):
    graph = picture()
    for key, owner, name, value in (("7", LOAD, "checkpoint", "tiny.safetensors"), ("8", SAMPLE, "decoder", "sjd")):
        graph[key] = {"class_type": "ProbeWire", "inputs": {"value": value}}
        graph[owner]["inputs"][name] = [key, 0]
    run = client.run(graph)
    assert run.succeeded, run.error
    assert run.shown[SAMPLE]["speculativear"][0]["decoder"] == "sjd"


def test_a_checkpoint_removed_after_the_graph_was_built(client: Client, server: comfyui.Server):
    path = tiny.write_model(server.models / "ar_models" / "removed.safetensors")
    assert (
        "removed.safetensors"
        in client.object_info("SpecARLoadCheckpoint")["input"]["required"]["checkpoint"][1]["options"]
    )
    assert client.run(picture(checkpoint="removed.safetensors")).succeeded
    path.unlink()
    node, sentence = refusal(client, picture(checkpoint="removed.safetensors"))
    assert node == LOAD
    assert "'removed.safetensors' is not in" in sentence


def test_a_folder_without_weights(client: Client, server: comfyui.Server):
    folder = server.models / "ar_models" / "half-downloaded"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    node, sentence = refusal(client, picture(checkpoint="half-downloaded"))
    shutil.rmtree(folder)
    assert node == LOAD
    assert "half-downloaded holds no weight files" in sentence


def test_a_truncated_file(client: Client, server: comfyui.Server):
    path = tiny.write_model(server.models / "ar_models" / "truncated.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
    node, sentence = refusal(client, picture(checkpoint="truncated.safetensors"))
    path.unlink()
    assert node == LOAD
    assert "truncated.safetensors" in sentence


def test_a_text_for_a_model_that_takes_classes(client: Client):
    node, sentence = refusal(client, prompted("a star", checkpoint="tiny.safetensors"))
    assert node == LABEL
    assert "tiny takes a class label" in sentence


def test_tokens_of_another_model(client: Client):
    graph = picture()
    graph["8"] = {
        "class_type": "SpecARLoadCheckpoint",
        "inputs": {**graph[LOAD]["inputs"], "checkpoint": "other-codes.safetensors"},
    }
    graph["9"] = {"class_type": "SpecARDecodeTokens", "inputs": {"model": ["8", 0], "tokens": [SAMPLE, 1]}}
    graph["10"] = {"class_type": "SaveImage", "inputs": {"images": ["9", 0], "filename_prefix": "never"}}
    node, sentence = refusal(client, graph)
    assert node == "9"
    assert "tiny, which makes 96 codes, but other-codes makes 64 codes" in sentence
