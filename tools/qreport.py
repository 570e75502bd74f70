"""qreport: what quantization did to a model, held against the checkpoint it came from.

    qreport model.hbf --reference model/            tensors, layers and predictions, on a text that comes along
    qreport model.gguf --reference model/ --text my.txt --tokens 10240
    qreport model.hbf --reference model/ --json     everything, for machines
    qreport model.hbf --reference model/ --html report.html

docs/accuracy.md says what every figure means.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .console import UsageError, run

if TYPE_CHECKING:
    import numpy as np

    from ..engine.report import Progress, Report
    from ..formats.checkpoint import Checkpoint

BUILT_IN_TEXT = Path(__file__).with_name("data") / "austen.txt"
"""Passages of Emma, Mansfield Park and Northanger Abbey (Jane Austen, 1814 to 1817), in the public domain."""

TOKENS = 5120
_MOST_TOKENS = 1 << 26


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (qreport --help shows the options)")


def parser() -> argparse.ArgumentParser:
    """The command line of qreport."""
    parser = _Parser(
        prog="qreport",
        description="Compare a quantized model with its reference: tensor by tensor, layer by layer, token by token.",
        epilog="examples: qreport model.hbf --reference model/ | qreport model.gguf --reference model/ --tokens 10240 --html report.html",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a .hbf, .gguf or .safetensors file, a Hugging Face folder, or a hub name")
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
    add("-t", "--threads", metavar="N", type=int, help="worker threads (default: the physical cores this process may use)")
    add("--json", action="store_true", help="print one JSON object")
    add("--html", metavar="FILE", help="write a page with plots, too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit status. Errors become one line on stderr."""
    return run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)
    for option, least, most in (("tokens", 1, _MOST_TOKENS), ("chunk", 4, 1 << 20), ("threads", 1, 512)):
        value = getattr(arguments, option)
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{option} must be between {least} and {most}, not {value}")
    if arguments.tensors_only and arguments.text is not None:
        raise UsageError("--text and --tensors-only: give one of them")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ..formats.checkpoint import open_checkpoint
    from ..formats.sources import resolve_source
    from .display import note

    start = time.perf_counter()
    model_path, reference_path = (resolve_source(name, note) for name in (arguments.model, arguments.reference))
    with ExitStack() as stack:
        model, reference = (stack.enter_context(open_checkpoint(path)) for path in (model_path, reference_path))
        page = None
        if arguments.html is not None:  # opened first: a folder that is missing should not be found after the work
            from ..formats.atomic import atomic_file
            from ..formats.convert import inputs

            texts = [] if arguments.text in (None, "-") else [arguments.text]
            page = stack.enter_context(atomic_file(arguments.html, inputs=[*inputs(model), *inputs(reference), *texts]))
        report = _report(model, reference, arguments)
        from .report_data import report_data

        data = report_data(report, "built-in" if arguments.text is None else arguments.text, time.perf_counter() - start)
        if page is not None:
            from .report_html import report_html

            page.write(report_html(data, report).encode())
    for text in report.notes:
        note(text)
    if arguments.json:
        from .display import print_json

        print_json(data)
    else:
        from .report_text import print_report

        print_report(data)
        if arguments.html is not None:
            note(f"the page is {arguments.html}")
    return 0


def _report(model: Checkpoint, reference: Checkpoint, arguments: argparse.Namespace) -> Report:
    from ..engine.compare import check_comparable, tensor_pairs
    from ..engine.report import make_report, why_not_run

    check_comparable(model, reference)
    tensor_pairs(model, reference)  # refuses what cannot be compared before any work is done
    notes = [*model.notes, *reference.notes]
    ids: np.ndarray | None = None
    reason = why_not_run(model) or why_not_run(reference)
    if reason is None and arguments.text is None and not (model.tokenizer or reference.tokenizer):
        reason = f"neither {model.path.name} nor {reference.path.name} has a tokenizer: only tensors are compared"
    if arguments.tensors_only:
        pass
    elif reason is None:
        from ..engine.evaluation_text import evaluation_tokens

        text = read_text(arguments.text, arguments.tokens)
        ids, more = evaluation_tokens(model, reference, text, arguments.tokens, arguments.chunk)
        notes += more
    else:
        notes.append(reason)
    with _progress(0 if ids is None else ids.size) as progress:
        report = make_report(model, reference, ids, arguments.compute, arguments.threads, arguments.chunk, progress)
    if ids is not None:
        notes += _converted(model)
    report.notes = list(dict.fromkeys(notes))
    return report


def _converted(model: Checkpoint) -> list[str]:
    """What the engine runs in another format than the file has: what is measured of layers and predictions then includes that."""
    from ..engine.weights import CONVERTED

    kinds = {t.format: CONVERTED[t.format] for t in model.tensors.values() if not t.vector and t.format in CONVERTED}
    return [
        f"tensors in {kind} are run as {other}; what that changes is part of the errors of layers and predictions"
        for kind, other in kinds.items()
    ]


def read_text(name: str | None, tokens: int) -> str:
    """The text in a file (None: the built-in one; "-": stdin), or enough of its beginning for so many tokens.

    Raises InputError for a file that cannot be read or is not UTF-8.
    """
    from ..formats.errors import InputError
    from ..formats.mapped import open_stream, why_not_opened

    if name == "-" and sys.stdin is None:
        raise InputError("stdin", "is closed")
    most = max(1 << 20, 64 * tokens)
    path = BUILT_IN_TEXT if name is None else Path(name)
    try:
        if name == "-":
            data = sys.stdin.buffer.read(most + 1)
        else:
            with open_stream(path) as file:
                data = file.read(most + 1)
    except OSError as error:
        raise InputError(path, why_not_opened(error, path)) from None
    except ValueError:
        raise InputError(str(name), "cannot be opened: not a file name") from None
    cut = len(data) > most
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if cut and error.start >= most - 4:  # only the last character, which the cut went through
            return data[: error.start].decode("utf-8-sig")
        raise InputError(path, "is not UTF-8 text; convert it first", offset=error.start) from None


@contextmanager
def _progress(tokens: int) -> Iterator[Progress]:
    """A bar with rate and time left on stderr, if that is a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    rate_column = TextColumn("{task.fields[rate]:>14}")
    columns = (TextColumn("{task.description:8}"), BarColumn(), TaskProgressColumn(), rate_column, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}
        begun: dict[str, float] = {}
        shown: dict[str, float] = {}

        def progress(what: str, done: float, total: float) -> None:
            now = time.monotonic()
            if what not in tasks:
                for other in tasks.values():
                    bar.update(other, visible=False)
                tasks[what], begun[what] = bar.add_task(what, total=total, rate=""), now
            if done < total and now - shown.get(what, 0) < 0.1:
                return
            shown[what] = now
            seconds = max(now - begun[what], 1e-3)
            rate = ""
            if what == "tensors":
                rate = f"{done / seconds / 1e6:.1f} M weights/s"
            elif what == "text" and total:
                rate = f"{tokens * done / total / seconds:.0f} tokens/s"
            bar.update(tasks[what], completed=done, total=total, rate=rate, visible=True)

        yield progress


if __name__ == "__main__":
    sys.exit(main())
