"""A .hbf file as a Checkpoint. Such a file is canonical as it lies; nothing is reordered or decoded."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..chat_template import template_of
from ..checkpoint import Checkpoint, TokenizerFiles, bind, check_shape
from ..errors import HeaderError
from ..families import family
from ..gguf.checkpoint import with_defaults
from ..gguf.values import TypedValues, ValueType
from ..metadata import Metadata
from .reader import NativeFile
from .structure import TOKENIZER

TOKENIZER_CONFIG = "halfbyte.tokenizer_config"
"""tokenizer_config.json without its chat template, as JSON text."""


def open_hbf(path: Path) -> Checkpoint:
    """Opens a .hbf file; one without an architecture holds weights only. Raises FileFormatError and CheckpointError."""
    with ExitStack() as stack:
        file = stack.enter_context(NativeFile(path))
        metadata = Metadata(file.metadata, path.name)
        notes: list[str] = []
        found = None
        names = list(file.tensors)
        if metadata.has("general.architecture"):
            found = family(metadata.require("general.architecture", str), path.name)
            metadata, notes = with_defaults(found, metadata, file.tensors)
            specs = found.tensors(metadata)
            there = bind(path, found, specs, names, {spec.name: (spec.name,) for spec in specs})
            specs = [spec for spec in specs if spec.name in there]
            for spec in specs:
                check_shape(path, file.tensors[spec.name].shape, spec, spec.name)
            names = [spec.name for spec in specs]
        else:
            notes = [f"{path.name} holds weights only, no architecture: it can be inspected and reported on, not run"]
        return Checkpoint(
            path,
            "hbf",
            metadata,
            {name: file.tensors[name] for name in names},
            family=found,
            tokenizer=_tokenizer(path, metadata, file.metadata),
            files=[path],
            notes=notes,
            prefetch=file.populate,
            closing=stack.pop_all(),
        )


def _tokenizer(path: Path, metadata: Metadata, values: TypedValues) -> TokenizerFiles:
    text: bytes | None = None
    if TOKENIZER in values and values.type(TOKENIZER) is ValueType.STRING:
        text = bytes(values.raw(TOKENIZER)[8:])  # behind its length; megabytes that need not become a str and bytes again
    elif TOKENIZER in values:
        metadata.require(TOKENIZER, str)
    config: Any = {}
    if metadata.has(TOKENIZER_CONFIG):
        try:
            config = json.loads(metadata.require(TOKENIZER_CONFIG, str))
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise HeaderError(path, "must hold a JSON object", where=TOKENIZER_CONFIG)
    return TokenizerFiles(text, config, template_of(metadata), metadata)
