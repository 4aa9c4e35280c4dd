"""The rooms below the nodes know no ComfyUI, and the decoders know no model family."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "decoders": {"comfy", "comfy_api", "comfy_extras", "folder_paths", "server", "nodes", "model_loaders"},
    "model_loaders": {"comfy", "comfy_api", "comfy_extras", "folder_paths", "server", "nodes"},
}


def imported(source: str) -> set[str]:
    """Every name that a module imports from, split at the dots, so that `from ..nodes import x` counts as well."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
            if node.module is None or node.level:
                names.update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_point_one_way(room: str) -> None:
    modules = sorted((ROOT / room).rglob("*.py"))
    assert modules
    found = {file.name: imported(file.read_text(encoding="utf-8")) & FORBIDDEN[room] for file in modules}
    assert not any(found.values()), found


def test_the_check_sees_every_form_of_import() -> None:
    for line in ("import comfy.ops", "from comfy import ops", "from ..nodes import x", "from .. import nodes"):
        assert imported(line) & FORBIDDEN["model_loaders"], line
