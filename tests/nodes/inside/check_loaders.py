"""What the loader nodes notice between two runs, and which picture sizes they take."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import tiny

from speculative_ar.nodes import folders, loaders


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    """ComfyUI's folder of AR models, with a model that names its tokenizer and one that does not."""
    before = dict(folder_paths.folder_names_and_paths)
    folder_paths.folder_names_and_paths["ar_models"] = ([str(tmp_path)], set())
    tiny.write_model(tmp_path / "tiny.safetensors")
    tiny.write_model(tmp_path / "plain.safetensors", named_vq=False)
    tiny.write_vq(tmp_path)
    yield tmp_path
    folder_paths.folder_names_and_paths.clear()
    folder_paths.folder_names_and_paths.update(before)


def fingerprint(**chosen: str) -> Any:
    given = {"checkpoint": "plain.safetensors", "vq": "auto", "text_encoder": "auto", **chosen}
    return loaders.SpecARLoadCheckpoint.fingerprint_inputs(dtype="auto", picture_size=0, **given)


def replace_vq(folder: Path) -> None:
    with (folder / "vq-96.safetensors").open("ab") as stream:
        stream.write(b" ")


def another_vq(folder: Path) -> None:
    shutil.copy(folder / "vq-96.safetensors", folder / "vq_ds16_c2i.safetensors")


def remove_vq(folder: Path) -> None:
    (folder / "vq-96.safetensors").unlink()


def text_encoder(folder: Path) -> None:
    (folder / "flan-t5-xl").mkdir()
    (folder / "flan-t5-xl" / "config.json").write_text("{}")


def another_model(folder: Path) -> None:
    tiny.write_model(folder / "unrelated.safetensors")


def half_a_download(folder: Path) -> None:
    (folder / "unrelated.pt").write_bytes(b"PK\x03\x04...")


def a_note(folder: Path) -> None:
    (folder / "readme.txt").write_text("hello")


def vq_in_a_published_place(folder: Path) -> None:
    place = folder / "chameleon" / "tokenizer"
    place.mkdir(parents=True)
    tiny.write_vq(place)


@pytest.mark.parametrize("change", [replace_vq, another_vq, remove_vq, text_encoder, vq_in_a_published_place])
def test_what_auto_takes_is_noticed(models: Path, change: Callable[[Path], None]):
    before = fingerprint()
    assert fingerprint() == before
    change(models)
    assert fingerprint() != before


@pytest.mark.parametrize("change", [another_model, half_a_download, a_note])
def test_what_auto_does_not_take_reloads_nothing(models: Path, change: Callable[[Path], None]):
    before = fingerprint()
    change(models)
    assert fingerprint() == before


def test_only_the_chosen_companions_count_where_some_are_chosen(models: Path):
    chosen = {"vq": "vq-96.safetensors"}
    before = fingerprint(**chosen)
    another_vq(models)
    assert fingerprint(**chosen) == before
    replace_vq(models)
    assert fingerprint(**chosen) != before


def test_a_model_that_names_its_tokenizer_does_not_look_at_others(models: Path):
    before = fingerprint(checkpoint="tiny.safetensors")
    another_vq(models)
    assert fingerprint(checkpoint="tiny.safetensors") == before
    replace_vq(models)
    assert fingerprint(checkpoint="tiny.safetensors") != before


def test_a_draft_model_has_no_companions(models: Path):
    before = loaders.SpecARLoadDraftModel.fingerprint_inputs(checkpoint="plain.safetensors", dtype="auto")
    replace_vq(models)
    text_encoder(models)
    assert loaders.SpecARLoadDraftModel.fingerprint_inputs(checkpoint="plain.safetensors", dtype="auto") == before


def test_the_fingerprint_opens_files_and_reads_no_tensor(models: Path, monkeypatch: pytest.MonkeyPatch):
    from speculative_ar.model_loaders.checkpoint_files import Checkpoint

    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("a tensor was read"))
    assert {Path(name).name for name, _, _ in fingerprint()} == {"plain.safetensors", "vq-96.safetensors"}


@pytest.mark.parametrize("node", [loaders.SpecARLoadCheckpoint, loaders.SpecARLoadDraftModel])
@pytest.mark.parametrize(("size", "side"), [(0, 16), (16, 1), (384, 24), (1024, 64)])
def test_a_picture_size_becomes_the_grid(models: Path, node: Any, size: int, side: int):
    tiny.write_model(models / "silent.safetensors", grid=None)
    companions = {"vq": "auto", "text_encoder": "auto"} if node is loaders.SpecARLoadCheckpoint else {}
    given = {"checkpoint": "silent.safetensors", "dtype": "auto", **companions}
    assert node.validate_inputs(**given, picture_size=size) is True
    (managed,) = node.execute(**given, picture_size=size).args
    assert managed.model.grid == (side, side)


@pytest.mark.parametrize("node", [loaders.SpecARLoadCheckpoint, loaders.SpecARLoadDraftModel])
@pytest.mark.parametrize("size", [-16, 8, 250, 1040])
def test_no_model_has_such_a_size(models: Path, node: Any, size: int):
    sentence = node.validate_inputs(checkpoint="plain.safetensors", dtype="auto", picture_size=size)
    assert f"picture_size is {size}, but a picture is a multiple of 16 pixels wide, at most 1024" in sentence
    with pytest.raises(ValueError, match=f"picture_size is {size}"):
        loaders.load(folders.find("plain.safetensors", folders.CHECKPOINT), "auto", size)


def test_a_model_that_knows_its_size_refuses_another(models: Path):
    with pytest.raises(ValueError, match=r"tiny was made for 16 x 16 codes.*leave the picture size at 0"):
        loaders.load(models / "tiny.safetensors", "auto", 384)
