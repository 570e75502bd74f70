"""Rotary position embedding parameters: from config.json to GGUF's keys and tensor, and back.

Two spellings of config.json are read: `rope_theta` beside `rope_scaling` (older), and `rope_parameters` with both inside (newer).
GGUF keeps linear and yarn scaling in `{arch}.rope.scaling.*`, and Llama 3's scaling as the tensor `rope_freqs.weight`,
float32[rotary dimensions / 2], which the frequencies are divided by. A few keys of ours carry what GGUF has no word for; they
begin with `halfbyte.rope.` and other programs pass over them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from .layers import RopeSpec
from .metadata import CheckpointError, Metadata, MetadataTypeError

FACTORS = "rope_freqs.weight"
DYNAMIC_FACTOR = "halfbyte.rope.dynamic_factor"
_LLAMA3 = {
    "factor": "halfbyte.rope.llama3.factor",
    "low_freq_factor": "halfbyte.rope.llama3.low_freq_factor",
    "high_freq_factor": "halfbyte.rope.llama3.high_freq_factor",
    "original_max_position_embeddings": "halfbyte.rope.llama3.original_context_length",
}
_DEFAULT_BASE = 10000.0
FACTOR_RANGE = 1e-3, 1e6
"""Scaling factors that make sense; far outside of it frequencies are no longer finite."""
LEAST_BASE = 1e-3
KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


class UnsupportedRopeError(CheckpointError):
    """A rope_type that is not understood; running the model without it would give wrong text."""


def check(metadata: Metadata, arch: str, base: float) -> None:
    """Raises UnsupportedRopeError for GGUF's keys of a scaling that is not understood, MetadataTypeError for numbers that make no sense."""
    kind = metadata.get(f"{arch}.rope.scaling.type", "none", str)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedRopeError(f"{metadata.source}: '{arch}.rope.scaling.type' {kind!r:.60} is not supported")
    if kind != "none":
        metadata.number(f"{arch}.rope.scaling.factor", *FACTOR_RANGE)
    if kind == "yarn":
        refuse_yarn_base(base, metadata.source, metadata.spelled(f"{arch}.rope.freq_base"))


def rope_spec(metadata: Metadata, arch: str) -> RopeSpec:
    """The rotary table that GGUF's keys describe."""
    scaling = f"{arch}.rope.scaling"
    kind = metadata.get(f"{scaling}.type", "none", str)
    plain = RopeSpec(metadata.count(f"{arch}.rope.dimension_count"), metadata.number(f"{arch}.rope.freq_base"), factors=FACTORS)
    if kind == "linear":
        return replace(plain, scaling=kind, factor=metadata.number(f"{scaling}.factor"))
    if kind == "yarn":
        factor = metadata.number(f"{scaling}.factor")
        return replace(
            plain,
            scaling=kind,
            factor=factor,
            original=metadata.number(f"{scaling}.original_context_length"),
            beta_fast=metadata.number(f"{scaling}.yarn_beta_fast", default=32.0),
            beta_slow=metadata.number(f"{scaling}.yarn_beta_slow", default=1.0),
            amplitude=metadata.number(f"{scaling}.attn_factor", default=1.0) * yarn_attention(factor),
        )
    if metadata.has(DYNAMIC_FACTOR):
        return replace(plain, scaling="dynamic", factor=metadata.number(DYNAMIC_FACTOR))
    return plain


def refuse_yarn_base(base: float, where: str, key: str) -> None:
    """Raises UnsupportedRopeError for a base that yarn's formulas have no logarithm for."""
    if base <= 1:
        raise UnsupportedRopeError(f"{where}: {key!r} is {base:g}; yarn needs one above 1")


def parameters(config: Metadata) -> Metadata:
    """The rope parameters of a config.json in the newer spelling: rope_type, rope_theta and what the type needs.

    Raises UnsupportedRopeError for a type that is not among KINDS or parameters per layer type.
    """
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    values: dict[str, Any] = dict(config.get(key, {}, dict))
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedRopeError(f"{config.source}: {key!r} differs by layer type; this architecture has one rotary embedding")
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in KINDS:
        raise UnsupportedRopeError(f"{config.source}: rope_type {kind!r:.60} is not supported; supported are {', '.join(KINDS)}")
    values["rope_type"] = kind
    spelling = {name: f"{key}.{name}" for name in (*values, *_LLAMA3)}
    if values.get("rope_theta") is None and config.has("rope_theta"):
        values["rope_theta"], spelling["rope_theta"] = config.require("rope_theta"), "rope_theta"
    return Metadata(values, config.source, spelling)


def to_gguf(config: Metadata, arch: str, dimensions: int) -> tuple[dict[str, Any], np.ndarray | None, list[str]]:
    """GGUF's keys, the factors of `rope_freqs.weight` (float32[dimensions / 2]) or None, and notes for the user."""
    rope = parameters(config)
    notes = []
    if not rope.has("rope_theta"):
        notes.append(f"{config.source} has no 'rope_theta'; {_DEFAULT_BASE:g} is used, as transformers does")
    base = rope.number("rope_theta", low=LEAST_BASE, default=_DEFAULT_BASE)
    keys: dict[str, Any] = {f"{arch}.rope.freq_base": base, f"{arch}.rope.dimension_count": dimensions}
    factors = None
    scaling = f"{arch}.rope.scaling"
    match rope["rope_type"]:
        case "linear":
            keys |= {f"{scaling}.type": "linear", f"{scaling}.factor": rope.number("factor", *FACTOR_RANGE)}
        case "dynamic":
            keys[DYNAMIC_FACTOR] = rope.number("factor", *FACTOR_RANGE)
        case "yarn":
            refuse_yarn_base(base, config.source, rope.spelled("rope_theta"))
            keys |= _yarn(config, rope, scaling)
        case "llama3":
            keys |= {ours: rope.number(name, high=1e9) for name, ours in _LLAMA3.items()}
            rope.number("factor", *FACTOR_RANGE)
            factor, low, high, original = (keys[ours] for ours in _LLAMA3.values())
            factors = llama3_factors(base, dimensions, factor, low, high, original, config.source)
    return keys, factors, notes


def _yarn(config: Metadata, rope: Metadata, scaling: str) -> dict[str, Any]:
    factor = rope.number("factor", *FACTOR_RANGE)
    original = rope.count("original_max_position_embeddings", default=config.count("max_position_embeddings"))
    if rope.get("truncate", True, bool) is False:
        raise UnsupportedRopeError(f"{rope.source}: yarn with 'truncate' false is not supported")
    if rope.has("mscale") or rope.has("mscale_all_dim"):
        raise UnsupportedRopeError(f"{rope.source}: yarn with 'mscale' is not supported for this architecture")
    keys = {
        f"{scaling}.type": "yarn",
        f"{scaling}.factor": factor,
        f"{scaling}.original_context_length": original,
        f"{scaling}.yarn_beta_fast": rope.number("beta_fast", default=32.0),
        f"{scaling}.yarn_beta_slow": rope.number("beta_slow", default=1.0),
    }
    if rope.has("attention_factor"):
        # GGUF's factor multiplies the usual one, transformers' replaces it.
        keys[f"{scaling}.attn_factor"] = rope.number("attention_factor") / yarn_attention(factor)
    return keys


def yarn_attention(factor: float) -> float:
    """What yarn multiplies cosines and sines by, unless told otherwise (arXiv 2309.00071, equation 22)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def llama3_factors(
    base: float, dimensions: int, factor: float, low: float, high: float, original: float, where: str = "config.json"
) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by: float32[dimensions / 2], from 1 (short waves) to `factor` (long ones).

    base        the base of the frequencies (rope_theta)
    original    the context length the model was first trained for; waves longer than original / low are stretched by
                `factor`, those shorter than original / high are kept, and between the two it is interpolated
    Raises MetadataTypeError if high is not above low.
    """
    if not high > low:
        raise MetadataTypeError(f"{where}: 'high_freq_factor' ({high:g}) must be above 'low_freq_factor' ({low:g})")
    waves = 2 * np.pi * base ** (np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def to_config(metadata: Metadata, arch: str, factors: np.ndarray | None) -> dict[str, Any]:
    """The other way: `rope_theta` and `rope_scaling` as config.json has them, in the older spelling, which every version reads.

    Raises UnsupportedRopeError for factors that are not those of Llama 3's rule.
    """
    base = metadata.number(f"{arch}.rope.freq_base", default=_DEFAULT_BASE)
    scaling = f"{arch}.rope.scaling"
    kind = metadata.get(f"{scaling}.type", "none", str)
    config: dict[str, Any] = {"rope_theta": base, "rope_scaling": None}
    if factors is not None:
        dimensions = metadata.count(f"{arch}.rope.dimension_count")
        config["rope_scaling"] = {"rope_type": "llama3", **_llama3_from(metadata, base, dimensions, np.asarray(factors))}
    elif metadata.has(DYNAMIC_FACTOR):
        config["rope_scaling"] = {"rope_type": "dynamic", "factor": metadata.number(DYNAMIC_FACTOR)}
    elif kind == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": metadata.number(f"{scaling}.factor")}
    elif kind == "yarn":
        factor = metadata.number(f"{scaling}.factor")
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.count(
                f"{scaling}.original_context_length", default=metadata.count(f"{arch}.context_length")
            ),
            "beta_fast": metadata.number(f"{scaling}.yarn_beta_fast", default=32.0),
            "beta_slow": metadata.number(f"{scaling}.yarn_beta_slow", default=1.0),
        }
        if metadata.has(f"{scaling}.attn_factor"):
            config["rope_scaling"]["attention_factor"] = metadata.number(f"{scaling}.attn_factor") * yarn_attention(factor)
    elif kind != "none":
        raise UnsupportedRopeError(f"{metadata.source}: {scaling}.type {kind!r:.60} has no counterpart in config.json")
    return config


def _llama3_from(metadata: Metadata, base: float, dimensions: int, factors: np.ndarray) -> dict[str, Any]:
    """The four numbers of Llama 3's rule that give these factors. Raises UnsupportedRopeError if none do."""
    numbers = [metadata.get(ours, math.nan, float) for ours in _LLAMA3.values()]
    if not all(map(math.isfinite, numbers)) and len(factors) == dimensions // 2:
        numbers = _fit_llama3(base, dimensions, np.asarray(factors, np.float64))
    sound = all(math.isfinite(number) and number > 0 for number in numbers) and numbers[2] > numbers[1]
    if not sound or not np.allclose(llama3_factors(base, dimensions, *numbers), factors, rtol=1e-5):
        raise UnsupportedRopeError(f"{metadata.source}: {FACTORS} is not Llama 3's scaling; config.json has no word for it")
    return {name: int(n) if name.startswith("original") and n.is_integer() else n for name, n in zip(_LLAMA3, numbers, strict=True)}


def _fit_llama3(base: float, dimensions: int, factors: np.ndarray) -> list[float]:
    """factor, low, high and original for factors of a file that holds nothing else; NaN where they follow no such rule.

    1 / factors = (1 - smooth) / most + smooth, and smooth = (original / wave - low) / (high - low) is linear in 1 / wave. The rule
    knows only ratios of low, high and original, so low is set to 1. Where fewer than two frequencies are interpolated, high is
    taken to be 4, as in all models so far.
    """
    most = float(factors.max())
    waves = 2 * np.pi * base ** (np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    between = np.flatnonzero((factors > 1 + 1e-6) & (factors < most * (1 - 1e-6)))
    smooth = (1 / factors[between] - 1 / most) / (1 - 1 / most)
    if len(between) >= 2:
        slope, start = np.polyfit(1 / waves[between], smooth, 1)
        span = -1 / start if start < 0 else math.nan
        return [_near(number) for number in (most, 1.0, 1 + span, float(slope * span))]
    if len(between) == 1:
        original = float(waves[between[0]] * (1 + 3 * smooth[0]))
    else:
        kept = waves[factors <= 1 + 1e-6]
        original = 4 * float(kept[-1]) if len(kept) else math.nan
    return [_near(number) for number in (most, 1.0, 4.0, original)]


def _near(number: float) -> float:
    """A number that float32 noise has moved off an integer, put back."""
    return float(round(number)) if math.isfinite(number) and abs(number - round(number)) < 1e-3 * max(1.0, abs(number)) else number
