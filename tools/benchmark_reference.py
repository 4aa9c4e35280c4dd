"""The benchmark's reference line: a straightforward Jacobi loop over transformers' Chameleon.

What the published programs have in common: a dynamic cache that is cropped after each pass, all output rows computed
and masked, rows of the whole vocabulary kept from pass to pass, one question to the host in each. Their loops over
single tokens are left out, so this is a lower bound of what they cost.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmark_models import CODES, FIRST_CODE, SyntheticModel, SyntheticNetwork
from launch_comfyui import declare_missing_operators
from speculative_ar.model_loaders.prompted import PromptCondition

DECLARED = declare_missing_operators()  # transformers imports torchvision

from transformers import ChameleonConfig, ChameleonForConditionalGeneration, DynamicCache  # noqa: E402

TINY_VQ = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "num_embeddings": 16, "resolution": 16}


@dataclass(frozen=True)
class Reference:
    """A run of the reference loop."""

    draft_length: int
    forward_passes: int
    ms_per_pass: float


class Chameleon:
    """transformers' model with the weights of a synthetic one, and the two streams of a prompt."""

    def __init__(self, model: SyntheticModel, condition: PromptCondition) -> None:
        self.device = model.device
        self.network = build(model.network).to(model.device, model.dtype).eval().requires_grad_(False)
        takes = inspect.signature(self.network.model.forward).parameters
        self.cache_argument = "cache" if "cache" in takes else "past_key_values"
        length = len(condition.ids)
        padding = torch.tensor([0, length - len(condition.unconditional)], device=self.device)[:, None]
        self.positions = torch.arange(length, device=self.device) - padding
        streams = [condition.ids, (0,) * int(padding[1]) + condition.unconditional]
        self.prompt = torch.tensor(streams, device=self.device)
        self.prefill()

    def prefill(self) -> None:
        """Begins anew: nothing but the prompt, its last token left out, is in the cache."""
        self.cache = DynamicCache()
        self._run(self.prompt[:, :-1], self.positions[:, :-1])

    def forward(self, ids: Tensor) -> Tensor:
        """Feeds ids [T] behind what is in the cache -> logits float32 [2, T, vocabulary]."""
        first = self.positions[:, -1:] + self.cache.get_seq_length() - self.prompt.shape[1] + 1
        positions = first + torch.arange(len(ids), device=self.device)
        return self.network.lm_head(self._run(ids.expand(2, -1), positions)).float()

    def _run(self, ids: Tensor, positions: Tensor) -> Tensor:
        seen = self.cache.get_seq_length() + ids.shape[1] - self.positions.shape[1]
        visible = torch.cat((self.positions >= 0, self.positions.new_ones(2, max(seen, 0), dtype=torch.bool)), dim=1)
        arguments = {"attention_mask": visible[:, : self.cache.get_seq_length() + ids.shape[1]].long()}
        arguments[self.cache_argument] = self.cache
        return self.network.model(input_ids=ids, position_ids=positions.clamp(min=0), use_cache=True, **arguments)[0]


@torch.inference_mode()
def run(
    model: SyntheticModel, condition: PromptCondition, draft_length: int, guidance: float, repeats: int = 3
) -> Reference:
    """Draws a picture a few times by Speculative Jacobi Decoding (arXiv 2410.01699); the quickest counts."""
    chameleon = Chameleon(model, condition)
    times = []
    for _ in range(repeats):
        chameleon.prefill()
        begin = time.perf_counter()
        passes = decode(chameleon, condition.layout.positions, draft_length, guidance)
        times.append(time.perf_counter() - begin)
    return Reference(draft_length, passes, 1000 * min(times) / passes)


def decode(chameleon: Chameleon, positions: int, window: int, guidance: float) -> int:
    """Decodes `positions` codes; returns the passes that it took."""
    device, vocabulary = chameleon.device, chameleon.network.config.vocab_size
    generator = torch.Generator(device).manual_seed(0)
    allowed = torch.zeros(vocabulary, dtype=torch.bool, device=device)
    allowed[FIRST_CODE : FIRST_CODE + CODES] = True
    uniform = allowed.float() / CODES
    last = chameleon.prompt[0, -1:]
    drafts, sources = last[:0], uniform.expand(0, -1)
    done = passes = 0
    while done < positions:
        new = window - 1 - len(drafts)
        drafts = torch.cat((drafts, FIRST_CODE + torch.randint(CODES, (new,), generator=generator, device=device)))
        sources = torch.cat((sources, uniform.expand(new, -1)))
        conditional, unconditional = chameleon.forward(torch.cat((last, drafts)))
        logits = unconditional + guidance * (conditional - unconditional)
        rows = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        p, q = (law.gather(-1, drafts[:, None])[:, 0] for law in (rows[:-1], sources))
        accepts = torch.rand(len(drafts), generator=generator, device=device) * q < p
        prefix = int(accepts.cumprod(0).sum())
        fresh = torch.multinomial(rows, 1, generator=generator)[:, 0]
        residual = (rows[prefix] - sources[prefix]).clamp(min=0) if prefix < len(drafts) else rows[prefix]
        last = torch.multinomial(residual, 1, generator=generator)
        drafts, sources = fresh[prefix + 1 :], rows[prefix + 1 :]
        if rejected := window - prefix - 1:
            chameleon.cache.crop(-rejected)
        done += prefix + 1
        passes += 1
    return passes


def build(network: SyntheticNetwork) -> ChameleonForConditionalGeneration:
    """The same transformer as transformers builds it, with the head over the whole vocabulary."""
    config = network.config
    built = ChameleonForConditionalGeneration(
        ChameleonConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.cached_heads,
            rms_norm_eps=config.norm_eps,
            vq_config=TINY_VQ,
            vocabulary_map={"<image>": 0},
        )
    )
    weights = {}
    for index, block in enumerate(network.layers):
        query, key, value = block.attention.wqkv.weight.split(block.attention.sizes)
        gate, up = block.feed_forward.w13.weight.chunk(2)
        parts = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": block.attention.wo.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": block.feed_forward.w2.weight,
        }
        weights |= {f"layers.{index}.{name}.weight": weight for name, weight in parts.items()}
    built.model.load_state_dict(weights, strict=False)  # its norms begin as ours: with scales of one
    codes = slice(FIRST_CODE, FIRST_CODE + CODES)
    built.model.embed_tokens.weight.data.copy_(network.tok_embeddings.weight)
    built.model.embed_tokens.weight.data[codes] = network.picture_embeddings.weight
    built.lm_head.weight.data[codes] = network.output.weight
    return built
