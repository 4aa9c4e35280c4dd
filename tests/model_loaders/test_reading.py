"""Every container that LlamaGen's weights come in gives the same model, in the precision asked for."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from speculative_ar import model_loaders
from speculative_ar.model_loaders.checkpoint_files import Checkpoint
from speculative_ar.model_loaders.companions import vq_candidates
from tests.model_loaders.repacking import repacked

Weights = dict[str, Tensor]
HEADS_AND_GRID = {"heads": "4", "grid": "[4, 4]"}


@pytest.fixture(autouse=True)
def vq_beside(tmp_path: Path, golden_folder: Path) -> None:
    shutil.copy(golden_folder / "vq_tiny.pt", tmp_path)


def split(weights: Weights) -> list[Weights]:
    names = list(weights)
    return [{name: weights[name] for name in part} for part in (names[:7], names[7:])]


def write_index(folder: Path, stem: str, suffix: str, shards: list[Weights]) -> None:
    files = [f"{stem}-{i:05d}-of-{len(shards):05d}{suffix}" for i in range(1, len(shards) + 1)]
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def bare(folder: Path, weights: Weights) -> Path:
    torch.save(weights, folder / "m.pt")
    return folder / "m.pt"


def wrapped(name: str) -> Callable[[Path, Weights], Path]:
    def write(folder: Path, weights: Weights) -> Path:
        torch.save(
            {name: weights, "optimizer": {"state": {}}, "steps": 3, "args": argparse.Namespace(lr=1)}, folder / "m.pth"
        )
        return folder / "m.pth"

    return write


def old_format(folder: Path, weights: Weights) -> Path:
    torch.save({"model": weights}, folder / "m.pt", _use_new_zipfile_serialization=False)
    return folder / "m.pt"


def prefixed(prefix: str) -> Callable[[Path, Weights], Path]:
    return lambda folder, weights: bare(folder, {prefix + name: tensor for name, tensor in weights.items()})


def prefixed_inside(folder: Path, weights: Weights) -> Path:
    return bare(folder, {name.replace("layers.1.", "layers.1._fsdp_wrapped_module."): t for name, t in weights.items()})


def leftovers(folder: Path, weights: Weights) -> Path:
    extra = {"freqs_cis": torch.zeros(17, 6, 2), "layers.0.attention.kv_cache.k_cache": torch.zeros(1)}
    return bare(folder, {**weights, **extra})


def safetensors(folder: Path, weights: Weights) -> Path:
    save_file(weights, folder / "m.safetensors")
    return folder / "m.safetensors"


def folder_of_one(folder: Path, weights: Weights) -> Path:
    safetensors(folder, weights)
    return folder


def sharded_safetensors(folder: Path, weights: Weights) -> Path:
    for number, shard in enumerate(split(weights), 1):
        save_file(shard, folder / f"model-{number:05d}-of-00002.safetensors")
    write_index(folder, "model", ".safetensors", split(weights))
    return folder


def one_shard_named(folder: Path, weights: Weights) -> Path:
    return sharded_safetensors(folder, weights) / "model-00002-of-00002.safetensors"


def the_index_named(folder: Path, weights: Weights) -> Path:
    return sharded_safetensors(folder, weights) / "model.safetensors.index.json"


def shards_without_index(folder: Path, weights: Weights) -> Path:
    (sharded_safetensors(folder, weights) / "model.safetensors.index.json").unlink()
    return folder


def sharded_bin(folder: Path, weights: Weights) -> Path:
    for number, shard in enumerate(split(weights), 1):
        torch.save(shard, folder / f"pytorch_model-{number:05d}-of-00002.bin")
    write_index(folder, "pytorch_model", ".bin", split(weights))
    return folder


def both_with_worthless_bin(folder: Path, weights: Weights) -> Path:
    sharded_bin(folder, {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    return sharded_safetensors(folder, weights)


def among_training_leftovers(folder: Path, weights: Weights) -> Path:
    torch.save(print, folder / "a_training_state.bin")  # refused when opened, and no obstacle
    return folder_of_one(folder, weights)


def repacked_safetensors(folder: Path, weights: Weights) -> Path:
    save_file(repacked(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


WRITERS = [
    bare,
    wrapped("model"),
    wrapped("module"),
    wrapped("state_dict"),
    old_format,
    prefixed("module."),
    prefixed("_orig_mod."),
    prefixed("_fsdp_wrapped_module."),
    prefixed("module._orig_mod."),
    prefixed_inside,
    leftovers,
    safetensors,
    folder_of_one,
    sharded_safetensors,
    one_shard_named,
    the_index_named,
    shards_without_index,
    sharded_bin,
    both_with_worthless_bin,
    among_training_leftovers,
    repacked_safetensors,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__qualname__)
def test_the_container_makes_no_difference(
    write: Callable[[Path, Weights], Path], tmp_path: Path, weights: Weights, c2i: Any, load: Any
) -> None:
    model = load(write(tmp_path, weights))
    assert model.family == "llamagen-c2i" and model.classes == 10 and model.vq is not None
    assert model.network.state_dict().keys() == c2i.network.state_dict().keys()
    for name, tensor in c2i.network.state_dict().items():
        assert torch.equal(model.network.state_dict()[name], tensor), name


@pytest.fixture
def training_file(tmp_path: Path, golden_folder: Path, weights: Weights) -> Path:
    """What LlamaGen's training writes: the weights among an optimizer's state and its arguments."""
    shutil.copy(golden_folder / "vq_tiny.pt", tmp_path)
    arguments = argparse.Namespace(gpt_model="tiny", image_size=32)
    content = {"model": weights, "optimizer": {"state": {}, "param_groups": []}, "steps": 100, "args": arguments}
    torch.save(content, tmp_path / "c2i_tiny_256.pt")
    return tmp_path / "c2i_tiny_256.pt"


def test_training_file_with_its_namespace(training_file: Path, c2i: Any, load: Any) -> None:
    model = load(training_file)
    assert torch.equal(model.network.output.weight, c2i.network.output.weight)


@pytest.mark.parametrize("registered", [False, True])
def test_reading_leaves_the_list_of_safe_classes_as_it_was(training_file: Path, load: Any, registered: bool) -> None:
    with torch.serialization.safe_globals([argparse.Namespace] if registered else []):
        before = set(torch.serialization.get_safe_globals())
        load(training_file)
        assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16])
def test_precision(
    tmp_path: Path, weights: Weights, load: Any, golden: Weights, stored: torch.dtype, asked: torch.dtype | None
) -> None:
    save_file({name: tensor.to(stored) for name, tensor in weights.items()}, tmp_path / "m.safetensors")
    model = load(tmp_path / "m.safetensors", dtype=asked)
    dtype = asked or stored
    assert model.dtype == dtype and {p.dtype for p in model.network.parameters()} == {dtype}
    assert {p.dtype for p in model.vq.parameters()} == {torch.float32}
    session = model.session(model.class_label(int(golden["c2i.class_ids"][0])), 1, True, 16)
    logits = session.forward(torch.zeros(1, 1, dtype=torch.long), torch.tensor([-1]))
    assert logits.dtype == torch.float32
    expected = golden["c2i.logits_teacher_forced"][[0, 2], :1]
    spread = expected.std().item()
    coarse = {torch.float32: 0.0, torch.float16: 0.01, torch.bfloat16: 0.05}
    torch.testing.assert_close(logits[:, 0], expected, atol=2e-4 + spread * max(coarse[stored], coarse[dtype]), rtol=0)


def test_metadata_say_what_shapes_cannot(tmp_path: Path, weights: Weights) -> None:
    shutil.copy(tmp_path / "vq_tiny.pt", tmp_path / "other.pt")  # two candidates: only the metadata tell which
    labels = [f"thing {index}" for index in range(10)]
    extra = {"labels": json.dumps(labels), "name": '"demo"', "vq": '"vq_tiny.pt"'}
    save_file(weights, tmp_path / "m.safetensors", metadata={**HEADS_AND_GRID, **extra})
    model = model_loaders.load(tmp_path / "m.safetensors")
    assert (model.config.transformer.heads, model.grid, model.labels, model.name) == (4, (4, 4), labels, "demo")
    assert model.class_label("Thing 7").label == 7


@pytest.mark.parametrize(
    "file, grid", [("c2i_B_384.pt", 24), ("c2i_L_256.pt", 16), ("c2i_512.pt", 32), ("renamed.pt", 16), ("x1384.pt", 16)]
)
def test_the_title_hints_at_the_grid_only(tmp_path: Path, weights: Weights, file: str, grid: int) -> None:
    torch.save(weights, tmp_path / file)
    model = model_loaders.load(tmp_path / file, overrides={"heads": 4})
    assert model.grid == (grid, grid) and model.family == "llamagen-c2i"
    assert model.layout(model.class_label(0)).positions == grid * grid


@pytest.mark.parametrize(
    "file, grid", [("t2i_XL_stage1_256.pt", 16), ("t2i_XL_stage2_512.pt", 32), ("my_stage2.pt", 32)]
)
def test_the_second_stage_of_t2i_draws_512_pixels(tmp_path: Path, golden_folder: Path, file: str, grid: int) -> None:
    shutil.copy(golden_folder / "t2i_tiny_stage1.pt", tmp_path / file)
    assert model_loaders.load(tmp_path / file, overrides={"heads": 4}).grid == (grid, grid)


def test_a_size_that_nothing_tells_is_announced(
    tmp_path: Path, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(weights, tmp_path / "c2i_B.pt")
    for overrides in ({"grid": (24, 24)}, {}):
        caplog.clear()
        model = model_loaders.load(tmp_path / "c2i_B.pt", overrides={"heads": 4, **overrides})
        assert model.grid == overrides.get("grid", (16, 16))
        assert ("which picture size c2i_B was trained for" in caplog.text) == (not overrides)


def test_a_file_called_model_takes_its_folder_as_title(tmp_path: Path, golden_folder: Path) -> None:
    folder = tmp_path / "LlamaGen-T2I-2"  # the published repack of the second stage
    folder.mkdir()
    save_file(torch.load(golden_folder / "t2i_tiny_stage1.pt")["model"], folder / "model.safetensors")
    model = model_loaders.load(folder, overrides={"heads": 4}, vq_path=tmp_path / "vq_tiny.pt")
    assert (model.name, model.grid, model.family) == ("LlamaGen-T2I-2", (32, 32), "llamagen-t2i")


def test_detection_ignores_misleading_names(tmp_path: Path, golden_folder: Path, load: Any) -> None:
    shutil.copy(golden_folder / "c2i_tiny_256.pt", tmp_path / "t2i_XL_vq_janus.pt")
    (tmp_path / "vq_tiny.pt").rename(tmp_path / "c2i_B.pt")
    model = load(tmp_path / "t2i_XL_vq_janus.pt")
    assert model.family == "llamagen-c2i" and model.vq is not None
    assert load(tmp_path).family == "llamagen-c2i"  # the folder holds one model, whatever the files are called


def test_a_draft_model_needs_no_companions(tmp_path: Path, weights: Weights, load: Any) -> None:
    (tmp_path / "vq_tiny.pt").unlink()
    model = load(bare(tmp_path, weights), with_vq=False)
    assert model.vq is None
    with pytest.raises(ValueError, match="without its VQ"):
        model.code_embeddings()
    with pytest.raises(ValueError, match="without its VQ"):
        model.decode(torch.zeros(1, 16, dtype=torch.long), model.layout(model.class_label(0)))


def test_the_published_vq_comes_first_and_a_given_path_before_it(tmp_path: Path, weights: Weights, load: Any) -> None:
    path = bare(tmp_path, weights)
    vq = torch.load(tmp_path / "vq_tiny.pt", weights_only=True)["model"]
    marked = {**vq, "post_quant_conv.bias": torch.full_like(vq["post_quant_conv.bias"], 7.0)}
    torch.save({"model": marked}, tmp_path / "vq_ds16_c2i.pt")
    assert load(path).vq.post_quant_conv.bias[0] == 7.0
    assert load(path, vq_path=tmp_path / "vq_tiny.pt").vq.post_quant_conv.bias[0] != 7.0


@pytest.mark.parametrize(
    "model, vq, own",
    [
        ("c2i_tiny_256.pt", "vq_ds16_t2i.pt", "vq_ds16_c2i.pt, from FoundationVision/LlamaGen"),
        ("t2i_tiny_stage1.pt", "vq_ds8_c2i.pt", "vq_ds16_t2i.pt, from peizesun/llamagen_t2i"),
    ],
)
@pytest.mark.parametrize("chosen", [False, True])
def test_the_vq_of_the_other_kind_of_model_is_taken_with_a_warning(
    tmp_path: Path,
    golden_folder: Path,
    load: Any,
    caplog: pytest.LogCaptureFixture,
    model: str,
    vq: str,
    own: str,
    chosen: bool,
) -> None:
    shutil.copy(golden_folder / model, tmp_path)
    (tmp_path / "vq_tiny.pt").rename(tmp_path / vq)
    more = {"vq_path": tmp_path / vq} if chosen else {}
    assert load(tmp_path / model, **more).vq is not None
    ((logger, level, sentence),) = caplog.record_tuples
    assert (logger, level) == ("speculative_ar.model_loaders.companions", logging.WARNING)
    file, source = own.split(", ")
    assert sentence.startswith(f"{model} takes the VQ {tmp_path / vq}, but was trained with {file};")
    assert source in sentence and "choose it as the VQ" in sentence


@pytest.mark.parametrize("vq", ["vq_ds16_c2i.pt", "vq_ds8_c2i.pt", "vq_tiny.pt", "mt2i.pt"])
def test_a_vq_of_the_own_kind_or_of_no_known_kind_is_no_matter(
    tmp_path: Path, weights: Weights, load: Any, caplog: pytest.LogCaptureFixture, vq: str
) -> None:
    (tmp_path / "vq_tiny.pt").rename(tmp_path / vq)
    assert load(bare(tmp_path, weights)).vq is not None
    assert caplog.text == ""


def test_which_files_may_become_the_vq(tmp_path: Path, weights: Weights) -> None:
    """Any VQ in the folder, or only the one that the metadata name; models, notes and damaged files are none."""
    path = safetensors(tmp_path, weights)
    bare(tmp_path, weights)
    (tmp_path / "readme.txt").write_text("hello")
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04")
    assert vq_candidates(path) == vq_candidates(tmp_path) == [tmp_path / "vq_tiny.pt"]
    save_file({"model.vq.quantize.embedding.weight": torch.zeros(2, 4)}, tmp_path / "another-family.safetensors")
    for file in ("old_vq.ckpt", "old_model.ckpt"):
        torch.save(weights, tmp_path / file, _use_new_zipfile_serialization=False)
    all_of_them = [tmp_path / file for file in ("another-family.safetensors", "old_vq.ckpt", "vq_tiny.pt")]
    assert vq_candidates(path) == all_of_them
    save_file(weights, path, metadata={"vq": '"vq_tiny.pt"'})
    assert vq_candidates(path) == [tmp_path / "vq_tiny.pt"]
    (tmp_path / "vq_tiny.pt").unlink()
    assert vq_candidates(path) == []


def test_a_vq_file_of_training_and_a_folder_with_a_vq(tmp_path: Path, weights: Weights, load: Any) -> None:
    content = torch.load(tmp_path / "vq_tiny.pt", weights_only=True)
    (tmp_path / "vq_tiny.pt").unlink()
    (tmp_path / "vq").mkdir()
    torch.save({**content, "discriminator": {"w": torch.ones(1)}, "optimizer": {}}, tmp_path / "vq" / "training.pt")
    assert load(bare(tmp_path, weights), vq_path=tmp_path / "vq").vq is not None


@pytest.mark.parametrize("write", [bare, safetensors])
def test_shapes_are_known_without_reading_and_tensors_are_mapped(
    tmp_path: Path, weights: Weights, write: Callable[[Path, Weights], Path]
) -> None:
    """What is put into the file after it was opened is what a tensor holds: nothing had been read before."""
    path, before = write(tmp_path, weights), weights["output.weight"]
    checkpoint = Checkpoint([path])
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    content, after = path.read_bytes(), torch.arange(before.numel(), dtype=before.dtype).view_as(before)
    assert content.count(before.numpy().tobytes()) == 1
    with path.open("r+b") as stream:
        stream.seek(content.index(before.numpy().tobytes()))
        stream.write(after.numpy().tobytes())
    assert torch.equal(checkpoint.tensor("output.weight"), after)


class Marked:
    """A family of layers that one can tell from torch's own."""

    Linear = type("Linear", (nn.Linear,), {})
    Embedding = type("Embedding", (nn.Embedding,), {})
    RMSNorm = type("RMSNorm", (nn.RMSNorm,), {})
    GroupNorm = type("GroupNorm", (nn.GroupNorm,), {})
    Conv2d = type("Conv2d", (nn.Conv2d,), {})


@pytest.mark.parametrize("file", ["c2i_tiny_256.pt", "t2i_tiny_stage1.pt"])
def test_every_weight_sits_on_a_leaf_made_by_operations(golden_folder: Path, load: Any, file: str) -> None:
    model = load(golden_folder / file, operations=Marked)
    kinds = (Marked.Linear, Marked.Embedding, Marked.RMSNorm, Marked.GroupNorm, Marked.Conv2d)
    for network in (model.network, model.vq):
        assert not list(network.buffers())
        for module in network.modules():
            if list(module.parameters(recurse=False)):
                assert isinstance(module, kinds) and not list(module.children())
        assert not any(parameter.requires_grad or parameter.is_meta for parameter in network.parameters())


def test_bundled_models_have_fixed_names() -> None:
    assert {name: path.name for name, path in model_loaders.bundled().items()} == {
        "demo-tokens": "demo-tokens.safetensors",
        "demo-tokens-draft": "demo-tokens-draft.safetensors",
        "demo-continuous": "demo-continuous.safetensors",
        "demo-continuous-draft": "demo-continuous-draft.safetensors",
    }
