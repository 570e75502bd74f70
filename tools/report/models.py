"""Several models side by side: what they are called, the rows of their table, and which of them no other model beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..terminal.display import one_line, size_text


def labels(paths: Sequence[str]) -> list[str]:
    """What each model is called: the name of its file, with as many of its folders as tell it from the others."""
    parts = [Path(path).parts for path in paths]
    found = []
    for own in parts:
        others = [other for other in parts if other != own]
        length = 1
        while length < len(own) and any(other[-length:] == own[-length:] for other in others):
            length += 1
        found.append(one_line(str(Path(*own[-length:])) if own else "."))
    return found


def model_rows(models: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(headings, cells): a row for each model, with the columns that any of them has. models: JSON objects, see report_data.

    "of weights" and "of activations" are parts of the mean KL divergence; decode and prefill are tokens per second.
    """
    names = labels([data["model"] for data in models])
    ran = any(data["tokens"] for data in models)
    split = any(data["tokens"] and "shares" in data["tokens"] for data in models)
    timed = any("speed" in data for data in models)
    headings = ["model", "file", "bits"]
    headings += ["KL mean", "median", "99 %", "top-1", "perplexity"] if ran else ["worst cosine", "error"]
    headings += ["of weights", "of activations"] if split else []
    headings += ["decode", "prefill"] if timed else []
    rows = []
    for name, data in zip(names, models, strict=True):
        row = [name, size_text(data["bytes"]), f"{data['bits_per_weight']:.3f}"]
        tokens = data["tokens"]
        if tokens:
            kl, error = tokens["kl_mean"], tokens["kl_standard_error"]
            row += [f"{kl:.5f} ± {error:.5f}", f"{tokens['kl_median']:.5f}", f"{tokens['kl_p99']:.4f}"]
            row += [f"{tokens['top1']:.2%}", f"{tokens['ppl']:.3f}"]
            if "shares" in tokens:
                row += [f"{tokens['shares']['kl_weights']:.5f}", f"{tokens['shares']['kl_activations']:+.5f}"]
        elif not ran:
            row += _tensor_cells(data["tensors"])
        row += ["-"] * (len(headings) - (2 if timed else 0) - len(row))
        if timed:
            speed = data.get("speed")
            row += [f"{speed['decode']:.1f}", f"{speed['prefill']:.1f}"] if speed else ["-", "-"]
        rows.append(row)
    return headings, rows


def _tensor_cells(tensors: list[dict[str, Any]]) -> list[str]:
    """The worst cosine of a tensor, and the error of all tensors that have one, root mean square, relative to the reference's weights."""
    changed = [t for t in tensors if t["nmse"] != 0]
    error = math.fsum(t["squared_error"] for t in changed)
    energy = math.fsum(t["squared_error"] / t["nmse"] for t in changed)  # 0 where the reference has nothing but zeros
    share = math.sqrt(error / energy) if energy else math.inf if error else 0.0
    return [f"{min((t['cosine'] for t in tensors), default=1.0):.6f}", f"{share:.2%}"]


def front(costs: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Numbers of those that no other equals or beats in both, from the cheapest to the best: the Pareto front.

    What is not finite is left out; of several that are alike the first is taken.
    """
    finite = [i for i, pair in enumerate(zip(costs, losses, strict=True)) if all(map(math.isfinite, pair))]
    found: list[int] = []
    for i in sorted(finite, key=lambda i: (costs[i], losses[i])):
        if not found or losses[i] < losses[found[-1]]:
            found.append(i)
    return found
