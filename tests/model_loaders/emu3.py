"""The tiny Emu3 of the goldens in every layout that its weights are published in, and vocabularies for it.

Its vision tokenizer comes without the encoder, which nothing here reads.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor

from speculative_ar import model_loaders
from tests.model_loaders.chameleon import config_of, weights_of, write

GOLDEN = Path(__file__).parents[1] / "golden" / "emu3"
GEN, VQ = GOLDEN / "Emu3-Gen", GOLDEN / "Emu3-VisionTokenizer"
LOGITS, PICTURES = 2e-4, 2e-3
ROWS, COLUMNS = 4, 6
CODES, FIRST_CODE = 256, 265
PAD, ROW_END, FRAME_END, SPARE, BEGIN, END, IMAGE, IMAGE_BEGIN, IMAGE_END = range(256, 265)
SPECIALS = (
    *("<|endoftext|>", "<|extra_200|>", "<|extra_201|>", "<|extra_202|>", "<|extra_203|>", "<|extra_204|>"),
    *("<|image token|>", "<|image start|>", "<|image end|>"),
)
VISION_TOKENS = (*SPECIALS[-3:], *(f"<|visual token {code:06d}|>" for code in range(CODES)))
EXTRAS = tuple(f"<|extra_{number}|>" for number in range(205))
Weights = dict[str, Tensor]


def load(path: Path, **more: Any) -> Any:
    return model_loaders.load(path, **{"dtype": torch.float32, **more})


def codes_of(ids: Tensor) -> Tensor:
    """The model's codes from a golden's ids: codes from 0 on, structure behind them."""
    structure = {ROW_END: CODES, FRAME_END: CODES + 1, IMAGE_END: CODES + 2, END: CODES + 3}
    return torch.tensor([structure.get(number, number - FIRST_CODE) for number in ids.tolist()])


def spelt(text: str) -> list[int]:
    """The fixture's ids of a text without special tokens: one for each byte, as in the goldens."""
    return list(text.encode("utf-8"))


def downloaded(folder: Path) -> Path:
    """The official model repository into a new folder, without its vocabulary."""
    return Path(shutil.copytree(GEN, folder))


def vq_weights() -> Weights:
    return load_file(VQ / "model.safetensors")


def in_transformers(names: Iterable[str], older: bool = False) -> dict[str, str]:
    """Name in the two official repositories -> name in transformers' layout, or in that before its version 4.52."""
    return {name: _older(new) if older else new for name in names for new in (_in_transformers(name),)}


def _in_transformers(name: str) -> str:
    if name.startswith(("model.", "lm_head.")):
        return name.replace("model.", "model.text_model.", 1) if name.startswith("model.") else name
    name = re.sub(r"^encoder\.down\.", "encoder.down_block.down.", name)
    name = re.sub(r"^decoder\.up\.", "decoder.up_block.up.", name)
    name = re.sub(r"\.mid\.", ".middle_block.", name)
    name = re.sub(r"\.attn_1\.norm\.", ".attn_norm.", name)
    name = re.sub(r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1.", name)
    name = re.sub(r"(\.attn(?:_1|\.\d+)\.)([qkv])\.", r"\1\2_proj.", name)
    return "model.vqmodel." + re.sub(r"(\.attn(?:_1|\.\d+)\.)proj_out\.", r"\1out_proj.", name)


def _older(name: str) -> str:
    name = name.replace("model.text_model.", "text_model.model.").replace("model.vqmodel.", "vqmodel.")
    return name.replace("lm_head.", "text_model.lm_head.")


def as_transformers_has_it(older: bool = False, vq: Weights | None = None) -> Weights:
    """All weights of the fixture in transformers' layout, where a convolution of one pixel is a matrix."""
    weights = {**weights_of(GEN), **(vq_weights() if vq is None else vq)}
    matrix = re.compile(r"\.attn(?:_1|\.\d+)\.(?:q|k|v|proj_out)\.weight$")
    names = in_transformers(weights, older)
    return {names[name]: tensor.flatten(1) if matrix.search(name) else tensor for name, tensor in weights.items()}


def transformers_config() -> dict[str, Any]:
    official = config_of(GEN)
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size")
    vocabulary = {token: PAD + place for place, token in enumerate(SPECIALS)}
    vocabulary |= {f"<|visual token {code:06d}|>": FIRST_CODE + code for code in range(CODES)}
    text = {"model_type": "emu3_text_model", **{key: official[key] for key in kept}}
    return {
        "model_type": "emu3",
        "text_config": {**text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "vocabulary_map": vocabulary,
    }


def write_in_transformers_layout(folder: Path, older: bool = False) -> Path:
    write(folder, as_transformers_has_it(older), transformers_config())
    write_tokenizer_json(folder)
    return folder


def write_tokenizer_json(folder: Path, specials: tuple[str, ...] = SPECIALS) -> Path:
    """A tokenizer.json that spells with single letters, as the goldens do."""
    tokenizer = Tokenizer(models.BPE({chr(number): number for number in range(PAD)}, []))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_tiktoken(folder: Path, tokens: Iterable[bytes], vision: Iterable[str] = VISION_TOKENS) -> Path:
    """emu3.tiktoken with tokens in the order of their ranks, and emu3_vision_tokens.txt beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    (folder / "emu3.tiktoken").write_bytes(b"".join(lines))
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(vision) + "\n", encoding="utf-8")
    return folder / "emu3.tiktoken"


def official_ids() -> dict[int, int]:
    """Id in the goldens -> id by the official rule: 256 tokens of text, Qwen's special ones, then Emu3's."""
    order = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *EXTRAS, *VISION_TOKENS)
    places = {token: PAD + place for place, token in enumerate(order)}
    named = {PAD + place: places[token] for place, token in enumerate(SPECIALS)}
    codes = {FIRST_CODE + code: places[VISION_TOKENS[3]] + code for code in range(CODES)}
    return {number: number for number in range(PAD)} | named | codes


def write_with_official_vocabulary(folder: Path) -> Path:
    """The fixture with all of its files as its authors publish them, the vision tokenizer's folder beside its own."""
    ids, config = official_ids(), config_of(GEN)
    weights = weights_of(GEN)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = torch.zeros(max(ids.values()) + 1, weights[name].shape[1])
        moved[list(ids.values())] = weights[name][list(ids)]
        weights[name] = moved
    config |= {key: ids[number] for key, number in config.items() if key.endswith("_token_id")}
    write(folder, weights, {**config, "vocab_size": max(ids.values()) + 1})
    write_tiktoken(folder, (bytes([byte]) for byte in range(256)))
    shutil.copytree(VQ, folder.parent / "Emu3-VisionTokenizer")
    return folder


def json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
