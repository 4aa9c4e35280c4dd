"""Checks everything: lint, format, types, and the tests, a real ComfyUI and a real browser among them.

    python tools/test.py [pytest's arguments]

Makes the environment that this needs on its first run. pytest's own summary is the last thing printed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import environment
from environment import HOME, ROOT, say

ROOMS = ("decoders", "model_loaders")
TYPECHECK = HOME / "typecheck"


def main() -> None:
    environment.enter(__file__, environment.TESTS)
    install_browser()
    check("lint", "ruff", "check", str(ROOT))
    check("format", "ruff", "format", "--check", str(ROOT))
    lay_out_for_types()
    packages = [argument for room in ROOMS for argument in ("-p", f"speculative_ar.{room}")]
    places = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(HOME / "mypy_cache")]
    check("types", "mypy", *places, *packages, folder=TYPECHECK)
    say("tests")
    sys.exit(subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], cwd=ROOT).returncode)


def install_browser() -> None:
    """Debian's Chromium, where this process may install it. Elsewhere the browser tests say that they are skipped."""
    if environment.browser() or not shutil.which("apt-get") or os.geteuid() != 0:
        return
    say("installing Chromium for the browser tests")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-qq", "--no-install-recommends", "chromium", "fonts-dejavu-core"],
    ):
        subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=False)


def lay_out_for_types() -> None:
    """mypy wants the package under its own name, and a clone's folder may have any."""
    shutil.rmtree(TYPECHECK, ignore_errors=True)
    package = TYPECHECK / "speculative_ar"
    for room in ROOMS:
        shutil.copytree(ROOT / room, package / room, ignore=shutil.ignore_patterns("bundled", "__pycache__"))
    (package / "__init__.py").touch()


def check(name: str, module: str, *arguments: str, folder: os.PathLike[str] = ROOT) -> None:
    """Runs a checker; ends the whole run where it finds something."""
    say(name)
    result = subprocess.run([sys.executable, "-m", module, *arguments], cwd=folder)
    if result.returncode:
        sys.exit(result.returncode)


if __name__ == "__main__":
    main()
