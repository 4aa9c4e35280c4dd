"""A real ComfyUI server with this pack, shared by the tests of a session, and clients to talk to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import comfyui
import environment
from comfyui_client import Client

HELPER_PACKS = Path(__file__).parent / "packs"


@pytest.fixture(scope="session")
def server() -> Iterator[comfyui.Server]:
    """The server; helper packs of the tests are the folders of tests/comfyui/packs."""
    packs = {comfyui.PACK: comfyui.ROOT, **{folder.name: folder for folder in HELPER_PACKS.glob("[!_]*")}}
    with comfyui.Server(packs=packs) as running:
        yield running


@pytest.fixture
def client(server: comfyui.Server) -> Iterator[Client]:
    """A fresh session with the server."""
    with Client(server.url) as session:
        yield session


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's executable. Where none is installed its tests are skipped, but under CI that is a failure."""
    found = environment.browser()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium on this machine, so the browser tests can't run")
        pytest.skip("no Chromium or Chrome on this machine: browser tests are not run")
    return found
