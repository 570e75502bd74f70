"""A report as one page that needs nothing else: numbers, plots as inline SVG, tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.measure.report import Report
from ..terminal.display import one_line, size_text
from .methods import KL_HEADING, METHOD_HEADINGS, method_cells
from .page import heading, number, page, percent, table
from .sensitivity import by_kind, kind_of, layer_of, measured, most_sensitive, sensitivity_text
from .svg import COLOURS, Plot, escape, heat_map, horizontal_bars
from .text import scored_text

MOST_SENSITIVE = 20
"""Tensors whose divergences are drawn by themselves."""


def report_html(data: dict[str, Any], report: Report) -> str:
    """The page. data: what report_data gave; report: for the divergence of every token."""
    title = f"{_name(data['model'])} against {_name(data['reference'])}"
    return page(title, about(data), [cards(data), *sections(data, report), notes(data["notes"])])


def about(data: dict[str, Any]) -> str:
    """How models were run, in words."""
    return (
        f"Accuracy report by Halfbyte. Architecture {one_line(data['architecture'] or 'not known')}; "
        f"models run with {'8-bit' if data['compute'] == 'int8' else 'float32'} activations, reference with float32."
    )


def sections(data: dict[str, Any], report: Report, level: int = 2) -> list[str]:
    """Everything about one model, each part below a heading of that level."""
    parts = []
    if data["tokens"] and report.tokens is not None:
        parts.append(_tokens(data["tokens"], report.tokens.divergences, level))
    if data["layers"]:
        parts.append(_layers(data["layers"], level))
    if "sensitivity" in data:
        parts.append(_sensitivity(data, level))
    parts.append(_methods(data["methods"], level))
    parts.append(_tensors(data["tensors"], level))
    return parts


def notes(texts: Sequence[str]) -> str:
    """Remarks as a list, "" if there are none."""
    items = "".join(f"<li>{escape(one_line(text))}</li>" for text in texts)
    return f"{heading('Notes', 2)}<ul>{items}</ul>" if items else ""


def _name(path: str) -> str:
    return one_line(Path(path).name)


def cards(data: dict[str, Any]) -> str:
    """The most important figures of a model."""
    found = [
        (size_text(data["bytes"]), f"file, instead of {size_text(data['reference_bytes'])}"),
        (f"{data['bits_per_weight']:.3f}", "bits per weight"),
    ]
    tokens = data["tokens"]
    if tokens:
        found += [
            (number(tokens["kl_mean"]), "KL divergence, mean, nats"),
            (percent(tokens["top1"]), "same most likely token"),
            (f"{tokens['ppl']:.3f}", f"perplexity, reference {tokens['ppl_reference']:.3f}"),
        ]
    if "speed" in data:
        speed = data["speed"]
        found.append((f"{speed['decode']:.1f}", f"tokens/s decode; prefill {speed['prefill']:.1f}"))
    quantized = [t for t in data["tensors"] if t["nmse"] > 0]
    if quantized:
        worst = min(quantized, key=lambda t: t["cosine"])
        found.append((f"{worst['cosine']:.5f}", f"worst tensor: {one_line(worst['name'])}"))
    boxes = "".join(f'<div class="card"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in found)
    return f'<div class="cards">{boxes}</div>'


# ---- predictions -----------------------------------------------------------------------------------------------------


def _tokens(tokens: dict[str, Any], divergences: np.ndarray, level: int) -> str:
    headings = ("", "KL mean", "median", "99 %", "largest", "same top token", "cosine of logits", "perplexity")
    rows = [("model", tokens)]
    if "weights" in tokens:
        rows += [("its weights alone", tokens["weights"]), ("its activations alone", tokens["activations"])]
    cells = [
        (
            name, *(number(t[key]) for key in ("kl_mean", "kl_median", "kl_p99", "kl_max")),
            percent(t["top1"]), f"{t['cosine_mean']:.5f}", f"{t['ppl']:.3f}",
        )
        for name, t in rows
    ]  # fmt: skip
    text = f"{scored_text(tokens)}. KL divergence {number(tokens['kl_mean'])} ± {number(tokens['kl_standard_error'])} nats per token."
    if "shares" in tokens:
        shares = tokens["shares"]
        text += f" Of that, weights {number(shares['kl_weights'])} and 8-bit activations {number(shares['kl_activations'])}."
    return f"{heading('Predictions', level)}<p>{escape(text)}</p>{table(headings, cells)}{_histogram(tokens, divergences)}"


def _histogram(tokens: dict[str, Any], divergences: np.ndarray) -> str:
    """Token divergences on a logarithmic axis; what is 0 or below (rounding) counts in the lowest bin."""
    finite = divergences[np.isfinite(divergences)]
    if not finite.size:
        return ""
    high = max(float(finite.max()), 1e-8)
    low = max(min(float(np.quantile(finite, 0.005)), high / 10), high * 1e-7, 1e-9)
    first, last = math.floor(10 * math.log10(low)), math.ceil(10 * math.log10(high)) + 1
    edges = 10.0 ** (np.arange(first, last + 1) / 10)
    counts, _ = np.histogram(np.clip(finite, edges[0], edges[-1]), edges)
    plot = Plot(
        "KL divergence of single tokens", "KL divergence from the reference, nats", "tokens",
        (float(edges[0]), float(edges[-1])), (0.0, float(counts.max()) * 1.2), log_x=True, width=1000,
    )  # fmt: skip
    for a, b, count in zip(edges[:-1], edges[1:], counts, strict=True):
        plot.bar(float(a) * 1.01, float(b) * 0.99, float(count), COLOURS[0], f"{a:.2g} to {b:.2g}: {count} tokens")
    for key, name in (("kl_median", "median"), ("kl_mean", "mean"), ("kl_p99", "99 %")):
        plot.rule(tokens[key], f"{name} {number(tokens[key])}", left=key == "kl_median" and tokens["kl_median"] < tokens["kl_mean"])
    return plot.svg()


# ---- how it was made -------------------------------------------------------------------------------------------------


def _methods(rows: list[dict[str, Any]], level: int) -> str:
    if not rows:
        return ""
    headings = [*METHOD_HEADINGS, *([KL_HEADING] if "kl" in rows[0] else [])]
    text = "How tensors were made, as the file itself says: their number, and their shares of weights, bytes and summed squared error"
    text += ", and of the summed KL divergences of single matrices." if "kl" in rows[0] else "."
    return f"{heading('Methods', level)}<p>{escape(text)}</p>{table(headings, [method_cells(row) for row in rows])}"


def _sensitivity(data: dict[str, Any], level: int) -> str:
    tensors = measured(data["tensors"])
    kinds = list(dict.fromkeys(kind_of(t["name"]) for t in tensors if layer_of(t["name"]) is not None))
    layers = sorted({layer for t in tensors if (layer := layer_of(t["name"])) is not None})
    cells = {
        (kinds.index(kind_of(t["name"])), layers.index(layer)): (t["kl"], _sensitivity_tip(t))
        for t in tensors
        if (layer := layer_of(t["name"])) is not None
    }
    colour = format_colours(tensors)
    sums, worst = by_kind(tensors), most_sensitive(tensors, MOST_SENSITIVE)
    bars = [
        horizontal_bars(
            "Sum by kind and format", "KL divergence, nats per token",
            [
                (
                    f"{one_line(row['kind'])} {row['format']}", row["kl"], colour[row["format"]],
                    f"{row['tensors']} tensors: {number(row['kl'])}, {percent(row['bytes_share'])} of the bytes",
                )
                for row in sums
            ],
        ),
        horizontal_bars(
            f"The {len(worst)} most sensitive tensors", "KL divergence, nats per token",
            [
                (f"{one_line(t['name'].removesuffix('.weight'))} {t['format']}", t["kl"], colour[t["format"]], _sensitivity_tip(t))
                for t in worst
            ],
        ),
    ]  # fmt: skip
    plot = heat_map("KL divergence by layer and kind", "layer", list(map(str, layers)), list(map(one_line, kinds)), cells, "nats per token")
    text = sensitivity_text(data).removeprefix("sensitivity: ")
    return f'{heading("Sensitivity", level)}<p>{escape(text)}.</p>{plot}<div class="plots">{"".join(bars)}</div>'


def _sensitivity_tip(tensor: dict[str, Any]) -> str:
    return f"{one_line(tensor['name'])}, {tensor['format']}: {number(tensor['kl'])}"


def format_colours(tensors: list[dict[str, Any]]) -> dict[str, str]:
    """A colour for each format."""
    formats = dict.fromkeys(t["format"] for t in tensors)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(formats)}


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers(layers: list[dict[str, Any]], level: int) -> str:
    numbers = [layer["layer"] for layer in layers]
    parts = [key for key, value in layers[0].items() if isinstance(value, dict) and key not in ("weights", "activations")]
    series = [("residual stream", [layer["cosine"] for layer in layers])]
    series += [(f"what {part} adds", [layer[part]["cosine"] for layer in layers]) for part in parts]
    values = [v for _, each in series for v in each if math.isfinite(v)]
    span = (numbers[0] - 0.3, numbers[-1] + 0.3)
    low = min(values, default=0.0)
    limits = (low - max(0.05 * (1 - low), 1e-9), 1.0)
    cosines = Plot("Cosine with the reference, mean over tokens", "layer", "cosine", span, limits, width=1000, whole_x=True)
    for (name, ys), colour in zip(series, COLOURS, strict=False):
        cosines.line(numbers, ys, colour, name)

    errors = [("all", [layer["error"] for layer in layers], False)]
    if "weights" in layers[0]:
        errors += [("weights alone", [layer["weights"]["error"] for layer in layers], True)]
        errors += [("activations alone", [layer["activations"]["error"] for layer in layers], False)]
    values = [v for _, each, _ in errors for v in each if math.isfinite(v) and v > 0]
    plots = cosines.svg()
    if values:
        limits = (10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)) + 1e-9))
        plot = Plot(
            "Relative error of the residual stream", "layer", "|difference| / |reference|", span, limits,
            width=1000, log_y=True, percent=True, whole_x=True,
        )  # fmt: skip
        for (name, ys, dashed), colour in zip(errors, (COLOURS[1], "var(--ink)", COLOURS[0]), strict=False):
            plot.line(numbers, ys, colour, name, dashed)
        plots += plot.svg()
    return heading("Layers", level) + plots


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _tensors(tensors: list[dict[str, Any]], level: int) -> str:
    quantized = [t for t in tensors if t["nmse"] > 0]
    colour = format_colours(quantized)
    kinds: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for t in quantized:
        layer = layer_of(t["name"])
        if layer is not None:
            kinds.setdefault(kind_of(t["name"]), []).append((layer, t))
    top = max((math.sqrt(t["nmse"]) for members in kinds.values() for _, t in members if math.isfinite(t["nmse"])), default=0.0)
    plots = []
    if top > 0:
        last = max(layer for members in kinds.values() for layer, _ in members)
        for kind, members in kinds.items():
            plot = Plot(
                one_line(kind), "layer", "relative error", (-0.6, last + 0.6), (0.0, top * 1.05),
                width=500, height=210, percent=True, whole_x=True,
            )  # fmt: skip
            for layer, t in members:
                error = math.sqrt(t["nmse"])
                tip = f"{one_line(t['name'])}, {t['format']}: error {error:.3%}, cosine {t['cosine']:.6f}"
                plot.bar(layer - 0.4, layer + 0.4, error, colour[t["format"]], tip, t["format"])
            plots.append(plot.svg())
    others = [t for t in quantized if layer_of(t["name"]) is None]
    outside = ", ".join(f"{one_line(t['name'])} {t['format']} {percent(math.sqrt(t['nmse']))}" for t in others if t["nmse"] >= 0)
    headings = ("tensor", "shape", "format", "was", "bits", "cosine", "relative error", "worst block", "its error")
    rows = [
        (
            one_line(t["name"]), " × ".join(map(str, t["shape"])), t["format"], t["reference_format"], f"{t['bits_per_weight']:.2f}",
            f"{t['cosine']:.6f}", percent(math.sqrt(t["nmse"]) if t["nmse"] >= 0 else math.nan),
            f"row {t['worst_block']['row']}, block {t['worst_block']['block']}" if t["nmse"] > 0 else "",
            number(t["worst_block"]["error"]),
        )
        for t in tensors
    ]  # fmt: skip
    return (
        heading("Tensors", level) + "<p>Error of the weights, root mean square, relative to the weights of the reference. "
        "The worst block is the 32 weights with the largest error, in units of the tensor's root mean square.</p>"
        f'<div class="plots">{"".join(plots)}</div>'
        + (f"<p>Outside the layers: {escape(outside)}.</p>" if outside else "")
        + f"<details><summary>All {len(tensors)} tensors</summary>{table(headings, rows)}</details>"
    )

