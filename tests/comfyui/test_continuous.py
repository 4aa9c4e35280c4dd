"""The bundled continuous pair in a genuine ComfyUI: each decoder, its options, previews, cancelling, and refusals."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from comfyui_client import Client, Graph
from tests.comfyui.graphs import LABEL, LOAD, PROBE, SAMPLE, picture, refusal

POSITIONS, CHANNELS = 64, 16
OPTIONS = "7"
FAST = {"iterations": 8, "diffusion_steps": 20}
DEFAULTS = {
    **{"iterations": 0, "diffusion_steps": 0, "guidance_schedule": "auto", "respacing": "auto"},
    **{"diffusion_sampler": "ddpm", "eta": 0.0, "tolerance": 0.02, "measure_deviation": False},
    **{"verification": "block", "sigma_factor": "paper", "softening": 42.0, "prefill_ratio": 0.05},
}


def graph(decoder: str = "ar", draft_length: int = 4, options: dict[str, Any] | None = None, **more: Any) -> Graph:
    """A small run of the bundled target; options replace those of a fast one."""
    made = picture(checkpoint="demo continuous", label="heart", decoder=decoder, draft_length=draft_length, **more)
    made[OPTIONS] = {"class_type": "SpecARContinuousOptions", "inputs": {**DEFAULTS, **FAST, **(options or {})}}
    made[SAMPLE]["inputs"]["options"] = [OPTIONS, 0]
    return made


def made_by(client: Client, asked: Graph) -> tuple[torch.Tensor, dict[str, Any]]:
    """Tokens [B, N, C] and the statistics of a run."""
    run = client.run(asked)
    assert run.succeeded, run.error
    (shown,) = run.shown[SAMPLE]["speculativear"]
    return torch.tensor(run.shown[PROBE]["tokens"]), shown


def test_each_decoder_draws_and_keeps_its_promise(client: Client) -> None:
    plain, reference = made_by(client, graph("ar"))
    assert plain.shape == (1, POSITIONS, CHANNELS)
    assert (reference["promise"], reference["forward_passes"], reference["head_calls"]) == ("reference", 8, 160)
    same, exact = made_by(client, graph("seed-exact", options={"tolerance": 0.0}))
    assert torch.equal(same, plain) and exact["promise"] == "seed-exact"
    near, shown = made_by(client, graph("seed-exact", options={"tolerance": 0.3, "measure_deviation": True}))
    assert (near - plain).norm(dim=-1).max() == pytest.approx(shown["deviation"], abs=1e-3)
    assert shown["promise"] == "seed-exact within tolerance" and shown["forward_passes"] <= 9
    other, fast = made_by(client, graph("head-speculative", 20))
    assert fast["promise"] == "lossless" and fast["head_calls"] < 100
    assert not torch.equal(other, plain)


def test_cspd_drafts_with_the_bundled_draft_model(client: Client) -> None:
    alone = refusal(client, graph("cspd"))
    assert alone[0] == SAMPLE and "needs a draft model" in alone[1]
    for options, promise in (
        ({}, "approximate"),
        ({"verification": "prefix", "sigma_factor": "off", "softening": 1.0}, "lossless"),
    ):
        _, shown = made_by(client, graph("cspd", draft="demo continuous draft", options=options))
        assert shown["promise"] == promise
        assert shown["draft_passes"] > 0 and shown["draft_head_calls"] > 0


def test_previews_show_the_tokens_where_they_belong(client: Client) -> None:
    run = client.run(graph("ar", seed=13, preview_every=1, options={"iterations": 32, "diffusion_steps": 100}))
    assert run.succeeded, run.error
    assert run.previews and {preview.node for preview in run.previews} == {SAMPLE}
    first = np.asarray(Image.open(io.BytesIO(run.previews[0].data)).convert("L"), dtype=int)
    assert 0.3 < (abs(first - 128) < 4).mean() < 1.0
    values = [value for value, _ in run.progress(SAMPLE)]
    assert values == sorted(values) and values[-1] == POSITIONS


def test_a_cancelled_run_stops_within_a_step_and_the_next_is_whole(client: Client) -> None:
    slow = {"iterations": 64, "diffusion_steps": 500}
    prompt_id = client.queue(graph("ar", seed=15, preview_every=0, options=slow))
    reached = []

    def cancel(event: dict[str, Any]) -> None:
        if event["type"] == "progress":
            reached.append(event["data"]["value"])
            if len(reached) == 3:
                client.interrupt(prompt_id)

    assert client.until_done(prompt_id, on_event=cancel).outcome == "execution_interrupted"
    assert reached[-1] < POSITIONS / 2
    assert made_by(client, graph("ar", seed=15))[0].shape == (1, POSITIONS, CHANNELS)


def test_tokens_can_be_decoded_again(client: Client) -> None:
    asked = graph(seed=21)
    asked["8"] = {"class_type": "SpecARDecodeTokens", "inputs": {"model": [LOAD, 0], "tokens": [SAMPLE, 1]}}
    asked["9"] = {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "again"}}
    run = client.run(asked)
    assert run.succeeded, run.error
    first, again = (Image.open(io.BytesIO(data)) for data in client.images(run.prompt_id))
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"decoder": "gsd"}, "gsd decodes codes, and demo continuous makes continuous tokens"),
        ({"decoder": "cspd", "draft": "demo tokens draft"}, "makes codes and demo continuous continuous tokens"),
        ({"top_k": 5}, "top_k"),
        ({"options": {"iterations": 65}}, "iterations is 65"),
        ({"options": {"diffusion_steps": 51, "respacing": "strided"}}, "no whole stride"),
        ({"decoder": "head-speculative", "options": {"diffusion_sampler": "ddim"}}, "ddim with eta 0 has none"),
    ],
)
def test_what_cannot_be_met_is_one_sentence(client: Client, changed: dict[str, Any], sentence: str) -> None:
    node, told = refusal(client, graph(**changed))
    assert node == SAMPLE and sentence in told


def test_options_of_the_other_kind_are_refused(client: Client) -> None:
    asked = graph()
    asked[LOAD]["inputs"]["checkpoint"] = "demo tokens"
    node, told = refusal(client, asked)
    assert node == SAMPLE and "connect Speculative Decoder Options instead" in told


def test_an_unknown_label_names_the_known_ones(client: Client) -> None:
    asked = graph()
    asked[LABEL]["inputs"]["label"] = "hart"
    node, told = refusal(client, asked)
    assert node == LABEL and "heart" in told
