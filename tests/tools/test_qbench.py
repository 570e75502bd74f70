"""qbench: what it measures and prints, and which options it refuses together."""

import json

import pytest

from halfbyte.tools import qbench
from support import tiny

QUICK = ("-p", "16", "-n", "4", "-r", "1", "-t", "1")


def run(capsys, *arguments):
    status = qbench.main(list(arguments))
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qbench")
    tiny.write_folder(folder)
    return str(folder)


def test_speeds_as_text_and_json(capsys, model):
    status, out, _ = run(capsys, model, *QUICK)
    assert status == 0 and "prefill    16 tokens" in out and "decode      4 tokens" in out
    status, out, _ = run(capsys, *QUICK, "--json", model)
    found = json.loads(out)
    assert status == 0 and found["threads"] == 1 and len(found["prefill_tok_s"]) == len(found["decode_tok_s"]) == 1
    assert min(found["prefill_tok_s"] + found["decode_tok_s"]) > 0


def test_the_cache_type_is_used(capsys, model):
    bytes_of = {}
    for kind in ("f16", "f32", "q8"):
        found = json.loads(run(capsys, model, *QUICK, "--json", "--kv-type", kind)[1])
        assert found["kv_type"] == kind
        bytes_of[kind] = found["kv_bytes_per_token"]
    assert bytes_of["q8"] < bytes_of["f16"] < bytes_of["f32"]


def test_sampling(capsys, model):
    status, out, _ = run(capsys, model, "--sampling", "-r", "1", "-t", "1", "--vocabulary", "300", "--json")
    found = json.loads(out)
    assert status == 0 and found["vocabulary"] == 300 and {speed["rows"] for speed in found["sampling"]} == {1, 32}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vocabulary", "100"), "--vocabulary: it goes with --sampling"),
        (("--sampling", "-p", "3"), "--prompt: with --sampling"),
        (("--sampling", "-n", "3"), "--tokens: with --sampling"),
        (("-p", "-1"), "--prompt must be between"),
        (("--kv-type", "q3"), "--kv-type"),
    ],
)
def test_what_is_not_used_is_refused(capsys, model, arguments, words):
    status, out, err = run(capsys, model, *arguments)
    assert status == 2 and not out and err.startswith("error: ") and words in err
