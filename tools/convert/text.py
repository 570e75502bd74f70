"""What qconvert did, as tables and as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.sensitivity import kind_of

if TYPE_CHECKING:
    from ...engine.convert.mix import MixResult
    from ...formats.conversion.convert import ConversionResult


def print_result(result: ConversionResult, source: Path, seconds: float, mix: MixResult | None = None) -> None:
    """Tables: formats, the plan if there was one, what is not as asked for; a line with sizes."""
    from ..terminal.display import one_line, size_text, table

    counts: dict[str, list[int]] = {}
    for tensor in result.tensors:
        row = counts.setdefault(tensor.format, [0, 0, 0])
        row[0] += 1
        row[1] += tensor.size
        row[2] += tensor.nbytes
    rows = [
        (name, count, f"{weights:,}", size_text(nbytes), f"{8 * nbytes / weights:.2f}")
        for name, (count, weights, nbytes) in sorted(counts.items(), key=lambda item: -item[1][2])
    ]
    table(("format", "tensors", "weights", "size", "bits per weight"), rows, right=(1, 2, 3, 4))
    if mix is not None:
        _print_plan(mix)
    reasons: dict[tuple[str, str], list[str]] = {}
    chosen = set() if mix is None else {each.name for each in mix.planned}
    for tensor in result.exceptions():
        if tensor.name in chosen:
            continue
        reasons.setdefault((tensor.format, tensor.reason), []).append(tensor.name)
    if reasons:
        print(f"\nnot {result.asked}:")
        for (name, reason), names in reasons.items():
            print(f"  {name}: {reason}: {_names(names)}")
    padded = [f"{one_line(tensor.name)} ({tensor.shape[-1]} to {tensor.padded})" for tensor in result.tensors if tensor.padded]
    if padded:
        print(f"\ncolumns filled up with zeros: {_some(padded)}")
    for name, reason in result.left_out.items():
        print(f"left out: {one_line(name)} {reason}")
    worst = result.worst
    if worst is not None and worst.cosine < 1:
        print(f"\nworst cosine: {worst.cosine:.6f} ({one_line(worst.name)}, {worst.format})")
    print(
        f"\n{one_line(source.name)} {size_text(result.bytes_before)} → {one_line(result.path)} {size_text(result.bytes_after)}, "
        f"{result.bits_per_weight:.3f} bits per weight, {seconds:.1f} s"
    )


def _print_plan(mix: MixResult) -> None:
    """Which matrices got which format, and what that costs."""
    from ...quant.block import get_format
    from ..terminal.display import table

    formats = sorted({form for each in mix.planned for form in each.nbytes}, key=lambda form: get_format(form).bits_per_weight())
    kinds: dict[str, list[Any]] = {}
    for each in mix.planned:
        kinds.setdefault(kind_of(each.name), []).append(each)
    rows = []
    for kind, members in kinds.items():
        counts = [sum(each.format == form for each in members) for form in formats]
        cost = sum(each.costs[each.format] for each in members)
        rows.append((kind, *(count or "" for count in counts), f"{cost:.5f}", _most(members)))
    print("\nthe plan: matrices by format, and the KL divergence that is expected of them")
    table(("matrices", *formats, "KL", "most by one"), rows, right=range(1, len(formats) + 2))
    print(f"expected of all weights, on text like that of the calibration: {mix.predicted:.4f} nats per token")
    if mix.measured is not None:
        print(f"measured, with int8 activations, on the text that qreport takes: {mix.measured:.5f}")


def _most(members: list[Any]) -> str:
    """The matrix that costs most of several."""
    worst = max(members, key=lambda each: each.costs[each.format])
    return f"{worst.costs[worst.format]:.5f} {worst.name}" if len(members) > 1 else ""


def _names(names: list[str]) -> str:
    """Names of tensors, those that differ only in the layer's number as one."""
    from ..terminal.display import one_line

    groups: dict[str, int] = {}
    for name in names:
        key = re.sub(r"\d+", "*", name)
        groups[key] = groups.get(key, 0) + 1
    single = {re.sub(r"\d+", "*", name): name for name in names}
    return _some([f"{one_line(key)} ({count})" if count > 1 else one_line(single[key]) for key, count in groups.items()], 24)


def _some(texts: list[str], most: int = 12) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def print_result_json(result: ConversionResult, source: Path, seconds: float, mix: MixResult | None = None) -> None:
    """The same as one JSON object."""
    from ..terminal.display import print_json

    formats: dict[str, int] = {}
    for tensor in result.tensors:
        formats[tensor.format] = formats.get(tensor.format, 0) + 1
    worst = result.worst
    print_json(
        {
            "source": str(source),
            "output": str(result.path),
            "kind": result.kind,
            "asked": result.asked,
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "bits_per_weight": result.bits_per_weight,
            "formats": formats,
            "exceptions": [{"name": t.name, "format": t.format, "reason": t.reason} for t in result.exceptions()],
            "worst": None if worst is None else {"name": worst.name, "format": worst.format, "cosine": worst.cosine},
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "source": t.source,
                    "format": t.format,
                    "method": t.method,
                    "bytes": t.nbytes,
                    "cosine": t.cosine,
                    "nmse": t.nmse,
                    "padded_columns": t.padded or None,
                    "replaced": t.replaced,
                }
                for t in result.tensors
            ],
            "plan": None if mix is None else _plan_data(mix),
            "left_out": result.left_out,
            "notes": result.notes,
            "seconds": seconds,
        }
    )


def _plan_data(mix: MixResult) -> dict[str, Any]:
    return {
        "kl_expected": mix.predicted,
        "kl_measured": mix.measured,
        "tensors": [{"name": p.name, "format": p.format, "kl": p.costs, "bytes": p.nbytes} for p in mix.planned],
        "recipe": {"format": mix.recipe.format, "method": mix.recipe.method, "tensors": dict(mix.recipe.tensors)},
    }
