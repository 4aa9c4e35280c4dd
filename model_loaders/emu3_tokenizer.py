"""Emu3's own vocabulary file, emu3.tiktoken, as a tokenizer: neither the package tiktoken nor the repository's code.

The file has a line for each token of text, its bytes in base64 and its id. A token's id is also its rank: of all
neighbours that make a token together, the pair of the lowest rank is joined first.
"""

from __future__ import annotations

import base64
from pathlib import Path

from .errors import CheckpointError
from .text_tokenizer import TextTokenizer

FILE = "emu3.tiktoken"
VISION_TOKENS_FILE = "emu3_vision_tokens.txt"
SUFFIX = ".tiktoken"
# Where a text is cut before tokens are made, as for Qwen, whose vocabulary this is.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXTRAS = 205


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer at a path, be it emu3.tiktoken or the tokenizer.json of transformers' layout."""
    return read_tiktoken(path) if path.suffix == SUFFIX else TextTokenizer.load(path)


def read_tiktoken(path: Path) -> TextTokenizer:
    """The tokenizer of a .tiktoken file and of the vision tokens beside it; raises CheckpointError for what is none."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    ranks = read_ranks(path)
    # tiktoken takes a word that is a token as it is, however its parts would join.
    tokenizer = Tokenizer(models.BPE(ranks, _pairs(ranks), ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _specials(path)])
    return TextTokenizer(tokenizer)


def read_ranks(path: Path) -> dict[str, int]:
    """Token -> rank, as the file tells, with a character for each byte; raises CheckpointError where it is damaged."""
    spelling = _spelling()
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        tokens = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise _damaged(path) from error
    ranks = {token.decode("latin-1").translate(spelling): rank for token, rank in tokens.items()}
    if not ranks.keys() >= set(spelling.values()) or sorted(ranks.values()) != list(range(len(ranks))):
        raise _damaged(path)
    return ranks


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: it is no list of all tokens and their ranks; download it again from BAAI/Emu3-Gen."
    )


def _pairs(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """Every two tokens that make a third, in the order in which they are joined."""
    return [
        (token[:cut], token[cut:])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]


def _spelling() -> dict[int, str]:
    """Byte -> the visible character by which the package `tokenizers` knows it: its own, or one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in visible else next(others)) for byte in range(256)}


def _specials(path: Path) -> list[str]:
    """The tokens behind those of text, in the order of their ids: Qwen's, and Emu3's where its list lies beside."""
    extras = (f"<|extra_{number}|>" for number in range(_EXTRAS))
    vision = path.with_name(VISION_TOKENS_FILE)
    listed = vision.read_text(encoding="utf-8").split("\n") if vision.is_file() else []
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *extras, *(line.strip() for line in listed if line.strip())]
