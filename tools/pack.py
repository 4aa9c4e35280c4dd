"""Makes the repository importable as `speculative_ar`, whatever the name of the folder it was cloned into.

Tests and tools need this because the repository root itself is the package that ComfyUI loads.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
NAME = "speculative_ar"


def register() -> ModuleType:
    """Imports the repository root under its package name, once, and returns it."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = importlib.util.spec_from_file_location(NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module
