"""Which tensor gets which format: the written rule of conversion.

1. A tensor of one dimension (norms, biases, rotary factors) stays float32, and never passes through a narrower type.
2. A matrix of fewer than 32 columns stays float32: one block per row would be mostly padding.
3. A matrix that the source already holds in an accepted format is kept bit for bit. Accepted is the format asked for; if only a
   number of bits was asked for, every format whose codes have that many bits; for embedding and head, also what rule 4 gives, and q8_0.
4. The embedding and the head get at least six bits: a format asked for that has fewer becomes q6_0 (q6_r if its rows have a scale of
   their own, too). Every prediction passes through the head, and rare tokens depend on their one row of the embedding.
5. 16 bits means bf16 for weights that are bf16 in the source, f16 for others; a tensor with weights beyond f16's range (65504)
   gets bf16.
6. Every other matrix gets the format asked for. Columns that are not a multiple of 32 are padded with zeros, and reported.
7. Where a pattern of the recipe is found in a matrix's name, its format goes before rules 3, 4, 6 and 8; of several the last one counts.
8. The router of a mixture of experts is not quantized to integers: it keeps its float type, or becomes float32. It is small, and an error
   in it sends a token to another expert.

Each exception to rule 6 is listed with its reason in what the conversion reports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...quant.block import METHODS, BlockFormat, format_names, get_format
from ...quant.errors import HalfbyteError
from ..decoder import EMBEDDING, HEAD, ROUTER
from ..errors import printable
from ..tensor import Tensor, block_format

BITS = {4: "q4_0", 8: "q8_0", 16: "f16"}
_TOP, _TOP_BY_ROW = "q6_0", "q6_r"
_TOP_BITS = 6.0
SMALLEST = 32
F16_MAX = 65504.0


class RecipeError(HalfbyteError):
    """What was asked for makes no sense."""


@dataclass(frozen=True)
class Choice:
    """The format of one tensor. `reason` is "" if it is the one asked for; `kept` if the blocks of the source are kept as they are."""

    format: str
    reason: str = ""
    kept: bool = False


@dataclass(frozen=True)
class Recipe:
    """What a conversion was asked for.

    bits     4, 8, 16, or None
    format   a block format's name, or None; it goes before `bits`
    method   how scales and codes are chosen: "nearest", "search" or "feedback", for which the model is run on a text (engine's
             convert_feedback); None: the format's default
    tensors  (regular expression, block format's name): formats of matrices by name, see rule 7
    """

    bits: int | None = None
    format: str | None = None
    method: str | None = None
    tensors: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in BITS:
            raise RecipeError(f"--bits {self.bits}: choose {', '.join(map(str, BITS))}")
        if self.method not in (None, *METHODS):
            raise RecipeError(f"--method {self.method}: choose {', '.join(METHODS)}")
        get_format(self.asked)
        for pattern, name in self.tensors:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise RecipeError(
                    f"{printable(pattern, 80)} is no regular expression for names of tensors: {printable(error, 120)}"
                ) from None
            get_format(name)

    @property
    def asked(self) -> str:
        """The format that matrices get if nothing speaks against it."""
        return self.format or BITS[self.bits or 4]

    def choose(self, tensor: Tensor) -> Choice:
        """The format of a tensor, but for rule 5's look at the weights (see `needs_range`)."""
        if tensor.vector:
            return Choice("f32", "one dimension: float32", kept=tensor.format == "f32")
        source = block_format(tensor.format)
        if tensor.columns < SMALLEST:
            return Choice("f32", f"fewer than {SMALLEST} columns", kept=tensor.format == "f32")
        pattern, named = self.named(tensor.name)
        if named is not None:
            return Choice(
                named, f"{pattern} in the recipe" if named != self.asked else "", kept=source is not None and tensor.format == named
            )
        if tensor.name.endswith(f".{ROUTER}.weight") and get_format(self.asked).integers:
            plain = tensor.format if source is not None and not source.integers else "f32"
            return Choice(plain, "router of experts: not quantized", kept=tensor.format == plain)
        asked, reason = self.asked, ""
        if self.format is None and self.bits == 16 and tensor.format == "bf16":
            asked, reason = "bf16", "bf16 in the source"
        accepted = {asked}
        if self.format is None:
            accepted.update(name for name in format_names() if get_format(name).bits == (self.bits or 4))
        if tensor.name in (EMBEDDING, HEAD) and get_format(asked).bits_per_weight() < _TOP_BITS:
            asked, reason = _TOP_BY_ROW if get_format(asked).header_bytes else _TOP, "embedding and head: at least six bits"
            accepted = {_TOP, _TOP_BY_ROW, "q8_0"}
        if source is not None and tensor.format in accepted:
            what = reason if tensor.format == asked else f"{tensor.format} in the source, kept bit for bit"
            return Choice(tensor.format, what, kept=True)
        return Choice(asked, reason)

    def check_without_inputs(self) -> None:
        """Raises RecipeError if the method needs to know what matrices read, for conversions that do not run the model."""
        if self.method == "feedback":
            raise RecipeError("method feedback needs the model to be run: convert with halfbyte.engine.convert.feedback first")

    def named(self, name: str) -> tuple[str, str | None]:
        """(pattern, format) of rule 7 for a matrix of that name; ("", None) if no pattern is found in it."""
        for pattern, form in reversed(self.tensors):
            if re.search(pattern, name):
                return pattern, form
        return "", None

    def unused(self, tensors: Iterable[Tensor]) -> list[str]:
        """A note for each pattern of rule 7 that decides about no matrix."""
        used = {self.named(tensor.name)[0] for tensor in tensors if not tensor.vector}
        return [f"no matrix gets its format by {printable(pattern, 80)}" for pattern, _ in self.tensors if pattern not in used]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the file's provenance."""
        found: dict[str, Any] = {"bits": self.bits, "format": self.asked, "method": self.method or "default"}
        return found | ({"tensors": dict(self.tensors)} if self.tensors else {})


def patterns(formats: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(the format that most matrices get, the patterns of a Recipe that give all others theirs), for formats by names of matrices.

    Matrices that differ in the layer's number alone share a pattern. Embedding and head are always named, because rule 4 speaks of them.
    """
    counts: dict[str, int] = {}
    for form in formats.values():
        counts[form] = counts.get(form, 0) + 1
    main = max(counts, key=lambda form: counts[form])
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, form in formats.items():
        found = re.fullmatch(r"(blk\.)(\d+)(\..*)", name)
        if found:
            groups.setdefault((found[1], found[3], form), []).append(found[2])
        else:
            groups.setdefault((name, "", form), [])
    named = []
    for (before, after, form), layers in groups.items():
        if form != main or before in (EMBEDDING, HEAD):
            numbers = f"({'|'.join(layers)})" if len(layers) > 1 else "".join(layers)
            named.append((f"^{re.escape(before)}{numbers}{re.escape(after)}$", form))
    return main, tuple(named)


def needs_range(choice: Choice, tensor: Tensor) -> bool:
    """True if the weights must be looked at before a tensor can become f16 (rule 5)."""
    return choice.format == "f16" and not choice.kept and tensor.format in ("f64", "f32", "bf16", "f8_e5m2")


def method_of(form: BlockFormat, recipe: Recipe) -> str | None:
    """How the scales of a format are chosen under a recipe, where nothing is known of inputs; None if it has none."""
    if not form.integers:
        return None
    return "search" if recipe.method == "feedback" else recipe.method or getattr(form, "method", None)
