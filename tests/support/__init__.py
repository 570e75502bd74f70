"""What tests share: where things lie, tiny models, fakes, bytes of files. `tests` is on the path while tests run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DATA, ORACLES = TESTS / "data", TESTS / "oracles"


def module(path: Path) -> ModuleType:
    """The module in a file that no import reaches, such as one beside the data that it makes."""
    spec = importlib.util.spec_from_file_location(f"halfbyte_test_{path.stem}", path)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found
