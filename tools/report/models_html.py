"""Several models on one page: their table, size against divergence and against speed, and each model's own figures, folded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engine.measure.report import Report
from ..terminal.display import one_line, size_text
from .html import about, cards, notes, sections
from .models import front, labels, model_rows
from .page import heading, number, page, table
from .svg import COLOURS, Plot, escape
from .text import scored_text, speed_text


def models_html(data: dict[str, Any], reports: Sequence[Report]) -> str:
    """The page. data: the JSON object of several models; reports: in the same order, for the divergence of every token."""
    models = data["models"]
    names = labels([model["model"] for model in models])
    reference = one_line(Path(data["reference"]).name)
    listed = " and ".join((", ".join(names[:-1]), names[-1])) if len(names) <= 3 else f"{len(names)} models"
    headings, rows = model_rows(models)
    parts = [_scored(models), table(headings, rows), '<div class="plots">', _divergences(models, names), _speeds(models, names), "</div>"]
    parts.append(heading("Each model", 2))
    for name, model, report in zip(names, models, reports, strict=True):
        text = f"{size_text(model['bytes'])}, {model['bits_per_weight']:.3f} bits per weight"
        if model["tokens"]:
            text += f", KL divergence {number(model['tokens']['kl_mean'])}"
        parts.append(f'<details class="model"><summary><b>{escape(name)}</b> <span class="soft">{escape(text)}</span></summary>')
        parts += [cards(model), *sections(model, report, 3), "</details>"]
    parts.append(notes(list(dict.fromkeys(note for model in models for note in model["notes"]))))
    return page(f"{listed} against {reference}", about(models[0]), parts)


def _scored(models: list[dict[str, Any]]) -> str:
    """On what text, and what the reference's perplexity is."""
    tokens = next((model["tokens"] for model in models if model["tokens"]), None)
    if tokens is None:
        return ""
    text = f"{scored_text(tokens)}. Perplexity of the reference {tokens['ppl_reference']:.3f}. KL divergence in nats per token."
    return f"<p>{escape(text)}</p>"


def _divergences(models: list[dict[str, Any]], names: list[str]) -> str:
    losses = [model["tokens"]["kl_mean"] if model["tokens"] else math.nan for model in models]
    losses = [loss if loss > 0 else math.nan for loss in losses]  # a model that is the reference has no place on a logarithmic axis
    if not any(map(math.isfinite, losses)):
        return ""
    tips = [f"{name}: {size_text(model['bytes'])}, {number(loss)} nats" for name, model, loss in zip(names, models, losses, strict=True)]
    plot = _size_plot("Size and KL divergence", "KL divergence, mean, nats per token", models, losses, log=True)
    left_out = [name for name, loss in zip(names, losses, strict=True) if not math.isfinite(loss)]
    missing = f'<p class="soft">Not in the plot: {escape(", ".join(left_out))}.</p>' if left_out else ""
    return f"<div>{_pareto(plot, models, names, losses, losses, tips)}{missing}</div>"


def _speeds(models: list[dict[str, Any]], names: list[str]) -> str:
    speeds = [model["speed"]["decode"] if "speed" in model else math.nan for model in models]
    if not any(map(math.isfinite, speeds)):
        return ""
    tips = [f"{name}: {speed_text(model['speed'])}" if "speed" in model else "" for name, model in zip(names, models, strict=True)]
    plot = _size_plot("Size and speed", "decode, tokens/s", models, speeds)
    return f"<div>{_pareto(plot, models, names, speeds, [-speed for speed in speeds], tips)}</div>"


def _size_plot(title: str, y_label: str, models: list[dict[str, Any]], ys: list[float], log: bool = False) -> Plot:
    """Empty axes with room for all models: file size across."""
    _, unit = _unit(models)
    sizes = _sizes(models)
    values = [y for y in ys if math.isfinite(y)]
    room = max(max(sizes) - min(sizes), 0.02 * max(sizes)) * 0.12
    low, high = min(values), max(values)
    limits = (low / 1.35, high * 1.35) if log else (0.0, high * 1.15)
    return Plot(title, f"file, {unit}", y_label, (max(min(sizes) - room, 0.0), max(sizes) + room), limits, 1000, 420, log_y=log)


def _pareto(
    plot: Plot, models: list[dict[str, Any]], names: list[str], ys: list[float], losses: list[float], tips: list[str]
) -> str:
    """The plot with its points, and the front as steps: the best that a file of at most that size reaches."""
    sizes = _sizes(models)
    best = front(sizes, losses)
    steps: list[tuple[float, float]] = []
    for i in best:
        if steps:
            steps.append((sizes[i], steps[-1][1]))
        steps.append((sizes[i], ys[i]))
    if len(best) > 1:
        plot.line([x for x, _ in steps], [y for _, y in steps], "var(--soft)", "best of its size or smaller", dashed=True)
    for i, (size, y, name, tip) in enumerate(zip(sizes, ys, names, tips, strict=True)):
        plot.point(size, y, name, COLOURS[0] if i in best else COLOURS[6], tip)
    return plot.svg()


def _sizes(models: list[dict[str, Any]]) -> list[float]:
    scale, _ = _unit(models)
    return [model["bytes"] / scale for model in models]


def _unit(models: list[dict[str, Any]]) -> tuple[float, str]:
    most = max(model["bytes"] for model in models)
    return next((scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")) if most >= scale or scale == 1.0)
