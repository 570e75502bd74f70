"""qreport from the outside: its JSON, tables and page, and every way to be refused in one line."""

import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from halfbyte.tools import qreport
from halfbyte.tools.report.svg import Plot, label_of, round_steps
from halfbyte.tools.terminal.stages import stages, token_rate
from halfbyte.tools.terminal.text_file import read_text
from support import tiny

SMALL = ("--chunk", "32", "--tokens", "64", "--threads", "2")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("qreport")
    tiny.write_folder(path / "model")
    with open_checkpoint(path / "model") as checkpoint:
        convert(checkpoint, path / "model.q4_0.hbf", Recipe(None, "q4_0", "nearest"))
    return path


@pytest.fixture
def run(root, monkeypatch, capsys):
    """Runs qreport on the tiny model in its folder; gives exit status, stdout and stderr."""
    monkeypatch.chdir(root)

    def run(*arguments, model="model.q4_0.hbf", reference="model", small=True):
        status = qreport.main([model, "--reference", reference, *(SMALL if small else ()), *map(str, arguments)])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


# --- what it says ---------------------------------------------------------------------------------------------------------------


def test_json(run, root):
    status, out, err = run("--json")
    assert status == 0 and err == ""
    data = json.loads(out)
    assert data["bytes"] == os.path.getsize(root / "model.q4_0.hbf")
    assert data["reference_bytes"] == os.path.getsize(root / "model" / "model.safetensors")
    assert data["tensor_bytes"] == sum(t["bytes"] for t in data["tensors"])
    assert data["bits_per_weight"] == pytest.approx(8 * data["tensor_bytes"] / data["weights"])
    assert (data["architecture"], data["compute"], data["notes"]) == ("llama", "int8", [])
    names = {t["name"] for t in data["tensors"]}
    assert names == {tiny.gguf_name(n) for n in tiny.weights(tiny.llama_config())}
    q = next(t for t in data["tensors"] if t["name"] == "blk.1.attn_q.weight")
    assert q["format"] == "q4_0" and q["reference_format"] == "bf16" and q["shape"] == [64, 64] and q["bytes"] == 64 * 2 * 18
    assert q["bits_per_weight"] == 4.5 and 0.98 < q["cosine"] < 0.999 and 0.001 < q["nmse"] < 0.02
    assert set(q["worst_block"]) == {"row", "block", "error"}
    assert [layer["layer"] for layer in data["layers"]] == [0, 1]
    for layer in data["layers"]:
        for place in (layer, layer["attention"], layer["ffn"]):
            assert 0.9 < place["cosine"] < 1 and place["cosine_min"] <= place["cosine"] and place["error"] > 0
            assert 0 < place["activations"]["error"] < place["weights"]["error"]
    tokens = data["tokens"]
    assert (tokens["count"], tokens["chunks"], tokens["chunk"], tokens["text"]) == (30, 2, 32, "built-in")
    assert 0 < tokens["kl_median"] <= tokens["kl_p99"] <= tokens["kl_max"] and tokens["kl_mean"] > 0 and 0 <= tokens["top1"] <= 1
    assert tokens["ppl"] > 1 and tokens["ppl_reference"] > 1 and 0.9 < tokens["cosine_mean"] < 1
    shares = tokens["shares"]
    assert shares["kl_weights"] == tokens["weights"]["kl_mean"]
    assert shares["kl_weights"] + shares["kl_activations"] == pytest.approx(tokens["kl_mean"])


def test_compute_f32_has_no_shares(run):
    data = json.loads(run("--json", "--compute", "f32")[1])
    assert data["compute"] == "f32" and "shares" not in data["tokens"] and "weights" not in data["layers"][0]
    assert data["tokens"]["kl_mean"] == json.loads(run("--json")[1])["tokens"]["weights"]["kl_mean"]


def test_tables(run):
    status, out, err = run()
    assert status == 0 and err == ""
    assert out.startswith("model.q4_0.hbf against model\n")
    assert re.search(r"^attn_q +q4_0 +2 +4\.50 +0\.99\d+ ", out, re.M)
    assert re.search(r"^ +1 +0\.9\d+ +0\.9\d+ +0\.9\d+ ", out, re.M), "a line for layer 1"
    assert re.search(r"^weights alone +0\.\d+", out, re.M) and re.search(r"^activations alone +0\.\d+", out, re.M)
    assert "30 tokens, in the second half of each of 2 chunks of 32; text: built-in\n" in out


def test_a_text_of_ones_own(run, root, monkeypatch):
    text = "It was a dark and stormy night; the rain fell in torrents. " * 3
    (root / "my.txt").write_text(text)
    first = json.loads(run("--json", "--text", "my.txt")[1])["tokens"]
    assert first["text"] == "my.txt"
    (root / "bom.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert json.loads(run("--json", "--text", "bom.txt")[1])["tokens"]["kl_mean"] == first["kl_mean"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert json.loads(run("--json", "--text", "-")[1])["tokens"]["kl_mean"] == first["kl_mean"]
    built_in = json.loads(run("--json")[1])["tokens"]
    assert built_in["kl_mean"] != first["kl_mean"]
    _, out, err = run("--json", "--text", "my.txt", "--tokens", "1000")
    assert json.loads(out)["tokens"]["chunks"] == 5 and err == "note: the text has 177 tokens; its 5 whole chunks of 32 are used\n"


def test_the_built_in_text():
    """It is what a report without --text is made on: whole sentences of plain ASCII prose, enough for the default number of tokens."""
    text = read_text(str(qreport.BUILT_IN_TEXT), qreport.TOKENS)
    assert 60_000 < len(text) < 80_000 and text.isascii() and text.startswith("Mr. Weston was a native of Highbury")
    assert all(name in text[:25_000] for name in ("Weston", "Fanny", "Catherine")), "three novels in turn"


def test_a_long_file_is_not_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_bytes("ä".encode() * (1 << 20))
    text = read_text(str(path), 1)
    assert set(text) == {"ä"} and len(text) == 1 << 19
    path.write_bytes(b"a" + "ä".encode() * (1 << 20))  # the cut falls inside a character
    assert read_text(str(path), 1) == "a" + "ä" * (1 << 19)


def test_tensors_only(run):
    data = json.loads(run("--json", "--tensors-only")[1])
    assert data["tokens"] is None and data["layers"] == [] and len(data["tensors"]) == 20
    assert "predictions" not in run("--tensors-only")[1]


def test_weights_without_a_config_are_compared_as_tensors(run, root):
    lone = root / "lone.safetensors"
    lone.write_bytes((root / "model" / "model.safetensors").read_bytes())
    (root / "other.safetensors").write_bytes(lone.read_bytes())
    status, out, err = run("--json", model="lone.safetensors", reference="other.safetensors")
    assert status == 0 and json.loads(out)["tokens"] is None and "only tensors are compared" in err
    assert all(t["cosine"] == pytest.approx(1) and t["nmse"] == 0 for t in json.loads(out)["tensors"])


def drawn(monkeypatch, work, **options):
    """What a terminal sees of a bar while `work` calls it."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        with stages(**options) as progress:
            work(progress)
    return terminal.getvalue()


def test_the_bar_names_its_stage_and_its_rate(monkeypatch):
    def work(progress):
        for stage, total in (("kernels", 7), ("text", 4e9)):
            for done in (0, total / 2, total):
                progress(stage, done, total)

    seen = drawn(monkeypatch, work, rate=token_rate(1000))
    assert "kernels" in seen and "text" in seen and re.search(r"\d+ tokens/s", seen) and "100%" in seen
    seen = drawn(monkeypatch, work, name="[red]\x1b[2Jm.hbf")
    assert "kernels" in seen and "[red]\\x1b[2Jm.hbf" in seen and "tokens/s" not in seen
    assert "\x1b[2J" not in seen, "names are shown, not obeyed"
    monkeypatch.setenv("TERM", "dumb")
    with stages() as progress:
        progress("text", 1, 2)


def test_the_bar_takes_totals_of_nothing(monkeypatch):
    assert "tokens/s" not in drawn(monkeypatch, lambda progress: progress("text", 0, 0), rate=token_rate(0))


# --- the page -------------------------------------------------------------------------------------------------------------------


def test_page(run, root):
    page = root / "page.html"
    status, _, err = run("--html", page)
    assert status == 0 and err == f"note: the page is {page}\n"
    text = page.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>") and text.endswith("</html>\n")
    links = set(re.findall(r"(?:https?:)?//[^\s\"'<>]+", text))
    assert links == {"http://www.w3.org/2000/svg"}, "the page needs nothing else"
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    plots = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    titles = [plot.find("{*}text").text for plot in plots]
    assert titles == [
        "KL divergence of single tokens", "Cosine with the reference, mean over tokens", "Relative error of the residual stream",
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
    ]  # fmt: skip
    bars = [r for plot in plots[3:] for r in plot.findall("{*}rect")]
    assert len(bars) == 2 * 7, "a bar for each quantized matrix of the two layers"
    assert sum(int(re.search(r"(\d+) tokens", r.find("{*}title").text)[1]) for r in plots[0].findall("{*}rect")) == 30
    assert sum(len(plot.findall("{*}polyline")) for plot in plots[1:3]) == 3 + 3
    for name in tiny.weights(tiny.llama_config()):
        assert f"<td>{tiny.gguf_name(name)}</td>" in text


def test_names_from_files_cannot_write_html(root, run):
    from safetensors.numpy import save_file

    evil = "<script>alert(1)</script>\x1b[2J"
    w = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    save_file({evil: w}, root / "a.safetensors")
    save_file({evil: w + 0.1}, root / "b.safetensors")
    status, out, _ = run("--html", root / "evil.html", model="a.safetensors", reference="b.safetensors")
    text = (root / "evil.html").read_text("utf-8")
    assert status == 0 and "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text + out


def test_the_page_is_whole_or_absent(run, root):
    page = root / "kept.html"
    page.write_text("before")
    before = set(os.listdir(root))
    assert run("--html", page, reference="missing")[0] == 1
    (root / "short.txt").write_text("too short")
    assert run("--html", page, "--text", "short.txt")[0] == 1
    assert page.read_text() == "before" and set(os.listdir(root)) - before == {"short.txt"}


def test_a_page_over_an_input_is_refused(run, root):
    before = (root / "model.q4_0.hbf").read_bytes()
    status, _, err = run("--html", "model.q4_0.hbf")
    assert status == 1 and err.startswith("error: ") and (root / "model.q4_0.hbf").read_bytes() == before
    (root / "in.txt").write_text("text " * 100)
    assert run("--html", "in.txt", "--text", "in.txt")[0] == 1 and (root / "in.txt").read_text().startswith("text")
    status, _, err = run("--html", "nowhere/page.html")
    assert status == 1 and "there is no folder" in err


# --- refusals -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "match"),
    [
        (("--reference", "nothing"), 1, "nothing: no such file"),
        (("--text", "nothing.txt"), 1, "nothing.txt: no such file"),
        (("--text", "."), 1, "is a folder"),
        (("--text", "a\0b"), 1, "not a file name"),
        (("--text", "latin1.txt"), 1, r"latin1.txt \(at byte 5\): is not UTF-8"),
        (("--text", "empty.txt"), 1, "the text has 0 tokens, which is less than one chunk of 32: give a longer text"),
        (("--chunk", "129"), 1, "at most 128 tokens, not 129"),
        (("--chunk", "3"), 2, "--chunk must be between 4 and"),
        (("--tokens", "0"), 2, "--tokens must be between 1 and"),
        (("--tokens", "many"), 2, "invalid int value"),
        (("--threads", "0"), 2, "--threads must be between 1 and 512"),
        (("--compute", "f16"), 2, "invalid choice"),
        (("--tensors-only", "--text", "latin1.txt"), 2, "--text and --tensors-only"),
        (("--frobnicate",), 2, "unrecognized arguments: --frobnicate"),
    ],
)
def test_refusals_are_one_line(run, root, arguments, status, match):
    (root / "latin1.txt").write_bytes("quer über".encode("latin-1"))
    (root / "empty.txt").write_bytes(b"")
    got, out, err = run(*arguments)
    assert got == status and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(match, err), err


def test_other_models_are_refused(run, root):
    tiny.write_folder(root / "qwen", tiny.qwen2_config())
    status, out, err = run(reference="qwen")
    assert status == 1 and out == "" and "different architectures, 'llama' and 'qwen2'" in err and err.count("\n") == 1


def test_a_reference_is_needed(capsys):
    assert qreport.main(["model"]) == 2
    assert "--reference" in capsys.readouterr().err


# --- plots ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.83, 1.0), (0, 29), (-3e-7, 4e-7), (12, 12.5), (0, 1e9)])
def test_round_steps(low, high):
    steps = round_steps(low, high)
    assert 2 <= len(steps) <= 8 and low <= steps[0] and steps[-1] <= high + 1e-9 * abs(high)
    gaps = np.diff(steps)
    np.testing.assert_allclose(gaps, gaps[0], rtol=1e-6)
    assert f"{gaps[0]:.0e}"[0] in "125"
    labels = [label_of(s, gaps[0]) for s in steps]
    assert len(set(labels)) == len(labels)


def test_points_lie_where_the_axes_say():
    plot = Plot("t", "x", "y", (0.0, 10.0), (1.0, 100.0), width=500, height=300, log_y=True)
    plot.line([0, 5, float("nan"), 10], [1, 10, 5, 100], "red")
    svg = ET.fromstring(plot.svg())
    lines = [[tuple(map(float, p.split(","))) for p in line.get("points").split()] for line in svg.findall("{*}polyline")]
    left, right, top, foot = plot.LEFT, 500 - plot.RIGHT, plot.TOP, 300 - plot.BOTTOM
    assert lines == [[(left, foot), ((left + right) / 2, (top + foot) / 2)]], "broken at the NaN"
    dot = svg.find("{*}circle")
    assert (float(dot.get("cx")), float(dot.get("cy"))) == (right, top)


# --- real models ----------------------------------------------------------------------------------------------------------------

MODELS = Path(os.environ.get("HALFBYTE_MODELS", Path.home() / ".cache" / "halfbyte-models"))
PEER = Path(os.environ.get("HALFBYTE_PEER", Path.home() / ".cache" / "halfbyte-peer")) / "build" / "bin"


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def smollm2():
    folder = MODELS / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip(f"needs SmolLM2 at {folder} (HALFBYTE_MODELS)")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("format", "least"), [("q8_0", 0.9999), ("q4_0", 0.99), ("q4_1", 0.99)])
def test_every_tensor_of_smollm2_is_near_enough(smollm2, tmp_path, format, least):
    command("halfbyte.tools.qconvert", smollm2, "--format", format, "--fast", "-o", tmp_path / "m.hbf")
    data = json.loads(command("halfbyte.tools.qreport", tmp_path / "m.hbf", "--reference", smollm2, "--tensors-only", "--json"))
    measured = [t for t in data["tensors"] if t["format"] == format]
    assert len(measured) >= 210
    assert min(t["cosine"] for t in measured) >= least
    assert min(t["cosine"] for t in data["tensors"]) >= least


@pytest.mark.slow
def test_kl_divergence_agrees_with_llama_perplexity(smollm2, tmp_path):
    """Mean KL divergence of the same GGUF file on the same text, within 3 %; perplexity of the reference within 0.1 %."""
    if not (PEER / "llama-perplexity").exists():
        pytest.skip(f"needs llama.cpp's programs at {PEER} (HALFBYTE_PEER)")
    full, small, base = tmp_path / "f32.gguf", tmp_path / "q4_0.gguf", tmp_path / "base.kld"
    chunks = 8
    command("halfbyte.tools.qconvert", smollm2, "--to", "gguf", "--format", "f32", "-o", full)
    peer = {"capture_output": True, "text": True, "timeout": 1800}
    subprocess.run([PEER / "llama-quantize", full, small, "Q4_0", "2"], check=True, **peer)
    common = ["-f", qreport.BUILT_IN_TEXT, "-c", "512", "--chunks", str(chunks), "-t", "2", "--kl-divergence-base", base]
    done = subprocess.run([PEER / "llama-perplexity", "-m", full, *common], check=True, **peer)
    # The base file holds 16-bit probabilities; what is printed while it is made is exact.
    ppl_reference = float(re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)[1])
    done = subprocess.run([PEER / "llama-perplexity", "-m", small, *common, "--kl-divergence"], check=True, **peer)
    said = done.stdout + done.stderr
    theirs = {key: float(re.search(rf"{re.escape(key)}\s*:\s*([\d.]+)", said)[1]) for key in ("Mean    KLD", "Median  KLD")}
    data = json.loads(command("halfbyte.tools.qreport", small, "--reference", smollm2, "--tokens", chunks * 512, "--json"))["tokens"]
    assert data["count"] == chunks * 255
    assert data["kl_mean"] == pytest.approx(theirs["Mean    KLD"], rel=0.03)
    assert data["kl_median"] == pytest.approx(theirs["Median  KLD"], rel=0.05)
    assert data["ppl_reference"] == pytest.approx(ppl_reference, rel=0.0005)
