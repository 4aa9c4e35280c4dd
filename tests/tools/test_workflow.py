"""Page format to API format, on the cases where the page does something of its own."""

from __future__ import annotations

from typing import Any

import pytest

from workflow import to_graph

OBJECT_INFO: dict[str, Any] = {
    "Sampler": {
        "input_order": {"required": ["model", "seed", "decoder"], "optional": ["note", "draft"]},
        "input": {
            "required": {
                "model": ["MODEL", {}],
                "seed": ["INT", {"control_after_generate": True}],
                "decoder": ["COMBO", {"options": ["ar", "sjd"]}],
            },
            "optional": {"note": ["STRING", {"forceInput": True}], "draft": ["MODEL"]},
        },
    },
    "Loader": {"input_order": {"required": ["file"]}, "input": {"required": {"file": [["a", "b"], {}]}}},
}


def workflow(**changes: Any) -> dict[str, Any]:
    sampler = {
        "id": 2,
        "type": "Sampler",
        "mode": 0,
        "inputs": [{"name": "model", "link": 7}, {"name": "draft", "link": None}],
        "widgets_values": [11, "fixed", "sjd"],
    }
    loader = {"id": 1, "type": "Loader", "mode": 0, "inputs": [], "widgets_values": ["b"]}
    note = {"id": 3, "type": "MarkdownNote", "mode": 0, "inputs": [], "widgets_values": ["Hello"]}
    return {"nodes": [loader, {**sampler, **changes}, note], "links": [[7, 1, 0, 2, 0, "MODEL"]]}


def test_widgets_take_their_places_and_links_their_names() -> None:
    assert to_graph(workflow(), OBJECT_INFO) == {
        "1": {"class_type": "Loader", "inputs": {"file": "b"}},
        "2": {"class_type": "Sampler", "inputs": {"seed": 11, "decoder": "sjd", "model": ["1", 0]}},
    }


def test_a_link_replaces_the_widget_of_the_same_name() -> None:
    linked = workflow(inputs=[{"name": "seed", "link": 7, "widget": {"name": "seed"}}])
    assert to_graph(linked, OBJECT_INFO)["2"]["inputs"] == {"seed": ["1", 0], "decoder": "sjd"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"type": "Other"}, "node 'Other' that this server does not know"),
        ({"mode": 4}, r"node 2 \(Sampler\) is muted or bypassed"),
        ({"widgets_values": [11, "sjd"]}, r"node 2 \(Sampler\) stores 2 values for the 3 widgets"),
    ],
)
def test_what_does_not_convert_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        to_graph(workflow(**changes), OBJECT_INFO)
