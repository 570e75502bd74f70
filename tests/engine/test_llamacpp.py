"""The same file in llama.cpp and here: the likeliest tokens and their log-probabilities along a text.

Needs a llama-server (built in $HALFBYTE_PEER/build/bin) and the models under $HALFBYTE_MODELS. Everything stays on the loopback address.
"""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from halfbyte import Engine

pytestmark = pytest.mark.slow

MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))
BIN = Path(os.environ.get("HALFBYTE_PEER", Path.home() / ".cache" / "halfbyte-peer")) / "build" / "bin"
TOKENS, TOP = 200, 20
TEXT = """The river that runs through the old town was once its only road. Barges brought salt and timber from the hills, and
went home with cloth, paper and letters. In the winter of 1783 it froze from bank to bank, and for six weeks a market stood on the ice:
bakers, a printer with his press, two tame bears. When the thaw came in March the bridge went with it. The council argued for nine years
over who should pay for a new one, and then built it of stone, with seven arches and a toll house at each end. Children still count the
arches on their way to school. A sum that every one of them can do: if a barge is 4 metres wide and an arch is 11, how many barges can
pass side by side under all seven? The answer is 14, and nobody has ever seen more than three.

def barges(arch_width, barge_width, arches):
    return arches * (arch_width // barge_width)
"""


@contextmanager
def llama_server(model):
    """The address of a server that runs this model; it ends with the block."""
    binary = BIN / ("llama-server.exe" if os.name == "nt" else "llama-server")
    if not binary.exists():
        pytest.skip(f"needs llama.cpp's llama-server in {BIN} (HALFBYTE_PEER)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, "-m", model, "--host", "127.0.0.1", "--port", port, "-c", 512, "-t", 2, "-np", 1, "--no-webui", "-ngl", 0]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "HF_"))}
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                    if answer.status == 200:
                        break
            except (urllib.error.URLError, OSError):
                pass
            assert process.poll() is None, "llama-server ended by itself"
            time.sleep(0.1)
        else:
            raise AssertionError("llama-server did not become ready in a minute")
        yield address
    finally:
        process.terminate()
        process.wait(30)


def likeliest(address, ids):
    """[(id, log-probability)] of the TOP likeliest tokens after these."""
    body = {"prompt": [int(i) for i in ids], "n_predict": 1, "n_probs": TOP, "temperature": 0, "cache_prompt": True}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
    return [(token["id"], token["logprob"]) for token in found]


def log_probabilities(model, **options):
    """(ids of the text, float64[TOKENS, vocabulary])"""
    with Engine(model, context=512, **options) as engine:
        ids = engine.tokenizer.encode(TEXT, bos=True)[:TOKENS]
        assert len(ids) == TOKENS
        logits = engine.logits(ids).astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return ids, shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def along(address, ids):
    """What llama.cpp says after each token: (ids int[TOKENS, TOP], log-probabilities float64[TOKENS, TOP])."""
    found = [likeliest(address, ids[:n]) for n in range(1, TOKENS + 1)]
    assert all(len(row) == TOP for row in found)
    return np.array([[i for i, _ in row] for row in found]), np.array([[p for _, p in row] for row in found])


def needed(name):
    if not (MODELS / name).exists():
        pytest.skip(f"needs {MODELS / name} (HALFBYTE_MODELS)")
    return MODELS / name


SMOL, QWEN = "smollm2-135m-instruct.q4_1.gguf", "qwen2.5-coder-1.5b-instruct.q4_k_m.gguf"


@pytest.fixture(scope="module")
def compared():
    """A function: log-probabilities of llama.cpp's likeliest tokens, by "llama.cpp", "int8" and "f32" (ours), float64[TOKENS, TOP]."""
    made = {}

    def compare(name):
        if name not in made:
            model = needed(name)
            ids, ours = log_probabilities(model)
            _, exact = log_probabilities(model, compute="f32")
            with llama_server(model) as address:
                top, theirs = along(address, ids)
            made[name] = {"llama.cpp": theirs, "int8": np.take_along_axis(ours, top, 1), "f32": np.take_along_axis(exact, top, 1)}
        return made[name]

    return compare


def median(a, b):
    return float(np.median(np.abs(a - b)))


def test_with_float_activations_the_two_agree(tmp_path):
    """llama.cpp runs the same weights, dequantized by it, in float32: what is left is the f16 of its KV cache."""
    model, quantize = needed(SMOL), BIN / "llama-quantize"
    if not quantize.exists():
        pytest.skip(f"needs llama.cpp's llama-quantize in {BIN} (HALFBYTE_PEER)")
    wide = tmp_path / "f32.gguf"
    subprocess.run([quantize, "--allow-requantize", model, wide, "F32"], check=True, capture_output=True)
    ids, exact = log_probabilities(model, compute="f32")
    with llama_server(wide) as address:
        top, theirs = along(address, ids)
    wide.unlink()
    ours = np.take_along_axis(exact, top, 1)
    print(f"median {median(ours, theirs):.5f}, largest {np.abs(ours - theirs).max():.4f}")
    assert median(ours, theirs) < 0.005 and np.abs(ours - theirs).max() < 0.1


@pytest.mark.parametrize("name", [SMOL, QWEN])
def test_integer_activations_cost_no_more_than_in_llama_cpp(name, compared):
    """Both round activations to 8 bits, each in its own way. Neither is the other's truth: that is float activations."""
    found = compared(name)
    ours, theirs = median(found["int8"], found["f32"]), median(found["llama.cpp"], found["f32"])
    apart = median(found["int8"], found["llama.cpp"])
    same = int((found["int8"].argmax(-1) == 0).sum())  # llama.cpp's own likeliest is the first
    print(f"{name}: from f32, ours {ours:.4f}, llama.cpp {theirs:.4f}; from each other {apart:.4f}; same likeliest {same} of {TOKENS}")
    assert ours < 1.1 * theirs
    assert apart < 1.1 * np.hypot(ours, theirs), "further apart than two independent errors of that size"
    assert same > 0.93 * TOKENS
