"""The frame around every command: errors as one line, exit statuses, and text from files made safe for a terminal.

Imports nothing but the standard library: every command pays for it at its start.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable

from ...quant.errors import HalfbyteError

FAILED, USAGE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
"""Exit statuses besides 0: anything refused; a command line that makes no sense; Ctrl-C; nobody reads what we print."""


class UsageError(HalfbyteError):
    """The command line does not make sense."""


def run(main: Callable[[], int | None]) -> int:
    """Runs a command and gives its exit status.

    Whatever goes wrong becomes one line on stderr that begins with "error: ". HALFBYTE_TRACEBACK=1 in the environment lets
    the traceback through instead.
    """
    _prepare_streams()
    with _Interrupt() as interrupt:
        return _run(main, interrupt)


def _prepare_streams() -> None:
    """Makes printing safe: a stream that was closed takes everything and shows nothing, and characters that the encoding of a stream does
    not have are written as escapes. The number of a closed stream must not become that of a file that is opened later."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            try:
                descriptor = os.open(os.devnull, os.O_RDWR)
                if descriptor > 2:
                    os.close(descriptor)
                if number:
                    setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for as long as the process lives)
            except OSError:
                pass
        elif number and getattr(stream, "errors", "") in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _run(main: Callable[[], int | None], interrupt: _Interrupt) -> int:
    debug = os.environ.get("HALFBYTE_TRACEBACK", "") not in ("", "0")
    try:
        status = main() or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return PIPE_CLOSED
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer takes it for an error
            _forget_stdout()
            return PIPE_CLOSED
        raise
    except UsageError as error:
        print_error(error)
        return USAGE
    except HalfbyteError as error:
        if debug:
            raise
        print_error(error)
    except MemoryError:
        print_error("out of memory: close other programs, or use a smaller model or --context")
    except OSError as error:
        if debug:
            raise
        if error.errno == errno.ENOSPC and error.filename is None:
            _forget_stdout()
        where = f"{error.filename}: " if error.filename is not None else ""
        print_error(f"{where}{error.strerror or error}")
    except BaseException as error:  # panics of libraries in Rust are no Exception
        kind = type(error).__name__
        if interrupt.pressed:  # in the middle of an import of C code, which makes an ImportError of it
            return INTERRUPTED
        if hasattr(error, "format_message"):  # typer: the command line
            print_error(error.format_message())
            context = getattr(error, "ctx", None)
            if context is not None:
                print(f"hint: {context.command_path} --help shows the options", file=sys.stderr)
            return USAGE
        if kind == "Abort":  # what typer makes of Ctrl-C
            return INTERRUPTED
        if debug:
            raise
        print_error(f"a defect in halfbyte, please report it: {kind}: {error} (HALFBYTE_TRACEBACK=1 shows where)")
    return FAILED


class _Interrupt:
    """While it is entered, Ctrl-C raises KeyboardInterrupt as usual, and is remembered."""

    def __enter__(self) -> _Interrupt:
        self.pressed = False
        try:
            self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if self._replaced:
                signal.signal(signal.SIGINT, self._press)
        except ValueError:  # not in the main thread
            self._replaced = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _press(self, number: int, frame: object) -> None:
        self.pressed = True
        raise KeyboardInterrupt


def print_error(error: object) -> None:
    """One line on stderr, "error: …", whatever the text holds."""
    text = safe_text(str(error).strip()).replace("\n", " ").replace("\t", " ")
    try:
        print(f"error: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed; the exit status has to do


def safe_text(text: str) -> str:
    """Text from a file or a model, with what a terminal would obey (escape sequences, direction marks) written as escapes.

    Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or _joins(c) else _escape(c) for c in text)


def _joins(character: str) -> bool:
    """Joiners (in emoji and Indic text), variation selectors and spaces of other widths only show."""
    return character in "\u200c\u200d\u00a0\u3000" or "\u2000" <= character <= "\u200a" or "\ufe00" <= character <= "\ufe0f"


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _forget_stdout() -> None:
    """Keeps the interpreter from flushing a broken stdout once more at its end, and complaining."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass
