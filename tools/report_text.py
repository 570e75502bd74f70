"""A report as tables on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .display import one_line, size_text, table

WORST = 8
"""Tensors that are named by themselves."""


def print_report(data: dict[str, Any]) -> None:
    """Prints what `report_data` gave: sizes, tensors by kind, the worst of them, layers, predictions."""
    model, reference = (one_line(Path(data[key]).name) for key in ("model", "reference"))
    print(f"{model} against {reference}")
    print(f"{size_text(data['bytes'])} instead of {size_text(data['reference_bytes'])}, {data['bits_per_weight']:.3f} bits per weight\n")
    _print_tensors(data["tensors"])
    if data["layers"]:
        _print_layers(data["layers"])
    if data["tokens"]:
        _print_tokens(data["tokens"])
    print(f"\n{data['seconds']:.1f} s")


def scored_text(tokens: dict[str, Any]) -> str:
    """Which tokens were scored, in words."""
    count, chunks = tokens["count"], tokens["chunks"]
    of = "a chunk" if chunks == 1 else f"each of {chunks} chunks"
    return f"{count} tokens, in the second half of {of} of {tokens['chunk']}; text: {one_line(tokens['text'])}"


def kind_of(name: str) -> str:
    """What a tensor is in any layer: attn_q of blk.3.attn_q.weight."""
    pieces = name.removesuffix(".weight").split(".")
    return ".".join(pieces[2:]) if len(pieces) > 2 and pieces[0] == "blk" and pieces[1].isdecimal() else ".".join(pieces)


def _print_tensors(tensors: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for tensor in tensors:
        groups.setdefault((kind_of(tensor["name"]), tensor["format"]), []).append(tensor)
    rows = []
    for (kind, form), members in groups.items():
        worst = min(members, key=lambda t: t["cosine"])
        mean = sum(t["cosine"] for t in members) / len(members)
        error = (sum(t["nmse"] for t in members) / len(members)) ** 0.5
        weights = sum(_weights(t) for t in members)
        bits = 8 * sum(t["bytes"] for t in members) / weights if weights else 0.0
        where = worst["name"] if len(members) > 1 and worst["nmse"] > 0 else ""
        rows.append((kind, form, len(members), f"{bits:.2f}", f"{mean:.6f}", f"{worst['cosine']:.6f}", f"{error:.2%}", where))
    table(("tensors", "format", "number", "bits", "cosine", "worst", "error", "worst one"), rows, right=(2, 3, 4, 5, 6))
    worst_blocks = sorted((t for t in tensors if t["nmse"] > 0), key=lambda t: -t["worst_block"]["error"])[:WORST]
    if worst_blocks:
        print("\nworst blocks of 32 weights, their error in units of the tensor's mean size")
        blocks = [(t["name"], t["format"], t["worst_block"]) for t in worst_blocks]
        cells = [(name, form, f"row {b['row']}, block {b['block']}", f"{b['error']:.2f}") for name, form, b in blocks]
        table(("tensor", "format", "where", "error"), cells, right=(3,))


def _weights(tensor: dict[str, Any]) -> int:
    count = 1
    for size in tensor["shape"]:
        count *= size
    return count


def _print_layers(layers: list[dict[str, Any]]) -> None:
    parts = [key for key, value in layers[0].items() if isinstance(value, dict) and key not in ("weights", "activations")]
    split = "weights" in layers[0]
    print("\nactivations: cosine with the reference, mean over tokens; relative error of the residual stream")
    headings = ["layer", "stream", *parts, "error", *(("by weights", "by activations") if split else ())]
    rows = []
    for layer in layers:
        row = [layer["layer"], f"{layer['cosine']:.5f}", *(f"{layer[part]['cosine']:.5f}" for part in parts), f"{layer['error']:.2%}"]
        if split:
            row += [f"{layer['weights']['error']:.2%}", f"{layer['activations']['error']:.2%}"]
        rows.append(row)
    table(headings, rows, right=range(len(headings)))


def _print_tokens(tokens: dict[str, Any]) -> None:
    print(f"\npredictions: {scored_text(tokens)}")
    rows = [("model", tokens)]
    if "weights" in tokens:
        rows += [("weights alone", tokens["weights"]), ("activations alone", tokens["activations"])]
    table(
        ("against the reference", "KL mean", "median", "99 %", "largest", "top-1", "cosine", "perplexity"),
        [
            (
                name, f"{t['kl_mean']:.5f}", f"{t['kl_median']:.5f}", f"{t['kl_p99']:.4f}", f"{t['kl_max']:.3f}",
                f"{t['top1']:.2%}", f"{t['cosine_mean']:.5f}", f"{t['ppl']:.3f}",
            )
            for name, t in rows
        ],
        right=range(1, 8),
    )  # fmt: skip
    kl, error = tokens["kl_mean"], tokens["kl_standard_error"]
    print(f"perplexity of the reference: {tokens['ppl_reference']:.3f}; KL divergence {kl:.5f} ± {error:.5f} nats")
    if "shares" in tokens:
        shares = tokens["shares"]
        print(f"of that, weights {shares['kl_weights']:.5f} and int8 activations {shares['kl_activations']:+.5f}")
