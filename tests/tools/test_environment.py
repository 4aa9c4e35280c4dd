"""What a newcomer sees where the environment can't be made: one sentence, and nothing changed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import environment


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 14, 0)])
def test_unfit_python(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(environment.SetupError, match=r"this is Python 3\.\d+, and Python 3\.10 to 3\.13 is needed"):
        environment.prepare(environment.DEMO)


def test_python_without_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(environment.SetupError, match="venv module is incomplete"):
        environment.prepare(environment.DEMO)


def test_no_network(tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    shutil.copytree(environment.ROOT / "tools", clone / "tools")
    (clone / "workflows").mkdir()
    (clone / "workflows" / "quick_start.json").write_text("{}", encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    unreachable = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    command = [sys.executable, str(clone / "tools" / "demo.py")]
    result = subprocess.run(command, env={**variables, **unreachable}, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "demo.py: PyPI can't be reached: connect this machine to the network, or set pip's proxy or index, "
        "and run the command again."
    ]
    assert not (clone / "output").exists()


def test_a_second_run_has_nothing_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    environment.prepare(environment.DEMO)
    assert capfd.readouterr().out == ""
