"""The tiny Lumina-mGPT and Anole of the goldens, and ways to write them anew under other names and in other shapes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from speculative_ar import model_loaders
from speculative_ar.model_loaders import CheckpointError
from speculative_ar.model_loaders.checkpoint_files import Checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
LUMINA, ANOLE = GOLDEN / "lumina_mgpt", GOLDEN / "anole_hf"
VQGAN = LUMINA / "chameleon" / "tokenizer" / "vqgan.ckpt"
SIZE = {"size": 96}  # three units of 32 pixels a side, so that the goldens' 2 x 3 units are allowed
LOGITS, PICTURES = 2e-4, 2e-3
CODES, FIRST_CODE = 8192, 4
ROW_END, IMAGE_END = 8803, 8196
Weights = dict[str, Tensor]


def codes_of(ids: Tensor) -> Tensor:
    """The model's codes from a golden's ids: codes from 0 on, the row end and the image end behind them."""
    structure = {ROW_END: CODES, IMAGE_END: CODES + 1}
    return torch.tensor([structure.get(number, number - FIRST_CODE) for number in ids.tolist()])


def logits(model: Any, condition: Any, tokens: Tensor, window: int) -> Tensor:
    """Logits [G, N, V] of the positions of `tokens`, fed in windows of that many."""
    fed = torch.cat((torch.zeros(1, dtype=torch.long), tokens[:-1]))
    session = model.session(condition, 1, True, window)
    parts = [
        session.forward(part[None], torch.tensor([index * window - 1])) for index, part in enumerate(fed.split(window))
    ]
    return torch.cat(parts, dim=2)[:, 0]


def plain_logits(weights: Weights, ids: list[int], theta: float, norm_after: bool) -> Tensor:
    """Chameleon written out in formulas, from float32 weights under their published names -> [T, vocabulary]."""
    x = weights["model.embed_tokens.weight"][ids]
    head_dim = weights["model.layers.0.self_attn.q_norm.weight"].shape[1]
    angles = torch.arange(len(ids))[:, None] / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def heads(x: Tensor, prefix: str, side: str) -> Tensor:
        x = F.linear(x, weights[f"{prefix}.{side}_proj.weight"]).unflatten(1, (-1, head_dim))
        if side == "v":
            return x
        scale, bias = (weights[f"{prefix}.{side}_norm.{kind}"] for kind in ("weight", "bias"))
        repeats = x.shape[1] // len(scale)
        x = F.layer_norm(x, (head_dim,)) * scale.repeat_interleave(repeats, 0) + bias.repeat_interleave(repeats, 0)
        turned = torch.complex(*x.chunk(2, dim=-1)) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)

    def attention(x: Tensor, prefix: str) -> Tensor:
        query, key, value = (heads(x, prefix, side) for side in "qkv")
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        scores = torch.einsum("qhc,khc->hqk", query, key) / head_dim**0.5
        scores += torch.full_like(scores, -torch.inf).triu(1)
        return F.linear(
            torch.einsum("hqk,khc->qhc", scores.softmax(-1), value).flatten(1), weights[f"{prefix}.o_proj.weight"]
        )

    def mlp(x: Tensor, prefix: str) -> Tensor:
        gate, up = (F.linear(x, weights[f"{prefix}.{side}_proj.weight"]) for side in ("gate", "up"))
        return F.linear(F.silu(gate) * up, weights[f"{prefix}.down_proj.weight"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps=1e-5)

    layer = "model.layers.0"
    while f"{layer}.input_layernorm.weight" in weights:
        for branch, part, name in (
            (attention, "self_attn", "input_layernorm"),
            (mlp, "mlp", "post_attention_layernorm"),
        ):
            inputs = x if norm_after else norm(x, f"{layer}.{name}")
            outputs = branch(inputs, f"{layer}.{part}")
            x = x + (norm(outputs, f"{layer}.{name}") if norm_after else outputs)
        layer = f"model.layers.{int(layer.rpartition('.')[2]) + 1}"
    return F.linear(norm(x, "model.norm"), weights["lm_head.weight"])


def weights_of(folder: Path) -> Weights:
    return {name: tensor for file in sorted(folder.glob("model-*")) for name, tensor in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def write(folder: Path, weights: Weights, config: dict[str, Any], file: str = "model.safetensors") -> Path:
    """A checkpoint of one file in a new folder."""
    folder.mkdir(parents=True)
    save_file(weights, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def without_vq(folder: Path) -> Path:
    """Lumina-mGPT as downloaded, into a new folder: its shards and its config."""
    folder.mkdir(parents=True)
    for file in (*LUMINA.glob("model*"), LUMINA / "config.json"):
        shutil.copy(file, folder)
    return folder


def write_tokenizer(folder: Path, first: int = 8720) -> None:
    """A tokenizer.json that knows some words, with ids from `first` on, and puts <s> in front of a text."""
    words = ["Generate", "an", "image", "of", "according", "to", "the", "following", "prompt", ":", "a", "red", "fox"]
    vocabulary = {word: first + place for place, word in enumerate([*words, "64x96", "96x64", "96x96", "no", "rain"])}
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 3, **vocabulary}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))


def refusal(path: Path, **more: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        model_loaders.load(path, **{"overrides": SIZE, **more})
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def names_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that fills with the name of every tensor that is read from now on."""
    names: list[str] = []
    read = Checkpoint.tensor

    def noted(checkpoint: Checkpoint, name: str) -> Tensor:
        names.append(name)
        return read(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "tensor", noted)
    return names
