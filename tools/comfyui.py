"""Starts a real ComfyUI without a screen, with this pack in it, in a folder of its own, and stops it again.

    with Server() as server:
        ... Client(server.url) ...

Runs inside the environment that tools/environment.py makes. Nothing of the user's own ComfyUI is read or written.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import environment
from comfyui_client import open_directly

PACK = "speculative-ar"
ROOT = environment.ROOT
FOLDERS = ("custom_nodes", "models", "input", "output", "temp", "user/default")
# Without the first the page covers itself with a dialog for new users.
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Workflow.ShowMissingModelsWarning": False}
VARIABLES = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
NOT_PART_OF_THE_PACK = shutil.ignore_patterns(".git", ".environment", "output", "__pycache__")


class StartError(RuntimeError):
    """ComfyUI can't be started. reason: one sentence; log: what ComfyUI printed; the message has the end of it."""

    def __init__(self, reason: str, log: str = "") -> None:
        self.reason, self.log = reason, log
        super().__init__(f"{reason} The end of its log:\n{log[-4000:]}" if log else reason)


class Server:
    """A ComfyUI process.

    packs: folder name in custom_nodes -> folder on disk. This pack alone by default.
    settings: the page's settings, beyond the ones that keep dialogs away.
    options: further options for ComfyUI's main.py.
    cpu: False lets ComfyUI choose its device.
    port: 0 takes a free one.
    """

    def __init__(
        self,
        *,
        packs: Mapping[str, Path] | None = None,
        settings: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        cpu: bool = True,
        port: int = 0,
    ) -> None:
        self.packs = {PACK: ROOT} if packs is None else dict(packs)
        self.settings = {**SETTINGS, **(settings or {})}
        self.options = [*(["--cpu"] if cpu else []), *options]
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.base = Path()

    @property
    def models(self) -> Path:
        """ComfyUI's models folder of this server."""
        return self.base / "models"

    @property
    def log(self) -> str:
        """Everything that ComfyUI has printed."""
        return (self.base / "server.log").read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def start(self, *, timeout: float = 240) -> None:
        """Returns once ComfyUI answers. Raises StartError."""
        if is_taken(self.port):
            raise StartError(f"Port {self.port} is taken by another program: choose another port, or 0 for a free one.")
        self.base = Path(tempfile.mkdtemp(prefix="speculative-ar-comfyui-"))
        try:
            self._fill_base()
            self._launch()
            self._wait_until_ready(timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the process, and removes its folder."""
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.base.is_absolute():  # the folder that start() made
            shutil.rmtree(self.base, ignore_errors=True)

    def _fill_base(self) -> None:
        for folder in FOLDERS:
            (self.base / folder).mkdir(parents=True)
        for name, source in self.packs.items():
            link(source, self.base / "custom_nodes" / name)
        settings = self.base / "user" / "default" / "comfy.settings.json"
        settings.write_text(json.dumps(self.settings), encoding="utf-8")

    def _launch(self) -> None:
        command = [
            sys.executable,
            str(Path(__file__).with_name("launch_comfyui.py")),
            str(environment.COMFYUI / "main.py"),
            *("--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", str(self.base)),
            *("--database-url", "sqlite:///:memory:", "--disable-api-nodes", "--disable-auto-launch"),
            *self.options,
        ]
        with (self.base / "server.log").open("wb") as log:
            # Its own session (on Windows: group), so that Ctrl-C reaches us alone, who end it when we are done.
            self.process = subprocess.Popen(
                command,
                cwd=environment.COMFYUI,
                env={**environment.clean_variables(), **VARIABLES},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )

    def _wait_until_ready(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise StartError("ComfyUI ended while it was starting.", self.log)
            try:
                with open_directly(f"{self.url}/system_stats", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise StartError(f"ComfyUI did not answer within {timeout:g} s.", self.log)


def link(source: Path, target: Path) -> None:
    """Makes the folder `source` appear as `target`."""
    try:
        target.symlink_to(source.resolve(), target_is_directory=True)
    except OSError:  # Windows lets only some accounts make symbolic links.
        shutil.copytree(source, target, ignore=NOT_PART_OF_THE_PACK)


def is_taken(port: int) -> bool:
    """Whether a program of this machine listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
