"""qconvert as it is typed, where the model is run: the default, goals, recipes, other kinds of files, and what goes wrong on the way."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest

from halfbyte.engine.measure.report import make_report
from halfbyte.formats.conversion.recipe_file import read_recipe
from halfbyte.formats.hbf.reader import NativeFile
from halfbyte.formats.opening import open_checkpoint
from halfbyte.tools import qconvert, qinspect
from support import tiny

COMMAND = [sys.executable, "-m", "halfbyte.tools.qconvert"]
posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")


@pytest.fixture
def model(tmp_path):
    """(a folder, the options that make it run a short text)."""
    tiny.write_folder(tmp_path / "m")
    (tmp_path / "text.txt").write_text("".join(map(str, range(1000))), encoding="utf-8")
    return tmp_path / "m", ("--calibrate", tmp_path / "text.txt", "--tokens", 640)


def run(tool, *arguments):
    """(status, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [tool.__name__.rpartition(".")[2], *map(str, arguments)])
        status = tool.main()
    assert "Traceback" not in err.getvalue()
    return status, out.getvalue(), err.getvalue()


def succeed(*arguments):
    status, out, err = run(qconvert, *arguments)
    assert status == 0, err
    return out


def formats_of(path):
    with open_checkpoint(path) as found:
        return {name: tensor.format for name, tensor in found.tensors.items()}


def test_the_default(model, tmp_path):
    """A mix of 4.75 bits, named after its bits, with its plan in the tables."""
    folder, _ = model
    out = succeed(folder, "--tokens", 512)
    assert "the plan: matrices by format" in out and "nats per token" in out and "attn_v" in out and "nl4" in out
    with open_checkpoint(tmp_path / "m.int4.hbf") as found:
        bits = 8 * sum(t.nbytes for t in found.tensors.values()) / sum(t.size for t in found.tensors.values())
        assert 4.6 < bits <= 4.75 and f"{bits:.3f} bits per weight" in out
    with NativeFile(tmp_path / "m.int4.hbf") as file:
        file.verify()
        about = json.loads(file.metadata["halfbyte.calibration"])
        assert about["text"] == "built-in" and about["tokens"] == "512" and about["goal"] == "4.75 bits per weight"
        assert str(tmp_path) not in str(dict(file.metadata))


def test_a_size_its_plan_and_its_recipe(model, tmp_path):
    folder, text = model
    wishes = ("--size", "132kB", "--tensor", "attn_v=q6_r", "--save-recipe", tmp_path / "r.json")
    answer = json.loads(succeed(folder, *text, *wishes, "--json"))
    output = tmp_path / "m.0.132MB.hbf"
    assert answer["output"] == str(output) and output.stat().st_size == answer["bytes_after"] <= 132_000
    plan, found = answer["plan"], formats_of(output)
    assert {each["name"]: each["format"] for each in plan["tensors"]} == {n: f for n, f in found.items() if "norm" not in n}
    assert plan["kl_expected"] == pytest.approx(sum(each["kl"][each["format"]] for each in plan["tensors"]))
    assert plan["kl_measured"] is None and all(set(each["kl"]) == set(each["bytes"]) for each in plan["tensors"])
    assert {each["format"] for each in plan["tensors"] if "attn_v" in each["name"]} == {"q6_r"}
    assert {t["method"] for t in answer["tensors"] if "norm" not in t["name"]} == {"feedback"} and answer["bits_per_weight"] > 4.4
    recipe = read_recipe(tmp_path / "r.json")
    assert plan["recipe"] == {"format": recipe.format, "method": "feedback", "tensors": dict(recipe.tensors)}
    again = json.loads(succeed(folder, *text, "--recipe", tmp_path / "r.json", "-o", tmp_path / "again.hbf", "--json"))
    assert formats_of(tmp_path / "again.hbf") == found and again["plan"] is None
    assert {t["method"] for t in again["tensors"] if "norm" not in t["name"]} == {"feedback"}


def test_a_divergence(model, tmp_path):
    """At most what was asked, on the text of reports."""
    folder, text = model
    status, out, err = run(qconvert, folder, *text, "--max-kl", "1e-9")
    assert status == 1 and out == "" and "cannot be reached" in err and sorted(p.name for p in tmp_path.iterdir()) == ["m", "text.txt"]
    least = float(err.split()[-1])
    asked = float(f"{3 * least:.2g}")
    answer = json.loads(succeed(folder, *text, "--max-kl", asked, "-o", tmp_path / "a.hbf", "--json"))
    assert 0 < answer["plan"]["kl_measured"] <= asked
    from halfbyte.engine.measure.evaluation_text import evaluation_tokens
    from halfbyte.tools.qreport import BUILT_IN_TEXT, TOKENS

    with open_checkpoint(folder) as reference, open_checkpoint(tmp_path / "a.hbf") as made:
        ids, _ = evaluation_tokens(reference, reference, BUILT_IN_TEXT.read_text("utf-8"), TOKENS, 128)
        report = make_report(made, reference, ids, threads=1, chunk=128)
    assert report.tokens.total.kl_mean == pytest.approx(answer["plan"]["kl_measured"], rel=1e-6)


def test_qinspect_shows_how_it_came_to_be(model, tmp_path):
    folder, text = model
    succeed(folder, *text, "--bpw", 5, "-o", tmp_path / "a.hbf")
    status, out, _ = run(qinspect, tmp_path / "a.hbf", "--json", "--verify")
    assert status == 0
    shown = json.loads(out)
    text_of_it = json.dumps(shown)
    assert "5 bits per weight" in text_of_it and "text.txt" in text_of_it and "feedback" in text_of_it
    status, out, _ = run(qinspect, tmp_path / "a.hbf")
    assert status == 0 and "feedback" in out and "bf16" in out and "halfbyte.calibration" in out


def test_statistics_give_a_fixed_mix(model, tmp_path):
    from halfbyte.tools.qcalibrate import main as qcalibrate

    folder, _ = model
    statistics = tmp_path / "s.safetensors"
    assert qcalibrate([str(folder), "--text", str(tmp_path / "text.txt"), "--tokens", "512", "--gram", "-o", str(statistics)]) == 0
    succeed(folder, "--calibrate", statistics)
    found = formats_of(tmp_path / "m.int4.hbf")
    assert found["blk.0.attn_q.weight"] == "nl4" and found["blk.1.attn_v.weight"] == found["token_embd.weight"] == "q6_r"


# ---- other kinds of files --------------------------------------------------------------------------------------------


def test_gguf_by_feedback(model, tmp_path):
    """The same blocks as in a .hbf file, in GGUF's order; what was lost is reported of the whole way."""
    folder, text = model
    hbf = json.loads(succeed(folder, *text, "--format", "iq4_nl", "--json"))
    gguf = json.loads(succeed(folder, *text, "--format", "iq4_nl", "--to", "gguf", "--json"))
    assert gguf["output"] == str(tmp_path / "m.iq4_nl.gguf") and gguf["kind"] == "gguf" and gguf["asked"] == "iq4_nl"
    assert gguf["bytes_before"] == hbf["bytes_before"] == (folder / "model.safetensors").stat().st_size
    with open_checkpoint(tmp_path / "m.iq4_nl.hbf") as a, open_checkpoint(tmp_path / "m.iq4_nl.gguf") as b:
        assert set(a.tensors) == set(b.tensors) and b.metadata["general.name"] == a.metadata["general.name"]
        same = [name for name in a.tensors if a.tensors[name].format == b.tensors[name].format]
        assert len(same) >= len(a.tensors) - 1  # GGUF has no q6_0 for the embedding
        for name in same:
            np.testing.assert_array_equal(a.tensors[name].float32(), b.tensors[name].float32(), err_msg=name)
    before = {t["name"]: t for t in hbf["tensors"]}
    for tensor in gguf["tensors"]:
        ours = before[tensor["name"]]
        assert tensor["source"] == "bf16" and tensor["method"] == ours["method"]
        assert tensor["cosine"] == pytest.approx(ours["cosine"], abs=1e-4)
    assert {t["method"] for t in gguf["tensors"] if t["format"] == "iq4_nl"} == {"feedback"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m.iq4_nl.gguf", "m.iq4_nl.hbf", "text.txt"]  # nothing waits any more


def test_safetensors_by_feedback(model, tmp_path):
    folder, text = model
    succeed(folder, *text, "--format", "nl4", "-o", tmp_path / "a.hbf")
    answer = json.loads(succeed(folder, *text, "--format", "nl4", "--to", "safetensors", "-o", tmp_path / "out", "--json"))
    assert answer["kind"] == "safetensors" and {t["method"] for t in answer["tensors"] if len(t["shape"]) == 2} == {"feedback"}
    with open_checkpoint(tmp_path / "a.hbf") as a, open_checkpoint(tmp_path / "out") as b:
        for name, tensor in a.tensors.items():
            np.testing.assert_allclose(b.tensors[name].float32(), tensor.float32(), rtol=2**-8, atol=1e-6, err_msg=name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.hbf", "m", "out", "text.txt"]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_errors_are_one_line_and_leave_nothing(model, tmp_path):
    folder, text = model
    before = sorted(p.name for p in tmp_path.iterdir())
    for words, *arguments in (
        ("cannot be reached", "--size", "1kB"),
        ("cannot be reached", "--bpw", 3),
        ("is a folder", "-o", tmp_path),
        ("is also the input", "-o", folder / "model.safetensors"),
        ("no folder", "-o", tmp_path / "none" / "a.hbf"),
        ("no folder", "-o", tmp_path / "none" / "a.gguf", "--to", "gguf"),
        ("--save-recipe", "--to", "safetensors", "-o", tmp_path / "out", "--save-recipe", tmp_path / "out.json"),
        ("less than one chunk", "--calibrate", "short"),
    ):
        (tmp_path / "short").write_text("short", encoding="utf-8")
        options = text if "safetensors" not in arguments and "short" not in arguments else ()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            status, out, err = run(qconvert, folder, *options, *arguments)
        (tmp_path / "short").unlink()
        assert status in (1, 2) and out == "" and words in err, (arguments, err)
        assert [line.startswith("error: ") for line in err.splitlines() if not line.startswith("hint: ")] == [True], err
        assert sorted(p.name for p in tmp_path.iterdir()) == before, arguments


@posix
@pytest.mark.parametrize("more", [(), ("--to", "gguf", "--format", "q4_0")])
def test_a_full_disk_is_one_line_and_leaves_nothing(model, tmp_path, more):
    import resource

    folder, text = model
    done = subprocess.run(
        [*COMMAND, *map(str, (folder, *text, *more, "-o", tmp_path / "x.hbf"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("hint: ", "note: "))]
    assert done.returncode == 1 and len(lines) == 1 and lines[0].startswith("error: "), done
    assert "larger than allowed" in lines[0] or "cannot be written to" in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "text.txt"]


@posix
@pytest.mark.parametrize("more", [(), ("--to", "gguf", "--format", "q4_0")])
def test_a_signal_ends_it_quietly_and_leaves_nothing(tmp_path, more):
    config = tiny.llama_config(vocab_size=4000, hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    tiny.write_folder(tmp_path / "m", config)
    command = [*COMMAND, str(tmp_path / "m"), *more, "-o", str(tmp_path / "x.out")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while child.poll() is None and time.monotonic() < end and not _maps_a_candidate(child.pid, tmp_path):
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=120)
    if child.returncode == 0:
        pytest.skip("it was done before the signal came")
    # Before there is an output to remove, nothing catches the signal.
    assert child.returncode in (143, -signal.SIGTERM) and out == "" and "Traceback" not in err and "error" not in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def _maps_a_candidate(pid, folder):
    """True once a process works on its output: a folder or file with a temporary name, or an open file without one."""
    if any(p.name.startswith(".") for p in folder.iterdir()):
        return True
    try:
        return any(str(folder) in os.readlink(f"/proc/{pid}/fd/{fd}") and "(deleted)" in os.readlink(f"/proc/{pid}/fd/{fd}")
                   for fd in os.listdir(f"/proc/{pid}/fd"))  # fmt: skip
    except OSError:
        return False
