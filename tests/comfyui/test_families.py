"""The template of every family, queued in a genuine ComfyUI on a tiny checkpoint in that family's published layout.

The stand-ins lie where the template's note says, under the names that the template expects. What a tiny checkpoint
cannot take, its picture size and the number of its codes, is changed in the graph.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import comfyui
from comfyui_client import Client
from speculative_ar.model_loaders.llamagen import LlamaGenConfig, LlamaGenNetwork
from speculative_ar.model_loaders.transformer import TransformerConfig
from speculative_ar.model_loaders.vq import VQConfig, VQTokenizer
from speculative_ar.model_loaders.xar import XARConfig, XARNetwork
from tests.comfyui.tiny import unfused
from tests.model_loaders import chameleon, continuous, emu3, janus
from tests.model_loaders.tiny_t5 import save_t5
from workflow import to_graph

CODES, CAPTION_CHANNELS = 2048, 32
PIXELS_PER_CODE = 4  # of the stand-ins for LlamaGen


def write_llamagen(folder: Path, model: str, vq: str, **conditions: int) -> None:
    """Two official `.pt` files: a model whose width gives one head, and its tokenizer."""
    torch.manual_seed(0)
    network = LlamaGenNetwork(LlamaGenConfig(TransformerConfig(2, 1, 64, 128, CODES), **conditions))
    torch.save({"model": dict(unfused(network.state_dict()))}, folder / model)
    levels = (32, 32, 32)
    tokenizer = VQTokenizer(VQConfig(CODES, 8, 32, 32, levels, levels, encoder_blocks=1, decoder_blocks=1))
    torch.save({"model": tokenizer.state_dict()}, folder / vq)


def write_class_model(folder: Path) -> None:
    write_llamagen(folder, "c2i_XL_384.pt", "vq_ds16_c2i.pt", classes=1000)


def write_text_model(folder: Path) -> None:
    captions = {"caption_length": 120, "caption_dim": CAPTION_CHANNELS}
    write_llamagen(folder, "t2i_XL_stage2_512.pt", "vq_ds16_t2i.pt", **captions)
    save_t5(folder / "flan-t5-xl", width=CAPTION_CHANNELS)


def write_janus(folder: Path) -> None:
    model = Path(shutil.copytree(janus.OFFICIAL, folder / "Janus-Pro-1B"))
    write_config(model, vision_config={"params": {"image_size": 96}})
    janus.write_tokenizer(model)


def write_lumina(folder: Path) -> None:
    model = Path(shutil.copytree(chameleon.LUMINA, folder / "Lumina-mGPT-7B-768"))
    chameleon.write_tokenizer(model)


def write_anole(folder: Path) -> None:
    model = Path(shutil.copytree(chameleon.ANOLE, folder / "Anole-7b-v0.1-hf"))
    chameleon.write_tokenizer(model, first=8600)  # its table ends at 8720


def write_emu3(folder: Path) -> None:
    model = emu3.downloaded(folder / "Emu3-Gen")
    emu3.write_tokenizer_json(model)
    write_config(model, image_area=80 * 80)
    shutil.copytree(emu3.VQ, folder / "Emu3-VisionTokenizer")


def write_mar(folder: Path) -> None:
    continuous.save(folder / "mar-huge.safetensors", continuous.mar_weights(), **continuous.HEADS)
    shutil.copy(continuous.VAE, folder / "kl16.ckpt")


def write_xar(folder: Path) -> None:
    """A width that tells the heads, one block a side; the tables as the authors' file keeps them."""
    torch.manual_seed(0)
    network = XARNetwork(XARConfig(768, 1, 1, heads=12, mlp_width=64, side=8, classes=1000))
    weights = network.state_dict()
    for part in ("encoder", "decoder"):
        weights[f"{part}_pos_embed_learned"] = weights.pop(f"{part}_positions.weight")[None]
    torch.save(dict(weights), folder / "xAR-H.pth")


def write_harmon(folder: Path) -> None:
    model = folder / "Harmon-0_5B"
    model.mkdir()
    continuous.save_harmon(model, **continuous.HARMON_HEADS)
    continuous.write_tokenizer(model)


def write_config(model: Path, **changed: Any) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | changed), encoding="utf-8")


# Template -> its stand-in, the inputs that are changed, and the size of the picture that comes out.
FAMILIES: dict[str, tuple[Callable[[Path], None], dict[str, Any], tuple[int, int]]] = {
    "llamagen_class": (write_class_model, {}, (24 * PIXELS_PER_CODE,) * 2),
    "llamagen_text": (write_text_model, {}, (32 * PIXELS_PER_CODE,) * 2),
    "janus_pro": (write_janus, {}, (96, 96)),
    "lumina_mgpt": (write_lumina, {"width": 128, "height": 128}, (128, 128)),
    "anole": (write_anole, {"draft_length": 16}, (64, 64)),
    "emu3": (write_emu3, {"width": 0, "height": 0, "top_k": 0}, (80, 80)),
    "mar": (write_mar, {"label": "7"}, (8, 8)),
    "xar": (write_xar, {}, (32, 32)),
    "harmon": (write_harmon, {}, (16, 16)),
}
CONTINUOUS = {"mar", "xar", "harmon"}


@pytest.fixture(scope="module", autouse=True)
def checkpoints(server: comfyui.Server) -> None:
    folder = server.models / "ar_models"
    folder.mkdir(exist_ok=True)
    for write, _, _ in FAMILIES.values():
        write(folder)


def workflow(name: str) -> dict[str, Any]:
    return json.loads((comfyui.ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_template_makes_its_picture(client: Client, name: str) -> None:
    _, changed, size = FAMILIES[name]
    graph = to_graph(workflow(name), client.object_info())
    for node in graph.values():
        node["inputs"] |= {key: value for key, value in changed.items() if key in node["inputs"]}
    (sampler,) = (node for node, entry in graph.items() if entry["class_type"] == "SpecARSampler")
    run = client.run(graph)
    assert run.succeeded, run.error
    (picture,) = [Image.open(io.BytesIO(data)) for data in client.images(run.prompt_id)]
    assert picture.size == size
    low, high = picture.convert("L").getextrema()
    assert low < high
    (shown,) = run.shown[sampler]["speculativear"]
    assert shown["promise"] == ("lossless" if name in CONTINUOUS else "seed-exact")
    assert shown["forward_passes"] <= shown["free_positions"]
    said = {key: value for entry in graph.values() for key, value in entry["inputs"].items()}
    assert said.get("text", f"class {said.get('label')}") in shown["prompt"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_template_says_where_its_files_come_from(name: str) -> None:
    loader, *_, note = workflow(name)["nodes"]
    models = loader["properties"]["models"]
    assert all(model["url"].startswith("https://huggingface.co/") for model in models)
    assert all(model["url"].endswith(f"/{model['name']}") for model in models)
    assert all(model["directory"].split("/")[0] == "ar_models" for model in models)
    checkpoint, *_ = loader["widgets_values"]
    assert any(checkpoint in (model["name"], model["directory"].rpartition("/")[2]) for model in models)
    assert checkpoint in note["widgets_values"][0]
