"""A text model in a genuine ComfyUI, from the words to the saved picture, with a real (tiny) T5 beside it."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from PIL import Image

import comfyui
from comfyui_client import Client, Graph
from tests.comfyui import tiny
from tests.comfyui.graphs import LABEL, LOAD, PROBE, SAMPLE, picture, prompted, refusal
from tests.model_loaders.tiny_t5 import save_t5

MODEL = "text/story.safetensors"
CHANNELS = 32


@pytest.fixture(scope="module", autouse=True)
def models(server: comfyui.Server) -> Path:
    """A text model with tokenizer and text encoder in one folder, as the official instructions lay them out."""
    folder = server.models / "ar_models"
    tiny.write_family(folder)
    tiny.write_model(server.models / "ar_models" / MODEL, caption_dim=CHANNELS)
    tiny.write_model(folder / "text" / "other-captions.safetensors", caption_dim=24)
    tiny.write_vq(folder / "text")
    save_t5(folder / "text" / "flan-t5-xl", width=CHANNELS)
    return folder


def tokens(client: Client, graph: Graph) -> list[list[int]]:
    run = client.run(graph)
    assert run.succeeded, run.error
    return run.shown[PROBE]["tokens"]


def test_words_become_a_saved_picture(client: Client):
    run = client.run(prompted("a red cat on the mat", checkpoint=MODEL, batch_size=2))
    assert run.succeeded, run.error
    pictures = [Image.open(io.BytesIO(data)) for data in client.images(run.prompt_id)]
    assert [one.size for one in pictures] == [(64, 64)] * 2
    assert all(low < high for one in pictures for low, high in [one.convert("L").getextrema()])
    (shown,) = run.shown[SAMPLE]["speculativear"]
    assert (shown["decoder"], shown["promise"]) == ("seed-exact", "seed-exact")
    assert shown["forward_passes"] < shown["positions"]


def test_the_words_matter_and_speculation_does_not(client: Client):
    cat = tokens(client, prompted("a red cat", checkpoint=MODEL, decoder="ar"))
    assert tokens(client, prompted("a red cat", checkpoint=MODEL)) == cat
    assert tokens(client, prompted("the mat", checkpoint=MODEL)) != cat
    assert tokens(client, prompted("a red cat", checkpoint=MODEL, negative="the mat")) != cat


def test_the_own_size_may_be_named(client: Client):
    own = tokens(client, prompted("a cat", checkpoint=MODEL))
    assert tokens(client, prompted("a cat", checkpoint=MODEL, width=64, height=64)) == own


def test_a_text_encoder_can_be_chosen_from_comfyuis_own_folder(client: Client, server: comfyui.Server, models: Path):
    elsewhere = server.models / "text_encoders" / "tiny-t5"
    shutil.copytree(models / "text" / "flan-t5-xl", elsewhere)
    (server.models / "text_encoders" / "t5xxl.safetensors").write_bytes(b"a single file")
    offered = client.object_info("SpecARLoadCheckpoint")["input"]["required"]["text_encoder"][1]["options"]
    assert {"auto", "text/flan-t5-xl", "tiny-t5"} <= set(offered)
    assert "t5xxl.safetensors" not in offered
    graph = prompted("a cat", checkpoint=MODEL)
    graph[LOAD]["inputs"]["text_encoder"] = "tiny-t5"
    assert tokens(client, graph) == tokens(client, prompted("a cat", checkpoint=MODEL))


def test_a_text_encoder_put_there_later_is_noticed(client: Client, models: Path):
    folder = models / "late"
    tiny.write_model(folder / "story.safetensors", caption_dim=CHANNELS)
    tiny.write_vq(folder)
    graph = prompted("a cat", checkpoint="late/story.safetensors")
    node, sentence = refusal(client, graph)
    assert node == LABEL
    assert "story needs the text encoder google/flan-t5-xl; put a copy of that folder, named flan-t5-xl" in sentence
    shutil.copytree(models / "text" / "flan-t5-xl", folder / "flan-t5-xl")
    assert tokens(client, graph) == tokens(client, prompted("a cat", checkpoint=MODEL))


def test_a_class_label_for_a_text_model(client: Client):
    node, sentence = refusal(client, picture(checkpoint=MODEL))
    assert node == LABEL
    assert "story takes a prompt, not a class label; connect a prompt" in sentence


def test_a_text_for_a_model_of_classes(client: Client):
    node, sentence = refusal(client, prompted("a cat", checkpoint="tiny.safetensors"))
    assert node == LABEL
    assert "tiny takes a class label, not a prompt; connect a class label" in sentence


@pytest.mark.parametrize(("width", "height"), [(512, 64), (64, 72), (128, 0)])
def test_a_size_that_the_model_does_not_draw(client: Client, width: int, height: int):
    node, sentence = refusal(client, prompted("a cat", checkpoint=MODEL, width=width, height=height))
    assert node == LABEL
    assert f"cannot draw {width or 64} x {height or 64} pixels" in sentence
    assert "the nearest size, and the only one, is 64 x 64" in sentence


def test_a_draft_model_of_other_captions(client: Client):
    graph = prompted(
        "a cat", checkpoint=MODEL, draft="text/other-captions.safetensors", decoder="draft-model", draft_length=4
    )
    node, sentence = refusal(client, graph)
    assert node == SAMPLE
    assert "other-captions takes prompts encoded as 12 rows of 24 channels" in sentence
    assert "as a draft model choose one with its target's text encoder" in sentence
