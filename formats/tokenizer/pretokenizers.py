"""How text is cut into words before byte-level BPE merges them: the pre-tokenizers that GGUF files call by name.

A GGUF file holds only the name (`tokenizer.ggml.pre`); a tokenizer.json holds the regular expressions. This table joins the
two, in both directions. An entry is a list of regular expressions in Oniguruma's syntax, as the models' own tokenizer.json
files spell them; each cuts the pieces left by the one before it, and what it does not match stays as it is. The names and
what they stand for are those that llama.cpp reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...quant.errors import HalfbyteError
from ..errors import printable, some


class TokenizerError(HalfbyteError):
    """A tokenizer cannot be read, built or written; the text names the key or the part that is not understood."""


class PreTokenizer(NamedTuple):
    """One way of cutting text into words.

    patterns       regular expressions, applied one after the other
    ignore_merges  a word that is a token as a whole is that token, whatever the merges say
    add_bos        whether a BOS token goes first where the file does not say (`tokenizer.ggml.add_bos_token`)
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DIGIT = r"\p{N}"
_DIGITS = r"\p{N}+"
_THREE_DIGITS = r"\p{N}{1,3}"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
"""The pattern of GPT-2, which the tokenizers library has built in as `ByteLevel(use_regex=True)`."""

_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"


def _words(number: str, marks: str = r"[\r\n]*", lines: str = r"\s*[\r\n]+") -> str:
    """The pattern family of cl100k: contractions, words with one character before them, numbers, marks, line ends, spaces."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+{marks}|{lines}|{_SPACES}"


def _cased_words(number: str, contraction: str) -> str:
    """The pattern family of o200k: words are cut where lower case turns to upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    tail = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
    return f"{first}{upper}*{lower}+{contraction}|{first}{upper}+{lower}*{contraction}|{number}{tail}"


LLAMA3 = _words(_THREE_DIGITS)
QWEN2 = _words(_DIGIT)
TEKKEN = _cased_words(_DIGIT, "")
GPT4O = _cased_words(_THREE_DIGITS, _CONTRACTION + "?")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)
_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|" + _SPACES
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of the cased scripts, one range after the other, as DeepSeek's tokenizer.json lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    _DIGITS,
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)


def _table() -> dict[str, PreTokenizer]:
    gpt2 = PreTokenizer((GPT2,))
    digits = PreTokenizer((_DIGIT, GPT2))
    llama3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
    plain_llama3 = PreTokenizer((LLAMA3,))
    qwen2 = PreTokenizer((QWEN2,))
    gpt4o = PreTokenizer((GPT4O,))
    deepseek3 = PreTokenizer((_THREE_DIGITS, _CJK, _DEEPSEEK3))
    groups: list[tuple[str, PreTokenizer]] = [
        # The first name of a kind is the one that is written when a tokenizer.json is turned into GGUF keys.
        ("gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert roberta-bpe "
         "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code", gpt2),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", digits),
        ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", llama3),
        ("smaug-bpe dbrx chatglm-bpe", plain_llama3),
        ("glm4 glm5", PreTokenizer((LLAMA3,), ignore_merges=True)),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", qwen2),
        ("qwen35", PreTokenizer((_QWEN35,))),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", deepseek3),
        ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
        ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
        ("falcon", PreTokenizer((_PUNCTUATION, GPT2, "[0-9][0-9][0-9]"))),
        ("tekken", PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True)),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", gpt4o),
        ("minicpm5", PreTokenizer((_THREE_DIGITS, _words(_DIGITS)), ignore_merges=True)),
        ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
        ("seed-coder", PreTokenizer((_SEED,))),
        ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
        ("viking", PreTokenizer((_BLOOM, _DIGIT))),
        # What llama.cpp does for files from before pre-tokenizers had names.
        ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, _DIGITS, "[0-9][0-9][0-9]"))),
    ]
    return {name: entry for names, entry in groups for name in names.split()}


PRE_TOKENIZERS: dict[str, PreTokenizer] = _table()
"""What each name in `tokenizer.ggml.pre` stands for."""


def get_pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name. Raises TokenizerError, which names it, if it is unknown."""
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre: unknown pre-tokenizer {printable(name)!r}; known are {some(PRE_TOKENIZERS, 100)}; "
            "a model in a Hugging Face folder brings its own tokenizer.json"
        )
    return PRE_TOKENIZERS[name]


def to_json(entry: PreTokenizer) -> dict[str, Any]:
    """The `pre_tokenizer` part of a tokenizer.json, byte-level step included."""
    steps: list[dict[str, Any]] = []
    built_in = entry.patterns[-1] == GPT2
    for pattern in entry.patterns[:-1] if built_in else entry.patterns:
        if pattern in (_DIGIT, _DIGITS):  # the library's own step for it is several times faster than a regular expression
            steps.append({"type": "Digits", "individual_digits": pattern == _DIGIT})
        else:
            steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": built_in}
    return {"type": "Sequence", "pretokenizers": [*steps, byte_level]} if steps else byte_level


# Other spellings of the same patterns: the GPT-2 pattern inside the tokenizers library, without its last branch, and the
# ones that llama.cpp adapted to regular expressions without case folding.
_SPELLINGS = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES: GPT2,
    GPT2.removesuffix(r"|\s+"): GPT2,
    r"\p{N}{1}": _DIGIT,
}
_ADAPTED_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PUNCTUATION_STEPS = {"Contiguous": _PUNCTUATION, "Isolated": r"[\p{P}\$\+<=>\^~\|`]"}


def _patterns(step: dict[str, Any]) -> list[str]:
    """The patterns of one step of a tokenizer.json's pre_tokenizer. Raises TokenizerError if it is of another kind."""
    kind = step.get("type")
    if kind == "Sequence":
        return [pattern for inner in step.get("pretokenizers", []) for pattern in _patterns(inner)]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [GPT2] if step.get("use_regex", True) else []
    if kind == "Digits":
        return [_DIGIT if step.get("individual_digits") else _DIGITS]
    if kind == "Punctuation" and step.get("behavior", "Isolated") in _PUNCTUATION_STEPS:
        return [_PUNCTUATION_STEPS[step.get("behavior", "Isolated")]]
    # Removed with invert keeps exactly what matches, which is the same cut for a pattern that matches all of a text.
    if kind == "Split" and (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True)):
        pattern = (step.get("pattern") or {}).get("Regex")
        if isinstance(pattern, str):
            pattern = pattern.replace(_ADAPTED_CONTRACTION, _CONTRACTION)
            return [_SPELLINGS.get(pattern, pattern)]
    raise TokenizerError(f"tokenizer.json: pre_tokenizer: a step that no GGUF pre-tokenizer has: {printable(step, 300)}")


def name_of(pre_tokenizer: dict[str, Any] | None, ignore_merges: bool) -> str:
    """The GGUF name of the `pre_tokenizer` part of a tokenizer.json.

    Several models share one way of cutting; the name is then the first that means it. Raises TokenizerError, which shows the
    patterns found, if no name means it.
    """
    if not isinstance(pre_tokenizer, dict):
        raise TokenizerError("tokenizer.json: pre_tokenizer: missing, and a byte-level GGUF tokenizer needs one")
    patterns = tuple(_patterns(pre_tokenizer))
    for name, entry in PRE_TOKENIZERS.items():
        if entry.patterns == patterns and entry.ignore_merges == ignore_merges:
            return name
    found = printable(patterns, 300) + (" with ignore_merges" if ignore_merges else "")
    raise TokenizerError(f"tokenizer.json: pre_tokenizer: no GGUF name stands for the patterns {found}")
