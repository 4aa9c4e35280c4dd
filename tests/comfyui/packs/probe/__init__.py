"""Looks inside the server for the tests: tokens on a wire, a model that runs out of memory, and what is still alive."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import torch
from aiohttp import web
from comfy_api.latest import ComfyExtension, io
from server import PromptServer

WATCHED = ("LlamaGen", "LlamaGenNetwork", "VQTokenizer", "KeyValueCache", "ManagedModel")
watched: list[weakref.ref] = []


class ProbeTokens(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ProbeTokens",
            is_output_node=True,
            inputs=[io.Custom("SPECAR_TOKENS").Input("tokens"), io.Custom("SPECAR_STATISTICS").Input("statistics")],
        )

    @classmethod
    def execute(cls, tokens: Any, statistics: Any) -> io.NodeOutput:
        return io.NodeOutput(ui={"tokens": tokens.tokens.tolist(), "statistics": [statistics.to_json()]})


class OutOfMemory:
    """A model whose sessions do not fit."""

    def __init__(self, model: Any) -> None:
        self.__dict__.update(model.__dict__)
        self.layout, self.memory_required = model.layout, model.memory_required

    def session(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("pretended")


class ProbeOutOfMemory(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        model = io.Custom("SPECAR_MODEL")
        return io.Schema(node_id="ProbeOutOfMemory", inputs=[model.Input("model")], outputs=[model.Output()])

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        return io.NodeOutput(dataclasses.replace(model, model=OutOfMemory(model.model)))


class ProbeWire(io.ComfyNode):
    """Gives a dropdown's value over a wire, so that nobody can check it before the run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ProbeWire", inputs=[io.String.Input("value")], outputs=[io.AnyType.Output(display_name="any")]
        )

    @classmethod
    def execute(cls, value: str) -> io.NodeOutput:
        return io.NodeOutput(value)


@PromptServer.instance.routes.post("/probe/watch")
async def watch(_: web.Request) -> web.Response:
    """Remembers the pack's large objects that are alive now, and says how many there are."""
    found = [thing for thing in gc.get_objects() if type(thing).__name__ in WATCHED]
    watched[:] = [weakref.ref(thing) for thing in found]
    return web.json_response(sorted(type(thing).__name__ for thing in found))


@PromptServer.instance.routes.get("/probe/alive")
async def alive(_: web.Request) -> web.Response:
    """Which of the remembered objects are left."""
    return web.json_response(sorted(type(thing).__name__ for ref in watched if (thing := ref()) is not None))


class ProbeExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ProbeTokens, ProbeOutOfMemory, ProbeWire]


async def comfy_entrypoint() -> ProbeExtension:
    return ProbeExtension()
