"""qreport: what quantization did to a model, held against the checkpoint it came from.

    qreport model.hbf --reference model/            tensors, layers and predictions, on a text that comes along
    qreport model.gguf --reference model/ --text my.txt --tokens 10240
    qreport a.hbf b.gguf c.hbf --reference model/   several side by side, a row for each
    qreport model.hbf --reference model/ --json     everything, for machines
    qreport model.hbf --reference model/ --html report.html
    qreport model.hbf --reference model/ --sensitivity   what each matrix alone costs

docs/accuracy.md says what every figure means.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..engine.measure.built_in_text import BUILT_IN_TEXT, TOKENS
from .terminal.command_line import Parser, check_ranges
from .terminal.console import UsageError, run
from .terminal.stages import Rate, stages, token_rate
from .terminal.text_file import read_text

if TYPE_CHECKING:
    import numpy as np

    from ..engine.measure.report import Report
    from ..formats.checkpoint import Checkpoint
    from .report.data import Sensitivity, Speed

SENSITIVITY_TOKENS, SENSITIVITY_CHUNK = 1024, 256
"""Fewer, because the work grows with the number of matrices."""
_MOST_TOKENS = 1 << 26


def parser() -> argparse.ArgumentParser:
    """The command line of qreport."""
    parser = Parser(
        prog="qreport",
        description="Compare quantized models with their reference: tensor by tensor, layer by layer, token by token.",
        epilog="examples: qreport model.hbf --reference model/ | qreport a.hbf b.gguf --reference model/ --tokens 10240 --html report.html",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help="a .hbf, .gguf or .safetensors file, a Hugging Face folder, or a hub name; or several")
    add("--reference", metavar="REF", required=True, help="the checkpoint to compare with, of any of these kinds")
    add("--text", metavar="FILE", help="text to predict, UTF-8; - is stdin (default: passages by Jane Austen)")
    add("--tokens", metavar="N", type=int, default=TOKENS, help=f"tokens of the text, in whole chunks (default {TOKENS})")
    add("--chunk", metavar="N", type=int, default=512, help="tokens of a context; the second half of each is scored (default 512)")
    add(
        "--compute",
        choices=("int8", "f32"),
        default="int8",
        help="activations of the model: int8 (default), or f32, so that only weights err",
    )
    add("--tensors-only", action="store_true", help="compare tensors, run nothing")
    add("--sensitivity", action="store_true", help="measure what each matrix alone does to the predictions, too")
    add("--sensitivity-tokens", metavar="N", type=int, help=f"tokens of the text for that (default {SENSITIVITY_TOKENS})")
    add("--speed", action="store_true", help="measure prefill and decode, too, as qbench does")
    add("-t", "--threads", metavar="N", type=int, help="worker threads (default: the physical cores this process may use)")
    add("--json", action="store_true", help="print one JSON object")
    add("--html", metavar="FILE", help="write a page with plots, too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit status. Errors become one line on stderr."""
    return run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = _arguments(argv)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ..formats.opening import open_checkpoint
    from ..formats.sources import resolve_source
    from .terminal.display import note

    start = time.perf_counter()
    *model_paths, reference_path = (resolve_source(name, note) for name in (*arguments.models, arguments.reference))
    with ExitStack() as stack:
        *models, reference = (stack.enter_context(open_checkpoint(path)) for path in (*model_paths, reference_path))
        page = None
        if arguments.html is not None:  # opened first: a folder that is missing should not be found after the work
            from ..formats.atomic import atomic_file
            from ..formats.conversion.convert import inputs

            texts = [] if arguments.text in (None, "-") else [arguments.text]
            sources = [path for checkpoint in (*models, reference) for path in inputs(checkpoint)]
            page = stack.enter_context(atomic_file(arguments.html, inputs=[*sources, *texts]))
        reports, found = _measure(models, reference, arguments)
        data: dict[str, Any] = found[0] if len(found) == 1 else {"reference": str(reference.path), "models": found}
        data["seconds"] = time.perf_counter() - start
        if page is not None:
            from .report.html import report_html
            from .report.models_html import models_html

            page.write((report_html(data, reports[0]) if len(models) == 1 else models_html(data, reports)).encode())
    for text in dict.fromkeys(text for report in reports for text in report.notes):
        note(text)
    if arguments.json:
        from .terminal.display import print_json

        print_json(data)
    else:
        from .report.text import print_models, print_report

        (print_report if len(models) == 1 else print_models)(data)
        if arguments.html is not None:
            note(f"the page is {arguments.html}")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was typed, checked. Raises UsageError."""
    arguments = parser().parse_intermixed_args(argv)  # models may stand before and after options
    limits = (("tokens", 1, _MOST_TOKENS), ("sensitivity_tokens", 1, _MOST_TOKENS), ("chunk", 4, 1 << 20), ("threads", 1, 512))
    check_ranges(arguments, limits)
    for option in ("text", "sensitivity", "speed"):
        if arguments.tensors_only and getattr(arguments, option):
            raise UsageError(f"--{option} and --tensors-only: give one of them")
    if arguments.sensitivity_tokens is not None and not arguments.sensitivity:
        raise UsageError("--sensitivity-tokens: give --sensitivity, too")
    return arguments


def _measure(models: list[Checkpoint], reference: Checkpoint, arguments: argparse.Namespace) -> tuple[list[Report], list[dict[str, Any]]]:
    """The report on each model, and the JSON object of each without the time that it took."""
    from ..engine.measure.compare import check_comparable, tensor_pairs
    from ..engine.measure.report import make_reports, why_not_run
    from .report.data import report_data

    for model in models:
        check_comparable(model, reference)
        tensor_pairs(model, reference)  # refuses what cannot be compared before any work is done
    notes = {id(model): [*model.notes, *reference.notes] for model in models}
    run = []
    for model in [] if arguments.tensors_only else models:
        reason = why_not_run(model) or why_not_run(reference)
        if reason is None and arguments.text is None and not (model.tokenizer or reference.tokenizer):
            reason = f"neither {model.path.name} nor {reference.path.name} has a tokenizer: only tensors are compared"
        if reason is None:
            run.append(model)
        else:
            notes[id(model)].append(reason)
    text = _text(arguments) if run else ""
    ids = _token_ids(run, reference, text, arguments.tokens, arguments.chunk, notes)
    speeds = {id(model): _speed(model, arguments) for model in run if arguments.speed}
    rate = _rates(arguments.tokens if ids is None else ids.size)
    with stages(rate) as progress:
        common = arguments.compute, arguments.threads, arguments.chunk, progress
        rest = [model for model in models if model not in run]
        made = {id(r.model): r for r in (*make_reports(rest, reference, None, *common), *make_reports(run, reference, ids, *common))}
    sensitivities = {id(model): _sensitivity(model, reference, text, arguments) for model in run if arguments.sensitivity}
    reports, found = [made[id(model)] for model in models], []
    text_name = "built-in" if arguments.text is None else arguments.text
    for report in reports:
        key = id(report.model)
        report.notes = list(dict.fromkeys([*notes[key], *(_converted(report.model) if report.tokens else ())]))
        found.append(report_data(report, text_name, sensitivities.get(key), speeds.get(key)))
    return reports, found


def _text(arguments: argparse.Namespace) -> str:
    """The text, or enough of its beginning. stdin can be read only once."""
    most = max(arguments.tokens, arguments.sensitivity_tokens or SENSITIVITY_TOKENS)
    return read_text(str(BUILT_IN_TEXT) if arguments.text is None else arguments.text, most)


def _token_ids(
    models: list[Checkpoint], reference: Checkpoint, text: str, tokens: int, chunk: int, notes: dict[int, list[str]]
) -> np.ndarray | None:
    """The tokens of the text, which all models must read alike; None if there are no models. Raises ReportError."""
    import numpy as np

    from ..engine.measure.compare import ReportError
    from ..engine.measure.evaluation_text import evaluation_tokens

    found = None
    for model in models:
        ids, more = evaluation_tokens(model, reference, text, tokens, chunk)
        notes[id(model)] += more
        if found is not None and not np.array_equal(ids, found):
            raise ReportError(
                f"{models[0].path.name} and {model.path.name} make other tokens of the text, "
                "so that their figures would not be comparable: report on them one by one"
            )
        found = ids
    return found


def _speed(model: Checkpoint, arguments: argparse.Namespace) -> Speed:
    """As qbench measures it: 512 tokens of prefill and 128 of decode, or as many as the context has room for, three times."""
    from ..engine.engine import Engine
    from ..engine.measure.benchmark import benchmark
    from .report.data import Speed

    assert model.architecture is not None
    longest = model.model.context
    prompt, tokens = min(512, longest), max(1, min(128, longest - 2))
    with Engine(model.path, compute=arguments.compute, threads=arguments.threads, context=max(prompt, tokens + 2)) as engine:
        return Speed(prompt, tokens, benchmark(engine, prompt, tokens, 3))


def _sensitivity(model: Checkpoint, reference: Checkpoint, text: str, arguments: argparse.Namespace) -> Sensitivity:
    from ..engine.measure.evaluation_text import evaluation_tokens
    from ..engine.measure.sensitivity import measure_sensitivities, probing_tokens
    from .report.data import Sensitivity

    chunk = min(SENSITIVITY_CHUNK, arguments.chunk)
    tokens = arguments.sensitivity_tokens or probing_tokens(reference, SENSITIVITY_TOKENS)  # as memory allows
    ids, _ = evaluation_tokens(model, reference, text, tokens, chunk)
    with stages(_rates(ids.size)) as progress:
        found = measure_sensitivities(reference, model, ids.reshape(-1, chunk), threads=arguments.threads, progress=progress)
    return Sensitivity(found, ids.size // chunk, chunk)


def _rates(tokens: int) -> Rate:
    of_text = token_rate(tokens)

    def rate(stage: str, done: float, total: float, seconds: float) -> str:
        return f"{done / seconds / 1e6:.1f} M weights/s" if stage == "tensors" else of_text(stage, done, total, seconds)

    return rate


def _converted(model: Checkpoint) -> list[str]:
    """What the engine runs in another format than the file has: what is measured of layers and predictions then includes that."""
    from ..engine.run.weights import CONVERTED

    kinds = {t.format: CONVERTED[t.format] for t in model.tensors.values() if not t.vector and t.format in CONVERTED}
    return [
        f"tensors in {kind} are run as {other}; what that changes is part of the errors of layers and predictions"
        for kind, other in kinds.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
