"""Talks to a running ComfyUI the way its web page does: HTTP calls, and one websocket for what happens meanwhile.

Every call blocks, so that tests and tools read from top to bottom.
"""

from __future__ import annotations

import asyncio
import json
import queue
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Graph = dict[str, dict[str, Any]]
ENDINGS = ("execution_success", "execution_error", "execution_interrupted")
PREVIEW_WITH_METADATA = 4
# A proxy that the user set is for the world outside and can't reach this machine's own ports.
open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Refused(Exception):
    """ComfyUI did not accept a graph. `errors` maps node ids to its sentences."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.errors: dict[str, list[str]] = {
            node: [f"{error['message']}: {error['details']}" for error in found["errors"]]
            for node, found in (answer.get("node_errors") or {}).items()
        }
        told = [f"node {node}: {'; '.join(sentences)}" for node, sentences in self.errors.items()]
        reasons = "; ".join(told) or answer["error"].get("details", "")
        super().__init__(f"{answer['error']['message']}: {reasons}")


@dataclass
class Preview:
    """A picture sent while a node was working; `data` is an encoded JPEG or PNG."""

    node: str
    data: bytes


@dataclass
class Run:
    """What was heard about one queued graph, in order."""

    prompt_id: str
    outcome: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    previews: list[Preview] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        return self.outcome == "execution_success"

    def data(self, kind: str) -> list[dict[str, Any]]:
        """The data of every event of one type."""
        return [event["data"] for event in self.events if event["type"] == kind]

    def progress(self, node: str) -> list[tuple[int, int]]:
        """(value, maximum) pairs that the node reported."""
        return [(entry["value"], entry["max"]) for entry in self.data("progress") if entry["node"] == node]

    @property
    def cached(self) -> set[str]:
        """Nodes that were not run again."""
        return {node for entry in self.data("execution_cached") for node in entry["nodes"]}

    @property
    def executed(self) -> set[str]:
        """Nodes that were run."""
        return {entry["node"] for entry in self.data("executing") if entry["node"] is not None}

    @property
    def shown(self) -> dict[str, dict[str, Any]]:
        """The `ui` dictionary of every node that returned one."""
        return {entry["node"]: entry["output"] for entry in self.data("executed") if entry["output"]}

    @property
    def error(self) -> dict[str, Any] | None:
        """The failure as ComfyUI tells it: `node_id`, `exception_type`, `exception_message`, `traceback`."""
        found = self.data("execution_error")
        return found[0] if found else None


class Client:
    """One session. Use as a context manager, or call `close()`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.id = uuid.uuid4().hex
        self._messages: queue.Queue[str | bytes | None] = queue.Queue()
        self._connected = threading.Event()
        self._failure: aiohttp.ClientError | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._connect()), daemon=True)
        self._thread.start()
        if not self._connected.wait(30):
            raise TimeoutError(f"no websocket connection to {url} within 30 seconds")
        if self._failure is not None:
            raise ConnectionError(f"{url} does not answer: {self._failure}")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._websocket.close(), self._loop).result(30)
        self._thread.join()

    def get(self, path: str, **query: str) -> Any:
        """The JSON value, or else the bytes, behind a path. Raises urllib.error.HTTPError."""
        return self._call(urllib.request.Request(_address(self.url + path, query)))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Sends JSON; returns JSON or bytes. Raises urllib.error.HTTPError."""
        data = json.dumps(body).encode()
        return self._call(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}))

    def object_info(self, node: str = "") -> dict[str, Any]:
        """The descriptions of all nodes, or the one of `node`, as the page gets them."""
        return self.get(f"/object_info/{node}")[node] if node else self.get("/object_info")

    def queue(self, graph: Graph, *, workflow: dict[str, Any] | None = None) -> str:
        """Queues a graph in API form and returns its prompt id. The PNGs also get `workflow`, the page's form of it.

        Raises Refused with the server's sentences.
        """
        body: dict[str, Any] = {"prompt": graph, "client_id": self.id}
        if workflow is not None:
            body["extra_data"] = {"extra_pnginfo": {"workflow": workflow}}
        try:
            return self.post("/prompt", body)["prompt_id"]
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            raise Refused(json.loads(error.read())) from None

    def until_done(
        self, prompt_id: str, *, timeout: float = 300, on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> Run:
        """Waits until the queued graph has ended, in whatever way, and its history can be read.

        on_event sees each event as it arrives, and may call this client (to interrupt, for example). Raises
        TimeoutError, and ConnectionError where the server goes away.
        """
        run = Run(prompt_id)
        end = time.monotonic() + timeout
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the graph did not end in {timeout:g} s; last events: {run.events[-3:]}") from None
            if message is None:
                raise ConnectionError("the server went away before the graph ended")
            if isinstance(message, bytes):
                run.previews += _previews(message)
                continue
            event = json.loads(message)
            if event["data"].get("prompt_id", prompt_id) != prompt_id:
                continue
            run.events.append(event)
            if event["type"] in ENDINGS:
                run.outcome = event["type"]
            if on_event is not None:
                on_event(event)
            if run.outcome and event["type"] == "executing" and event["data"]["node"] is None:
                return run

    def run(self, graph: Graph, **options: Any) -> Run:
        """Queues a graph and waits for its end. Options are those of `until_done`."""
        return self.until_done(self.queue(graph), **options)

    def interrupt(self, prompt_id: str) -> None:
        self.post("/interrupt", {"prompt_id": prompt_id})

    def free(self) -> None:
        """Asks for all models to be unloaded and all results forgotten; the server's worker does it a moment later."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    def history(self, prompt_id: str) -> dict[str, Any]:
        """What ComfyUI recorded: `outputs` (node id -> `ui` dictionary), `status`, `prompt`."""
        return self.get(f"/history/{prompt_id}")[prompt_id]

    def view(self, image: dict[str, str]) -> bytes:
        """The file behind one entry of an output's `images` list."""
        return self.get("/view", filename=image["filename"], subfolder=image["subfolder"], type=image["type"])

    def images(self, prompt_id: str) -> list[bytes]:
        """Every picture file that a finished graph saved, in order of node ids."""
        outputs = self.history(prompt_id)["outputs"]
        return [self.view(image) for node in sorted(outputs) for image in outputs[node].get("images", [])]

    async def _connect(self) -> None:
        """Hands over every message of the websocket, and None when it has closed."""
        try:
            await self._listen()
        except aiohttp.ClientError as error:
            self._failure = error
            self._connected.set()
        finally:
            self._messages.put(None)

    async def _listen(self) -> None:
        self._loop = asyncio.get_running_loop()
        address = f"{self.url}/ws?clientId={self.id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as self._websocket:
            # Only as the first message does this make the server name the node in every preview.
            await self._websocket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
            self._connected.set()
            async for message in self._websocket:
                self._messages.put(message.data)

    def _call(self, request: urllib.request.Request) -> Any:
        with open_directly(request, timeout=60) as answer:
            body = answer.read()
            return json.loads(body) if body and "json" in answer.headers.get("Content-Type", "") else body


def _address(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urllib.parse.urlencode(query)}" if query else path


def _previews(frame: bytes) -> list[Preview]:
    (kind,) = struct.unpack(">I", frame[:4])
    if kind != PREVIEW_WITH_METADATA:
        return []
    (length,) = struct.unpack(">I", frame[4:8])
    return [Preview(json.loads(frame[8 : 8 + length])["node_id"], frame[8 + length :])]
