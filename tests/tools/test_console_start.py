"""Ctrl-C before a command has begun: while its modules are imported."""

import signal
import subprocess
import sys

import pytest

CHILD = """
import builtins, signal
imported = builtins.__import__
def press(name, *more):
    if name == {name!r}:
        signal.raise_signal(signal.SIGINT)
    return imported(name, *more)
builtins.__import__ = press
import halfbyte.tools.qrun
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX exit statuses")
@pytest.mark.parametrize("name", ["argparse", "gc", "signal"])
def test_ctrl_c_while_a_command_is_imported_is_no_traceback(name):
    done = subprocess.run([sys.executable, "-c", CHILD.format(name=name)], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_other_errors_keep_their_traceback():
    done = subprocess.run([sys.executable, "-c", "import halfbyte.tools; raise ValueError('x')"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and done.stderr.endswith("ValueError: x\n")
