"""tools/demo.py as a newcomer calls it, with their own Python: a picture, a table, a server, and nothing left over."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from PIL import Image

import comfyui
import comfyui_client
import demo
import environment
from workflow import WorkflowError

ROOT = environment.ROOT
OWN_PYTHON = sys._base_executable  # the one that the environment was made with
START = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {}
END = signal.CTRL_BREAK_EVENT if os.name == "nt" else signal.SIGTERM
NOWHERE = "http://127.0.0.1:9"


def start(*options: str, **variables: str) -> subprocess.Popen[str]:
    command = [OWN_PYTHON, str(ROOT / "tools" / "demo.py"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    # Beside other programs, threads that spin while they wait make a run ten times as long.
    patient = {"OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(command, env={**os.environ, **patient, **variables}, **pipes, **START)


@dataclass
class Served:
    """What was seen of `demo.py --serve`, from its start to its end."""

    lines: list[str]
    pictures: list[Path]
    node_known: bool
    exit_code: int
    port_open: bool
    survivors: list[psutil.Process]
    base_left: bool


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One run, with a proxy in the environment that would swallow every call, ended as a system ends a program."""
    process = start("--serve", "--pairs", "1", http_proxy=NOWHERE, HTTP_PROXY=NOWHERE, no_proxy="", NO_PROXY="")
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("> ComfyUI is at"):
                break
        assert lines and "ComfyUI is at" in lines[-1], process.stderr.read()
        saved = [ROOT / line.removeprefix("> saved ") for line in lines if line.startswith("> saved ")]
        url = lines[-1].split()[4].partition("/?")[0]
        known = comfyui_client.open_directly(f"{url}/object_info/SpecARSampler").status == 200
        children = psutil.Process(process.pid).children(recursive=True)
        (server,) = (child for child in children if "--base-directory" in child.cmdline())
        base = Path(server.cmdline()[server.cmdline().index("--base-directory") + 1])
        assert base.is_dir()
        process.send_signal(END)
        exit_code = process.wait(30)
        survivors = psutil.wait_procs(children, timeout=5)[1]
        port = int(url.rpartition(":")[2])
        yield Served(lines, saved, known, exit_code, comfyui.is_taken(port), survivors, base.exists())
        for picture in saved:
            picture.unlink()
    finally:
        process.kill()
        process.communicate()


def test_pictures_are_saved(served: Served) -> None:
    pictures = [Image.open(path) for path in served.pictures]
    assert pictures
    assert {(picture.format, picture.size) for picture in pictures} == {("PNG", (256, 256))}
    assert all(low < high for picture in pictures for low, high in [picture.convert("L").getextrema()])


def test_the_table_has_every_decoder(served: Served) -> None:
    rows = [line.split("|")[1].strip() for line in served.lines if line.startswith("|")]
    assert rows == ["decoder", "---", "ar", "seed-exact", "scd-gumbel", "scd-maximal", "sjd", "gsd", "draft-model"]


def test_the_server_answers_at_the_printed_address(served: Served) -> None:
    assert served.node_known
    assert served.lines[-1].endswith("/?template=quick_start&source=speculative-ar (Ctrl-C stops it)")


def test_a_request_to_end_stops_everything(served: Served) -> None:
    assert served.exit_code == environment.ENDED
    assert not served.port_open
    assert not served.survivors
    assert not served.base_left


def test_a_taken_port_is_told_in_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = start("--port", str(port))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines() == [
        f"demo.py: Port {port} is taken by another program: choose another port, or 0 for a free one."
    ]


def test_a_comfyui_that_ends_while_it_starts_shows_its_log() -> None:
    with pytest.raises(comfyui.StartError, match="unrecognized arguments: --no-such-option") as caught:
        comfyui.Server(options=["--no-such-option"]).start()
    assert caught.value.reason == "ComfyUI ended while it was starting."


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9 does not answer"):
        comfyui_client.Client(NOWHERE)


REFUSAL = {
    "error": {"message": "Prompt outputs failed validation", "details": ""},
    "node_errors": {"3": {"errors": [{"message": "Value not in list", "details": "decoder: 'x' not in ['ar']"}]}},
}


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (comfyui.StartError("ComfyUI ended while it was starting."), "ComfyUI ended while it was starting."),
        (
            comfyui_client.Refused(REFUSAL),
            "ComfyUI refused the workflow. Prompt outputs failed validation: node 3: Value not in list: "
            "decoder: 'x' not in ['ar']",
        ),
        (TimeoutError("the graph did not end in 300 s"), "the graph did not end in 300 s"),
        (ConnectionError("the server went away"), "the server went away"),
        (WorkflowError("the workflow has a node 'x'"), "the workflow has a node 'x'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch, failure: Exception, sentence: str) -> None:
    def fail(options: object) -> None:
        raise failure

    monkeypatch.setattr(demo, "demonstrate", fail)
    with pytest.raises(SystemExit) as ended:
        demo.run(argparse.Namespace())
    assert ended.value.code == f"demo.py: {sentence}"


def test_the_log_of_a_failed_start_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "OUTPUT", tmp_path)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    assert demo.kept("all that it printed\n") == " What it printed is in comfyui.log."
    assert (tmp_path / "comfyui.log").read_text(encoding="utf-8") == "all that it printed\n"
