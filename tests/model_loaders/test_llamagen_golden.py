"""LlamaGen against its own code: logits, guidance, greedy tokens and pictures of tiny models with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speculative_ar.model_loaders.rotary import grid_rotary_table

LOGITS, PICTURES = 2e-4, 2e-3
POSITIONS = 16


def conditions(request: pytest.FixtureRequest, kind: str) -> tuple[Any, list[Any]]:
    """The model and the golden's two conditions."""
    model, golden = request.getfixturevalue(kind), request.getfixturevalue("golden")
    if kind == "c2i":
        return model, [model.class_label(int(label)) for label in golden["c2i.class_ids"]]
    features, masks = golden["t2i.t5_embeddings_right_padded"], golden["t2i.t5_mask_right_padded"]
    return model, [model.caption(*pair) for pair in zip(features, masks, strict=True)]


def guided_tokens(kind: str) -> str:
    return "c2i.tokens_greedy_cfg4" if kind == "c2i" else "t2i.tokens_greedy_cfg7.5"


def whole_pass(model: Any, condition: Any, tokens: Tensor) -> Tensor:
    """Logits [G, N, V] of every position, from one window over the whole picture."""
    session = model.session(condition, 1, True, POSITIONS)
    return session.forward(shifted(tokens)[None], torch.tensor([-1]))[:, 0]


def shifted(tokens: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.long), tokens[:-1]))


def single_steps(model: Any, condition: Any, tokens: Tensor) -> Tensor:
    """The same logits from one pass a position."""
    session = model.session(condition, 1, True, 1)
    steps = enumerate(shifted(tokens))
    logits = [session.forward(token[None, None], torch.tensor([index - 1])) for index, token in steps]
    return torch.cat(logits, dim=2)[:, 0]


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
@pytest.mark.parametrize("run, name", [(whole_pass, "teacher_forced"), (single_steps, "cached")])
def test_logits(request: pytest.FixtureRequest, golden: dict[str, Tensor], kind: str, run: Any, name: str) -> None:
    model, both = conditions(request, kind)
    logits = [run(model, *pair) for pair in zip(both, golden[guided_tokens(kind)], strict=True)]
    computed = torch.stack(logits, dim=1).flatten(0, 1)  # the golden has the conditional half first
    torch.testing.assert_close(computed, golden[f"{kind}.logits_{name}"], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("kind, scale", [("c2i", 4.0), ("t2i", 7.5)])
def test_guided_logits(request: pytest.FixtureRequest, golden: dict[str, Tensor], kind: str, scale: float) -> None:
    model, both = conditions(request, kind)
    for index, condition in enumerate(both):
        conditional, unconditional = single_steps(model, condition, golden[guided_tokens(kind)][index])
        guided = unconditional + scale * (conditional - unconditional)
        expected = golden[f"{kind}.logits_cfg{scale:g}"][index]
        torch.testing.assert_close(guided, expected, atol=LOGITS * scale, rtol=0)


def greedy(model: Any, condition: Any, scale: float, guided_steps: int = POSITIONS) -> Tensor:
    """The likeliest code at each position; guidance is dropped after so many steps."""
    session = model.session(condition, 1, True, 1)
    tokens = [torch.tensor(0)]
    for step in range(POSITIONS):
        conditional, unconditional = session.forward(tokens[-1][None, None], torch.tensor([step - 1]))[:, 0, 0]
        guidance = scale if step <= guided_steps else 1.0
        tokens.append((unconditional + guidance * (conditional - unconditional)).argmax())
    return torch.stack(tokens[1:])


@pytest.mark.parametrize(
    "kind, name, scale, guided_steps",
    [
        ("c2i", "c2i.tokens_greedy_cfg4", 4.0, POSITIONS),
        ("c2i", "c2i.tokens_greedy_nocfg", 1.0, POSITIONS),
        ("c2i", "c2i.tokens_greedy_cfg4_interval5", 4.0, 6),  # the prefill, then decode steps 0 to 5
        ("t2i", "t2i.tokens_greedy_cfg7.5", 7.5, POSITIONS),
    ],
)
def test_greedy_tokens(
    request: pytest.FixtureRequest, golden: dict[str, Tensor], kind: str, name: str, scale: float, guided_steps: int
) -> None:
    model, both = conditions(request, kind)
    computed = torch.stack([greedy(model, condition, scale, guided_steps) for condition in both])
    assert computed.tolist() == golden[name].tolist()


def test_without_guidance_only_the_conditional_stream_runs(c2i: Any, golden: dict[str, Tensor]) -> None:
    session = c2i.session(c2i.class_label(int(golden["c2i.class_ids"][0])), 1, False, POSITIONS)
    logits = session.forward(shifted(golden["c2i.tokens_greedy_cfg4"][0])[None], torch.tensor([-1]))
    assert logits.shape == (1, 1, POSITIONS, 256) and logits.dtype == torch.float32
    torch.testing.assert_close(logits[0, 0], golden["c2i.logits_teacher_forced"][0], atol=LOGITS, rtol=0)


def test_rotary_table(golden: dict[str, Tensor]) -> None:
    table = torch.stack(grid_rotary_table(4, 4, head_dim=12, base=1e4, prefix=1), dim=-1)
    torch.testing.assert_close(table, golden["c2i.rope_table"], atol=1e-6, rtol=0)


def test_caption_moves_to_the_right_end(t2i: Any, golden: dict[str, Tensor]) -> None:
    for index in range(2):
        features, mask = golden["t2i.t5_embeddings_right_padded"][index], golden["t2i.t5_mask_right_padded"][index]
        condition = t2i.caption(features, mask)
        assert torch.equal(condition.features, golden["t2i.cond_left_padded"][index])
        assert torch.equal(condition.visible, golden["t2i.mask_left_padded"][index].bool())


def test_learned_empty_caption(t2i: Any, golden: dict[str, Tensor]) -> None:
    assert torch.equal(t2i.network.cls_embedding.uncond_embedding.weight, golden["t2i.uncond"])


def test_attention_mask(request: pytest.FixtureRequest, golden: dict[str, Tensor]) -> None:
    model, both = conditions(request, "t2i")
    expected = golden["t2i.attn_mask"].bool()
    length = expected.shape[-1]
    for index, condition in enumerate(both):
        session = model.session(condition, 1, True, 1)
        visible = session.visible(torch.arange(length).expand(2, length), session.key_visible)[..., :length]
        assert torch.equal(visible, expected[[index, index + 2]])


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
def test_pictures(request: pytest.FixtureRequest, golden: dict[str, Tensor], kind: str) -> None:
    model, both = conditions(request, kind)
    tokens, layout = golden[guided_tokens(kind)], model.layout(both[0])
    expected = golden[f"{kind}.image"]
    torch.testing.assert_close(model.pixels(tokens, layout), expected, atol=PICTURES, rtol=0)
    shown = model.decode(tokens, layout)
    assert shown.shape == (2, 32, 32, 3) and shown.dtype == torch.float32
    torch.testing.assert_close(shown, ((expected + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1), atol=PICTURES, rtol=0)


def test_code_embeddings_are_the_unit_vectors_of_the_code_book(c2i: Any, golden_folder: Any) -> None:
    table = torch.load(golden_folder / "vq_tiny.pt", weights_only=True)["model"]["quantize.embedding.weight"]
    torch.testing.assert_close(c2i.code_embeddings(), table / table.norm(dim=-1, keepdim=True))
