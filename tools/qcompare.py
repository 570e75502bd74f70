"""qcompare: several models answer the same prompts, side by side.

    qcompare reference/ model.hbf                          a few prompts that come along
    qcompare a.hbf b.hbf c.gguf --prompt "Why is the sky blue?" --max-tokens 100
    qcompare reference/ model.hbf --prompts prompts.jsonl --html answers.html

The first model is what the others are held against. Models are run one after the other: while the last one answers, each prompt is
printed with all answers to it. docs/comparing.md says what every figure means.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from .terminal.command_line import Parser, check_ranges
from .terminal.console import UsageError, run
from .terminal.sampling import add_sampling_options, sampling_params

if TYPE_CHECKING:
    from ..engine.generate.params import SamplingParams
    from .compare.answers import LogitFile, ModelAnswer
    from .compare.models import Candidate
    from .compare.prompts import Prompt

MAX_TOKENS = 64
"""Tokens of an answer unless told otherwise: enough to see where models part."""

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Fields of SamplingParams that have an option here, spelled as in qrun. Penalties have none: with them the likeliest token is not the
one that is chosen, and agreement would not mean what it says."""


def parser() -> argparse.ArgumentParser:
    """The command line of qcompare."""
    parser = Parser(
        prog="qcompare",
        description="Let several models answer the same prompts and show the answers side by side: where they part, how fast they are, "
        "and how far each agrees with the first.",
        epilog="examples: qcompare reference/ model.hbf | qcompare a.hbf b.gguf --prompt \"Why is the sky blue?\" | "
        "qcompare reference/ model.hbf --prompts prompts.jsonl --html answers.html",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help="a .hbf or .gguf file, a folder with safetensors, a hub name; the others are compared "
        "with the first")  # fmt: skip
    add("--prompt", "-p", metavar="TEXT", action="append", default=[], help="what to answer; may be given several times")
    add("--prompts", metavar="FILE", help='prompts, one per line, or JSON lines with "messages" or "prompt"; - is stdin')
    add("--system", metavar="TEXT", help="the system message")
    add("--raw", action="store_true", help="no chat template: the models continue the prompts")
    add("--max-tokens", "-n", metavar="N", type=int, default=MAX_TOKENS, help=f"the most tokens of an answer (default {MAX_TOKENS})")
    add_sampling_options(parser, MAX_TOKENS, _OPTIONS)
    add("--compute", choices=("int8", "f32"), default="int8", help="activations in matrix products; f32 is exact and slower")
    add("--threads", "-t", metavar="N", type=int, help="worker threads (default: the physical cores this process may use)")
    add("--json", action="store_true", help="print one JSON object")
    add("--html", metavar="FILE", help="write a page, too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit status. Errors become one line on stderr."""
    return run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_intermixed_args(argv)  # models may stand between options
    if len(arguments.models) < 2:
        raise UsageError("give two models or more: the first is what the others are compared with (qcompare --help shows the options)")
    check_ranges(arguments, (("max_tokens", 1, 1 << 20), ("threads", 1, 512)))
    if arguments.raw and arguments.system is not None:
        raise UsageError("--system needs the chat template that --raw turns off")
    # If no seed is given it is drawn here, so that all models have the same.
    params = sampling_params(arguments, seed=int.from_bytes(os.urandom(4), "little"))
    from ..formats.sources import resolve_source
    from .compare.models import survey
    from .compare.prompts import gather
    from .terminal.display import note, print_json

    start = time.perf_counter()
    prompts = gather(arguments.prompt, arguments.prompts)
    paths = [resolve_source(name, note) for name in arguments.models]
    models = survey(paths, arguments.models, prompts, arguments.raw, arguments.system)
    notes = list(dict.fromkeys(text for model in models for text in model.notes))
    for text in notes:
        note(text)
    with ExitStack() as stack:
        page = None
        if arguments.html is not None:  # opened first: a folder that is missing should not be found after the work
            from ..formats.atomic import atomic_file

            read = [path for model in models for path in model.inputs]
            read += [] if arguments.prompts in (None, "-") else [arguments.prompts]
            page = stack.enter_context(atomic_file(arguments.html, inputs=read))
        data = _compare(models, prompts, params, arguments)
        data |= {"notes": notes, "seconds": time.perf_counter() - start}
        if page is not None:
            from .compare.html import compare_html

            page.write(compare_html(data).encode("utf-8", "replace"))
    if arguments.json:
        print_json(data)
    else:
        from .compare.text import print_summary

        print_summary(data["models"], len(prompts))
        if arguments.html is not None:
            note(f"the page is {arguments.html}")
    return 0


def _compare(
    models: Sequence[Candidate], prompts: Sequence[Prompt], params: SamplingParams, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Runs the models and prints each prompt as soon as all have answered it (without --json). Returns all but notes and seconds."""
    from ..quant.processors import physical_cores
    from .compare.answers import LogitFile
    from .compare.data import prompt_data, summary

    if not arguments.json:
        from .compare.text import print_prompt

    answers: list[list[ModelAnswer]] = [[] for _ in prompts]
    done: list[dict[str, Any]] = []
    threads = arguments.threads or physical_cores()
    with ExitStack() as stack:
        status = stack.enter_context(_Status())
        kept = None
        if params.greedy and any(model.same_tokens for model in models[1:]):
            kept = stack.enter_context(LogitFile(models[0].vocabulary))
        for model in models:
            context = model.context_for(models[0], arguments.max_tokens)
            settings = (arguments.compute, threads, context)
            with closing(_answers(settings, model, models[0], params, kept, answers, status)) as found:
                for i, answer in enumerate(found):
                    answers[i].append(answer)
                    if model is not models[-1]:
                        continue
                    done.append(prompt_data(prompts[i], models, answers[i]))
                    if not arguments.json:
                        status.clear()
                        print_prompt(done[-1], i + 1, len(prompts))
                        sys.stdout.flush()
            gc.collect()  # a mapped file may be held in a cycle, and garbage is not looked for by itself while little is made
    return {
        "models": summary(models, done),
        "prompts": done,
        "settings": {
            "max_tokens": arguments.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": None if params.greedy else params.seed,
            "system": arguments.system,
            "raw": arguments.raw,
            "compute": arguments.compute,
            "threads": threads,
        },
    }


def _answers(
    settings: tuple[Any, int, int],
    model: Candidate,
    first: Candidate,
    params: SamplingParams,
    kept: LogitFile | None,
    before: Sequence[Sequence[ModelAnswer]],
    status: _Status,
) -> Generator[ModelAnswer]:
    """A model's answers, prompt by prompt, with their agreement with the first model's (`before`), whose logits are kept for that.

    settings: compute, threads and context of the engine, which nothing refers to any more at the end: its memory is free then.
    """
    from ..engine.engine import Engine
    from ..engine.generate.answer import PromptError
    from ..engine.generate.sampler import LogitsError
    from .compare.answers import agreement, answer
    from .compare.models import CompareError

    is_first = model is first
    with Engine(model.path, *settings, report=status.loading(model.name)) as engine:
        for i, ids in enumerate(model.prompts):
            status.begin(f"{model.name}: prompt {i + 1} of {len(model.prompts)}")
            try:
                found = answer(engine, ids, params, model.continues, kept if is_first else None, status.tokens)
            except (PromptError, LogitsError) as error:
                raise CompareError(f"prompt {i + 1} with {model.name}: {error}") from None
            if kept is not None and model.same_tokens and not is_first:
                found.agreement = agreement(engine, first.prompts[i], before[i][0].chosen, kept, before[i][0].row)
            yield found


class _Status:
    """One line on stderr, if that is a terminal, that says what is being done; wiped away before anything else is printed.

    Drawn by the thread that works, a few times a second: a thread of its own would take time from the workers that are measured.
    """

    def __init__(self) -> None:
        self._show = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._text, self._width, self._due = "", 0, 0.0

    def loading(self, name: str) -> Any:
        """report(what, done, total), as the engine calls it while it loads."""
        self.begin(f"{name}: opening")

        def report(what: str, done: int, total: int) -> None:
            self._draw(f"{name}: {what} {100 * done // max(total, 1)} %")

        return report

    def begin(self, text: str) -> None:
        self._text, self._due = text, 0.0
        self._draw(text)

    def tokens(self, count: int) -> None:
        self._draw(f"{self._text}, {count} tokens")

    def _draw(self, text: str) -> None:
        now = time.monotonic()
        if not self._show or now < self._due:
            return
        from .terminal.display import one_line

        self._due = now + 0.1
        text = one_line(text)[: max(shutil.get_terminal_size().columns - 1, 0)]
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def clear(self) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0

    def __enter__(self) -> _Status:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


if __name__ == "__main__":
    sys.exit(main())
