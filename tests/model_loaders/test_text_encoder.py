"""A real T5 encoder of transformers, tiny and random, from a folder as a user would put it beside the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from speculative_ar import model_loaders
from speculative_ar.model_loaders import CheckpointError
from tests.model_loaders.tiny_t5 import save_t5, transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, golden_folder: Path) -> Path:
    """Model, VQ and text encoder as the official instructions lay them out."""
    folder = tmp_path_factory.mktemp("pretrained_models")
    for name in ("t2i_tiny_stage1.pt", "vq_tiny.pt"):
        shutil.copy(golden_folder / name, folder)
    save_t5(folder / "t5-ckpt" / "flan-t5-xl")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path, load: Any) -> Any:
    return load(folder / "t2i_tiny_stage1.pt")


def test_a_prompt_becomes_its_encoding_at_the_right_end(model: Any, folder: Path) -> None:
    condition = model.prompt("A  Red CAT on the mat")
    reference = transformers.T5EncoderModel.from_pretrained(folder / "t5-ckpt" / "flan-t5-xl").eval()
    ids = torch.tensor([[3, 8, 4, 5, 6, 7, 1]])
    expected = reference(input_ids=ids).last_hidden_state[0]
    assert condition.visible.tolist() == [False] * 113 + [True] * 7
    assert condition.features.shape == (120, 32) and not condition.features[:113].any()
    torch.testing.assert_close(condition.features[113:], expected, atol=1e-5, rtol=0)
    assert condition.text == "A  Red CAT on the mat"


def test_a_prompt_drives_a_session(model: Any) -> None:
    first, second = (
        model.session(model.prompt(text), 2, True, 4).forward(
            torch.zeros(2, 1, dtype=torch.long), torch.tensor([-1, -1])
        )
        for text in ("a cat", "the red mat")
    )
    assert first.shape == (2, 2, 1, 256)
    assert torch.equal(first[:, 0], first[:, 1]) and not torch.allclose(first, second)


def test_long_prompts_are_cut(model: Any) -> None:
    assert model.prompt("cat " * 300).visible.all()


def test_a_negative_prompt_takes_the_place_of_the_learned_empty_caption(model: Any) -> None:
    def unconditional(negative: str) -> torch.Tensor:
        session = model.session(model.prompt("a cat", negative=negative), 1, True, 1)
        return session.forward(torch.zeros(1, 1, dtype=torch.long), torch.tensor([-1]))[1]

    plain = model.session(model.prompt("the mat"), 1, False, 1)
    expected = plain.forward(torch.zeros(1, 1, dtype=torch.long), torch.tensor([-1]))[0]
    torch.testing.assert_close(unconditional("the mat"), expected)
    assert not torch.allclose(unconditional(" "), expected)


def test_the_own_size_may_be_named(model: Any) -> None:
    assert model.prompt("a cat", width=32, height=32).visible.sum() == 3


def test_half_precision_runs_the_encoder_in_bfloat16(folder: Path, load: Any) -> None:
    model = load(folder / "t2i_tiny_stage1.pt", dtype=torch.float16)
    assert model.text_encoder.encoder.shared.weight.dtype == torch.bfloat16  # transformers 4 keeps some layers finer
    logits = model.session(model.prompt("a cat"), 1, True, 1).forward(torch.zeros(1, 1).long(), torch.tensor([-1]))
    assert logits.isfinite().all()


def test_a_draft_model_loads_no_text_encoder(folder: Path, load: Any, model: Any) -> None:
    draft = load(folder / "t2i_tiny_stage1.pt", with_vq=False)
    assert draft.text_encoder is None
    draft.session(model.prompt("a cat"), 1, True, 1)  # it takes the target's condition


def test_the_wrong_text_encoder_is_refused(folder: Path, tmp_path: Path, load: Any) -> None:
    save_t5(tmp_path / "small", width=16)
    path = folder / "t2i_tiny_stage1.pt"
    with pytest.raises(CheckpointError, match=r"gives 16 channels .* takes 32; choose a copy of google/flan-t5-xl"):
        load(path, text_encoder_path=tmp_path / "small")
    with pytest.raises(CheckpointError, match="is no text encoder"):
        load(path, text_encoder_path=tmp_path)


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json"])
def test_an_incomplete_text_encoder_is_refused(folder: Path, tmp_path: Path, load: Any, lost: str) -> None:
    copy = shutil.copytree(folder / "t5-ckpt" / "flan-t5-xl", tmp_path / "flan-t5-xl")
    (copy / lost).unlink()
    with pytest.raises(CheckpointError, match="no complete copy of google/flan-t5-xl"):
        load(folder / "t2i_tiny_stage1.pt", text_encoder_path=copy)


def test_code_in_the_folder_does_not_run(folder: Path, tmp_path: Path, load: Any) -> None:
    copy = shutil.copytree(folder / "t5-ckpt" / "flan-t5-xl", tmp_path / "flan-t5-xl")
    config = (copy / "config.json").read_text()
    (copy / "bad.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'exploded')!r}).touch()\nclass T: pass\n"
    )
    (copy / "config.json").write_text(
        config.replace("{", '{"auto_map": {"AutoModel": "bad.T", "AutoConfig": "bad.T"},', 1)
    )
    assert load(folder / "t2i_tiny_stage1.pt", text_encoder_path=copy).text_encoder is not None
    assert not (tmp_path / "exploded").exists()


def test_the_package_transformers_is_not_needed_for_class_labels(golden_folder: Path) -> None:
    import subprocess
    import sys

    root = Path(__file__).parents[2]
    code = (
        "import sys; sys.path.insert(0, 'tools'); import pack; pack.register()\n"
        "from speculative_ar import model_loaders\n"
        f"model_loaders.load({str(golden_folder / 'c2i_tiny_256.pt')!r}, overrides={{'heads': 4, 'grid': (4, 4)}})\n"
        "assert 'transformers' not in sys.modules and 'comfy' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_model_loaders_exports_are_few() -> None:
    assert sorted(model_loaders.__all__) == ["CheckpointError", "bundled", "load"]
