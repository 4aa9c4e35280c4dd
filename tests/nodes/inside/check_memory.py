"""Weights under ComfyUI's management: nothing is stranded when a model does not fit, and errors stay recognisable."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.utils
import pytest
import tiny
import torch

from speculative_ar.decoders import SamplerSettings
from speculative_ar.model_loaders.checkpoint_files import Checkpoint
from speculative_ar.nodes import loaders, memory, sampler
from speculative_ar.nodes.progress import RunProgress

META = torch.device("meta")
GOLDEN = Path(__file__).parents[2] / "golden"
# Family -> its tiny checkpoint, the picture size to state, and how to make a condition of it without a tokenizer.
FAMILIES: dict[str, tuple[Path, int, Any]] = {
    "janus": (GOLDEN / "janus_official", 64, lambda model: model.condition((1, 2, 3), 4)),
    "lumina": (GOLDEN / "lumina_mgpt", 512, lambda model: model.condition((0, 5, 6), 2, 3)),
    "anole": (GOLDEN / "anole_hf", 0, lambda model: model.condition((0, 5, 6))),
    "emu3": (GOLDEN / "emu3" / "Emu3-Gen", 0, lambda model: model.condition((1, 2, 3), (4, 5), 4, 6)),
}
TOO_LITTLE = 200_000  # bytes; the tiny network is more than twice as big


@pytest.fixture
def managed(tmp_path: Path) -> memory.ManagedModel:
    tiny.write_model(tmp_path / "tiny.safetensors")
    tiny.write_vq(tmp_path)
    return loaders.load(tmp_path / "tiny.safetensors", "auto")


def logits(model: Any, device: str) -> torch.Tensor:
    model.device = torch.device(device)
    session = model.session(model.class_label(0), 2, True, 4)
    tokens = torch.arange(8, device=device).view(2, 4)
    return session.forward(tokens, torch.tensor([-1, -1], device=device))


def test_a_network_that_does_not_fit_is_streamed_and_computes_on_the_device(managed: memory.ManagedModel):
    """Loading to the meta device: any tensor that stays behind and is not cast at use stops the forward pass."""
    managed.network.load(device_to=META, lowvram_model_memory=TOO_LITTLE)
    network = managed.network.model
    devices = {parameter.device.type for parameter in network.parameters()}
    assert devices == {"cpu", "meta"}, "the budget was meant to split the network"
    assert managed.streamed
    for module in network.modules():
        stays = [p for p in module.parameters(recurse=False) if p.device.type == "cpu"]
        assert not stays or module.comfy_cast_weights
    assert not list(network.buffers())
    assert logits(managed.model, "meta").shape == (2, 2, 4, managed.model.vocabulary)


def test_a_tokenizer_that_does_not_fit_is_streamed_as_well(managed: memory.ManagedModel):
    managed.vq.load(device_to=META, lowvram_model_memory=1)
    model = managed.model
    model.device = META
    tokens = torch.zeros(1, 256, dtype=torch.long, device=META)
    assert model.decode(tokens, model.layout(model.class_label(0))).shape == (1, 64, 64, 3)
    assert model.code_embeddings().device == META


def test_streaming_does_not_change_a_logit(managed: memory.ManagedModel):
    whole = logits(managed.model, "cpu")
    managed.network.load(device_to=torch.device("cpu"), lowvram_model_memory=TOO_LITTLE)
    assert managed.streamed
    assert torch.equal(logits(managed.model, "cpu"), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_streamed(family: str, tmp_path: Path):
    """As above, for the layers that the other families add, down to the picture."""
    managed, condition = load_family(family, tmp_path, "fp32")
    model, whole = managed.model, family_logits(managed, condition, "cpu")
    managed.network.load(device_to=META, lowvram_model_memory=1)
    managed.vq.load(device_to=META, lowvram_model_memory=1)
    assert managed.streamed
    assert family_logits(managed, condition, "meta").shape == whole.shape
    layout = model.layout(condition)
    pixels = model.decode(torch.zeros(1, layout.positions, dtype=torch.long, device=META), layout)
    assert pixels.device == META and pixels.shape[-1] == 3


@pytest.mark.parametrize("family", ["llamagen", *FAMILIES])
def test_eight_bit_weights_compute_in_the_dtype_of_the_device(family: str, tmp_path: Path):
    plain, condition = load_family(family, tmp_path, "fp32")
    eight, _ = load_family(family, tmp_path, "fp8")
    stored = {name: parameter.dtype for name, parameter in eight.network.model.named_parameters()}
    assert stored["layers.0.attention.wqkv.weight"] == stored["layers.0.feed_forward.w2.weight"] == torch.float8_e4m3fn
    assert stored["norm.weight"] == stored["tok_embeddings.weight"] == torch.float32
    assert eight.model.dtype == torch.float32
    found, expected = (family_logits(managed, condition, "cpu") for managed in (eight, plain))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.15 * expected.abs().max().item())
    eight.network.load(device_to=META, lowvram_model_memory=1)
    assert family_logits(eight, condition, "meta").shape == found.shape


def load_family(family: str, folder: Path, dtype: str) -> tuple[memory.ManagedModel, Any]:
    """A tiny model of a family, and a condition for it."""
    path, size, prompt = {"llamagen": (folder / "tiny.safetensors", 0, None), **FAMILIES}[family]
    if family == "llamagen" and not path.exists():
        tiny.write_model(path)
        tiny.write_vq(folder)
    managed = loaders.load(path, dtype, size)
    model = managed.model
    return managed, prompt(model) if prompt else model.class_label(0)


def family_logits(managed: memory.ManagedModel, condition: Any, device: str) -> torch.Tensor:
    managed.model.device = torch.device(device)
    session = managed.model.session(condition, 1, True, 4)
    return session.forward(torch.arange(4, device=device)[None], torch.tensor([-1], device=device))


def test_a_cancelled_load_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny.write_model(tmp_path / "tiny.safetensors")
    tiny.write_vq(tmp_path)
    told: list[int] = []
    kept: list[weakref.ref] = []
    read = Checkpoint.tensor

    def remembered(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        tensor = read(checkpoint, name)
        kept.append(weakref.ref(tensor))
        return tensor

    def cancelled_at_half(bar: loaders.LoadingProgress, done: int, total: int) -> None:
        told.append(done)
        if 2 * done > total:
            raise mm.InterruptProcessingException

    monkeypatch.setattr(Checkpoint, "tensor", remembered)
    monkeypatch.setattr(loaders.LoadingProgress, "__call__", cancelled_at_half)
    with pytest.raises(mm.InterruptProcessingException):
        loaders.load(tmp_path / "tiny.safetensors", "auto")
    gc.collect()
    assert len(told) > 1 and told == sorted(told)
    assert kept and all(reference() is None for reference in kept)


def test_loading_fills_the_bar_and_stops_for_a_cancel(managed: memory.ManagedModel, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    comfy.utils.set_progress_bar_global_hook(lambda value, total, *_, **__: seen.append((value, total)))
    try:
        loaders.load(tmp_path / "tiny.safetensors", "auto")
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    assert seen == sorted(seen) and seen[-1] == (100, 100)
    mm.interrupt_current_processing(True)
    with pytest.raises(mm.InterruptProcessingException):
        loaders.load(tmp_path / "tiny.safetensors", "auto")


def test_target_tokenizer_and_draft_are_all_placed(managed: memory.ManagedModel, tmp_path: Path):
    draft = loaders.load(tmp_path / "tiny.safetensors", "auto", with_vq=False)
    assert draft.vq is None
    memory.place_for_sampling(managed, draft, memory_required=1 << 20)
    placed = mm.loaded_models()
    assert {id(patcher) for patcher in (managed.network, managed.vq, draft.network)} <= {id(one) for one in placed}
    assert not managed.streamed


def test_room_is_made_for_a_preview_where_previews_are_on(
    managed: memory.ManagedModel, monkeypatch: pytest.MonkeyPatch
):
    """A preview is decoded between two passes, when the caches are there already."""
    asked = []
    load = mm.load_models_gpu

    def remember(models: list, memory_required: int = 0, **more: Any) -> None:
        asked.append(memory_required)
        load(models, memory_required=memory_required, **more)

    monkeypatch.setattr(mm, "load_models_gpu", remember)
    condition = managed.model.class_label(0)
    layout = managed.model.layout(condition)
    for preview_every in (0, 16):
        progress = RunProgress(managed.model, layout, 1, "3", preview_every)
        sampler.sample(managed, condition, SamplerSettings(draft_length=8), None, progress)
    memory.place_for_decoding(managed, layout)
    without, with_previews, one_picture = asked
    assert one_picture == 64 * 64 * 32 * 4 * memory.DECODE_MAPS
    assert with_previews - without == one_picture


def test_an_outside_unload_is_no_obstacle(managed: memory.ManagedModel):
    memory.place_for_sampling(managed, None, memory_required=0)
    before = logits(managed.model, "cpu")
    mm.unload_all_models()
    memory.place_for_sampling(managed, None, memory_required=0)
    assert torch.equal(logits(managed.model, "cpu"), before)


def test_nothing_outlives_the_last_reference(tmp_path: Path):
    tiny.write_model(tmp_path / "tiny.safetensors")
    tiny.write_vq(tmp_path)
    managed = loaders.load(tmp_path / "tiny.safetensors", "auto")
    memory.place_for_sampling(managed, None, memory_required=0)
    alive = [weakref.ref(thing) for thing in (managed.model, managed.network.model, managed.vq.model)]
    gc.disable()
    del managed
    mm.cleanup_models()
    gc.enable()
    assert [ref() for ref in alive] == [None] * 3


def test_auto_precision_on_a_processor_is_float32(managed: memory.ManagedModel):
    assert memory.computing_dtype("auto") == torch.float32
    assert memory.computing_dtype("bf16") == torch.bfloat16
    assert managed.model.dtype == torch.float32
    assert {parameter.dtype for parameter in managed.network.model.parameters()} == {torch.float32}


def test_half_precision_weights_compute_in_half_precision(managed: memory.ManagedModel, tmp_path: Path):
    half = loaders.load(tmp_path / "tiny.safetensors", "bf16")
    assert {parameter.dtype for parameter in half.network.model.parameters()} == {torch.bfloat16}
    found, expected = logits(half.model, "cpu"), logits(managed.model, "cpu")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


def test_an_out_of_memory_error_keeps_its_identity_and_gains_advice():
    error = torch.OutOfMemoryError("no room for 3 GiB")
    with pytest.raises(mm.OOM_EXCEPTION) as caught, memory.explained_out_of_memory("Lower batch_size."):
        raise error
    assert caught.value is error
    assert str(error) == "no room for 3 GiB\nLower batch_size."


def test_a_cancelled_run_passes_through_unchanged():
    error = mm.InterruptProcessingException()
    with pytest.raises(mm.InterruptProcessingException) as caught, memory.explained_out_of_memory("Lower batch_size."):
        raise error
    assert caught.value is error
    assert error.args == ()
