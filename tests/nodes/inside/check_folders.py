"""Which checkpoints the loaders list, and what they say about names that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import folder_paths
import pytest

from speculative_ar.nodes import folders


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    """ComfyUI's folder table with one folder from a user's extra_model_paths.yaml, which is read before packs load."""
    before = dict(folder_paths.folder_names_and_paths)
    folder_paths.folder_names_and_paths["ar_models"] = ([str(tmp_path / "yaml")], set())
    folders.register()
    yield tmp_path / "yaml"
    folder_paths.folder_names_and_paths.clear()
    folder_paths.folder_names_and_paths.update(before)


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_the_users_folders_stay_and_come_first(models: Path):
    searched = folder_paths.get_folder_paths("ar_models")
    assert searched == [str(models), str(Path(folder_paths.models_dir) / "ar_models")]
    folders.register()
    assert folder_paths.get_folder_paths("ar_models") == searched


def test_files_and_folders_are_listed_with_slashes_and_shards_are_not(models: Path):
    put(models / "b.safetensors")
    put(models / "author" / "a.pt")
    put(models / "author" / "readme.md")
    put(models / "Emu3" / "config.json")
    put(models / "Emu3" / "model-00001-of-00002.safetensors")
    put(models / ".hidden" / "c.safetensors")
    found = ["author", "author/a.pt", "b.safetensors", "Emu3"]
    demos = ["demo tokens", "demo tokens draft", "demo continuous", "demo continuous draft"]
    assert list(folders.listed(folders.CHECKPOINT)) == [*demos, *found]
    assert list(folders.listed(folders.VQ)) == found


def test_a_link_to_a_folder_elsewhere_is_followed(models: Path, tmp_path: Path):
    put(tmp_path / "disk" / "m.safetensors")
    models.mkdir(exist_ok=True)
    (models / "linked").symlink_to(tmp_path / "disk", target_is_directory=True)
    assert folders.find("linked/m.safetensors", folders.CHECKPOINT).read_bytes() == b"x"


def test_names_are_looked_up_and_never_joined(models: Path):
    put(models.parent / "secret.safetensors")
    with pytest.raises(ValueError, match=r"'\.\./secret\.safetensors' is not in .*yaml and .*ar_models"):
        folders.find("../secret.safetensors", folders.CHECKPOINT)


@pytest.mark.parametrize(
    ("kind", "own_folder", "form"),
    [
        (folders.CHECKPOINT, "ar_models", "the checkpoint there, as one file or as one folder"),
        (folders.VQ, "vae", "the VQ tokenizer's file there"),
        (folders.TEXT_ENCODER, "text_encoders", "the text encoder's folder there, with its config.json"),
    ],
)
def test_a_missing_name_is_answered_with_what_to_put_where(
    models: Path, kind: folders.Kind, own_folder: str, form: str
):
    with pytest.raises(ValueError) as caught:
        folders.find("gone", kind)
    sentence = str(caught.value)
    for place in (str(models), *folder_paths.get_folder_paths(own_folder)):
        assert place in sentence
    assert f"Put {form}" in sentence
    assert "press R" in sentence


def test_companions_come_from_comfyuis_own_folders_too_and_first_from_ours(models: Path, tmp_path: Path):
    folder_paths.folder_names_and_paths["vae"] = ([str(tmp_path / "vae")], set())
    put(tmp_path / "vae" / "vq_ds16.pt")
    put(tmp_path / "vae" / "both.pt")
    put(models / "vq_ds8.pt")
    put(models / "both.pt")
    assert list(folders.listed(folders.VQ)) == ["both.pt", "vq_ds16.pt", "vq_ds8.pt"]
    assert folders.find("both.pt", folders.VQ) == models / "both.pt"


def test_only_folders_with_a_config_are_text_encoders(models: Path, tmp_path: Path):
    folder_paths.folder_names_and_paths["text_encoders"] = ([str(tmp_path / "clip")], set())
    put(tmp_path / "clip" / "t5xxl_fp16.safetensors")
    put(tmp_path / "clip" / "flan-t5-xl" / "config.json")
    put(models / "t2i.pt")
    put(models / "weights" / "only.safetensors")
    put(models / "LlamaGen" / "t5-ckpt" / "flan-t5-xl" / "config.json")
    assert list(folders.listed(folders.TEXT_ENCODER)) == ["flan-t5-xl", "LlamaGen/t5-ckpt/flan-t5-xl"]
    with pytest.raises(ValueError, match=r"'t5xxl_fp16\.safetensors' is not in"):
        folders.find("t5xxl_fp16.safetensors", folders.TEXT_ENCODER)


def test_the_fingerprint_follows_the_file(models: Path):
    path = put(models / "a.safetensors")
    first = folders.fingerprint(path)
    assert folders.fingerprint(path) == first
    path.write_bytes(b"xy")
    assert folders.fingerprint(path) != first
    assert [Path(name).name for name, _, _ in folders.fingerprint(models)] == ["a.safetensors"]
