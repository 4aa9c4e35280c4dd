"""Turns a workflow file, as the page saves it, into the graph that ComfyUI's API takes, as the page does to queue it.

Covers what the files in workflows/ use: plain nodes, links, widgets in the order of the node's inputs, and notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
NOTES = {"Note", "MarkdownNote"}
ACTIVE = 0


class WorkflowError(ValueError):
    """A workflow can't be queued on a server; the message says why."""


def to_graph(workflow: dict[str, Any], object_info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The API graph of a workflow; object_info is the server's description of its nodes.

    Raises WorkflowError for a node that the server does not know, that is muted, or whose stored values don't fit.
    """
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    return {
        str(node["id"]): {"class_type": node["type"], "inputs": _inputs(node, object_info, links)}
        for node in workflow["nodes"]
        if node["type"] not in NOTES
    }


def _inputs(node: dict[str, Any], object_info: dict[str, Any], links: dict[int, list[Any]]) -> dict[str, Any]:
    kind = node["type"]
    if kind not in object_info:
        raise WorkflowError(f"the workflow has a node {kind!r} that this server does not know")
    if node.get("mode", ACTIVE) != ACTIVE:
        raise WorkflowError(f"node {node['id']} ({kind}) is muted or bypassed: only whole workflows can be converted")
    names = list(_widget_names(object_info[kind]))
    values = node.get("widgets_values", [])
    if len(values) != len(names):
        raise WorkflowError(
            f"node {node['id']} ({kind}) stores {len(values)} values for the {len(names)} widgets {names}"
        )
    widgets = {name: value for name, value in zip(names, values, strict=True) if name}
    linked = {entry["name"]: links[entry["link"]] for entry in node.get("inputs", []) if entry.get("link") is not None}
    return {**widgets, **linked}


def _widget_names(info: dict[str, Any]) -> Iterator[str]:
    """The inputs that are widgets, in the order of `widgets_values`; "" where the page stores a control of its own."""
    for group in ("required", "optional"):
        for name in info["input_order"].get(group, []):
            kind, *rest = info["input"][group][name]
            options = rest[0] if rest else {}
            if not (isinstance(kind, list) or kind in WIDGET_TYPES) or options.get("forceInput"):
                continue
            yield name
            if options.get("control_after_generate", kind == "INT" and name in ("seed", "noise_seed")):
                yield ""
