"""Small tokenizers for tests: a byte-level one that is trained when asked for, and a SentencePiece one that was trained once."""

import functools
import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from support import DATA
from support import texts as TEXTS

HERE = DATA / "tokenizers"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIZE = 680
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@functools.cache
def byte_level() -> bytes:
    """tokenizer.json of a byte-level BPE tokenizer of SIZE tokens and some added ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXTS.CORPUS.split("\n"), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens(
        [
            AddedToken("<tool_call>", normalized=False),
            AddedToken("<tool", normalized=False),
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("whole", single_word=True, normalized=False),
        ]
    )
    return tokenizer.to_str().encode()


@functools.cache
def sentencepiece() -> dict:
    """What make.py wrote: tokens, scores, types, and ids of texts by the sentencepiece library."""
    return json.loads((HERE / "spm.json").read_text(encoding="utf-8"))


def sentencepiece_keys(**more) -> dict:
    """The SentencePiece tokenizer as GGUF metadata."""
    model = sentencepiece()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": model["tokens"],
        "tokenizer.ggml.scores": model["scores"],
        "tokenizer.ggml.token_type": model["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }
