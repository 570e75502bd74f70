"""Tokenizers of real models against llama.cpp, transformers and the original files."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from halfbyte.engine.text.tokenizer import Tokenizer, TokenizerError
from halfbyte.formats.tokenizer.to_gguf import gguf_keys
from support import DATA
from support import small_tokenizers as small

FOLDER = DATA / "tokenizers"
TEXTS = small.TEXTS.TEXTS


MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))
PEER = Path(os.environ.get("HALFBYTE_PEER", Path.home() / ".cache" / "halfbyte-peer"))
REAL = [
    ("smollm2-135m-instruct", "smollm2-135m-instruct.q4_1.gguf"),
    ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-1.5b-instruct.q4_k_m.gguf"),
]


def real(folder, file):
    from halfbyte.formats.gguf.reader import GGUFFile

    if not (MODELS / folder / "tokenizer.json").is_file() or not (MODELS / file).is_file():
        pytest.skip(f"needs {folder} and {file} in {MODELS} (HALFBYTE_MODELS)")
    with GGUFFile(MODELS / file) as opened:
        keys = {key: opened.metadata[key] for key in opened.metadata if key.startswith("tokenizer.")}
    config = json.loads((MODELS / folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return Tokenizer((MODELS / folder / "tokenizer.json").read_bytes(), config=config), Tokenizer(gguf=keys), keys


def normalized(text):
    """What a tokenizer.json that asks for NFC makes of a text; GGUF readers do not."""
    from unicodedata import normalize

    return normalize("NFC", text)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), REAL)
def test_real_gguf_reads_text_as_the_original_tokenizer_json(folder, file):
    original, from_file, _ = real(folder, file)
    for text in map(normalized, TEXTS):
        for special in (False, True):
            assert from_file.encode(text, special=special) == original.encode(text, special=special), text
    for name in ("bos_id", "eos_ids", "add_bos", "vocabulary_size", "special_ids"):
        assert getattr(from_file, name) == getattr(original, name), name


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), REAL)
def test_real_tokenizer_json_gives_the_keys_of_the_gguf(folder, file):
    original, _, keys = real(folder, file)
    made = gguf_keys((MODELS / folder / "tokenizer.json").read_bytes(), original._config)
    names = "model pre tokens merges token_type bos_token_id eos_token_id padding_token_id add_bos_token"
    for key in (f"tokenizer.ggml.{name}" for name in names.split()):
        if key in keys:
            assert np.array_equal(np.asarray(made[key]), np.asarray(keys[key])), key


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), REAL)
def test_real_ids_are_llama_cpps(folder, file, tmp_path):
    program = PEER / "build" / "bin" / "llama-tokenize"
    if not program.is_file():
        pytest.skip(f"needs llama.cpp's llama-tokenize at {program} (HALFBYTE_PEER)")
    _, tokenizer, _ = real(folder, file)
    different = []
    for text in filter(None, TEXTS):
        (tmp_path / "text").write_bytes(text.encode())
        # llama.cpp takes "</s>" for an end mark in any vocabulary; in Qwen's it is a token like any other.
        for special in (False, True) if "<" in text and "</s>" not in text else (False,):
            command = [program, "-m", MODELS / file, "--ids", "--no-bos", "--no-escape", "--log-disable", "-f", tmp_path / "text"]
            done = subprocess.run([*command, *([] if special else ["--no-parse-special"])], capture_output=True, check=True)
            if json.loads(done.stdout) != tokenizer.encode(text, special=special):
                different.append((text, special))
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), REAL)
def test_real_ids_are_transformers(folder, file):
    transformers = pytest.importorskip("transformers")
    original, _, _ = real(folder, file)
    theirs = transformers.AutoTokenizer.from_pretrained(str(MODELS / folder))
    for text in TEXTS:
        assert original.encode(text, special=True) == theirs.encode(text, add_special_tokens=False), text
        ids = original.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), text
        assert original.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False), text


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((PEER / "src" / "models").glob("ggml-vocab-*.gguf.inp")) or [None], ids=str)
def test_vocabularies_of_llama_cpp_give_the_originals_ids(path):
    """The .out files beside llama.cpp's test vocabularies are ids by the original tokenizers."""
    from halfbyte.formats.gguf.reader import GGUFFile

    if path is None:
        pytest.skip(f"needs llama.cpp's source at {PEER / 'src'} (HALFBYTE_PEER)")
    if not path.with_suffix("").is_file():
        pytest.skip("the vocabulary is not there")
    with GGUFFile(path.with_suffix("")) as opened:
        keys = {key: opened.metadata[key] for key in opened.metadata if key.startswith("tokenizer.")}
    if keys["tokenizer.ggml.model"] not in ("gpt2", "llama"):
        with pytest.raises(TokenizerError, match=keys["tokenizer.ggml.model"]):
            Tokenizer(gguf=keys)
        return
    tokenizer = Tokenizer(gguf=keys)
    texts = path.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = path.with_suffix(".out").read_text().split("\n")
    assert len(texts) > 40
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text) == [int(i) for i in ids.split()], text
    keys = gguf_keys(tokenizer.to_json(), {**tokenizer.special_tokens, "add_bos_token": tokenizer.add_bos})
    again = Tokenizer(gguf=keys)
    assert all(again.encode(text) == tokenizer.encode(text) for text in texts)
