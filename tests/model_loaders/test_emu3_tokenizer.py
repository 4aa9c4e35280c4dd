"""emu3.tiktoken read as a tokenizer gives the ids that tiktoken gives: against plain merging, and against real ids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from speculative_ar.model_loaders import CheckpointError
from speculative_ar.model_loaders.emu3_tokenizer import load_tokenizer, read_tiktoken
from speculative_ar.model_loaders.text_tokenizer import TextTokenizer
from tests.model_loaders.emu3 import EXTRAS, GOLDEN, VISION_TOKENS, json_of, write_tiktoken, write_tokenizer_json

# In the order of Qwen's vocabulary: bytes that one can see first.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [bytes([byte]) for byte in (*VISIBLE, *sorted(set(range(256)) - set(VISIBLE)))]
TEXT = """A red fox jumps over 3 lazy dogs; the dogs don't mind. Lowres, bad anatomy, worst quality, jpeg artifacts.
    def portrait(of): return "a masterpiece, film grained, best quality."  # überraschend, naïve café
\u65e5\u672c\u8a9e\u306e\u6587\u7ae0 banana bananas aaaaaaa hahahaha 2024-12-01 ...!?  \t tabs\tand\r\n\r\nlines   """


def trained(size: int) -> list[bytes]:
    """The tokens of a byte-level BPE trained on the text above, in the order of their ranks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    bytes_of = dict(zip(sorted(alphabet), BYTES, strict=True))
    vocabulary = tokenizer.get_vocab()
    return [b"".join(bytes_of[letter] for letter in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def plain(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule, written out: a word that is a token is that; else the neighbours of the lowest rank join."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = enumerate(itertools.pairwise(parts))
        joined = [(ranks[left + right], place) for place, (left, right) in pairs if left + right in ranks]
        if not joined:
            return [ranks[part] for part in parts]
        place = min(joined)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return {token: rank for rank, token in enumerate(trained(420))}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, ranks: dict[bytes, int]) -> TextTokenizer:
    return load_tokenizer(write_tiktoken(tmp_path_factory.mktemp("emu3"), ranks))


def words(count: int) -> Iterator[str]:
    """Single words of letters, with much repetition, and a few letters of several bytes."""
    choice = random.Random(1)
    for _ in range(count):
        letters = choice.choice(
            ["an", "ab", "aeiou", "fox redlaz", "üéï\u672c\u8a9e\u6587", "abcdefghijklmnopqrstuvwxyz"]
        )
        yield "".join(choice.choice(letters) for _ in range(choice.randint(1, 20))).replace(" ", "")


def test_words_are_merged_by_rank(tokenizer: TextTokenizer, ranks: dict[bytes, int]) -> None:
    for word in (*words(400), *TEXT.split()):
        if word.isalpha():
            assert tokenizer.encode(word) == plain(word.encode(), ranks)


@pytest.mark.parametrize("seed", range(5))
def test_any_vocabulary_merges_by_rank(tmp_path: Path, seed: int) -> None:
    """Also one in which many pairs make the same token, and a token's parts may come later than it."""
    choice = random.Random(seed)
    tokens = {"".join(choice.choice("ab") for _ in range(choice.randint(2, 5))).encode() for _ in range(40)}
    order = [*BYTES, *choice.sample(sorted(tokens), len(tokens))]
    ranks = {token: rank for rank, token in enumerate(order)}
    tokenizer = read_tiktoken(write_tiktoken(tmp_path, ranks))
    for _ in range(300):
        word = "".join(choice.choice("abc") for _ in range(choice.randint(1, 24)))
        assert tokenizer.encode(word) == plain(word.encode(), ranks)


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("a red fox", ["a", " red", " fox"]),
        ("I'm DON'T'll WE'REX", ["I", "'m", " DON", "'T", "'ll", " WE", "'RE", "X"]),
        ("90*90", ["9", "0", "*", "9", "0"]),
        ("in 2024, yes", ["in", " ", "2", "0", "2", "4", ",", " yes"]),
        ("best quality.\nnext", ["best", " quality", ".\n", "next"]),
        ("two  spaces   ", ["two", " ", " spaces", "   "]),
        ("(parenthesis) #tag", ["(parenthesis", ")", " #", "tag"]),
        ("lines\r\n\r\n end", ["lines", "\r\n\r\n", " end"]),
        ("\tdéjà \u65e5\u672c\u8a9e!!", ["\tdéjà", " \u65e5\u672c\u8a9e", "!!"]),
    ],
)
def test_a_text_is_cut_as_for_qwen(tmp_path: Path, text: str, pieces: list[str]) -> None:
    """In a vocabulary of all pairs of bytes of the text, merges would cross any cut that is not made."""
    assert "".join(pieces) == text
    pairs = {bytes(pair) for pair in itertools.pairwise(text.encode())} - set(BYTES)
    ranks = {token: rank for rank, token in enumerate([*BYTES, *sorted(pairs)])}
    tokenizer = read_tiktoken(write_tiktoken(tmp_path, ranks))
    assert tokenizer.encode(text) == [number for piece in pieces for number in plain(piece.encode(), ranks)]


def test_a_letter_and_its_accent_are_one_and_other_letters_stay(tokenizer: TextTokenizer) -> None:
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")
    assert tokenizer.encode("\ufb01") != tokenizer.encode("fi")


def test_special_tokens_follow_those_of_text(tokenizer: TextTokenizer, ranks: dict[bytes, int]) -> None:
    order = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *EXTRAS, *VISION_TOKENS]
    assert [tokenizer.id(token) for token in order] == list(range(len(ranks), len(ranks) + len(order)))
    assert tokenizer.encode("a<|image start|>b") == [
        *(ranks[b"a"], tokenizer.id("<|image start|>"), ranks[b"b"]),
    ]


def test_emu3s_own_list_may_be_absent(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    """The prompt's special tokens come from config.json, and a text spells none."""
    file = write_tiktoken(tmp_path, ranks)
    (tmp_path / "emu3_vision_tokens.txt").unlink()
    tokenizer = read_tiktoken(file)
    assert tokenizer.id("<|extra_204|>") == len(ranks) + 207
    assert tokenizer.id("<|image start|>") is None


def test_the_suffix_tells_the_kind_of_file(tmp_path: Path) -> None:
    assert load_tokenizer(write_tokenizer_json(tmp_path)).id("<|image start|>") == 263


# Real ids

# The pieces of the two real prompts in the order of their ids, and the tokens through which two of them come about.
POSITIVE = ["a", " portrait", " of", " young", " girl", ".", " masterpiece", ",", " film", " gr", "ained", ",", " best"]
POSITIVE += [" quality", "."]
NEGATIVE = ["low", "res", ",", " bad", " anatomy", ",", " bad", " hands", ",", " text", ",", " error", ",", " missing"]
NEGATIVE += [" fingers", ",", " extra", " digit", ",", " fewer", " digits", ",", " cropped", ",", " worst", " quality"]
NEGATIVE += [",", " low", " quality", ",", " normal", " quality", ",", " jpeg", " artifacts", ",", " signature", ","]
NEGATIVE += [" watermark", ",", " username", ",", " blurry", "."]
BETWEEN = {b"re": 265, b" g": 342, b"lo": 385, b"ai": 386, b"ed": 291, b"ain": 466}
TEXT_TOKENS = 151643


@pytest.fixture(scope="module")
def examples() -> dict[str, object]:
    return json_of(GOLDEN / "tokenizer_examples.json")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, examples: dict) -> TextTokenizer:
    """A vocabulary as long as the published one that has the known tokens where they are; the others spell nothing."""
    tokens = dict(enumerate(BYTES)) | {rank: token for token, rank in BETWEEN.items()}
    for pieces, ids in ((POSITIVE, examples["pos_ids"]), (NEGATIVE, examples["neg_ids"])):
        tokens |= {number: piece.encode() for piece, number in zip(pieces, ids[1:], strict=False)}
    order = [tokens.get(rank, b"\x00" + str(rank).encode()) for rank in range(TEXT_TOKENS)]
    codes = (f"<|visual token {code:06d}|>" for code in range(32768))
    return read_tiktoken(write_tiktoken(tmp_path_factory.mktemp("real"), order, (*VISION_TOKENS[:3], *codes)))


@pytest.mark.parametrize("name", ["pos", "neg"])
def test_real_prompts_have_their_real_ids(real: TextTokenizer, examples: dict, name: str) -> None:
    assert real.encode(examples[f"{name}_text"]) == examples[f"{name}_ids"]


def test_real_special_tokens_have_their_real_ids(real: TextTokenizer) -> None:
    names = ["<|endoftext|>", "<|extra_0|>", "<|extra_200|>", "<|extra_201|>", "<|extra_203|>", "<|extra_204|>"]
    assert [real.id(name) for name in names] == [151643, 151646, 151846, 151847, 151849, 151850]
    assert [real.id(name) for name in VISION_TOKENS[:3]] == [151851, 151852, 151853]
    assert real.id("<|visual token 032767|>") == 151854 + 32767


def test_digits_have_their_real_ids(real: TextTokenizer, tokenizer: TextTokenizer) -> None:
    for one in (real, tokenizer):
        assert one.encode("0123456789*") == [*range(15, 25), 9]


# Damage


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        b"<!doctype html>\n",
        b"IQ== 0\nIg== x\n",
        b"IQ== 0\nIg==",
        b"IQ== 0\n\xff\xfe 1\n",
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "emu3.tiktoken").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"emu3\.tiktoken is damaged: .*; download it again from BAAI/Emu3-Gen\."):
        read_tiktoken(tmp_path / "emu3.tiktoken")


def test_a_gap_between_the_ranks_is_damage(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    file = write_tiktoken(tmp_path, ranks)
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join(lines[:300] + lines[301:]))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_tiktoken(file)
