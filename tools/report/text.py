"""A report as tables on a terminal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..terminal.display import one_line, size_text, table
from .methods import KL_HEADING, METHOD_HEADINGS, method_cells
from .models import front, labels, model_rows
from .sensitivity import by_kind, kind_of, most_sensitive, sensitivity_text, share_text

WORST = 8
"""Tensors that are named by themselves."""


def print_report(data: dict[str, Any]) -> None:
    """Prints what `report_data` gave: sizes, tensors by kind, the worst of them, methods, layers, predictions, sensitivity, speed."""
    model, reference = (one_line(Path(data[key]).name) for key in ("model", "reference"))
    print(f"{model} against {reference}")
    print(f"{size_text(data['bytes'])} instead of {size_text(data['reference_bytes'])}, {data['bits_per_weight']:.3f} bits per weight\n")
    _print_tensors(data["tensors"])
    _print_methods(data["methods"])
    if data["layers"]:
        _print_layers(data["layers"])
    if data["tokens"]:
        _print_tokens(data["tokens"])
    if "sensitivity" in data:
        _print_sensitivity(data)
    if "speed" in data:
        speed = data["speed"]
        print(f"\nspeed with {speed['threads']} threads: {speed_text(speed)}")
    print(f"\n{data['seconds']:.1f} s")


def print_models(data: dict[str, Any]) -> None:
    """Prints several models side by side, a row for each, and what was measured of their matrices."""
    models = data["models"]
    print(f"against {one_line(Path(data['reference']).name)}, {size_text(models[0]['reference_bytes'])}")
    ran = next((m["tokens"] for m in models if m["tokens"]), None)
    if ran:
        print(f"predictions: {scored_text(ran)}; perplexity of the reference: {ran['ppl_reference']:.3f}")
    print()
    headings, rows = model_rows(models)
    table(headings, rows, right=range(1, len(headings)))
    speeds = [m["speed"] for m in models if "speed" in m]
    if speeds:
        first = speeds[0]
        print(f"\ndecode of {first['tokens']} tokens and prefill of {first['prompt']}: tokens/s with {first['threads']} threads")
    if ran:
        names = labels([m["model"] for m in models])
        best = front([m["bytes"] for m in models], [m["tokens"]["kl_mean"] if m["tokens"] else math.inf for m in models])
        print(f"\nno other is both smaller and nearer to the reference: {', '.join(names[i] for i in best) or 'none'}")
    for model, name in zip(models, labels([m["model"] for m in models]), strict=True):
        if "sensitivity" in model:
            print(f"\n{name}")
            _print_sensitivity(model)
    print(f"\n{data['seconds']:.1f} s")


def speed_text(speed: dict[str, Any]) -> str:
    """Decode and prefill in words."""
    decode, prefill = (f"{speed[key]:.1f} tokens/s" for key in ("decode", "prefill"))
    return f"decode {decode} ({speed['tokens']} tokens), prefill {prefill} ({speed['prompt']} tokens)"


def scored_text(tokens: dict[str, Any]) -> str:
    """Which tokens were scored, in words."""
    count, chunks = tokens["count"], tokens["chunks"]
    of = "a chunk" if chunks == 1 else f"each of {chunks} chunks"
    return f"{count} tokens, in the second half of {of} of {tokens['chunk']}; text: {one_line(tokens['text'])}"


def _print_tensors(tensors: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for tensor in tensors:
        groups.setdefault((kind_of(tensor["name"]), tensor["format"]), []).append(tensor)
    rows = []
    for (kind, form), members in groups.items():
        worst = min(members, key=lambda t: t["cosine"])
        mean = sum(t["cosine"] for t in members) / len(members)
        error = (sum(t["nmse"] for t in members) / len(members)) ** 0.5
        weights = sum(math.prod(t["shape"]) for t in members)
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


def _print_methods(rows: list[dict[str, Any]]) -> None:
    print("\nhow tensors were made, as the file says; shares of the model, of its summed squared error")
    headings = [*METHOD_HEADINGS, *([KL_HEADING] if "kl" in rows[0] else [])] if rows else METHOD_HEADINGS
    table(headings, [method_cells(row) for row in rows], right=range(2, len(headings)))


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


def _print_sensitivity(data: dict[str, Any]) -> None:
    print(f"\n{sensitivity_text(data)}")
    table(
        ("most sensitive", "format", "KL divergence", "share"),
        [(t["name"], t["format"], f"{t['kl']:.6f}", share_text(t["kl"], data)) for t in most_sensitive(data["tensors"], WORST)],
        right=(2, 3),
    )
    print()
    table(
        ("kind", "format", "number", "KL divergence, sum", "share", "bytes"),
        [
            (row["kind"], row["format"], row["tensors"], f"{row['kl']:.6f}", share_text(row["kl"], data), f"{row['bytes_share']:.2%}")
            for row in by_kind(data["tensors"])
        ],
        right=(2, 3, 4, 5),
    )
