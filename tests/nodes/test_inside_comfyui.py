"""The nodes without a server: each file in inside/ is run by a process that can import ComfyUI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from comfyui import environment

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted((HERE / "inside").glob("check_*.py")), ids=lambda path: path.stem)
def test_inside(file: Path):
    done = subprocess.run(
        [sys.executable, str(HERE / "inside_comfyui.py"), str(file)],
        cwd=file.parent,
        env=environment.clean_variables(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
