"""Other processes of this interpreter, which compile beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def child_environment() -> dict[str, str]:
    """The child must import this very package, wherever it was imported from."""
    path = os.pathsep.join(dict.fromkeys(p for p in (*sys.path, str(PACKAGE.parent)) if p))
    return os.environ | {"PYTHONPATH": path}
