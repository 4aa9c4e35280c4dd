"""The pack as ComfyUI and the registry meet it: what importing it costs and changes, what its files hold, metadata."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pack

ROOT = pack.ROOT
ROOMS = ("decoders", "model_loaders", "nodes")
SHIPPED = [ROOT / "__init__.py", *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))]
OURS = [*SHIPPED, *(path for room in ("tests", "tools") for path in sorted((ROOT / room).rglob("*.py")))]
HEAVY = {"torch", "numpy", "PIL", "safetensors", "transformers", "comfy", "comfy_api", "aiohttp", "requests"}
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "server", "nodes"}
NETWORK = {"requests", "urllib", "http", "socket", "aiohttp", "httpx", "huggingface_hub"}
PROCESSES = {"pip", "subprocess", "multiprocessing"}
GLOBAL_TORCH_STATE = {
    "set_default_dtype",
    "set_default_device",
    "set_grad_enabled",
    "manual_seed",
    "set_num_threads",
    "set_float32_matmul_precision",
    "use_deterministic_algorithms",
}

IMPORT_IT = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "tools")!r})
import pack
before = set(sys.modules)
start = time.perf_counter()
pack.register()
seconds = time.perf_counter() - start
print(seconds, *{{name.split(".")[0] for name in set(sys.modules) - before}})
"""

TORCH_FLAGS = """
def flags():
    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, tuple(torch.get_rng_state().tolist()),
    )
"""

COMPARE_FLAGS = f"""
import sys, torch
sys.path.insert(0, {str(ROOT / "tools")!r})
{TORCH_FLAGS}
before = flags()
import pack
pack.register()
import speculative_ar.decoders, speculative_ar.model_loaders
assert flags() == before, (flags(), before)
"""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def imports(path: Path) -> Iterator[str]:
    """Top-level names of the absolute imports anywhere in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0]


def relative_imports(path: Path) -> Iterator[str]:
    """The rooms that a file imports from."""
    parents = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = [*parents[: len(parents) + 1 - node.level], *(node.module or "").split(".")]
            yield from [package[0]] if package[0] else [alias.name for alias in node.names]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_importing_the_pack_is_light_and_quick() -> None:
    runs = [python(IMPORT_IT).split() for _ in range(5)]
    assert not HEAVY & set(runs[0][1:])
    assert min(float(seconds) for seconds, *_ in runs) < 0.3


def test_the_pack_works_without_comfyui() -> None:
    package = pack.register()
    assert package.WEB_DIRECTORY == "./web"
    assert (ROOT / package.WEB_DIRECTORY).is_dir()
    assert callable(package.comfy_entrypoint)


def test_importing_the_rooms_changes_no_global_torch_setting() -> None:
    python(COMPARE_FLAGS)


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_shipped_code_starts_no_process_opens_no_connection_and_sets_no_global_torch_state(path: Path) -> None:
    assert not (NETWORK | PROCESSES) & set(imports(path))
    attributes = {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
    assert not GLOBAL_TORCH_STATE & attributes


@pytest.mark.parametrize("path", SHIPPED[1:], ids=name)
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert set(relative_imports(path)) <= set(ROOMS[: ROOMS.index(room) + 1])
    if room != "nodes":
        assert not COMFYUI & set(imports(path))


@pytest.mark.parametrize("path", OURS, ids=name)
def test_files_say_why_they_exist_and_print_on_any_windows_console(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    text.encode("cp1252")
    assert not text or ast.get_docstring(ast.parse(text))


def test_node_ids_are_literals_in_their_classes() -> None:
    """ComfyUI's manager finds a missing pack by reading the ids without running the code."""
    found = []
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "node_id":
                assert isinstance(node.value, ast.Constant)
                found.append(node.value.value)
    assert sorted(found) == sorted(set(found))
    assert {"SpecARLoadCheckpoint", "SpecARSampler"} <= set(found)
    assert all(str(name).startswith("SpecAR") for name in found)


def test_registry_metadata(project: dict[str, Any]) -> None:
    table, comfy = project["project"], project["tool"]["comfy"]
    assert table["name"] == "speculative-ar"
    assert re.fullmatch(r"\d+\.\d+\.\d+", table["version"])
    assert (ROOT / table["license"]["file"]).read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert table["urls"]["Repository"].startswith("https://github.com/")
    assert comfy["PublisherId"] == "speculative-ar"
    assert comfy["DisplayName"] == "Speculative AR"
    assert comfy["requires-comfyui"] == ">=0.3.75"
    assert "web" not in comfy, "with WEB_DIRECTORY too, a clone's scripts would be loaded twice"


def test_the_changelog_tells_of_this_version(project: dict[str, Any]) -> None:
    assert f"## {project['project']['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_nothing_has_to_be_installed(project: dict[str, Any]) -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("#") for line in lines)
    assert project["project"]["dependencies"] == []
