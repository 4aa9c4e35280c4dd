"""Class labels and prompts: what a model takes, and the sentence for what it does not take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from speculative_ar import model_loaders
from speculative_ar.model_loaders.llamagen import CaptionCondition, ClassCondition
from speculative_ar.model_loaders.text_encoder import clean_prompt

LABELS = ["Grinning Face", "red heart", "Flag: Japan", "cat face", "dog face", "pizza", "tree", "sun", "moon", "star"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory, golden_folder: Path) -> Any:
    return load_labelled(tmp_path_factory.mktemp("labelled"), golden_folder, LABELS)


def load_labelled(folder: Path, golden_folder: Path, labels: list[str]) -> Any:
    weights = torch.load(golden_folder / "c2i_tiny_256.pt", weights_only=True)["model"]
    stated = {"heads": "4", "grid": "[4, 4]", "labels": json.dumps(labels)}
    save_file(weights, folder / "labelled.safetensors", metadata=stated)
    return model_loaders.load(folder / "labelled.safetensors", with_vq=False)


def refused(make: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        make(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "given, index", [(3, 3), ("3", 3), (" 0 ", 0), ("CAT face", 3), ("flag: japan", 2), ("Sun", 7)]
)
def test_a_class_by_number_or_name(labelled: Any, given: int | str, index: int) -> None:
    condition = labelled.class_label(given)
    assert (condition.label, condition.name) == (index, LABELS[index])


@pytest.mark.parametrize("given", [-1, "-1", 10, "10", 1000])
def test_out_of_range(labelled: Any, given: int | str) -> None:
    assert f"Class {int(given)} is out of range; labelled has the classes 0 to 9" in refused(
        labelled.class_label, given
    )


def test_unknown_names_get_the_nearest_ones(labelled: Any) -> None:
    sentence = refused(labelled.class_label, "cat fase")
    assert "'cat fase' is no class of labelled; nearest are: cat face" in sentence and "0 to 9" in sentence
    sentence = refused(labelled.class_label, "xqzw")
    assert "; some are: Grinning Face, red heart, Flag: Japan." in sentence and "nearest" not in sentence


@pytest.mark.parametrize("given", [LABELS[:4], [*LABELS, "comet"]])
def test_more_or_fewer_names_than_classes(golden_folder: Path, tmp_path: Path, given: list[str]) -> None:
    """A class without a name is known by its number; a name without a class is none."""
    model = load_labelled(tmp_path, golden_folder, given)
    assert [model.class_label(index).name for index in range(10)] == [*given, *[""] * 6][:10]
    assert "no class of labelled" in refused(model.class_label, "comet")


def test_official_models_ship_no_names(c2i: Any) -> None:
    assert c2i.class_label(3).name == ""
    assert "ships no class names; give a number from 0 to 9" in refused(c2i.class_label, "goldfish")


def test_text_and_labels_are_told_apart(c2i: Any, t2i: Any, golden: dict[str, Tensor]) -> None:
    assert "takes a class label, not a prompt" in refused(c2i.prompt, "a cat")
    assert "takes a prompt, not a class label" in refused(t2i.class_label, 3)
    caption = t2i.caption(golden["t2i.t5_embeddings_right_padded"][0], golden["t2i.t5_mask_right_padded"][0])
    assert "takes a class label, not a prompt" in refused(c2i.session, caption, 1, True, 1)
    assert "takes a prompt, not a class label" in refused(t2i.session, c2i.class_label(3), 1, True, 1)


def test_a_draft_model_with_fewer_classes_says_so(c2i: Any) -> None:
    condition = ClassCondition(12)
    assert "out of range" in refused(c2i.session, condition, 1, True, 1)
    assert "out of range" in refused(c2i.layout, condition)


@pytest.mark.parametrize("rows, channels", [(120, 24), (77, 32)])
def test_a_draft_model_of_other_captions_says_so(t2i: Any, rows: int, channels: int) -> None:
    condition = CaptionCondition(torch.zeros(rows, channels), torch.ones(rows, dtype=torch.bool))
    for make in (t2i.layout, lambda given: t2i.session(given, 1, True, 1)):
        assert "takes prompts encoded as 120 rows of 32 channels" in (sentence := refused(make, condition))
        assert "draft model" in sentence and "text encoder" in sentence


def test_a_condition_of_another_family_is_refused(c2i: Any, t2i: Any) -> None:
    assert "connect AR Prompt with t2i_tiny_stage1" in refused(t2i.layout, object())
    assert "takes a class label" in refused(c2i.layout, object())


def test_sizes_name_the_nearest_one(t2i: Any) -> None:
    assert "cannot draw 512 x 256 pixels" in (sentence := refused(t2i.prompt, "a cat", width=512, height=256))
    assert "32 x 32" in sentence


def test_prompt_without_text_encoder(t2i: Any) -> None:
    assert "google/flan-t5-xl" in refused(t2i.prompt, "a cat")


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("A  Cat\n on a MAT ", "a cat on a mat"),
        ("salt &amp; pepper", "salt & pepper"),
        ("fish &amp;amp; chips", "fish & chips"),
        ("see https://example.org/a?b=1 this www.example.com now", "see this now"),
        ("a <b>bold</b><br/> claim", "a bold claim"),
        ("I <3 you, 2 < 3 > 1", "i <3 you, 2 < 3 > 1"),
        ("Ünïcode stays \u732b", "ünïcode stays \u732b"),
        ("", ""),
    ],
)
def test_prompt_cleaning(text: str, cleaned: str) -> None:
    assert clean_prompt(text) == cleaned
