"""Runs one file of checks where ComfyUI can be imported: in a process of its own, as ComfyUI has a `nodes` too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["-q", "--no-header", "--show-capture=no", "--import-mode=importlib", "-p", "no:cacheprovider"]


def main(file: str) -> int:
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "comfyui")]
    import environment
    import launch_comfyui
    import pack

    sys.path.insert(0, str(environment.COMFYUI))
    library = launch_comfyui.declare_missing_operators()
    import comfy.cli_args
    import utils.install_util  # noqa: F401  (in ComfyUI's own order: later its comfy/utils.py would be found instead)

    comfy.cli_args.args.cpu = True
    pack.register()
    import pytest

    outcome = pytest.main([*OPTIONS, "-c", os.devnull, "-o", "python_files=check_*.py", file])
    del library  # the declarations are needed until here
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
