"""How the tensors of a model were made: what each method and format holds, and what it costs."""

from __future__ import annotations

import math
from typing import Any

from ..terminal.display import one_line

NOT_RECORDED = "not recorded"
"""Tensors whose file does not say how they were made, as files of other programs do not."""


def method_shares(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method and format, the one with most bytes first. tensors: those of the JSON object, see report_data.

    The method is what the file has recorded, None if it has not. Vectors that hold what the reference's do are "kept" whatever the file.
    squared_error is summed over the weights; shares are of the sums over all rows, None where such a sum is not above 0. With tensors whose
    divergences ("kl") were measured, these are summed, too. A head that is tied to its embedding is not counted twice.
    """
    groups: dict[tuple[str | None, str], list[dict[str, Any]]] = {}
    for tensor in tensors:
        if tensor["bytes"]:
            kept = "kept" if len(tensor["shape"]) < 2 and tensor["nmse"] == 0 else None
            groups.setdefault((tensor["method"] or kept, tensor["format"]), []).append(tensor)
    measured = any("kl" in tensor for tensor in tensors)
    rows = []
    for (method, form), members in groups.items():
        row = {
            "method": method,
            "format": form,
            "tensors": len(members),
            "weights": sum(math.prod(t["shape"]) for t in members),
            "bytes": sum(t["bytes"] for t in members),
            "squared_error": math.fsum(t["squared_error"] for t in members),
        }
        if measured:
            row["kl"] = math.fsum(t["kl"] for t in members if t["kl"] is not None)
        rows.append(row)
    for key in ("weights", "bytes", "squared_error", *(("kl",) if measured else ())):
        whole = math.fsum(row[key] for row in rows)
        for row in rows:
            row[f"{key}_share"] = row[key] / whole if whole > 0 else None
    return sorted(rows, key=lambda row: -row["bytes"])


def method_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, for METHOD_HEADINGS; with one more cell, for KL_HEADING, where divergences were measured."""
    cells = [one_line(row["method"] or NOT_RECORDED), row["format"], str(row["tensors"])]
    cells += [_share(row[f"{key}_share"]) for key in ("weights", "bytes", "squared_error")]
    if "kl" in row:
        cells.append(_share(row["kl_share"]))
    return tuple(cells)


METHOD_HEADINGS = ("method", "format", "tensors", "weights", "bytes", "squared error")
KL_HEADING = "KL divergence"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}" if math.isfinite(value) else str(value)
