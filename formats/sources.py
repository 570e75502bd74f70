"""What a user may name as a model: a path, a name on the Hugging Face hub, or the built-in demo model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ..quant.block import format_names
from .errors import InputError, printable, some

DEMO = "smollm2"
_ENDINGS = (".hbf", ".gguf", ".safetensors")
_FORMAT_IN_NAME = r"[._-](fp16|fp32|i?q\d(_[a-z0-9]+)*|int[48]|\d+(\.\d+)?(MB|bpw)|kl\d+(\.\d+)?)$"
"""What names of files say of their format besides the name of one of ours: GGUF's types and mixes, and what qconvert was asked for."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def resolve_source(name: str | os.PathLike[str], tell: Callable[[str], None] = lambda text: None) -> Path:
    """The path of a model, which is fetched first if it is not on this machine.

    A path that exists is that path; one that lacks only its ending (.hbf, .gguf, .safetensors) is found; `smollm2` is the demo
    model; OWNER/NAME is a model of the hub. tell: called with a sentence before something is fetched.
    Raises InputError if it is none of these, HubError or DemoError if it cannot be fetched.
    """
    text = os.fspath(name)
    if not text:
        raise InputError("''", "is no name of a model")
    path = Path(text)
    try:
        if path.exists():
            return path
        for ending in _ENDINGS if not text.endswith(os.sep) else ():
            found = path.with_name(path.name + ending)
            if found.is_file():
                return found
        nearby = sorted(entry.name for entry in path.parent.glob("*.hbf") if entry.name.startswith(f"{path.name}.")) if path.name else []
    except (OSError, ValueError):
        raise InputError(text, "cannot be opened: not a file name") from None
    if text == DEMO:
        from .demo import fetch_demo

        return fetch_demo(tell)
    if len(nearby) == 1:
        return path.with_name(nearby[0])
    if _HUB_NAME.fullmatch(text) and not path.parent.is_dir() and path.suffix not in _ENDINGS:
        from .huggingface.hub import fetch_model

        return fetch_model(text, tell)
    hint = f"; there are {some(nearby, 4)}" if nearby else ""
    raise InputError(printable(text, 300), f"no such file or folder, and neither a hub name such as OWNER/MODEL nor {DEMO!r}{hint}")


def default_output(source: Path, kind: str, format: str) -> Path:
    """Where a conversion goes if nothing is said: beside the source, named after it and the format.

    model.safetensors -> model.q4_0.hbf; a folder -> a file beside the folder; kind "safetensors" -> a folder.
    """
    source = Path(os.path.abspath(source))
    stem = source.name if source.is_dir() else source.stem
    # The format that a name may carry is that of the source: the new one takes its place.
    ours = "|".join(map(re.escape, format_names()))
    stem = re.sub(rf"[._-]({ours})$|{_FORMAT_IN_NAME}", "", stem, flags=re.IGNORECASE) or stem
    ending = "" if kind == "safetensors" else f".{kind}"
    return source.with_name(f"{stem}.{format}{ending}")
