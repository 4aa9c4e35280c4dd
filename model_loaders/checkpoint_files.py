"""Reading checkpoint files: shapes first and tensors one by one, from safetensors or from torch files.

No code inside a file ever runs: torch files go through torch's restricted unpickler, and what it refuses is refused.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".pt", ".pth", ".bin", ".ckpt")
INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.\w+)$")
_PREFIX = re.compile(r"^(?:(?:module|_orig_mod|_fsdp_wrapped_module)\.)+|(?<=\.)(?:_orig_mod|_fsdp_wrapped_module)\.")
_WRAPPERS = ("model_ema", "model", "module", "state_dict")  # of the first two MAR samples with the first
_ZIP_MAGIC = b"PK\x03\x04"
_ANY_MODEL = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?")


@dataclass(frozen=True)
class _OpenFile:
    """A weight file, mapped into memory where possible. read: gives a tensor by its name in the file."""

    shapes: Mapping[str, Iterable[int]]
    read: Callable[[str], Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


class Checkpoint:
    """The tensors of one checkpoint by name, whatever files they lie in.

    shapes: name -> shape, known without reading a tensor. metadata: the safetensors metadata with its JSON decoded.
    path: the first file, which stands for the checkpoint in messages. folder: where companions are looked for.
    One file is open at a time: what was read stays in memory as long as its file is mapped.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = tuple(files)
        self.path = self.files[0]
        self.folder = self.path.parent
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.metadata: dict[str, Any] = {}
        self._places: dict[str, tuple[int, str]] = {}  # name -> which file, name in the file
        self._open: tuple[int, _OpenFile] | None = None
        for index in range(len(self.files)):
            content = self._file(index)
            self.metadata.update({key: _decoded(value) for key, value in content.metadata.items()})
            for name, shape in content.shapes.items():
                self._add(_PREFIX.sub("", name), tuple(shape), (index, name))
        if not self.shapes:
            raise CheckpointError(f"{self.path} holds no weights; give a checkpoint file.")

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor, on the CPU and in the file's precision (mapped from the file where possible)."""
        index, own = self._places[name]
        return self._file(index).read(own)

    def position(self, name: str) -> int:
        """Which of the files holds a tensor: whoever reads in this order opens each file once."""
        return self._places[name][0]

    def _file(self, index: int) -> _OpenFile:
        if self._open is None or self._open[0] != index:
            self._open = None  # before the next is opened
            self._open = index, _open_file(self.files[index])
        return self._open[1]

    def _add(self, name: str, shape: tuple[int, ...], place: tuple[int, str]) -> None:
        if name in self.shapes:
            raise CheckpointError(f"{self.path} holds the weight {name} twice; give an unchanged checkpoint.")
        self.shapes[name], self._places[name] = shape, place

    @property
    def title(self) -> str:
        """The file's name without its suffix, or the folder's where the file has the name that every model has."""
        stem = self.path.stem
        return self.folder.resolve().name if _ANY_MODEL.fullmatch(stem) else stem

    def config(self) -> dict[str, Any]:
        """What config.json beside the weights says, nothing where there is none; raises CheckpointError for damage."""
        return read_json(file) if (file := self.folder / "config.json").is_file() else {}


def _open_file(file: Path) -> _OpenFile:
    _opened(file).close()
    return _open_safetensors(file) if file.suffix == SAFETENSORS else _open_torch(file)


def _open_safetensors(file: Path) -> _OpenFile:
    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _unreadable(file) from error
    shapes = {name: handle.get_slice(name).get_shape() for name in handle.keys()}  # noqa: SIM118  (it is no dict)
    return _OpenFile(shapes, handle.get_tensor, handle.metadata() or {})


def _open_torch(file: Path) -> _OpenFile:
    content = {str(name): value for name, value in _unwrapped(_load_torch(file)).items() if isinstance(value, Tensor)}
    return _OpenFile({name: tensor.shape for name, tensor in content.items()}, content.__getitem__)


def file_sets(path: Path) -> list[tuple[Path, ...]]:
    """The checkpoints at a path, each as the files that make it up, the most likely model first.

    A file, an index or any of its shards gives one; a folder gives its sharded set and every other weight file in it.
    """
    if path.is_file():
        return [_set_of(path)]
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; choose a checkpoint file or folder that does.")
    indexes = [index for suffix in INDEX_SUFFIXES for index in sorted(path.glob(f"*{suffix}"))]
    weights = sorted((file for file in path.iterdir() if is_weight_file(file)), key=_safetensors_first)
    if not indexes and not weights:
        raise CheckpointError(
            f"The folder {path} holds no weight files; accepted are {', '.join(SUFFIXES)}, also as sharded sets."
        )
    if any(file.name.startswith("model") and SAFETENSORS in file.name for file in (*indexes, *weights)):
        weights = [file for file in weights if not file.name.startswith("pytorch_model")]
        indexes = [index for index in indexes if not index.name.startswith("pytorch_model")]
    sets = [_set_of(file) for file in (*indexes, *weights)]
    return list(dict.fromkeys(sets))


def is_weight_file(path: Path) -> bool:
    """Whether the suffix is one that this module reads."""
    return path.suffix in SUFFIXES and path.is_file()


def reads_lazily(path: Path) -> bool:
    """Whether opening the file costs little: safetensors and zipped torch files, not the old torch format."""
    return path.suffix == SAFETENSORS or _starts_with_zip(path)


def _safetensors_first(file: Path) -> tuple[bool, str]:
    return file.suffix != SAFETENSORS, file.name


def _set_of(file: Path) -> tuple[Path, ...]:
    """The files of the checkpoint that a file, shard or index belongs to; raises where one is missing."""
    if file.name.endswith(INDEX_SUFFIXES):
        return _indexed(file)
    if shard := _SHARD.match(file.name):
        index = file.with_name(f"{shard['stem']}{shard['suffix']}.index.json")
        return _indexed(index) if index.is_file() else _numbered(file, shard)
    if file.suffix not in SUFFIXES:
        raise CheckpointError(
            f"{file} is no checkpoint; accepted are {', '.join(SUFFIXES)} and folders with such files."
        )
    return (file,)


def _indexed(index: Path) -> tuple[Path, ...]:
    with _opened(index) as stream:
        content = stream.read()
    try:
        names = sorted(set(json.loads(content)["weight_map"].values()))
        files = [index.with_name(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"The index {index} is damaged; download it again.") from error
    return _complete(index, files)


def _numbered(file: Path, shard: re.Match[str]) -> tuple[Path, ...]:
    count = int(shard["count"])
    names = (f"{shard['stem']}-{i:05d}-of-{count:05d}{shard['suffix']}" for i in range(1, count + 1))
    return _complete(file, [file.with_name(name) for name in names])


def _complete(source: Path, files: list[Path]) -> tuple[Path, ...]:
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{source.parent} is incomplete: {source.name} belongs to {len(files)} files, of which "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; download what is missing."
        )
    return tuple(files)


def _opened(file: Path) -> BinaryIO:
    """The file, opened for reading; raises CheckpointError where this account may not read it."""
    try:
        return file.open("rb")
    except PermissionError as error:
        raise CheckpointError(f"{file} may not be read; give this account the permission to read it.") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file's object; raises CheckpointError where it holds none."""
    with _opened(file) as stream:
        written = stream.read()
    try:
        content = json.loads(written)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged: it is no JSON object; download it again.")
    return content


def _starts_with_zip(file: Path) -> bool:
    with _opened(file) as stream:
        return stream.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC


def _load_torch(file: Path) -> Any:
    # LlamaGen's training files hold their argparse.Namespace, which is plain data. The context would also unregister
    # what someone else had registered before, hence the difference.
    plain: list[Any] = [kind for kind in (argparse.Namespace,) if kind not in torch.serialization.get_safe_globals()]
    try:
        with torch.serialization.safe_globals(plain):
            return torch.load(str(file), map_location="cpu", weights_only=True, mmap=_starts_with_zip(file))
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise _holds_code(file, str(error)) from error
        raise _unreadable(file) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError) as error:
        if "TorchScript" in str(error):
            raise _holds_code(file, "GLOBAL TorchScript") from error
        raise _unreadable(file) from error


def _holds_code(file: Path, reason: str) -> CheckpointError:
    found = re.search(r"GLOBAL (\S+)", reason)
    what = f" ({found[1]})" if found else ""
    return CheckpointError(
        f"{file} holds program code{what} beside its weights, which is never run here; convert it to safetensors on a "
        "machine that trusts it (torch.load, then safetensors.torch.save_file on its state dict)."
    )


def _unreadable(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read: its {file.stat().st_size:,} bytes are cut short or hold no weights; download it again."
    )


def _unwrapped(content: Any) -> dict[Any, Any]:
    """The state dict inside a checkpoint's wrapper, or the content itself."""
    if not isinstance(content, dict):
        return {}
    for wrapper in _WRAPPERS:
        if isinstance(content.get(wrapper), dict):
            return content[wrapper]
    return content


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
