"""qbench: how fast a model runs here.

    qbench model.hbf                       512 tokens of prefill, 128 of decode, three times
    qbench model.hbf -p 0 -n 64 -t 1       decode only, one thread
    qbench model.hbf --json                one JSON object
    qbench model.hbf --sampling            what choosing tokens costs, for 1 and for 32 sequences

Decode is the whole loop with sampler and detokenizer. Beside it stands the speed of a pure read of memory, measured in the same minute
with the same threads: a large model cannot be decoded faster than its weights can be read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from .terminal.command_line import Parser, check_ranges
from .terminal.console import UsageError, run, safe_text

PROMPT, TOKENS = 512, 128
"""Tokens of prefill and decode if nothing is said."""


def parser() -> argparse.ArgumentParser:
    """The command line of qbench."""
    parser = Parser(
        prog="qbench",
        description="Measure prefill and decode speed of a model, and the speed of memory beside it.",
        epilog="examples: qbench model.hbf | qbench model.hbf -p 0 -n 64 -t 1 | qbench model.gguf --json",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a .hbf or .gguf file, a folder with safetensors, a hub name, or smollm2")
    add("-p", "--prompt", metavar="N", type=int, help=f"tokens of prefill (default {PROMPT}; 0: none)")
    add("-n", "--tokens", metavar="N", type=int, help=f"tokens of decode (default {TOKENS}; 0: none)")
    add("-t", "--threads", metavar="N", type=int, help="worker threads (default: the physical cores this process may use)")
    add("-r", "--repetitions", metavar="N", type=int, default=3, help="how often each is measured (default 3)")
    add("--compute", choices=("int8", "f32"), default="int8", help="activations in matrix products")
    add("--kv-type", choices=("f16", "f32", "q8"), help="keys and values in the cache (default f16; f32 with --compute f32)")
    add("--sampling", action="store_true", help="measure what choosing a token costs instead, beside a step of decode and beside NumPy")
    add("--vocabulary", metavar="N", type=int, help="with --sampling: of a vocabulary of N tokens (default: the model's)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit status. Errors become one line on stderr."""
    return run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)
    check_ranges(
        arguments, (("prompt", 0, 1 << 20), ("tokens", 0, 1 << 20), ("repetitions", 1, 1 << 20), ("vocabulary", 1, 1 << 19))
    )
    if arguments.vocabulary is not None and not arguments.sampling:
        raise UsageError("--vocabulary: it goes with --sampling")
    for option, value in (("--prompt", arguments.prompt), ("--tokens", arguments.tokens)):
        if value is not None and arguments.sampling:
            raise UsageError(f"{option}: with --sampling no text is run, only single steps")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ..engine.engine import Engine
    from ..engine.measure.benchmark import benchmark
    from ..formats.sources import resolve_source

    path = resolve_source(arguments.model)
    if arguments.sampling:
        return _sampling(arguments, path)
    prompt = PROMPT if arguments.prompt is None else arguments.prompt
    tokens = TOKENS if arguments.tokens is None else arguments.tokens
    context = max(prompt, tokens + 2, 64)
    with Engine(path, arguments.compute, arguments.threads, context, kv_type=arguments.kv_type) as engine:
        result = benchmark(engine, prompt, tokens, arguments.repetitions)
    if arguments.json:
        print(
            json.dumps(
                {
                    "model": os.fspath(path),
                    "threads": result.threads,
                    "compute": arguments.compute,
                    "kv_type": result.kv_type,
                    "kv_bytes_per_token": result.kv_bytes_per_token,
                    "prefill_tok_s": result.prefill_tok_s,
                    "decode_tok_s": result.decode_tok_s,
                    "weight_bytes_per_token": result.weight_bytes_per_token,
                    "memory_read_gb_s": result.memory_read_gb_s,
                    "share_of_memory_limit": result.share_of_memory_limit,
                }
            )
        )
        return 0
    spread = lambda values: f"{sorted(values)[len(values) // 2]:9.1f}   ({min(values):.1f} - {max(values):.1f})" if values else "        -"  # noqa: E731
    print(f"{safe_text(os.fspath(path))}, {result.threads} threads, {arguments.compute} activations")
    print(f"  prefill {prompt:5} tokens   {spread(result.prefill_tok_s)} tokens/s")
    print(f"  decode  {tokens:5} tokens   {spread(result.decode_tok_s)} tokens/s")
    print(f"  weights read per token {result.weight_bytes_per_token / 1e6:9.1f} MB")
    print(f"  cache of a token       {result.kv_bytes_per_token / 1e3:9.1f} kB ({result.kv_type})")
    print(f"  memory, pure read      {result.memory_read_gb_s:9.1f} GB/s; decode uses {result.share_of_memory_limit:.0%} of it")
    return 0


def _sampling(arguments: argparse.Namespace, path: str | os.PathLike[str]) -> int:
    """What choosing tokens costs, a line for each way and number of sequences."""
    from ..engine.engine import Engine
    from ..engine.measure.sampling_speed import ROWS, decode_step, measure

    context = 8 * arguments.repetitions + 8
    with Engine(path, arguments.compute, arguments.threads, context, context * max(ROWS), kv_type=arguments.kv_type) as engine:
        vocabulary = arguments.vocabulary or engine.model.vocabulary
        steps = {rows: decode_step(engine, rows, arguments.repetitions) for rows in ROWS}
        threads = engine.model.workers.count
    found = measure(vocabulary, threads, arguments.repetitions)
    if arguments.json:
        print(json.dumps({"model": os.fspath(path), "threads": threads, "vocabulary": vocabulary, "step_ms": steps,
                          "sampling": [vars(speed) for speed in found]}))  # fmt: skip
        return 0
    print(f"{safe_text(os.fspath(path))}, {threads} threads, a vocabulary of {vocabulary} tokens; milliseconds, medians")
    for rows, step in steps.items():
        print(f"  a step of decode of {rows:2} sequences {step:51.3f}")
    for speed in found:
        ours, numpy = speed.medians
        print(f"  {speed.name:52} {speed.rows:2} sequences {ours:9.3f}  {ours / steps[speed.rows]:6.1%} of a step   NumPy {numpy:9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
