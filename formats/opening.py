"""Opening a checkpoint of any kind: what it is, is told by the first bytes of the file, and the room of that kind reads it."""

from __future__ import annotations

import os
from pathlib import Path

from .checkpoint import Checkpoint
from .errors import InputError
from .file_kinds import HEAD_BYTES, kind_of

_WEIGHT_ENDINGS = (".hbf", ".gguf", ".safetensors")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint of any kind; what it is, is told by the first bytes of the file.

    Raises FileFormatError (a file that is not what it promises, tensors that do not fit) or CheckpointError (a key that is missing
    or not understood), both HalfbyteError; nothing else.
    """
    if not os.fspath(path):
        raise InputError("''", "is no name of a file or folder")
    target = Path(path)
    if target.is_dir():
        from .huggingface.folder import open_folder

        return open_folder(target)
    try:
        if target.exists() and not target.is_file():  # opening a named pipe would wait for a writer that may never come
            raise InputError(target, "is not a regular file; a file or a folder is needed here")
        with open(target, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        from .mapped import why_not_opened

        raise InputError(target, why_not_opened(error, target)) from None
    except ValueError:
        raise InputError(target, "cannot be opened: not a file name") from None
    kind = kind_of(head, target)
    if kind == "gguf":
        from .gguf.checkpoint import open_gguf

        return open_gguf(target)
    if kind == "hbf":
        from .hbf.checkpoint import open_hbf

        return open_hbf(target)
    if kind == "safetensors":
        from .huggingface.folder import open_file

        return open_file(target)
    if target.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise InputError(target, "a PyTorch pickle, which can run code when it is read; convert it to safetensors first")
    if target.name == "config.json" or target.name.endswith(".safetensors.index.json"):
        raise InputError(target, "part of a checkpoint; name the folder that it lies in")
    raise InputError(target, f"not a checkpoint: expected one of {', '.join(_WEIGHT_ENDINGS)} or a Hugging Face folder")
