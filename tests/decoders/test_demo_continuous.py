"""The bundled continuous pair, really trained: what each decoder promises of it, on few pictures."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from speculative_ar import model_loaders
from speculative_ar.decoders import ContinuousOptions, Generation, SamplerSettings, generate


@cache
def model(name: str) -> Any:
    return model_loaders.load(model_loaders.bundled()[name], dtype=torch.float32)


def run(decoder: str, length: int = 0, options: dict[str, Any] | None = None, **more: Any) -> Generation:
    settings = SamplerSettings(
        decoder=decoder, draft_length=length, continuous=ContinuousOptions(**(options or {})), seed=3, **more
    )
    target = model("demo-continuous")
    return generate(target, target.class_label("heart"), settings, draft_model=model("demo-continuous-draft"))


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_a_set_of_tokens_takes_at_most_twenty_calls_of_the_head_for_its_hundred_steps(cfg: float) -> None:
    statistics = run("head-speculative", guidance_scale=cfg).statistics
    assert (statistics.forward_passes, statistics.promise) == (32, "lossless")
    assert statistics.head_calls <= 20 * statistics.forward_passes


def test_seed_exact_is_ar_at_tolerance_0_and_near_it_in_fewer_passes_above() -> None:
    few = {"diffusion_steps": 20}
    plain = run("ar", options=few)
    same = run("seed-exact", 8, {**few, "tolerance": 0.0})
    assert torch.equal(same.tokens, plain.tokens)
    near = run("seed-exact", 8, {**few, "measure_deviation": True})
    assert near.statistics.forward_passes < 20 < plain.statistics.forward_passes
    assert near.statistics.audit_residual < 0.1
    assert (near.tokens - plain.tokens).norm(dim=-1).mean() < 0.02


@pytest.mark.parametrize("verification", ["block", "prefix"])
def test_cspd_leaves_no_token_empty(verification: str) -> None:
    options = {"diffusion_steps": 20, "iterations": 16, "verification": verification}
    made = run("cspd", 4, options, guidance_scale=2.0, batch_size=2)
    assert made.tokens.isfinite().all() and (made.tokens.norm(dim=-1) > 0.1).all()
    assert made.statistics.promise == "approximate"
    assert made.decode().shape == (2, 64, 64, 3)
    if verification == "block":
        assert made.statistics.accepted > 0


def test_the_pair_is_under_15_mb() -> None:
    files = list(model_loaders.bundled()["demo-continuous"].parent.glob("demo-continuous*.safetensors"))
    assert len(files) == 3 and sum(path.stat().st_size for path in files) < 15e6
