"""LlamaGen's weights under the names of the safetensors in circulation, which are those of transformers' Llama."""

from __future__ import annotations

from torch import Tensor

RENAMES = (
    ("tok_embeddings", "embed_tokens"),
    ("attention.wo", "self_attn.o_proj"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
)


def repacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with query, key and value apart."""
    result = {}
    for name, tensor in weights.items():
        for official, other in RENAMES:
            name = name.replace(official, other)
        if "wqkv" in name:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                result["model." + name.replace("attention.wqkv", f"self_attn.{letter}_proj")] = part.clone()
        else:
            result["lm_head.weight" if name == "output.weight" else f"model.{name}"] = tensor
    return result
