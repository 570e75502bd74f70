"""qcalibrate: what the inputs of a model's matrices are like, for quantizing it well.

    qcalibrate model/                            on a text that comes along; model.calibration.safetensors beside it
    qcalibrate model/ --text my.txt --tokens 50000 -o my.calibration.safetensors
    qcalibrate model/ --gram                     with the Gram matrices that error feedback needs

docs/calibration.md says what the file holds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal.command_line import Parser, check_ranges
from .terminal.console import run

if TYPE_CHECKING:
    from ..engine.convert.calibration import InputStatistics
    from ..formats.checkpoint import Checkpoint

_MOST_TOKENS = 1 << 26


def parser() -> argparse.ArgumentParser:
    """The command line of qcalibrate."""
    parser = Parser(
        prog="qcalibrate",
        description="Run a model over a text and keep what the inputs of its matrices are like, for quantizing it well.",
        epilog="examples: qcalibrate model/ | qcalibrate model/ --text my.txt --tokens 50000 -o my.calibration.safetensors",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face folder, a .safetensors, .gguf or .hbf file, or a hub name; best the original")
    add("--text", metavar="FILE", help="text to run, UTF-8; - is stdin (default: a mixture of prose, verse, code and dialogue)")
    add("--tokens", metavar="N", type=int, help="tokens of the text, in whole chunks (default 24576)")
    add("--chunk", metavar="N", type=int, help="tokens of a context (default 512, or the model's context)")
    add("-o", "--output", metavar="STATS", help="default: beside the model")
    add("--gram", action="store_true", help="keep Gram matrices, too: large, and only needed to convert more than once")
    add("-t", "--threads", metavar="N", type=int, help="worker threads (default: the physical cores this process may use)")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit status. Errors become one line on stderr."""
    return run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)
    check_ranges(arguments, (("tokens", 1, _MOST_TOKENS), ("chunk", 4, 1 << 20), ("threads", 1, 512)))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ..formats.opening import open_checkpoint
    from ..formats.sources import resolve_source
    from .terminal.display import note

    path = resolve_source(arguments.model, note)
    output = _default_output(arguments.model, path) if arguments.output is None else Path(arguments.output)
    with open_checkpoint(path) as checkpoint:
        for text in checkpoint.notes:
            note(text)
        result = _calibrate(checkpoint, output, arguments)
    if arguments.json:
        from .terminal.display import print_json

        print_json(result)
    else:
        from .terminal.display import one_line, size_text

        print(
            f"{one_line(path.name)}: {result['inputs']} inputs of {result['matrices']} matrices over {result['tokens']} tokens → "
            f"{one_line(output)} {size_text(result['bytes'])}, {result['seconds']:.1f} s"
        )
    return 0


def _default_output(name: str, path: Path) -> Path:
    """Beside the model; what was fetched into a cache goes to the current folder."""
    from ..formats.sources import default_output

    own = Path(name).exists() or path.parent == Path(name).parent
    found = default_output(path if own else Path(name), "safetensors", "calibration")
    return (found if own else Path.cwd() / found.name).with_name(f"{found.name}.safetensors")


def _calibrate(checkpoint: Checkpoint, output: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from ..engine.convert.calibration import Calibration, stacks, token_counts
    from ..engine.convert.calibration_text import TOKENS, built_in_text, calibration_tokens
    from ..formats.conversion.convert import inputs as model_inputs
    from ..formats.conversion.statistics import StatisticsWriter, fingerprint
    from .terminal.display import note
    from .terminal.stages import stages, token_rate
    from .terminal.text_file import read_text, text_name

    start = time.perf_counter()
    wanted = TOKENS if arguments.tokens is None else arguments.tokens
    text = built_in_text() if arguments.text is None else read_text(arguments.text, wanted)
    texts, notes = calibration_tokens(checkpoint, text, wanted, arguments.chunk)
    for each in notes:
        note(each)
    metadata = {
        "model": checkpoint.path.name,
        "model_fingerprint": fingerprint(checkpoint),
        "architecture": str(checkpoint.architecture),
        "text": text_name(arguments.text),
        "tokens_sha256": hashlib.sha256(texts.astype("<i8").tobytes()).hexdigest(),
        "tokens": str(texts.size),
        "chunk": str(texts.shape[1]),
    }
    counts = token_counts(checkpoint, texts)
    sources = [*model_inputs(checkpoint), *([] if arguments.text in (None, "-") else [arguments.text])]
    with (
        stages(token_rate(texts.size)) as progress,
        Calibration(checkpoint, texts, threads=arguments.threads, progress=progress) as calibration,
    ):
        inputs = calibration.inputs
        table = [(i.names, i.matrices, i.columns, arguments.gram) for i in inputs]
        with StatisticsWriter(output, table, metadata, vocabulary=counts.size, sources=sources) as writer:

            def keep(layer: list[InputStatistics]) -> None:
                for each in stacks(layer):
                    grams = [one.gram for one in each if one.gram is not None]
                    writer.write(each[0].names, [one.sums for one in each], [one.count for one in each], grams or None)

            calibration.run(keep, arguments.gram)
            writer.write_token_counts(counts)
    return {
        "output": str(output),
        "inputs": sum(i.matrices for i in inputs),
        "matrices": sum(len(i.names) * i.matrices for i in inputs),
        "gram": arguments.gram,
        "bytes": output.stat().st_size,
        **{key: int(value) if key in ("tokens", "chunk") else value for key, value in metadata.items()},
        "notes": [*checkpoint.notes, *notes],
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    sys.exit(main())
