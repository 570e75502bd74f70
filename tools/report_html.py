"""A report as one page that needs nothing else: numbers, plots as inline SVG, tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.report import Report
from .display import one_line, size_text
from .report_text import kind_of, scored_text
from .svg import COLOURS, Plot, escape

_STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --soft: #59636e; --rule: #d8dee4; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e9ec; --soft: #9aa4ae; --rule: #33393f; --card: #1d2125; }
}
body { margin: 2rem auto; max-width: 1060px; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
body { background: var(--paper); color: var(--ink); }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .6rem 1rem; min-width: 8.5rem; }
.card b { display: block; font-size: 1.25rem; } .card span { color: var(--soft); font-size: .85rem; }
.card b, table { font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; }
th, td { padding: .22rem .75rem .22rem 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; } .plots { display: flex; flex-wrap: wrap; gap: .8rem; }
details { margin: .8rem 0; } summary { cursor: pointer; }
svg { max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-weight: 600; font-size: 12.5px; fill: var(--ink); }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--soft); stroke-width: 1; }
"""


def report_html(data: dict[str, Any], report: Report) -> str:
    """The page. data: what report_data gave; report: for the divergence of every token."""
    title = f"{_name(data['model'])} against {_name(data['reference'])}"
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Accuracy report by Halfbyte. Architecture {escape(one_line(data["architecture"] or "not known"))}; '
        f"model run with {'8-bit' if data['compute'] == 'int8' else 'float32'} activations, reference with float32.</p>",
        _cards(data),
    ]
    if data["tokens"] and report.tokens is not None:
        parts.append(_tokens(data["tokens"], report.tokens.divergences))
    if data["layers"]:
        parts.append(_layers(data["layers"]))
    parts.append(_tensors(data["tensors"]))
    if data["notes"]:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(one_line(note))}</li>" for note in data["notes"]) + "</ul>")
    parts.append("</body></html>\n")
    return "".join(parts)


def _name(path: str) -> str:
    return one_line(Path(path).name)


def _cards(data: dict[str, Any]) -> str:
    cards = [
        (size_text(data["bytes"]), f"file, instead of {size_text(data['reference_bytes'])}"),
        (f"{data['bits_per_weight']:.3f}", "bits per weight"),
    ]
    tokens = data["tokens"]
    if tokens:
        cards += [
            (_number(tokens["kl_mean"]), "KL divergence, mean, nats"),
            (_percent(tokens["top1"]), "same most likely token"),
            (f"{tokens['ppl']:.3f}", f"perplexity, reference {tokens['ppl_reference']:.3f}"),
        ]
    quantized = [t for t in data["tensors"] if t["nmse"] > 0]
    if quantized:
        worst = min(quantized, key=lambda t: t["cosine"])
        cards.append((f"{worst['cosine']:.5f}", f"worst tensor: {one_line(worst['name'])}"))
    boxes = "".join(f'<div class="card"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in cards)
    return f'<div class="cards">{boxes}</div>'


# ---- predictions -----------------------------------------------------------------------------------------------------


def _tokens(tokens: dict[str, Any], divergences: np.ndarray) -> str:
    headings = ("", "KL mean", "median", "99 %", "largest", "same top token", "cosine of logits", "perplexity")
    rows = [("model", tokens)]
    if "weights" in tokens:
        rows += [("its weights alone", tokens["weights"]), ("its activations alone", tokens["activations"])]
    cells = [
        (
            name, *(_number(t[key]) for key in ("kl_mean", "kl_median", "kl_p99", "kl_max")),
            _percent(t["top1"]), f"{t['cosine_mean']:.5f}", f"{t['ppl']:.3f}",
        )
        for name, t in rows
    ]  # fmt: skip
    text = f"{scored_text(tokens)}. KL divergence {_number(tokens['kl_mean'])} ± {_number(tokens['kl_standard_error'])} nats per token."
    if "shares" in tokens:
        shares = tokens["shares"]
        text += f" Of that, weights {_number(shares['kl_weights'])} and 8-bit activations {_number(shares['kl_activations'])}."
    return f"<h2>Predictions</h2><p>{escape(text)}</p>{_table(headings, cells)}{_histogram(tokens, divergences)}"


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
        plot.rule(tokens[key], f"{name} {_number(tokens[key])}", left=key == "kl_median" and tokens["kl_median"] < tokens["kl_mean"])
    return plot.svg()


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers(layers: list[dict[str, Any]]) -> str:
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
    return f"<h2>Layers</h2>{plots}"


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _tensors(tensors: list[dict[str, Any]]) -> str:
    quantized = [t for t in tensors if t["nmse"] > 0]
    formats = list(dict.fromkeys(t["format"] for t in quantized))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(formats)}
    kinds: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for t in quantized:
        layer = _layer_of(t["name"])
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
    others = [t for t in quantized if _layer_of(t["name"]) is None]
    outside = ", ".join(f"{one_line(t['name'])} {t['format']} {_percent(math.sqrt(t['nmse']))}" for t in others if t["nmse"] >= 0)
    headings = ("tensor", "shape", "format", "was", "bits", "cosine", "relative error", "worst block", "its error")
    rows = [
        (
            one_line(t["name"]), " × ".join(map(str, t["shape"])), t["format"], t["reference_format"], f"{t['bits_per_weight']:.2f}",
            f"{t['cosine']:.6f}", _percent(math.sqrt(t["nmse"]) if t["nmse"] >= 0 else math.nan),
            f"row {t['worst_block']['row']}, block {t['worst_block']['block']}" if t["nmse"] > 0 else "",
            _number(t["worst_block"]["error"]),
        )
        for t in tensors
    ]  # fmt: skip
    return (
        "<h2>Tensors</h2><p>Error of the weights, root mean square, relative to the weights of the reference. "
        "The worst block is the 32 weights with the largest error, in units of the tensor's root mean square.</p>"
        f'<div class="plots">{"".join(plots)}</div>'
        + (f"<p>Outside the layers: {escape(outside)}.</p>" if outside else "")
        + f"<details><summary>All {len(tensors)} tensors</summary>{_table(headings, rows)}</details>"
    )


def _layer_of(name: str) -> int | None:
    pieces = name.split(".")
    return int(pieces[1]) if len(pieces) > 2 and pieces[0] == "blk" and pieces[1].isdecimal() else None


# ---- text ------------------------------------------------------------------------------------------------------------


def _table(headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 5e-5 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value:.2%}" if math.isfinite(value) else str(value)
