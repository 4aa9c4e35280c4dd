"""Runs in a genuine ComfyUI: what a user sees while it works, cancels, changes a value, or frees the memory."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

import comfyui
from comfyui_client import Client, Graph
from tests.comfyui import tiny
from tests.comfyui.graphs import DRAFT, LABEL, LOAD, PROBE, SAMPLE, SAVE, picture

POSITIONS = 256


@pytest.fixture(scope="module", autouse=True)
def models(server: comfyui.Server) -> Iterator[None]:
    tiny.write_family(server.models / "ar_models")
    yield


def tokens(client: Client, graph: Graph) -> list[list[int]]:
    run = client.run(graph)
    assert run.succeeded, run.error
    return run.shown[PROBE]["tokens"]


def saved(client: Client, graph: Graph) -> bytes:
    """The pixels of the only picture that a graph saves."""
    run = client.run(graph)
    assert run.succeeded, run.error
    (data,) = client.images(run.prompt_id)
    return Image.open(io.BytesIO(data)).tobytes()


def with_options(graph: Graph, **changed: Any) -> Graph:
    """Links an options node to the sampler; arguments replace its defaults."""
    inputs = {
        **{"redraft": "auto", "verify": "auto", "initialise": "auto", "grouping": "dynamic"},
        **{"group_size": 14, "group_probability_gap": 0.15, "group_distance": 0.0, **changed},
    }
    graph["7"] = {"class_type": "SpecARDecoderOptions", "inputs": inputs}
    graph[SAMPLE]["inputs"]["options"] = ["7", 0]
    return graph


def test_a_picture_arrives_with_its_statistics(client: Client):
    run = client.run(picture(batch_size=2, seed=11))
    assert run.succeeded, run.error
    pictures = [Image.open(io.BytesIO(data)) for data in client.images(run.prompt_id)]
    assert [one.size for one in pictures] == [(64, 64)] * 2
    (shown,) = run.shown[SAMPLE]["speculativear"]
    assert shown == run.shown[PROBE]["statistics"][0]
    assert (shown["decoder"], shown["promise"], shown["batch_size"]) == ("seed-exact", "seed-exact", 2)
    assert [sum(row) for row in shown["accepted_per_pass"]] == [POSITIONS] * 2
    assert shown["forward_passes"] < POSITIONS
    assert shown["seconds"]["decode"] > 0


def test_progress_counts_accepted_tokens_up_to_all_of_them(client: Client):
    run = client.run(picture(batch_size=3, seed=12))
    progress = run.progress(SAMPLE)
    values = [value for value, _ in progress]
    assert values == sorted(values)
    assert len(set(values)) > 10
    assert set(progress[-1]) == {3 * POSITIONS} == {maximum for _, maximum in progress}


def test_previews_and_live_numbers_come_and_can_be_turned_off(client: Client):
    run = client.run(picture(decoder="ar", seed=13))
    assert {preview.node for preview in run.previews} == {SAMPLE}
    assert Image.open(io.BytesIO(run.previews[0].data)).format == "JPEG"
    live = run.data("speculativear.progress")
    assert {numbers["node"] for numbers in live} == {SAMPLE}
    assert all(numbers["accepted"] == numbers["forward_passes"] for numbers in live)
    assert not client.run(picture(decoder="ar", seed=14, preview_every=0)).previews


def test_a_cancelled_run_stops_and_the_next_one_gives_the_whole_picture(client: Client):
    expected = tokens(client, picture(decoder="ar", seed=15))
    client.free()
    prompt_id = client.queue(picture(decoder="ar", seed=15, preview_every=0))
    reached = []

    def cancel(event: dict) -> None:
        if event["type"] == "progress":
            reached.append(event["data"]["value"])
            if reached[-1] == 20:
                client.interrupt(prompt_id)

    run = client.until_done(prompt_id, on_event=cancel)
    assert run.outcome == "execution_interrupted"
    assert 20 <= reached[-1] < POSITIONS
    assert tokens(client, picture(decoder="ar", seed=15, preview_every=0)) == expected


def test_the_same_graph_again_is_not_run_again(client: Client):
    client.run(picture(seed=16))
    again = client.run(picture(seed=16))
    assert again.succeeded
    assert again.cached >= {LOAD, LABEL, SAMPLE, SAVE}
    assert not again.executed & {LOAD, LABEL, SAMPLE, SAVE}


def test_another_seed_runs_the_sampler_alone(client: Client):
    first = tokens(client, picture(seed=17))
    run = client.run(picture(seed=18))
    assert run.executed == {SAMPLE, SAVE, PROBE}
    assert run.shown[PROBE]["tokens"] != first


def test_a_replaced_checkpoint_is_loaded_anew(client: Client, server: comfyui.Server):
    folder = server.models / "ar_models"
    tiny.write_model(folder / "replaced.safetensors", seed=3)
    first = tokens(client, picture(checkpoint="replaced.safetensors"))
    tiny.write_model(folder / "replaced.safetensors", seed=4)
    run = client.run(picture(checkpoint="replaced.safetensors"))
    assert LOAD in run.executed
    assert run.shown[PROBE]["tokens"] != first


def test_a_replaced_tokenizer_beside_the_checkpoint_is_loaded_anew(client: Client, server: comfyui.Server):
    folder = server.models / "ar_models" / "beside"
    graph = picture(checkpoint="beside/model-b.safetensors")
    tiny.write_model(folder / "model-b.safetensors", named_vq=False)
    tiny.write_vq(folder)
    first = saved(client, graph)
    tiny.write_model(folder / "unrelated.safetensors")
    assert LOAD in client.run(graph).cached, "a file that auto does not take is no reason to load again"
    tiny.write_vq(folder, seed=9)
    assert saved(client, graph) != first


def test_a_size_that_the_file_does_not_tell_can_be_said(client: Client, server: comfyui.Server):
    for name, layers in (("silent", 2), ("silent-draft", 1)):
        tiny.write_model(server.models / "ar_models" / f"{name}.safetensors", grid=None, layers=layers)
    graph = picture(
        checkpoint="silent.safetensors", draft="silent-draft.safetensors", decoder="draft-model", draft_length=4
    )
    for loader in (LOAD, DRAFT):
        graph[loader]["inputs"]["picture_size"] = 128
    run = client.run(graph)
    assert run.succeeded, run.error
    assert len(run.shown[PROBE]["tokens"][0]) == 8 * 8
    (data,) = client.images(run.prompt_id)
    assert Image.open(io.BytesIO(data)).size == (32, 32), "4 pixels a code"


@pytest.mark.parametrize("seed", [0, 2**32, 2**64 - 1])
def test_seed_exact_gives_the_tokens_of_ar_for_any_seed(client: Client, seed: int):
    assert tokens(client, picture(seed=seed)) == tokens(client, picture(seed=seed, decoder="ar"))


def test_the_draft_model_is_loaded_only_where_it_is_used(client: Client):
    client.free()
    assert DRAFT not in client.run(picture(draft="tiny-draft.safetensors", seed=19)).executed
    run = client.run(picture(draft="tiny-draft.safetensors", seed=19, decoder="draft-model", draft_length=4))
    assert run.succeeded, run.error
    assert DRAFT in run.executed
    (shown,) = run.shown[SAMPLE]["speculativear"]
    assert (shown["decoder"], shown["promise"]) == ("draft-model", "lossless")
    assert shown["draft_passes"] > 0


def test_options_change_the_decoder_and_its_promise(client: Client):
    graph = picture(draft="tiny-draft.safetensors", decoder="draft-model", draft_length=4, seed=20)
    run = client.run(with_options(graph, verify="exact"))
    assert run.succeeded, run.error
    assert run.shown[SAMPLE]["speculativear"][0]["promise"] == "seed-exact"
    assert run.shown[PROBE]["tokens"] == tokens(client, picture(decoder="ar", seed=20))


GROUPS = {"grouping": "static", "group_size": 40, "group_probability_gap": 1.0, "group_distance": 9.0}


@pytest.mark.parametrize(
    ("decoder", "ignored", "heeded"),
    [
        ("draft-model", {"redraft": "maximal", "initialise": "left", **GROUPS}, {"verify": "grouped"}),
        ("sjd", GROUPS, {"initialise": "left"}),
        ("ar", {"redraft": "maximal", "initialise": "left", "verify": "grouped", **GROUPS}, {}),
    ],
)
def test_options_that_a_decoder_ignores(client: Client, decoder: str, ignored: dict, heeded: dict):
    """As the options' help page says."""

    def passes(options: dict) -> list[list[int]]:
        graph = picture(draft="tiny-draft.safetensors", decoder=decoder, draft_length=4, seed=24)
        run = client.run(with_options(graph, **options))
        assert run.succeeded, run.error
        return run.shown[SAMPLE]["speculativear"][0]["accepted_per_pass"]

    assert passes(ignored) == passes({})
    assert not heeded or passes({**heeded, **GROUPS}) != passes({})


def test_tokens_can_be_decoded_again(client: Client):
    graph = picture(seed=21)
    graph["8"] = {"class_type": "SpecARDecodeTokens", "inputs": {"model": [LOAD, 0], "tokens": [SAMPLE, 1]}}
    graph["9"] = {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "again"}}
    run = client.run(graph)
    assert run.succeeded, run.error
    first, again = (Image.open(io.BytesIO(data)) for data in client.images(run.prompt_id))
    assert first.tobytes() == again.tobytes()


def test_running_out_of_memory_says_what_to_lower_and_the_next_run_works(client: Client):
    graph = picture(seed=22)
    graph["7"] = {"class_type": "ProbeOutOfMemory", "inputs": {"model": [LOAD, 0]}}
    graph[SAMPLE]["inputs"]["model"] = ["7", 0]
    failed = client.run(graph)
    assert failed.error["node_id"] == SAMPLE
    assert failed.error["exception_type"].endswith("OutOfMemoryError")
    assert "lower batch_size or draft_length" in failed.error["exception_message"]
    assert "TIPS" in failed.error["exception_message"], "ComfyUI did not take it for an out-of-memory error"
    assert client.run(picture(seed=22)).succeeded


def test_free_releases_the_models(client: Client):
    assert client.run(picture(draft="tiny-draft.safetensors", decoder="draft-model", draft_length=4, seed=23)).succeeded
    alive = client.post("/probe/watch", {})
    assert alive.count("LlamaGenNetwork") >= 2
    assert "VQTokenizer" in alive
    assert "KeyValueCache" not in alive, "a cache outlived its run"
    client.free()
    end = time.monotonic() + 30
    while client.get("/probe/alive") and time.monotonic() < end:
        time.sleep(0.1)
    assert client.get("/probe/alive") == []
    assert client.run(picture(seed=23)).succeeded
