"""What a newcomer sees where the environment can't be made: one sentence, and nothing changed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
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


PACKAGE = "specklet"
WHEEL = {
    f"{PACKAGE}/__init__.py": "",
    f"{PACKAGE}/part.py": "",
    f"{PACKAGE}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n",
    f"{PACKAGE}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


class Clone:
    """A clone whose environment needs one small package, from a folder in place of PyPI; its ComfyUI is in place."""

    def __init__(self, root: Path) -> None:
        self.tools = shutil.copytree(environment.ROOT / "tools", root / "tools")
        self.venv = root / ".environment" / "venv"
        comfyui = root / ".environment" / "comfyui"
        comfyui.mkdir(parents=True)
        (comfyui / "carrier.txt").write_text(environment.COMFYUI_CARRIER, encoding="utf-8")
        self.index = root / "index"
        self.index.mkdir()
        with zipfile.ZipFile(self.index / f"{PACKAGE}-1.0-py3-none-any.whl", "w") as wheel:
            for name, text in {**WHEEL, f"{PACKAGE}-1.0.dist-info/RECORD": "".join(f"{n},,\n" for n in WHEEL)}.items():
                wheel.writestr(name, text)

    def prepare(self) -> str:
        """Makes the environment ready in a process of its own; returns what that printed."""
        variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.index.as_uri(), "PIP_CONFIG_FILE": os.devnull}
        command = [sys.executable, "-c", f"import environment; environment.prepare(['{PACKAGE}'])"]
        run = subprocess.run(
            command, cwd=self.tools, env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
        return run.stdout

    @property
    def packages(self) -> Path:
        (folder,) = (folder.parent for folder in self.venv.rglob("pip") if (folder / "__main__.py").is_file())
        return folder

    def works(self) -> bool:
        python = self.venv / environment.PYTHON.relative_to(environment.VENV)
        command = [str(python), "-c", f"import pip, {PACKAGE}.part"]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone whose environment was made without a disturbance."""
    clone = Clone(tmp_path_factory.mktemp("a clone"))
    clone.prepare()
    assert clone.works()
    return clone


def test_what_is_installed_is_noted_inside_the_environment(finished: Clone) -> None:
    assert json.loads((finished.venv / "packages.json").read_text(encoding="utf-8")) == [PACKAGE]
    assert finished.prepare() == ""


def test_a_package_at_which_pip_was_interrupted_is_completed(finished: Clone) -> None:
    (finished.venv / "packages.json").unlink()
    (finished.packages / PACKAGE / "part.py").unlink()
    (finished.packages / f"{PACKAGE}-1.0.dist-info" / "INSTALLER").unlink()
    assert not finished.works()
    printed = finished.prepare()
    assert "making a Python environment" not in printed
    assert finished.works()


def test_an_environment_without_a_whole_pip_is_made_again(finished: Clone) -> None:
    (metadata,) = finished.packages.glob("pip-*.dist-info")
    (metadata / "INSTALLER").unlink()
    shutil.rmtree(finished.packages / "pip" / "_internal")
    printed = finished.prepare()
    assert "making a Python environment" in printed
    assert finished.works()


@pytest.mark.skipif(os.name == "nt", reason="Windows copies Python into an environment")
def test_an_environment_whose_python_was_removed_is_made_again(finished: Clone) -> None:
    python = finished.venv / environment.PYTHON.relative_to(environment.VENV)
    python.unlink()
    python.symlink_to("python-that-was-removed")
    assert "making a Python environment" in finished.prepare()
    assert finished.works()
