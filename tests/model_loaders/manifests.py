"""Every name, shape and dtype in the released checkpoints, as the official code makes them on the meta device."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "manifests"


def manifest(name: str) -> dict[str, Any]:
    """{"keys": {name: [shape, dtype]}, ...} of one file."""
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape."""
    return {key: tuple(shape) for key, (shape, _) in manifest(name)["keys"].items()}
