"""What cannot be loaded is refused with one sentence that says what to do; nothing in it ever runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from speculative_ar import model_loaders
from speculative_ar.model_loaders import CheckpointError


def refusal(path: Path, **more: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        model_loaders.load(path, **{"overrides": {"heads": 4, "grid": (4, 4)}, **more})
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["beside the weights", "instead of weights"])
def test_pickled_code_never_runs(tmp_path: Path, weights: dict[str, Tensor], zipped: bool, place: str) -> None:
    file, mark = tmp_path / "model.pt", tmp_path / "exploded"
    content = {"model": weights, "args": Bomb(mark)} if place == "beside the weights" else Bomb(mark)
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    sentence = refusal(file)
    assert "holds program code" in sentence and "mkdir" in sentence and "safetensors" in sentence
    assert "holds program code" in refusal(tmp_path)  # found in a folder
    assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists()  # the bomb was live


def test_plain_pickle_never_runs(tmp_path: Path) -> None:
    file, mark = tmp_path / "model.ckpt", tmp_path / "exploded"
    file.write_bytes(pickle.dumps(Bomb(mark)))
    refusal(file)
    assert not mark.exists()


def test_a_bomb_beside_the_model_neither_runs_nor_hinders(tmp_path: Path, golden_folder: Path, load: Any) -> None:
    for name in ("c2i_tiny_256.pt", "vq_tiny.pt"):
        shutil.copy(golden_folder / name, tmp_path)
    torch.save(Bomb(tmp_path / "exploded"), tmp_path / "a.pt")
    assert load(tmp_path / "c2i_tiny_256.pt").vq is not None
    assert not (tmp_path / "exploded").exists()


def test_torchscript_is_a_program(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(file))
    assert "holds program code" in refusal(file)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_truncated(tmp_path: Path, weights: dict[str, Tensor], kind: str, share: float) -> None:
    file = tmp_path / ("m.safetensors" if kind == "safetensors" else "m.pt")
    if kind == "safetensors":
        save_file(weights, file)
    else:
        torch.save({"model": weights}, file, _use_new_zipfile_serialization=kind == "zip")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert str(file) in (sentence := refusal(file)) and "download it again" in sentence


def test_a_web_page_saved_as_weights(tmp_path: Path) -> None:
    for name in ("m.pt", "m.safetensors"):
        (tmp_path / name).write_text("<!doctype html><title>Sign in</title>" + " " * 200)
        assert "download it again" in refusal(tmp_path / name)


def test_missing_path(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "gone.pt")


def test_empty_folder_and_folder_without_weights(tmp_path: Path) -> None:
    assert "holds no weight files" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "holds no weight files" in refusal(tmp_path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "is no checkpoint; accepted are .safetensors" in refusal(tmp_path / "notes.txt")


def test_no_tensor_inside(tmp_path: Path) -> None:
    torch.save({"steps": 3}, tmp_path / "m.pt")
    assert "holds no weights" in refusal(tmp_path / "m.pt")
    torch.save([1, 2], tmp_path / "m.pt")
    assert "holds no weights" in refusal(tmp_path / "m.pt")


@pytest.mark.parametrize("indexed", [True, False])
def test_missing_shards_are_named(tmp_path: Path, weights: dict[str, Tensor], indexed: bool) -> None:
    save_file(weights, tmp_path / "model-00001-of-00003.safetensors")
    if indexed:
        places = {f"w{i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for path in (tmp_path, tmp_path / "model-00001-of-00003.safetensors"):
        sentence = refusal(path)
        assert "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors are missing" in sentence


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b.bin"}}'])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json is damaged" in refusal(tmp_path)


def test_unknown_family(tmp_path: Path) -> None:
    save_file({"model.diffusion_model.out.weight": torch.zeros(2)}, tmp_path / "sd.safetensors")
    sentence = refusal(tmp_path / "sd.safetensors")
    assert "no supported family" in sentence and "model.diffusion_model.out.weight" in sentence
    assert "LlamaGen, class-conditional; LlamaGen, text-conditional" in sentence


def test_vq_as_the_model(golden_folder: Path) -> None:
    assert "is a VQ tokenizer" in refusal(golden_folder / "vq_tiny.pt")


def test_model_as_the_vq(golden_folder: Path) -> None:
    model = golden_folder / "c2i_tiny_256.pt"
    sentence = refusal(model, vq_path=model)
    assert "is a model, not the VQ tokenizer" in sentence and "vq_ds16_c2i.pt" in sentence
    assert "vq_ds16_t2i.pt from peizesun/llamagen_t2i" in refusal(golden_folder / "t2i_tiny_stage1.pt", vq_path=model)


@pytest.mark.parametrize(
    "file, wanted",
    [
        ("c2i_tiny_256.pt", "vq_ds16_c2i.pt from FoundationVision/LlamaGen"),
        ("t2i_tiny_stage1.pt", "vq_ds16_t2i.pt from peizesun/llamagen_t2i"),
    ],
)
def test_missing_vq_is_named_with_its_source(tmp_path: Path, golden_folder: Path, file: str, wanted: str) -> None:
    shutil.copy(golden_folder / file, tmp_path)
    assert wanted in refusal(tmp_path / file)
    assert "does not exist" in refusal(tmp_path / file, vq_path=tmp_path / "vq.pt")


def test_several_vqs_or_models_must_be_told_apart(tmp_path: Path, golden_folder: Path) -> None:
    for copy in ("a.pt", "b.pt"):
        shutil.copy(golden_folder / "vq_tiny.pt", tmp_path / f"vq_{copy}")
        shutil.copy(golden_folder / "c2i_tiny_256.pt", tmp_path / f"c2i_{copy}")
    assert "several VQ tokenizers (vq_a.pt, vq_b.pt)" in refusal(tmp_path / "c2i_a.pt")
    assert "several models (c2i_a.pt, c2i_b.pt)" in refusal(tmp_path)


def test_the_vq_that_the_metadata_name_is_missing(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, tmp_path / "demo.safetensors", metadata={"vq": '"demo-vq.safetensors"'})
    assert "needs its VQ demo-vq.safetensors" in refusal(tmp_path / "demo.safetensors")


def test_vq_of_another_vocabulary(tmp_path: Path, golden_folder: Path) -> None:
    vq = torch.load(golden_folder / "vq_tiny.pt", weights_only=True)["model"]
    vq["quantize.embedding.weight"] = torch.zeros(128, 8)
    torch.save({"model": vq}, tmp_path / "vq.pt")
    assert "has 128 codes and the model c2i_tiny_256.pt 256" in refusal(
        golden_folder / "c2i_tiny_256.pt", vq_path=tmp_path / "vq.pt"
    )


@pytest.mark.parametrize("name", ["layers.1.attention.wo.weight", "norm.weight", "tok_embeddings.weight"])
def test_missing_weights(tmp_path: Path, weights: dict[str, Tensor], name: str) -> None:
    del weights[name]
    save_file(weights, tmp_path / "m.safetensors")
    assert name in (sentence := refusal(tmp_path / "m.safetensors", with_vq=False)) and "incomplete" in sentence


def test_unknown_weights(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file({**weights, "adapter.weight": torch.zeros(2)}, tmp_path / "m.safetensors")
    assert "adapter.weight is unknown" in refusal(tmp_path / "m.safetensors", with_vq=False)


def test_wrong_shape(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file({**weights, "norm.weight": torch.zeros(47)}, tmp_path / "m.safetensors")
    assert "norm.weight has the shape [47]" in refusal(tmp_path / "m.safetensors", with_vq=False)


@pytest.mark.parametrize(
    "first, second",
    [
        ("norm.weight", "model.norm.weight"),
        ("norm.weight", "module.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("layers.1.attention.wqkv.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("layers.0.feed_forward.w3.weight", "layers.0.mlp.up_proj.weight"),
    ],
)
def test_one_weight_under_two_names(tmp_path: Path, weights: dict[str, Tensor], first: str, second: str) -> None:
    save_file({**weights, second: weights[first].clone()}, tmp_path / "m.safetensors")
    sentence = refusal(tmp_path / "m.safetensors", with_vq=False)
    assert "m.safetensors holds" in sentence and "twice" in sentence and first in sentence


@pytest.fixture
def forbidding(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Takes the permission to read a file away, for root too: it reads everything, so it becomes somebody else."""
    if not hasattr(os, "geteuid"):
        pytest.skip("Windows has no read permission that a program could take away from itself")
    is_root = os.geteuid() == 0
    for folder in (tmp_path, *tmp_path.parents)[:3] if is_root else ():
        folder.chmod(0o755)

    def forbid(file: Path) -> None:
        file.chmod(0)
        if is_root:
            os.seteuid(65534)

    yield forbid
    if is_root:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "model.safetensors.index.json"])
def test_a_file_that_may_not_be_read(
    tmp_path: Path, weights: dict[str, Tensor], forbidding: Callable[[Path], None], name: str
) -> None:
    file = tmp_path / name
    if file.suffix == ".pt":
        torch.save(weights, file)
    elif file.suffix == ".json":
        file.write_text('{"weight_map": {}}')
    else:
        save_file(weights, file)
    forbidding(file)
    assert f"{file} may not be read; give this account the permission" in refusal(file, with_vq=False)


@pytest.mark.parametrize("name", ["vq_ds16_c2i.pt", "other.pt", "other.safetensors"])
def test_a_file_beside_the_model_that_may_not_be_read(
    tmp_path: Path, golden_folder: Path, forbidding: Callable[[Path], None], name: str
) -> None:
    """The published VQ is missed; any other file is no obstacle."""
    for file in ("c2i_tiny_256.pt", "vq_tiny.pt"):
        shutil.copy(golden_folder / file, tmp_path)
    torch.save({}, tmp_path / name)
    forbidding(tmp_path / name)
    if name == "vq_ds16_c2i.pt":
        assert "vq_ds16_c2i.pt may not be read" in refusal(tmp_path / "c2i_tiny_256.pt")
    else:
        assert model_loaders.load(tmp_path / "c2i_tiny_256.pt", overrides={"heads": 4, "grid": (4, 4)}).vq is not None


def test_a_size_that_the_file_contradicts(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    file = tmp_path / "own.safetensors"
    save_file(weights, file, metadata={"heads": "4", "grid": "[4, 4]"})
    sentence = refusal(file, overrides={"grid": (24, 24)}, with_vq=False)
    assert "own was made for 4 x 4 codes" in sentence and "24 x 24" in sentence and "picture size at 0" in sentence
    assert model_loaders.load(file, overrides={"grid": (4, 4)}, with_vq=False).grid == (4, 4)


@pytest.mark.parametrize("stated", [{}, {"heads": 5}])
def test_heads_that_no_file_tells(golden_folder: Path, stated: dict[str, int]) -> None:
    assert "48 channels wide" in (sentence := refusal(golden_folder / "c2i_tiny_256.pt", overrides=stated))
    assert "`heads`" in sentence
