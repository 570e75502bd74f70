"""qrun with a model, and what it imports on the way to the first token."""

import json
import subprocess
import sys

import pytest

import halfbyte
from halfbyte.engine.generate.params import SamplingParams
from halfbyte.tools.chat.chat import Conversation
from support import fakes, tiny

child = fakes.child


HEAVY = {
    "typer", "click", "rich", "jinja2", "prompt_toolkit", "numba", "llvmlite", "gguf", "huggingface_hub", "ml_dtypes", "requests",
    "urllib.request", "http.client", "ssl", "asyncio", "logging", "multiprocessing", "concurrent.futures", "tempfile",
    "subprocess", "json", "unittest", "numpy.random", "numpy.fft", "numpy.polynomial", "numpy.ctypeslib", "numpy.testing", "numpy.ma",
    "yaml", "importlib.metadata", "pydantic", "email",
}  # fmt: skip
"""Imports that cost milliseconds, none of which an answer needs before its first token."""


def test_nothing_heavy_is_imported_on_the_way_to_the_first_token():
    after = f"print('loaded', sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run(child("Hi", after=after), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout == "Hello, world\nloaded []\n", done.stdout + done.stderr


def test_numpy_starts_no_blas_threads():
    after = "print(os.environ['OPENBLAS_NUM_THREADS'], 'numpy' in sys.modules)"
    done = subprocess.run(child("Hi", after=after), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout.endswith("1 True\n")




@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model as .hbf, so that a second start finds all its kernels ready."""
    from halfbyte.formats.conversion.convert import convert
    from halfbyte.formats.conversion.recipe import Recipe
    from halfbyte.formats.opening import open_checkpoint

    folder = tmp_path_factory.mktemp("qrun")
    tiny.write_folder(folder / "model", tiny.llama_config(max_position_embeddings=256))
    with open_checkpoint(folder / "model") as checkpoint:
        convert(checkpoint, folder / "model.hbf", Recipe(bits=8))
    return folder / "model.hbf"


def real(model, *arguments, code=None):
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "halfbyte.tools.qrun"]
    done = subprocess.run([*command, str(model), *arguments], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_conversation_is_what_it_would_be_without_a_memory(model):
    """Each turn reuses what the turns before left in the cache; the answers are those of a cache that is empty."""
    with halfbyte.Engine(model, threads=2) as engine:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=9)
        free = engine.model.cache.free_positions
        talk = Conversation(engine, params)
        for question in ("Hello there", "And again", "Why?"):
            before = [*talk.messages, {"role": "user", "content": question}]
            said = "".join(talk.ask(question))
            assert said == "".join(p.text for p in engine.generate(before, params))
        assert talk.last.timings.reused > 30
        talk.close()
        assert engine.model.cache.free_positions == free


def test_same_seed_same_text_whatever_the_threads(model):
    options = ("--raw", "--json", "--temperature", "1", "--top-k", "50", "--seed", "11", "--max-tokens", "20", "--ignore-eos")
    first, second, other = (json.loads(real(model, "Hello", *options, "--threads", n)) for n in ("1", "2", "2"))
    assert len(first["token_ids"]) == 20
    assert first["text"] == second["text"] == other["text"] and first["token_ids"] == second["token_ids"]
    assert json.loads(real(model, "Hello", *options, "--seed", "12"))["token_ids"] != first["token_ids"]


def test_nothing_heavy_is_imported_with_a_model_either(model):
    code = (
        "import gc, sys; from halfbyte.tools.qrun import main; main(); "
        f"print('\\nloaded', sorted(set(sys.modules) & {HEAVY!r}), gc.isenabled())"
    )
    real(model, "Hello", "--raw", "--max-tokens", "3")  # the first start on a machine compiles
    assert real(model, "Hello", "--raw", "--max-tokens", "3", code=code).endswith("\nloaded ['json'] True\n")  # for the tokenizer
    with_template = real(model, "Hello", "--max-tokens", "3", code=code).splitlines()[-1]
    assert "jinja2" in with_template
    for name in HEAVY - {"json", "jinja2", "tempfile"}:  # jinja2 imports json and tempfile
        assert f"'{name}'" not in with_template
