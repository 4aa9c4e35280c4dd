"""Where checkpoints live: models/ar_models, the user's extra paths, and the demo models inside the pack.

A checkpoint is one file, or a folder with its weights and config. Names in a workflow are untrusted: they are
looked up in the list, never joined to a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import folder_paths

from ..model_loaders import bundled
from ..model_loaders.checkpoint_files import SUFFIXES

FOLDER = "ar_models"
DEPTH = 2  # folders below a registered one: ar_models/author/model


def _holds_config(path: Path) -> bool:
    return (path / "config.json").is_file()


@dataclass(frozen=True)
class Kind:
    """What a dropdown lists. folders: ComfyUI's names of the places, the first wins. form: what a user puts there."""

    folders: tuple[str, ...]
    form: str
    accepts: Callable[[Path], bool] = Path.exists


CHECKPOINT = Kind((FOLDER,), "the checkpoint there, as one file or as one folder with its config and weights")
VQ = Kind((FOLDER, "vae"), "the VQ tokenizer's file there")
TEXT_ENCODER = Kind(
    (FOLDER, "text_encoders"), "the text encoder's folder there, with its config.json and tokenizer", _holds_config
)


def register() -> None:
    """Adds models/ar_models to ComfyUI's folders; paths from extra_model_paths.yaml stay in front."""
    folder_paths.add_model_folder_path(FOLDER, str(Path(folder_paths.models_dir) / FOLDER))
    paths, _ = folder_paths.folder_names_and_paths[FOLDER]
    folder_paths.folder_names_and_paths[FOLDER] = (paths, set(SUFFIXES))


def bundled_checkpoints() -> dict[str, Path]:
    """The demo models, under the names that the loaders show."""
    return {key.replace("-", " "): path for key, path in bundled().items()}


def listed(kind: Kind) -> dict[str, Path]:
    """Files and folders of a kind by relative /-separated name, sorted; before the checkpoints the demo models."""
    found: dict[str, Path] = {}
    for root in _roots(kind):
        for path in _candidates(Path(root), DEPTH):
            if kind.accepts(path):
                found.setdefault(path.relative_to(root).as_posix(), path)
    ordered = dict(sorted(found.items(), key=lambda item: item[0].lower()))
    return bundled_checkpoints() | ordered if kind is CHECKPOINT else ordered


def _roots(kind: Kind) -> list[str]:
    return [root for folder in kind.folders for root in folder_paths.get_folder_paths(folder)]


def _candidates(folder: Path, depth: int) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.is_file() and entry.suffix in SUFFIXES:
            yield entry
        elif entry.is_dir() and not entry.name.startswith("."):
            if _holds_checkpoint(entry):
                yield entry
            # The shards of a folder with a config are parts of it, not checkpoints of their own.
            if depth and not _holds_config(entry):
                yield from _candidates(entry, depth - 1)


def _holds_checkpoint(folder: Path) -> bool:
    return any(entry.name == "config.json" or entry.suffix in SUFFIXES for entry in folder.iterdir())


def find(name: str, kind: Kind) -> Path:
    """The path of a name that a loader shows. Raises ValueError with the folders searched."""
    known = listed(kind)
    if name in known:
        return known[name]
    searched = " and ".join(_roots(kind))
    raise ValueError(f"{name!r} is not in {searched}. Put {kind.form}, then press R in ComfyUI and choose it again.")


def fingerprint(path: Path) -> list[tuple[str, int, int]]:
    """(path, modification time, size) of a file or of each file in a folder: changes when the checkpoint does."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
