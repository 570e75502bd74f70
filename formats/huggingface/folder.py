"""A Hugging Face checkpoint as a Checkpoint: config.json, safetensors in one file or in shards, tokenizer files beside them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..chat_template import template_keys, writable
from ..checkpoint import EOS_IDS, Checkpoint, TokenizerFiles, assemble, model_name
from ..decoder import EMBEDDING, HEAD
from ..errors import HeaderError, InputError, printable, some
from ..families import family_of_model_type
from ..family import Family, TensorSpec
from ..json_file import is_there, read_bytes, read_object
from ..metadata import Metadata
from ..safetensors.reader import read_index
from ..tensor import RowsTensor, Tensor
from .weights import SHARD_INDEX, Weights, open_weights, refuse_packed, refuse_quantized

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"

_PREFIXES = (("model.", ""), ("", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""))
"""What stands before the names of the decoder and of its head: usual models, bare decoders, the text half of two generations of others."""

_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def open_folder(folder: Path) -> Checkpoint:
    """A folder with config.json and safetensors. Raises FileFormatError and CheckpointError."""
    if not is_there(folder / CONFIG):
        others = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".gguf", ".hbf", ".safetensors")]
        hint = f"; name one of its files: {some(others, 4)}" if others else "; a Hugging Face folder has one"
        raise InputError(folder, f"the folder has no {CONFIG}{hint}")
    return _open(folder, folder, None)


def open_file(path: Path) -> Checkpoint:
    """A .safetensors: with its config.json beside it a model, alone just weights."""
    folder = path.parent
    if not is_there(folder / CONFIG):
        return _open_alone(path)
    index = folder / SHARD_INDEX
    if is_there(index) and path.name in read_index(index).values():
        return _open(folder, folder, None)  # one of the shards stands for all of them
    return _open(path, folder, path)


def _open_alone(path: Path) -> Checkpoint:
    with ExitStack() as stack:
        weights, _ = open_weights(path.parent, path, stack)
        refuse_packed(path, weights.names)
        tensors: dict[str, Tensor] = {name: weights.tensor(name) for name in weights.names}
        note = f"{path.name} stands alone, without config.json and tokenizer.json: it can be inspected, converted and reported on, not run"
        return Checkpoint(
            path,
            "safetensors",
            Metadata({"general.name": path.stem}, path.name),
            tensors,
            files=weights.files,
            notes=[note],
            closing=stack.pop_all(),
        )


def _open(path: Path, folder: Path, file: Path | None) -> Checkpoint:
    config_json = read_object(folder / CONFIG)
    config = text_config(config_json)
    refuse_quantized(config)
    found = family_of_model_type(config.require("model_type", str), CONFIG)
    keys, computed, notes = found.from_huggingface(config)
    with ExitStack() as stack:
        weights, more = open_weights(folder, file, stack, config)
        notes += more
        refuse_packed(folder, weights.names)
        keys |= _more_keys(folder, config)
        tokenizer = tokenizer_files(folder, notes)
        keys |= template_keys(tokenizer.chat_template)
        metadata = Metadata(keys, CONFIG, found.spelling())
        tensors = _tensors(path, found, found.huggingface_tensors(metadata, config), weights, computed)
        notes += settle_head(tensors, config.get("tie_word_embeddings", None, bool))
        return Checkpoint(
            path,
            "safetensors",
            metadata,
            tensors,
            family=found,
            tokenizer=TokenizerFiles(tokenizer.json, tokenizer.config, tokenizer.chat_template, metadata),
            files=weights.files,
            config=config_json,
            notes=notes,
            closing=stack.pop_all(),
        )


def text_config(config: dict[str, Any]) -> Metadata:
    """config.json as one mapping: the keys of a nested text_config stand before those around it."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return Metadata({**{key: value for key, value in config.items() if key != "text_config"}, **inner}, CONFIG)
    return Metadata(config, CONFIG)


def _tensors(path: Path, found: Family, specs: list[TensorSpec], weights: Weights, computed: dict[str, Any]) -> dict[str, Tensor]:
    body, head = next((pair for pair in _PREFIXES if f"{pair[0]}embed_tokens.weight" in weights), _PREFIXES[0])

    def spell(name: str) -> str:
        return (head if name.startswith("lm_head.") else body) + name

    return assemble(path, found, specs, "huggingface", weights.names, weights.tensor, spell=spell, computed=computed)


def settle_head(tensors: dict[str, Tensor], tied: bool | None) -> list[str]:
    """Leaves out a head that only repeats the embedding, and gives notes on what is odd.

    tied: tie_word_embeddings, None if the config does not say.
    """
    if HEAD not in tensors:
        if tied is False:
            return [f"{CONFIG} says that the head is not tied to the embedding, but there is no lm_head.weight: the embedding is used"]
        return []
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if not tied:
        return []
    assert isinstance(head, RowsTensor) and isinstance(embedding, RowsTensor)
    if head.same_as(embedding):
        del tensors[HEAD]
        return []
    return [f"{CONFIG} says that the head is tied to the embedding, but lm_head.weight differs from it: both are kept"]


def _more_keys(folder: Path, config: Metadata) -> dict[str, Any]:
    """GGUF's keys on names, special tokens and sampling."""
    keys: dict[str, Any] = {"general.name": writable(model_name(folder))}
    generation: Metadata = Metadata({}, GENERATION)
    if is_there(folder / GENERATION):
        generation = Metadata(read_object(folder / GENERATION), GENERATION)
    vocabulary = config.count("vocab_size")
    for ours, theirs in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        source = generation if generation.has(theirs) else config
        ids = _ids(source, theirs, vocabulary)
        if ids:
            keys[f"tokenizer.ggml.{ours}_token_id"] = ids[0]
        if ours == "eos" and ids:
            keys[EOS_IDS] = list(dict.fromkeys([*ids, *_ids(config, theirs, vocabulary)]))
    for theirs, ours in _SAMPLING.items():
        value = generation.get(theirs)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and generation.get("do_sample", True) is not False:
            if not abs(value) < 1 << 31:  # false for NaN as well
                raise HeaderError(folder / GENERATION, f"must be a usual number, is {printable(repr(value), 60)}", where=theirs)
            keys[f"general.sampling.{ours}"] = int(value) if ours == "top_k" else float(value)
    return keys


def _ids(source: Metadata, key: str, vocabulary: int) -> list[int]:
    """The token ids under a key that holds one, a list of them, or nothing. Those beyond the vocabulary mean "none" (-1 is common)."""
    if not source.has(key):
        return []
    value = source.require(key)
    values = value if isinstance(value, list) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int):
            raise HeaderError(source.source, f"must be a token id or a list of them, is {printable(repr(value), 60)}", where=key)
    return [one for one in values if 0 <= one < vocabulary]


def tokenizer_files(folder: Path, notes: list[str]) -> TokenizerFiles:
    """The files of a folder that are about text. What is missing is added to the notes."""
    raw = read_bytes(folder / TOKENIZER) if is_there(folder / TOKENIZER) else None
    if raw is None:
        other = " (tokenizer.model is not read; save the tokenizer with transformers)" if (folder / "tokenizer.model").is_file() else ""
        notes.append(f"there is no {TOKENIZER}{other}: the model runs on token ids only")
    config = read_object(folder / TOKENIZER_CONFIG) if is_there(folder / TOKENIZER_CONFIG) else {}
    return TokenizerFiles(raw, config, chat_template(folder, config))


def chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or templates by name: files of their own come before tokenizer_config.json, as in transformers."""
    named: dict[str, str] = {}
    value = config.get("chat_template")
    legacy = folder / "chat_template.json"
    if is_there(legacy) and value is None:
        value = read_object(legacy).get("chat_template")
    if isinstance(value, str):
        named["default"] = value
    elif isinstance(value, dict):
        named = {str(name): text for name, text in value.items() if isinstance(text, str)}
    elif isinstance(value, list):
        for entry in value:
            if not (isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)):
                raise HeaderError(folder / TOKENIZER_CONFIG, "each entry needs a 'name' and a 'template'", where="chat_template")
            named[entry["name"]] = entry["template"]
    elif value is not None:
        raise HeaderError(folder / TOKENIZER_CONFIG, "must be a text or a list of named ones", where="chat_template")
    if is_there(folder / "chat_template.jinja"):
        named["default"] = _text(folder / "chat_template.jinja")
    more = folder / "additional_chat_templates"
    if more.is_dir():
        named |= {path.stem: _text(path) for path in sorted(more.glob("*.jinja"))}
    if not named:
        return None
    return named["default"] if list(named) == ["default"] else named


def _text(path: Path) -> str:
    try:
        return read_bytes(path, 1 << 24).decode()
    except UnicodeDecodeError:
        raise HeaderError(path, "is not UTF-8") from None
