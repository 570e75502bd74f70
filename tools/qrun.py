"""qrun: a model answers, once or in a chat.

    qrun MODEL "What is the capital of France?"     one answer on stdout
    qrun MODEL < question.txt                       the same, the prompt from stdin
    qrun MODEL                                      a chat in the terminal

Time to the first token matters here, so this module imports nothing at its top that is not needed to read the arguments:
argparse reads them (4 ms; typer would take 40), and chat, JSON and templates come in when they are asked for. A test watches it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

from .terminal.command_line import Parser
from .terminal.console import UsageError, run, safe_text
from .terminal.sampling import add_sampling_options, sampling_params, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..engine.engine import Engine
    from ..engine.generate.answer import Answer
    from ..engine.generate.params import SamplingParams


def _bias(text: str) -> tuple[int, float]:
    id, separator, value = text.partition("=")
    try:
        return int(id), float(value if separator else "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=NUMBER, such as 1234=-5, not {text!r}") from None


MOST_TOKENS = 1024
"""Where an answer ends unless told otherwise: a small model may repeat itself for ever."""

LONGEST_PROMPT = 1 << 24
"""Most bytes that are read from stdin: several million tokens."""

def parser() -> argparse.ArgumentParser:
    """The command line of qrun, the only place where its options are defined."""
    parser = Parser(
        prog="qrun",
        description="Let a model answer a prompt, or chat with it when there is none.",
        epilog="MODEL is a .hbf or .gguf file, a folder with safetensors, a name on the Hugging Face hub, or smollm2 (a small "
        "model to try things with). Without PROMPT it is read from stdin; if stdin is a terminal, a chat begins.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="what to run")
    add("prompt", metavar="PROMPT", nargs="?", help="what to answer; - reads it from stdin")
    add("--system", metavar="TEXT", help="the system message")
    add("--raw", action="store_true", help="no chat template: the model continues the prompt")
    add("--special", action="store_true", help="with --raw: text that spells a special token of the model is that token")
    add("--json", action="store_true", help="print one JSON object: text, token ids, finish reason, timings")
    add("--stop", metavar="TEXT", action="append", default=[], help="end the answer before this text; may be given several times")
    add_sampling_options(parser, most_tokens=MOST_TOKENS)
    add("--logit-bias", metavar="ID=B", type=_bias, action="append", default=[], help="added to a token's logit; -inf bans it")
    add("--ignore-eos", action="store_true", help="do not end where the model says that its answer is over")
    add("--threads", "-t", metavar="N", type=whole(1), help="worker threads (default: the physical cores this process may use)")
    add("--compute", choices=("int8", "f32"), default="int8", help="activations in matrix products; f32 is exact and slower")
    add("--kv-type", choices=("f16", "f32", "q8"), help="keys and values in the cache (default f16; q8 takes half of it)")
    add("--context", "-c", metavar="N", type=whole(1), help="the most tokens, prompt and answer together")
    add("--version", action="version", version=f"qrun {_version()}", help="print the version")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit status. Errors become one line on stderr. Without `argv` it is all that the process does."""
    if argv is not None:
        return run(lambda: _main(argv))
    gc.disable()  # until an answer begins: what imports make lives on, and looking for garbage in it takes 10 ms
    status = run(lambda: _main(None))
    gc.freeze()  # nor does the interpreter need to look through it all at its end, 15 ms
    return status


def _collect_again() -> None:
    """Garbage is collected from here on, if it was not, but never looked for among what is there now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _main(argv: Sequence[str] | None) -> int:
    start = time.perf_counter()
    arguments = parser().parse_args(argv)
    params = sampling(arguments)
    if arguments.special and not arguments.raw:
        raise UsageError("--special goes with --raw: a chat template writes the special tokens itself")
    if arguments.raw and arguments.system is not None:
        raise UsageError("--system needs the chat template that --raw turns off")
    prompt = _prompt(arguments)
    if prompt is None and (arguments.raw or arguments.json):
        raise UsageError(f"{'--raw' if arguments.raw else '--json'} needs a PROMPT, or one on stdin")
    with open_engine(arguments) as engine:
        if prompt is None:
            from .chat.chat import chat

            _collect_again()
            return chat(engine, params, system=arguments.system, name=arguments.model)
        return _answer(engine, arguments, prompt, params, start)


def sampling(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling parameters of a command line. Raises UsageError that names the option."""
    return sampling_params(
        arguments, repetition_window=64, max_tokens=MOST_TOKENS, stop=arguments.stop, logit_bias=dict(arguments.logit_bias),
        ignore_eos=arguments.ignore_eos,
    )  # fmt: skip


def open_engine(arguments: argparse.Namespace) -> Engine:
    """The engine that a command line asks for; MODEL may be a path, a name on the hub, or smollm2."""
    from ..engine.engine import Engine

    path = arguments.model
    if not os.path.exists(path):
        from ..formats.sources import resolve_source

        path = resolve_source(path, lambda text: print(f"note: {text}", file=sys.stderr))
    with _Loading() as loading:
        return Engine(
            path, arguments.compute, arguments.threads, arguments.context, report=loading.report, kv_type=arguments.kv_type
        )


class _Loading:
    """A line on stderr, if that is a terminal, while a model takes long to load; it is wiped away at the end."""

    WORDS: ClassVar = {"weights": "preparing weights", "kernels": "compiling kernels, once for this machine"}

    def __init__(self) -> None:
        self._show = sys.stderr is not None and sys.stderr.isatty()
        self._due = time.monotonic() + 0.5
        self._width = 0

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._show and (now >= self._due or (what == "kernels" and done == 0)):
            self._due = now + 0.1
            self._write(f"{self.WORDS.get(what, what)} … {100 * done // max(total, 1)} %")

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def __enter__(self) -> _Loading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()


def _prompt(arguments: argparse.Namespace) -> str | None:
    """The prompt, None for a chat. One line end at the end of stdin is dropped: echo and editors add it."""
    if arguments.prompt is not None and arguments.prompt != "-":
        return arguments.prompt
    if arguments.prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    if sys.stdin is None:
        raise UsageError("no PROMPT given, and stdin is closed")
    data = sys.stdin.buffer.read(LONGEST_PROMPT + 1)
    if len(data) > LONGEST_PROMPT:
        raise UsageError(f"the prompt on stdin is longer than {LONGEST_PROMPT >> 20} MiB, more than any model reads; shorten it")
    text = data.decode("utf-8", "replace")
    if not text:
        raise UsageError("no PROMPT given, and nothing came on stdin")
    return text.removesuffix("\n").removesuffix("\r")


def _answer(engine: Engine, arguments: argparse.Namespace, prompt: str, params: SamplingParams, start: float) -> int:
    """One answer on stdout, nothing else there."""
    from ..engine.generate.answer import Answer

    loaded = time.perf_counter()
    ids = _prompt_ids(engine, arguments, prompt)
    _collect_again()
    answer = Answer(engine, ids, params, continues=arguments.raw or engine.template is None)
    if arguments.json:
        _print_json(answer, start, loaded)
    else:
        _print_text(answer)
        if arguments.max_tokens is None and answer.finish_reason == "length":
            print(f"note: the answer was cut off after {len(answer.ids)} tokens (--max-tokens, --context)", file=sys.stderr)
    return 0


def _prompt_ids(engine: Engine, arguments: argparse.Namespace, prompt: str) -> list[int]:
    if arguments.raw:
        return engine.tokenizer.encode(prompt, special=arguments.special, bos=True)
    if engine.template is None:
        if arguments.system is not None:
            raise UsageError("--system: this model has no chat template to put it in")
        print("note: this model has no chat template; it continues the prompt, as with --raw", file=sys.stderr)
        return engine.tokenizer.encode(prompt, bos=True)
    messages = [{"role": "system", "content": arguments.system}] if arguments.system is not None else []
    messages.append({"role": "user", "content": prompt})
    return engine.prompt_ids(messages)


def _print_text(answer: Answer) -> None:
    """Writes text as it is made. What a terminal would obey is made visible; a pipe gets the text as it is."""
    out = sys.stdout
    terminal = out.isatty()
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # the locale may lack a character
    last = "\n"
    for piece in answer:
        if piece.text:
            last = piece.text
            out.write(safe_text(last) if terminal else last)
            out.flush()
    if not last.endswith("\n"):
        out.write("\n")
        out.flush()


def _print_json(answer: Answer, start: float, loaded: float) -> None:
    import json

    begun = time.perf_counter()
    for _ in answer:
        pass
    timings = answer.timings
    said: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.ids,
        "prompt_token_ids": answer.prompt_ids,
        "finish_reason": answer.finish_reason,
        "seed": answer.seed,
        "timings": {
            "load_s": loaded - start,
            "prefill_s": timings.first_token_s,
            "prefill_tok_s": timings.prefill_tok_s,
            "first_token_s": begun + timings.first_token_s - start,
            "decode_s": timings.decode_s,
            "decode_tok_s": timings.decode_tok_s,
            "total_s": time.perf_counter() - start,
        },
    }
    if answer.params.logprobs is not None:
        said["logprobs"] = [
            {"id": id, "logprob": logprob, "top": [{"id": i, "logprob": p} for i, p in top]} for id, logprob, top in answer.logprobs
        ]
    # ASCII only: whatever the locale, it is the same JSON
    print(json.dumps(said, ensure_ascii=True, allow_nan=False))


def _version() -> str:
    from .. import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
