"""A tiny random T5 with its tokenizer, made by transformers and stored as google/flan-t5-xl is."""

from __future__ import annotations

from pathlib import Path

from launch_comfyui import declare_missing_operators

# The environment's torchvision may be built for another torch, and transformers imports it.
OPERATORS = declare_missing_operators()
import transformers  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

WORDS = ["<pad>", "</s>", "<unk>", "a", "cat", "on", "the", "mat", "red"]


def save_t5(folder: Path, width: int = 32) -> None:
    """Encoder and decoder, as the published folder holds them, and a tokenizer of a few words."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=len(WORDS),
        d_model=width,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    transformers.set_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
