"""The commands. Here only what must come before everything else in each of them."""

import sys
from types import TracebackType


def _leave_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _hook(kind, error, trace)


# Ctrl-C while a command's modules are still being imported, so before `console.run`, ends the process like any other (status 130 in a
# shell), but without a traceback. While the interpreter itself starts, nothing of ours can help.
_hook, sys.excepthook = sys.excepthook, _leave_quietly
