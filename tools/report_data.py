"""A report as plain data: what `qreport --json` prints, and what the table and the page are made of."""

from __future__ import annotations

import os
from typing import Any

from ..engine.compare import TensorReport
from ..engine.report import Comparison, Distance, LayerReport, Report, TokenReport
from ..formats.checkpoint import Checkpoint
from ..quant.measures import TokenErrors


def report_data(report: Report, text: str, seconds: float) -> dict[str, Any]:
    """The JSON object of docs/accuracy.md. text: where the text came from."""
    return {
        "model": str(report.model.path),
        "reference": str(report.reference.path),
        "architecture": report.model.architecture,
        "compute": report.compute,
        "bytes": _file_bytes(report.model),
        "reference_bytes": _file_bytes(report.reference),
        "tensor_bytes": report.nbytes,
        "weights": sum(t.weights for t in report.tensors if t.nbytes),
        "bits_per_weight": report.bits_per_weight,
        "tensors": [_tensor(t) for t in report.tensors],
        "layers": [_layer(layer) for layer in report.layers],
        "tokens": None if report.tokens is None else _tokens(report.tokens, text),
        "notes": report.notes,
        "seconds": seconds,
    }


def _file_bytes(checkpoint: Checkpoint) -> int:
    return sum(os.stat(path).st_size for path in checkpoint.files)


def _tensor(t: TensorReport) -> dict[str, Any]:
    row, block = t.errors.worst_block
    return {
        "name": t.name,
        "shape": list(t.shape),
        "format": t.format,
        "reference_format": t.reference_format,
        "bytes": t.nbytes,
        "bits_per_weight": t.bits_per_weight,
        "cosine": t.errors.cosine,
        "nmse": t.errors.nmse,
        "max_error": t.errors.max_error,
        "worst_block": {"row": row, "block": block, "error": t.errors.worst_block_error},
    }


def _layer(layer: LayerReport) -> dict[str, Any]:
    return {"layer": layer.layer, **_comparison(layer.stream), **{name: _comparison(part) for name, part in layer.parts.items()}}


def _comparison(c: Comparison) -> dict[str, Any]:
    found = _distance(c.total)
    if c.weights is not None and c.activations is not None:
        found |= {"weights": _distance(c.weights), "activations": _distance(c.activations)}
    return found


def _distance(d: Distance) -> dict[str, Any]:
    return {"cosine": d.cosine, "cosine_min": d.cosine_min, "error": d.error}


def _tokens(tokens: TokenReport, text: str) -> dict[str, Any]:
    found = {
        **_predictions(tokens.total),
        "kl_standard_error": tokens.standard_error,
        "chunks": tokens.chunks,
        "chunk": tokens.chunk,
        "text": text,
    }
    if tokens.weights is not None and tokens.activations is not None:
        whole, alone = tokens.total.kl_mean, tokens.weights.kl_mean
        found["weights"] = _predictions(tokens.weights)
        found["activations"] = _predictions(tokens.activations)
        found["shares"] = {"kl_weights": alone, "kl_activations": whole - alone, "weights": alone / whole if whole > 0 else None}
    return found


def _predictions(errors: TokenErrors) -> dict[str, Any]:
    return {
        "count": errors.count,
        "kl_mean": errors.kl_mean,
        "kl_median": errors.kl_median,
        "kl_p99": errors.kl_p99,
        "kl_max": errors.kl_max,
        "top1": errors.top1,
        "ppl": errors.ppl,
        "ppl_reference": errors.ppl_reference,
        "cosine_mean": errors.cosine_mean,
    }
