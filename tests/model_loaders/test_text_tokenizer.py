"""A tokenizer file becomes ids as it stands: nothing added, cut, padded or fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from speculative_ar.model_loaders import CheckpointError
from speculative_ar.model_loaders.text_tokenizer import TextTokenizer, find_tokenizer, missing_tokenizer

WORDS = ["<unk>", "<bos>", "<pad>", "a", "cat", "on", "the", "mat"]


def built() -> Tokenizer:
    """A few words, and a post-processor that would put <bos> before every text."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.add_special_tokens([AddedToken(token) for token in ("<bos>", "<pad>", "<image>")])
    return tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    built().save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_text_becomes_its_ids_and_nothing_more(file: Path) -> None:
    tokenizer = TextTokenizer.load(file)
    assert tokenizer.encode("a cat on the mat") == [3, 4, 5, 6, 7]
    assert tokenizer.encode("") == []


def test_special_tokens_count_where_the_text_spells_them(file: Path) -> None:
    assert TextTokenizer.load(file).encode("<bos>a cat<image>") == [1, 3, 4, 8]


def test_a_token_has_its_id_by_its_spelling(file: Path) -> None:
    tokenizer = TextTokenizer.load(file)
    assert tokenizer.id("<image>") == 8 and tokenizer.id("cat") == 4
    assert tokenizer.id("<begin_of_image>") is None


def test_a_length_that_a_training_script_left_in_the_file_is_ignored(tmp_path: Path) -> None:
    tokenizer = built()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer.load(tmp_path / "tokenizer.json").encode("a cat on the mat") == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("content", [b"", b"{", b"<!doctype html>", b"\x00\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer .*; download it again\."):
        TextTokenizer.load(tmp_path / "tokenizer.json")


def test_the_tokenizer_is_found_near_the_checkpoint(file: Path) -> None:
    assert find_tokenizer(file.parent, None) == file
    assert find_tokenizer(file.parent / "elsewhere", None) is None


def test_the_first_of_several_names_comes_first(file: Path) -> None:
    nested = file.parent / "tokenizer" / "text_tokenizer.json"
    nested.parent.mkdir()
    nested.touch()
    assert find_tokenizer(file.parent, None, ("tokenizer/text_tokenizer.json", "tokenizer.json")) == nested
    assert find_tokenizer(file.parent, None, ("other.json", "tokenizer.json")) == file


def test_the_choice_comes_before_what_lies_near(file: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "text_encoders" / "janus"
    chosen.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds no tokenizer; choose a folder with tokenizer\.json in it"):
        find_tokenizer(file.parent, chosen)
    copy = chosen / "tokenizer.json"
    copy.write_bytes(file.read_bytes())
    renamed = chosen / "janus_pro_tokenizer.json"
    renamed.write_bytes(file.read_bytes())
    assert find_tokenizer(file.parent, chosen) == copy
    assert find_tokenizer(file.parent, renamed) == renamed


def test_a_missing_tokenizer_is_named_with_its_source(tmp_path: Path) -> None:
    sentence = str(missing_tokenizer("Janus", "tokenizer.json", "deepseek-ai/Janus-Pro-7B", tmp_path))
    assert sentence.startswith("Janus needs its tokenizer")
    assert f"put tokenizer.json from deepseek-ai/Janus-Pro-7B into {tmp_path}, or choose a copy" in sentence
