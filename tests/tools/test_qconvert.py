"""qconvert as it is typed: results, defaults, errors in one line, and outputs that survive kills, signals and full disks."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.formats.opening import open_checkpoint
from halfbyte.tools.qconvert import main
from support import tiny

COMMAND = [sys.executable, "-m", "halfbyte.tools.qconvert"]
posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")


def run(*arguments, cwd=None, **options):
    """A CompletedProcess; in this process, unless the child is to get limits of its own."""
    if not options:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["qconvert", *map(str, arguments)])
            patch.chdir(cwd or Path.cwd())
            status = main()
        return subprocess.CompletedProcess(sys.argv, status, out.getvalue(), err.getvalue())
    environment = {**os.environ, "COLUMNS": "120", **options.pop("env", {})}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=environment, timeout=120, check=False, **options
    )


def succeed(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def fail(*arguments, status=1, **options):
    """One line that begins with error:, perhaps hints behind it, nothing on stdout."""
    done = run(*arguments, **options)
    lines = done.stderr.splitlines()
    assert done.returncode == status and done.stdout == "", done
    assert [line for line in lines if line.startswith("error: ")] == lines[:1] and "Traceback" not in done.stderr, done.stderr
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert all(c.isprintable() or c == "\n" for c in done.stderr)
    return lines[0]


@pytest.fixture
def large(tmp_path):
    """A folder whose conversion takes a good part of a second."""
    config = tiny.llama_config(vocab_size=40_000, hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    tiny.write_folder(tmp_path / "large", config)
    return tmp_path / "large"


def test_table_and_json(tmp_path):
    tiny.write_folder(tmp_path / "m")
    text = succeed(tmp_path / "m", "--format", "q4_0", "--fast").stdout
    output = tmp_path / "m.q4_0.hbf"
    assert output.is_file()
    for words in (
        "q4_0",
        "q6_0",
        "embedding and head: at least six bits",
        "token_embd.weight",
        "bits per weight",
        "worst cosine",
        "blk.*.attn_norm",
    ):
        assert words in text, words
    answer = json.loads(succeed(tmp_path / "m", "--bits", 8, "-o", tmp_path / "x.hbf", "--json", "--threads", 1).stdout)
    assert answer["output"] == str(tmp_path / "x.hbf") and answer["asked"] == "q8_0"
    assert answer["bytes_after"] == (tmp_path / "x.hbf").stat().st_size
    assert answer["bytes_before"] == (tmp_path / "m" / "model.safetensors").stat().st_size
    assert answer["formats"] == {"q8_0": 15, "f32": 5} and answer["worst"]["cosine"] > 0.999
    assert {entry["format"] for entry in answer["exceptions"]} == {"f32"} and all(entry["reason"] for entry in answer["exceptions"])
    with NativeFile(tmp_path / "x.hbf") as file:
        file.verify()


def test_round_through_every_kind(tmp_path):
    stored = tiny.write_folder(tmp_path / "m")
    succeed(tmp_path / "m", "--bits", 16, "-o", tmp_path / "a.hbf")
    succeed(tmp_path / "a.hbf", "--to", "gguf", "-o", tmp_path / "b.gguf")
    succeed(tmp_path / "b.gguf", "--to", "safetensors", "-o", tmp_path / "c")
    with open_checkpoint(tmp_path / "c") as found:
        for name, value in stored.items():
            np.testing.assert_array_equal(found.tensors[tiny.gguf_name(name)].float32(), value)


def test_default_outputs(tmp_path):
    tiny.write_folder(tmp_path / "m")
    succeed(tmp_path / "m" / "model.safetensors", "--format", "q4_1", "--fast")
    assert (tmp_path / "m" / "model.q4_1.hbf").is_file()
    succeed("model.q4_1", "--to", "gguf", cwd=tmp_path / "m")  # the ending may be left out
    assert (tmp_path / "m" / "model.q4_1.gguf").is_file()
    succeed(tmp_path / "m" / "model.q4_1.gguf", "--bits", 8)
    assert (tmp_path / "m" / "model.q8_0.hbf").is_file()
    succeed(f"{tmp_path / 'm'}{os.sep}", "--to", "safetensors")
    assert (tmp_path / "m.dequantized" / "config.json").is_file()


def test_help_and_command_lines_that_make_no_sense(tmp_path):
    shown = succeed("--help").stdout
    assert "Examples:" in shown and "--allow-nonfinite" in shown and "--bits" in shown
    assert "SRC" in fail(status=2)
    assert "--nonsense" in fail("a", "--nonsense", status=2)
    assert "threads" in fail("a", "--threads", "0", status=2)
    tiny.write_folder(tmp_path / "m")
    assert "--bits and --format" in fail(tmp_path / "m", "--bits", 4, "--format", "q4_0", status=2)
    assert "--bits 3" in fail(tmp_path / "m", "--bits", 3)
    assert "q9" in fail(tmp_path / "m", "--format", "q9")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_bad_sources(tmp_path):
    assert "no such file" in fail(tmp_path / "nothing")
    assert "no name" in fail("")
    (tmp_path / "a\x1b[31m.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    assert "\\x1b" in fail(tmp_path / "a\x1b[31m.gguf")
    (tmp_path / "b.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    fail(tmp_path / "b.safetensors")
    tiny.write_folder(tmp_path / "m")
    config = tiny.llama_config()
    del config["num_hidden_layers"]
    tiny.write_json(tmp_path / "m" / "config.json", config)
    assert "config.json lacks 'num_hidden_layers'" in fail(tmp_path / "m")
    assert not list(tmp_path.rglob("*.hbf")) and not list(tmp_path.rglob("*halfbyte-tmp*"))


def test_bad_outputs(tmp_path):
    tiny.write_folder(tmp_path / "m")
    assert "no folder" in fail(tmp_path / "m", "-o", tmp_path / "not" / "there.hbf")
    assert "is a folder" in fail(tmp_path / "m", "-o", tmp_path)
    assert "input" in fail(tmp_path / "m", "-o", tmp_path / "m" / "model.safetensors")
    assert "not empty" in fail(tmp_path / "m", "--to", "safetensors", "-o", tmp_path)


def test_a_lone_file_says_that_it_cannot_run(tmp_path):
    save_file({"w": np.ones((32, 64), np.float32)}, tmp_path / "w.safetensors")
    done = succeed(tmp_path / "w.safetensors")
    assert "note: " in done.stderr and "not run" in done.stderr
    assert (tmp_path / "w.int4.hbf").is_file()


def test_non_finite_weights(tmp_path):
    tensors = tiny.weights(tiny.llama_config())
    tensors["model.layers.0.mlp.up_proj.weight"][4, 2] = np.nan
    tiny.write_folder(tmp_path / "m", tensors=tensors)
    for way in (["--fast"], ["--format", "q4_0"], []):
        assert "blk.0.ffn_up.weight [row 4, column 2]" in fail(tmp_path / "m", *way)
        assert "blk.0.ffn_up.weight: 1 weights" in succeed(tmp_path / "m", *way, "--allow-nonfinite").stderr


def test_an_unexpected_error_is_one_line(tmp_path):
    code = "import halfbyte.formats.opening as c, halfbyte.tools.qconvert as q; c.open_checkpoint = lambda path: 1 / 0; exit(q.main())"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60)
    assert (
        done.returncode == 1
        and done.stderr.startswith("error: ")
        and "ZeroDivisionError" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    environment = {**os.environ, "HALFBYTE_TRACEBACK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert "Traceback" in done.stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    tiny.write_folder(tmp_path / "m")
    with subprocess.Popen([*COMMAND, str(tmp_path / "m"), "--fast", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert b"Traceback" not in child.stderr.read() and b"error" not in child.stderr.read()
    assert (tmp_path / "m.int4.hbf").is_file()


@posix
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, large):
    import resource

    (tmp_path / "old.hbf").write_bytes(b"precious")
    for kind, name in (("hbf", "old.hbf"), ("gguf", "x.gguf"), ("safetensors", "folder")):
        line = fail(
            large,
            "--to",
            kind,
            "--bits",
            16,
            "-o",
            tmp_path / name,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        )
        assert "larger than allowed" in line and name in line
    assert (tmp_path / "old.hbf").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "old.hbf"]


@posix
def test_killed_at_any_moment_there_is_no_file_or_a_whole_one(tmp_path, large):
    output = tmp_path / "out.hbf"
    start = time.monotonic()
    succeed(large, "-o", output, "--method", "nearest")
    whole, longest = output.read_bytes(), time.monotonic() - start
    output.unlink()
    rng = random.Random(5)
    for _ in range(4):
        child = subprocess.Popen([*COMMAND, str(large), "-o", str(output), "--method", "nearest"], stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 1.0) * longest)
        child.kill()
        child.wait()
        if output.exists():
            assert output.read_bytes() == whole
            output.unlink()
    succeed(large, "-o", output, "--method", "nearest")
    assert output.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "out.hbf"]  # leftovers of the killed are gone


@posix
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_quietly(tmp_path, large, number, status):
    child = subprocess.Popen(
        [*COMMAND, str(large), "--method", "search", "-o", str(tmp_path / "out.hbf")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not list(tmp_path.glob(".out.hbf.*")) and time.monotonic() < end:
        time.sleep(0.002)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    if child.returncode == 0:
        pytest.skip("it was done before the signal came")
    assert child.returncode == status and out == "" and "Traceback" not in err and "error" not in err, err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large"]


@pytest.mark.slow
@posix
def test_memory_stays_small(tmp_path):
    """The embedding of Qwen2.5-1.5B is 933 MB as float32; the limit is that and 300 MB."""
    folder = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models")) / "qwen2.5-coder-1.5b-instruct"
    if not folder.is_dir():
        pytest.skip(f"{folder.name} is not there")
    if not Path("/proc/self/status").is_file():
        pytest.skip("the most memory of a process, without that of the one that started it, is known on Linux only")
    code = """if True:
        import halfbyte.tools.qconvert as qconvert
        status = qconvert.main()
        print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
        exit(status)"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), "--method", "nearest", "-o", str(tmp_path / "q.hbf")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) * 1024 < 151936 * 1536 * 4 + 300e6
