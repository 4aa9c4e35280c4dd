"""The pack in a genuine ComfyUI: it loads without a complaint; and the server of these tests leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import comfyui
from comfyui_client import Client

NODES = {
    "SpecARLoadCheckpoint",
    "SpecARLoadDraftModel",
    "SpecARPrompt",
    "SpecARClassLabel",
    "SpecARContinuousOptions",
    "SpecARDecoderOptions",
    "SpecARSampler",
    "SpecARDecodeTokens",
}


def test_the_pack_loads(server: comfyui.Server, client: Client) -> None:
    complaints = ("(IMPORT FAILED)", "Error while calling comfy_entrypoint", "Speculative AR could not be loaded")
    assert not [line for line in server.log.splitlines() if any(complaint in line for complaint in complaints)]
    module = f"custom_nodes.{comfyui.PACK}"
    assert {name for name, info in client.object_info().items() if info["python_module"] == module} == NODES


def test_the_server_stops_and_leaves_nothing() -> None:
    with comfyui.Server(packs={}) as server:
        assert server.base.is_dir()
    assert not server.base.exists()
    assert server.process.poll() is not None


def test_the_pack_is_copied_where_links_are_not_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    comfyui.link(comfyui.ROOT, tmp_path / "pack")
    assert (tmp_path / "pack" / "nodes" / "extension.py").is_file()
    assert not (tmp_path / "pack" / ".environment").exists()
