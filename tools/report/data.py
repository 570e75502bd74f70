"""A report as plain data: what `qreport --json` prints, and what the tables and the page are made of."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.measure.benchmark import Benchmark
from ...engine.measure.compare import TensorReport
from ...engine.measure.report import Comparison, Distance, LayerReport, Report, TokenReport
from ...engine.measure.token_errors import TokenErrors
from ...formats.checkpoint import Checkpoint
from .methods import method_shares


@dataclass(frozen=True)
class Sensitivity:
    """kl: mean KL divergence of the output, nats per token, when a matrix alone is the model's, by its name. chunks, chunk: of the text."""

    kl: dict[str, float]
    chunks: int
    chunk: int


@dataclass(frozen=True)
class Speed:
    """What a benchmark with `prompt` tokens of prefill and `tokens` of decode gave."""

    prompt: int
    tokens: int
    result: Benchmark


def report_data(report: Report, text: str, sensitivity: Sensitivity | None = None, speed: Speed | None = None) -> dict[str, Any]:
    """The JSON object of docs/accuracy.md, without the time that it took. text: where the text came from."""
    tensors = [_tensor(t) for t in report.tensors]
    if sensitivity is not None:
        for tensor in tensors:
            same = 0.0 if tensor["nmse"] == 0 and len(tensor["shape"]) > 1 else None  # what changes nothing need not be run
            tensor["kl"] = sensitivity.kl.get(tensor["name"], same)
    found = {
        "model": str(report.model.path),
        "reference": str(report.reference.path),
        "architecture": report.model.architecture,
        "compute": report.compute,
        "bytes": _file_bytes(report.model),
        "reference_bytes": _file_bytes(report.reference),
        "tensor_bytes": report.nbytes,
        "weights": sum(t.weights for t in report.tensors if t.nbytes),
        "bits_per_weight": report.bits_per_weight,
        "tensors": tensors,
        "methods": method_shares(tensors),
        "layers": [_layer(layer) for layer in report.layers],
        "tokens": None if report.tokens is None else _tokens(report.tokens, text),
    }
    if sensitivity is not None:
        found["sensitivity"] = {
            "kl_sum": math.fsum(sensitivity.kl.values()),
            "chunks": sensitivity.chunks,
            "chunk": sensitivity.chunk,
            "text": text,
        }
    if speed is not None:
        found["speed"] = _speed(speed)
    return {**found, "notes": report.notes}


def _file_bytes(checkpoint: Checkpoint) -> int:
    return sum(os.stat(path).st_size for path in checkpoint.files)


def _tensor(t: TensorReport) -> dict[str, Any]:
    row, block = t.errors.worst_block
    return {
        "name": t.name,
        "shape": list(t.shape),
        "format": t.format,
        "reference_format": t.reference_format,
        "method": t.method,
        "bytes": t.nbytes,
        "bits_per_weight": t.bits_per_weight,
        "cosine": t.errors.cosine,
        "nmse": t.errors.nmse,
        "squared_error": t.squared_error,
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


def _speed(speed: Speed) -> dict[str, Any]:
    result = speed.result
    return {
        "prompt": speed.prompt,
        "tokens": speed.tokens,
        "threads": result.threads,
        "prefill": float(np.median(result.prefill_tok_s)),
        "decode": result.decode,
        "prefill_tok_s": result.prefill_tok_s,
        "decode_tok_s": result.decode_tok_s,
    }
