"""What the divergences of single matrices ("kl" of a tensor in the JSON object) come to: the largest, and sums by kind and format."""

from __future__ import annotations

import math
from typing import Any


def kind_of(name: str) -> str:
    """What a tensor is in any layer: attn_q of blk.3.attn_q.weight."""
    pieces = name.removesuffix(".weight").split(".")
    return ".".join(pieces[2:]) if len(pieces) > 2 and pieces[0] == "blk" and pieces[1].isdecimal() else ".".join(pieces)


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to, or None."""
    pieces = name.split(".")
    return int(pieces[1]) if len(pieces) > 2 and pieces[0] == "blk" and pieces[1].isdecimal() else None


def measured(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tensors whose divergence was measured."""
    return [t for t in tensors if t.get("kl") is not None]


def most_sensitive(tensors: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The tensors with the largest divergences above 0, the largest first. What is not a number comes before all."""
    found = [t for t in measured(tensors) if not t["kl"] <= 0]
    return sorted(found, key=lambda t: (not math.isnan(t["kl"]), -t["kl"]))[:most]


def by_kind(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kind of matrix and format, the largest sum first: {"kind", "format", "tensors", "kl", "bytes", "bytes_share"}.

    bytes_share is that of the bytes of all matrices that were measured.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for tensor in measured(tensors):
        groups.setdefault((kind_of(tensor["name"]), tensor["format"]), []).append(tensor)
    whole = sum(t["bytes"] for t in measured(tensors))
    rows = []
    for (kind, form), members in groups.items():
        nbytes = sum(t["bytes"] for t in members)
        rows.append(
            {
                "kind": kind,
                "format": form,
                "tensors": len(members),
                "kl": math.fsum(t["kl"] for t in members),
                "bytes": nbytes,
                "bytes_share": nbytes / whole if whole else 0.0,
            }
        )
    return sorted(rows, key=lambda row: -row["kl"])


def share_text(kl: float, data: dict[str, Any]) -> str:
    """A divergence as a share of the sum of all; "-" where that is not above 0."""
    whole = data["sensitivity"]["kl_sum"]
    return f"{kl / whole:.2%}" if whole > 0 else "-"


def sensitivity_text(data: dict[str, Any]) -> str:
    """What was measured, in words."""
    about = data["sensitivity"]
    chunks = "1 chunk" if about["chunks"] == 1 else f"{about['chunks']} chunks"
    return (
        "sensitivity: KL divergence of the predictions, nats per token, when one matrix alone is the model's and all else the reference's; "
        f"{chunks} of {about['chunk']} tokens; the sum of all is {about['kl_sum']:.5f}"
    )
