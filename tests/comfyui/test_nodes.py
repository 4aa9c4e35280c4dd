"""What ComfyUI is told about the nodes. Saved workflows depend on ids, order and defaults: they only ever grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfyui
from comfyui_client import Client

SNAPSHOT = Path(__file__).with_name("object_info.json")
KEPT = ("default", "min", "max", "step", "options", "lazy", "advanced", "multiline", "control_after_generate")
LISTS_OF_FILES = ("checkpoint", "vq", "text_encoder")


def described(info: dict[str, Any]) -> dict[str, Any]:
    """The parts of a node's description that a saved workflow or an API user relies on."""
    inputs = [
        {
            "id": name,
            "type": kind,
            "optional": section == "optional",
            **{
                key: details[key] for key in KEPT if key in details and (key != "options" or name not in LISTS_OF_FILES)
            },
        }
        for section in ("required", "optional")
        for name, (kind, details) in info["input"].get(section, {}).items()
    ]
    outputs = [list(output) for output in zip(info["output_name"], info["output"], strict=True)]
    return {"title": info["display_name"], "category": info["category"], "inputs": inputs, "outputs": outputs}


def own_nodes(client: Client) -> dict[str, Any]:
    return {node: info for node, info in client.object_info().items() if node.startswith("SpecAR")}


def test_descriptions_are_those_of_the_snapshot(client: Client):
    found = {node: described(info) for node, info in own_nodes(client).items()}
    expected = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    if found != expected:
        written = comfyui.ROOT / "output" / SNAPSHOT.name
        written.parent.mkdir(exist_ok=True)
        written.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"If the change is meant: copy {written} to {SNAPSHOT}.")
    assert found == expected


def test_the_demo_models_lead_the_lists(client: Client):
    for node, default in (("SpecARLoadCheckpoint", "demo tokens"), ("SpecARLoadDraftModel", "demo tokens draft")):
        details = client.object_info(node)["input"]["required"]["checkpoint"][1]
        demos = [f"demo {kind}{role}" for kind in ("tokens", "continuous") for role in ("", " draft")]
        assert details["options"][:4] == demos
        assert details["default"] == default


def test_every_node_and_input_explains_itself(client: Client):
    for node, info in own_nodes(client).items():
        assert info["description"], node
        for section in ("required", "optional"):
            for name, (_, details) in info["input"].get(section, {}).items():
                assert details.get("tooltip"), f"{node}.{name}"


def test_options_that_some_decoders_ignore_say_so(client: Client):
    """That it is so is a test of the runs."""
    inputs = client.object_info("SpecARDecoderOptions")["input"]["required"]
    page = client.get("/extensions/speculative-ar/docs/SpecARDecoderOptions.md").decode()
    for name in ("redraft", "initialise"):
        assert "Without effect on draft-model" in inputs[name][1]["tooltip"]
    assert page.count("Without effect on `draft-model`") == 2
    for name in ("grouping", "group_size", "group_probability_gap", "group_distance"):
        assert inputs[name][1]["tooltip"].startswith("For grouped verification.")
    assert "an effect only where drafts are\nverified by `grouped`" in page


def test_the_english_texts_are_those_of_the_nodes(client: Client):
    served = client.get("/i18n")["en"]["nodeDefs"]
    for node, info in own_nodes(client).items():
        texts = served[node]
        assert (texts["display_name"], texts["description"]) == (info["display_name"], info["description"])
        inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
        assert texts["inputs"] == {name: {"tooltip": details["tooltip"]} for name, (_, details) in inputs.items()}


def test_every_node_has_a_help_page(client: Client):
    for node, info in own_nodes(client).items():
        page = client.get(f"/extensions/speculative-ar/docs/{node}.md").decode()
        assert page.startswith(f"# {info['display_name']}\n")


def test_the_decoder_list_tells_the_page_what_each_decoder_uses(client: Client):
    details = client.object_info("SpecARSampler")["input"]["required"]["decoder"][1]
    assert list(details["speculativear_widgets"]) == list(details["speculativear_summaries"]) == details["options"]
    assert details["speculativear_widgets"]["ar"] == ["top_k", "top_p"]
    assert details["speculativear_widgets"]["seed-exact"] == ["draft_length", "top_k", "top_p"]
    assert details["speculativear_widgets"]["cspd"] == ["draft_length"]
