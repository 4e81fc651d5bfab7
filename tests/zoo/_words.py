"""Words, and a tokenizer of them that is built in memory."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zoo import texts

WORDS = [f"w{number}" for number in range(13)]
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    plain = Tokenizer(WordLevel({word: place for place, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences(count: int, most: int) -> list[str]:
    """Return sentences of 4 to the given number of words."""
    rows = next(texts(1, count, most))
    return [" ".join(WORDS[token] for token in row[: 4 + place * 7 % (most - 3)]) for place, row in enumerate(rows)]


def llama_config() -> LlamaConfig:
    """Return the config of a small Llama that reads the words."""
    return LlamaConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def llama() -> LlamaForCausalLM:
    """Return a small Llama that reads the words."""
    return LlamaForCausalLM(llama_config())
