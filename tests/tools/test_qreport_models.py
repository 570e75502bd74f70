"""qreport on several models at once, and what it says of methods, of single matrices and of speed."""

import json
import math
import os
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from halfbyte.engine.measure import benchmark
from halfbyte.engine.measure.evaluation_text import evaluation_tokens
from halfbyte.engine.measure.sensitivity import measure_sensitivities
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from halfbyte.tools import qreport
from halfbyte.tools.report.methods import method_cells, method_shares
from halfbyte.tools.report.models import front, labels
from halfbyte.tools.report.sensitivity import by_kind, most_sensitive
from halfbyte.tools.report.svg import Plot, heat_map, horizontal_bars, shortened
from support import tiny

SMALL = ("--chunk", "32", "--tokens", "64", "--threads", "2")
NAMES = ("q8_0.hbf", "q4_0.hbf", "q4_1.gguf")
NOTE = "note: q4_1.gguf has no tokenizer; the other's is used\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The reference in "model" (f32), and of it q8_0.hbf (nearest), q4_0.hbf (search), q4_1.gguf (by another library)."""
    path = tmp_path_factory.mktemp("qreport-models")
    stored = tiny.write_folder(path / "model", dtype="f32")
    tiny.write_gguf(path / "q4_1.gguf", tiny.llama_config(), stored, "Q4_1")
    with open_checkpoint(path / "model") as checkpoint:
        convert(checkpoint, path / "q8_0.hbf", Recipe(None, "q8_0", "nearest"))
        convert(checkpoint, path / "q4_0.hbf", Recipe(None, "q4_0", "search"))
    return path


@pytest.fixture
def run(root, monkeypatch, capsys):
    """Runs qreport in the folder of the models; gives exit status, stdout and stderr."""
    monkeypatch.chdir(root)

    def run(*arguments):
        status = qreport.main(["--reference", "model", *SMALL, *map(str, arguments)])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


def without_time(data):
    return {key: value for key, value in data.items() if key != "seconds"}


class Balance(HTMLParser):
    """Raises AssertionError unless every element is closed where it was opened."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}>"


def plots_of(text):
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]


def title_of(plot):
    return next(t.text for t in plot.findall("{*}text") if t.get("class") == "title")


# --- several models -------------------------------------------------------------------------------------------------------------


def test_json_of_several_holds_the_object_of_each(run):
    status, out, err = run(*NAMES, "--json")
    assert status == 0 and err == NOTE
    data = json.loads(out)
    assert list(data) == ["reference", "models", "seconds"] and data["reference"] == "model" and data["seconds"] > 0
    assert [model["model"] for model in data["models"]] == list(NAMES)
    for name, model in zip(NAMES, data["models"], strict=True):
        assert model == without_time(json.loads(run(name, "--json")[1])), "no figure depends on the other models"


def test_models_may_stand_around_options(run, monkeypatch, capsys):
    expected = without_time(json.loads(run(*NAMES[:2], "--json")[1]))
    assert qreport.main([NAMES[0], *SMALL, "--reference", "model", NAMES[1], "--json"]) == 0
    assert without_time(json.loads(capsys.readouterr().out)) == expected


def test_table_of_several(run):
    status, out, err = run(*NAMES)
    assert status == 0 and err == NOTE
    models = json.loads(run(*NAMES, "--json")[1])["models"]
    assert out.startswith("against model, ")
    for name, model in zip(NAMES, models, strict=True):
        tokens = model["tokens"]
        cells = re.split(r"  +", re.search(rf"^{re.escape(name)} .*$", out, re.M)[0])
        assert cells[2:] == [
            f"{model['bits_per_weight']:.3f}", f"{tokens['kl_mean']:.5f} ± {tokens['kl_standard_error']:.5f}", f"{tokens['kl_median']:.5f}",
            f"{tokens['kl_p99']:.4f}", f"{tokens['top1']:.2%}", f"{tokens['ppl']:.3f}", f"{tokens['shares']['kl_weights']:.5f}",
            f"{tokens['shares']['kl_activations']:+.5f}",
        ]  # fmt: skip
    best = re.search(r"no other is both smaller and nearer to the reference: (.*)", out)[1].split(", ")
    points = {name: (m["bytes"], m["tokens"]["kl_mean"]) for name, m in zip(NAMES, models, strict=True)}
    assert set(best) == {n for n, p in points.items() if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points.values())}


def test_table_of_tensors_only(run):
    status, out, _ = run(*NAMES, "--tensors-only")
    models = json.loads(run(*NAMES, "--tensors-only", "--json")[1])["models"]
    assert status == 0 and "KL" not in out and "no other is both" not in out
    for name, model in zip(NAMES, models, strict=True):
        assert model["tokens"] is None
        cells = re.split(r"  +", re.search(rf"^{re.escape(name)} .*$", out, re.M)[0])
        assert cells[3] == f"{min(t['cosine'] for t in model['tensors']):.6f}" and 0 < float(cells[4].rstrip("%")) < 20


def test_page_of_several(run, root):
    status, _, err = run(*NAMES, "--html", "page.html")
    assert status == 0 and err == f"{NOTE}note: the page is page.html\n"
    text = (root / "page.html").read_text("utf-8")
    seen = Balance(text).seen
    assert not {"script", "link", "img", "iframe"} & set(seen)
    assert set(re.findall(r"(?:https?:)?//[^\s\"'<>]+", text)) == {"http://www.w3.org/2000/svg"}
    plots = plots_of(text)
    assert title_of(plots[0]) == "Size and KL divergence"
    assert {t.text for t in plots[0].findall("{*}text")} >= set(NAMES), "every point has its model's name"
    dots = plots[0].findall("{*}circle")
    assert len(dots) == len(NAMES) and all(name in "".join(d.find("{*}title").text for d in dots) for name in NAMES)
    assert "Size and speed" not in {title_of(p) for p in plots}, "nobody has measured it"
    assert seen.count("details") == 2 * len(NAMES), "each model folded, and its table of tensors"
    assert [title_of(p) for p in plots].count("KL divergence of single tokens") == len(NAMES)
    for summary in re.findall(r'<details class="model"><summary><b>(.*?)</b>', text):
        assert summary in NAMES


def test_a_broken_model_among_several_leaves_nothing(run, root):
    data = (root / "q4_0.hbf").read_bytes()
    (root / "cut.hbf").write_bytes(data[: len(data) // 2])
    tiny.write_folder(root / "narrow", tiny.llama_config(hidden_size=32, num_attention_heads=2))
    (root / "kept.html").write_text("before")
    before = set(os.listdir(root))
    for bad, match in (("cut.hbf", "cut.hbf"), ("missing.hbf", "missing.hbf"), ("narrow", "different widths, 32 and 64")):
        status, out, err = run("q8_0.hbf", bad, "q4_0.hbf", "--html", "kept.html")
        assert status == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and match in err, err
    assert (root / "kept.html").read_text() == "before" and set(os.listdir(root)) == before


def test_a_page_over_any_of_the_models_is_refused(run, root):
    before = (root / "q4_0.hbf").read_bytes()
    status, _, err = run("q8_0.hbf", "q4_0.hbf", "--html", "q4_0.hbf")
    assert status == 1 and err.startswith("error: ") and (root / "q4_0.hbf").read_bytes() == before


def test_models_that_read_the_text_differently_are_refused(run, root):
    tiny.write_folder(root / "bos", dtype="f32")
    at = root / "bos" / "tokenizer_config.json"
    at.write_text(json.dumps({**json.loads(at.read_text()), "add_bos_token": True}))
    status, out, err = run("q8_0.hbf", "bos")
    assert status == 1 and out == "" and "q8_0.hbf and bos make other tokens of the text" in err.splitlines()[-1]


def test_names_of_files_cannot_write_html_or_to_a_terminal(run, root):
    evil = "<b onclick=x>\x1b[2J&\"'.hbf"
    (root / evil).write_bytes((root / "q8_0.hbf").read_bytes())
    names = [evil]
    try:
        odd = os.fsdecode(b"\xff.hbf")
        (root / odd).write_bytes((root / "q4_0.hbf").read_bytes())
        names.append(odd)
    except (OSError, UnicodeError):  # a file system that takes only UTF-8
        names.append("q4_0.hbf")
    status, out, err = run(*names, "--html", "evil.html")
    text = (root / "evil.html").read_text("utf-8")
    assert status == 0 and "\x1b" not in out + err + text
    assert "b" not in Balance(text).seen[:4] and "<b onclick" not in text and "&lt;b onclick=x&gt;" in text
    assert any("\\x1b[2J" in (t.text or "") for t in plots_of(text)[0].findall("{*}text"))


def test_one_stdin_serves_all_models(run, monkeypatch):
    import io

    text = "It was a dark and stormy night; the rain fell in torrents. " * 3
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    status, out, _ = run(*NAMES, "--text", "-", "--json", "--sensitivity", "--sensitivity-tokens", "32")
    models = json.loads(out)["models"]
    assert status == 0 and all(m["tokens"]["chunks"] == 2 and m["sensitivity"]["chunks"] == 1 for m in models)


# --- methods --------------------------------------------------------------------------------------------------------------------


def test_methods_of_a_file(run):
    data = json.loads(run("q4_0.hbf", "--json")[1])
    rows = {(row["method"], row["format"]): row for row in data["methods"]}
    assert set(rows) == {("search", "q4_0"), ("nearest", "q6_0"), ("kept", "f32")} or set(rows) == {
        ("search", "q4_0"), ("search", "q6_0"), ("kept", "f32"),
    }  # fmt: skip
    assert sum(row["tensors"] for row in rows.values()) == len(data["tensors"])
    for key, whole in (("weights", data["weights"]), ("bytes", data["tensor_bytes"])):
        assert sum(row[key] for row in rows.values()) == whole
        assert sum(row[f"{key}_share"] for row in rows.values()) == pytest.approx(1)
    row = rows["search", "q4_0"]
    members = [t for t in data["tensors"] if t["format"] == "q4_0"]
    assert {t["method"] for t in members} == {"search"} and row["tensors"] == len(members) == 14
    assert row["squared_error"] == pytest.approx(sum(t["squared_error"] for t in members))
    assert 0.5 < row["squared_error_share"] < 1 and rows["kept", "f32"]["squared_error_share"] == 0
    assert "kl" not in row
    status, out, _ = run("q4_0.hbf")
    assert status == 0 and re.search(rf"^search +q4_0 +14 +{row['weights_share']:.2%} ", out, re.M)


def test_methods_of_files_that_record_none(run):
    data = json.loads(run("q4_1.gguf", "--json")[1])
    assert {t["method"] for t in data["tensors"]} == {None}
    assert {row["method"] for row in data["methods"]} == {None, "kept"}
    assert re.search(r"^not recorded +q4_1 +15 ", run("q4_1.gguf")[1], re.M)


def tensor(name, method, form, nbytes, error, shape=(4, 32), **more):
    common = {"name": name, "method": method, "format": form, "bytes": nbytes, "shape": list(shape)}
    return {**common, "squared_error": error, "nmse": error, **more}


def test_method_shares():
    tensors = [
        tensor("blk.0.a.weight", "search", "nl4", 100, 3.0, kl=0.4),
        tensor("blk.1.a.weight", "feedback", "nl4", 300, 1.0, kl=0.1),
        tensor("blk.2.a.weight", "feedback", "nl4", 300, 0.0, kl=0.0),
        tensor("norm", None, "f32", 100, 0.0, shape=(32,), kl=None),
        tensor("output.weight", "search", "nl4", 0, 9.0, kl=9.0),  # tied: its embedding is in the table already
    ]
    feedback, search, kept = method_shares(tensors)
    assert (feedback["method"], feedback["tensors"]) == ("feedback", 2)
    assert (feedback["bytes_share"], feedback["squared_error_share"]) == (0.75, 0.25)
    assert feedback["kl_share"] == pytest.approx(0.2) and search["kl_share"] == pytest.approx(0.8) and kept["kl"] == 0
    assert method_cells(kept) == ("kept", "f32", "1", f"{32 / 416:.2%}", "12.50%", "0.00%", "0.00%")
    nothing = method_shares([tensor("a", "\x1b[2J", "f32", 10, 0.0)])
    assert nothing[0]["squared_error_share"] is None and method_cells(nothing[0])[0] == "\\x1b[2J"
    assert method_shares([]) == []
    broken = method_shares([tensor("a", "search", "nl4", 10, math.nan), tensor("b", "search", "nl5", 10, 1.0)])
    assert math.isnan(broken[0]["squared_error"]) and broken[1]["squared_error_share"] is None


# --- sensitivity ----------------------------------------------------------------------------------------------------------------


def test_the_divergence_of_a_model_with_one_matrix_changed_is_that_matrixs(run, root):
    """Two ways to about the same figure (other positions are scored): a report on a model in which only one matrix is another, and the
    sensitivity of that matrix."""
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors = tiny.weights(tiny.llama_config())
    tensors[name] = np.round(tensors[name], 1).astype(np.float32)
    tiny.write_folder(root / "one", tensors=tensors, dtype="f32")
    options = ("--compute", "f32", "--sensitivity", "--sensitivity-tokens", "64")
    data = json.loads(run("one", *options, "--json")[1])
    kl = {t["name"]: t["kl"] for t in data["tensors"]}
    own = kl.pop("blk.1.attn_v.weight")
    assert own == pytest.approx(data["tokens"]["kl_mean"], rel=0.3) and own > 1e-4
    matrices = {n for n, v in kl.items() if v is not None}
    assert matrices == {tiny.gguf_name(n) for n, w in tensors.items() if w.ndim == 2 and n != name}
    assert all(kl[n] == 0 for n in matrices)
    assert data["sensitivity"] == {"kl_sum": own, "chunks": 2, "chunk": 32, "text": "built-in"}
    with open_checkpoint(root / "model") as reference, open_checkpoint(root / "one") as model:
        text = qreport.BUILT_IN_TEXT.read_text("utf-8")
        texts = evaluation_tokens(model, reference, text, 64, 32)[0].reshape(2, 32)
        assert measure_sensitivities(reference, model, texts, threads=2) == {"blk.1.attn_v.weight": own}, "on the text's beginning"


def test_a_quantized_reference_is_run_by_its_values(run, root):
    """Whether the reference's int8 weights lie in a .hbf file or as floats in a folder makes no difference that counts."""
    with open_checkpoint(root / "q8_0.hbf") as checkpoint:
        values = {n: t.float32() for n, t in checkpoint.tensors.items()}
    tiny.write_folder(root / "floats", tensors={n: values[tiny.gguf_name(n)] for n in tiny.weights(tiny.llama_config())}, dtype="f32")
    options = ("q4_0.hbf", "--sensitivity", "--sensitivity-tokens", "32", "--json", "--reference")
    packed, plain = (json.loads(run(*options, reference)[1]) for reference in ("q8_0.hbf", "floats"))
    ours, theirs = ([t["kl"] for t in data["tensors"] if t["kl"] is not None] for data in (packed, plain))
    assert len(ours) == len(theirs) == 15 and ours == pytest.approx(theirs, rel=0.05, abs=1e-6) and min(ours) > 0


def test_sensitivity_in_tables_and_page(run, root):
    options = ("--sensitivity", "--sensitivity-tokens", "32", "--html", "sensitive.html")
    status, out, _ = run("q4_0.hbf", *options)
    data = json.loads(run("q4_0.hbf", "--json", *options)[1])
    assert status == 0 and "1 chunk of 32 tokens" in out
    measured = {t["name"]: t["kl"] for t in data["tensors"] if t["kl"] is not None}
    assert len(measured) == 15 and all(kl > -1e-6 for kl in measured.values())
    assert data["sensitivity"]["kl_sum"] == pytest.approx(sum(measured.values()))
    worst = max(measured, key=measured.get)
    listed = out[out.index("most sensitive") :]
    assert listed.splitlines()[2].split()[0] == worst and f"{measured[worst]:.6f}" in listed.splitlines()[2]
    sums = re.findall(r"^(\S+) +(q\d_\d) +(\d+) +(-?\d\.\d{6}) ", listed[listed.index("kind ") :], re.M)
    assert {kind for kind, *_ in sums} == {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd"}
    assert sum(float(kl) for *_, kl in sums) == pytest.approx(data["sensitivity"]["kl_sum"], abs=1e-5)
    assert sum(row["kl"] for row in data["methods"]) == pytest.approx(data["sensitivity"]["kl_sum"])

    text = (root / "sensitive.html").read_text("utf-8")
    Balance(text)
    plots = {title_of(p): p for p in plots_of(text)}
    cells = [r.find("{*}title").text for r in plots["KL divergence by layer and kind"].findall("{*}rect") if r.find("{*}title") is not None]
    assert len(cells) == 2 * 7 and any(cell.startswith("blk.1.ffn_up.weight, q4_0: ") for cell in cells)
    assert len(plots["Sum by kind and format"].findall("{*}rect")) == 8
    assert len(plots["The 15 most sensitive tensors"].findall("{*}rect")) == 15


def test_sensitivity_of_several(run):
    status, out, _ = run("q8_0.hbf", "q4_0.hbf", "--sensitivity", "--sensitivity-tokens", "32")
    assert status == 0 and out.count("most sensitive") == 2 and re.search(r"^q4_0.hbf$", out, re.M)


def test_most_sensitive_and_sums():
    tensors = [
        tensor("blk.0.a.weight", None, "nl4", 30, 0, kl=0.1),
        tensor("blk.1.a.weight", None, "nl4", 30, 0, kl=0.3),
        tensor("blk.1.b.weight", None, "nl4", 40, 0, kl=math.nan),
        tensor("blk.0.b.weight", None, "q6_r", 100, 0, kl=-1e-9),
        tensor("norm", None, "f32", 10, 0, kl=None),
    ]
    assert [t["kl"] for t in most_sensitive(tensors, 9)][1:] == [0.3, 0.1] and len(most_sensitive(tensors, 1)) == 1
    rows = {(row["kind"], row["format"]): row for row in by_kind(tensors)}
    assert rows["a", "nl4"]["kl"] == pytest.approx(0.4) and rows["a", "nl4"]["bytes_share"] == 0.3 and rows["a", "nl4"]["tensors"] == 2
    assert set(rows) == {("a", "nl4"), ("b", "nl4"), ("b", "q6_r")}


# --- speed ----------------------------------------------------------------------------------------------------------------------


def test_speed(run, root, monkeypatch):
    monkeypatch.setattr(benchmark, "READ_BYTES", 1 << 20)
    status, out, _ = run(*NAMES[:2], "--speed", "--html", "speed.html")
    assert status == 0 and re.search(r"decode of 126 tokens and prefill of 128: tokens/s with 2 threads", out)
    data = json.loads(run(NAMES[0], "--speed", "--json")[1])
    speed = data["speed"]
    assert (speed["prompt"], speed["tokens"], speed["threads"]) == (128, 126, 2), "as much as the context has room for"
    assert speed["prefill"] == sorted(speed["prefill_tok_s"])[1] > 0 and speed["decode"] == sorted(speed["decode_tok_s"])[1] > 0
    plots = {title_of(p): p for p in plots_of((root / "speed.html").read_text("utf-8"))}
    assert len(plots["Size and speed"].findall("{*}circle")) == 2
    assert "decode" in run(NAMES[0], "--speed")[1].splitlines()[-3]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--speed", "--tensors-only"), "--speed and --tensors-only"),
        (("--sensitivity", "--tensors-only"), "--sensitivity and --tensors-only"),
        (("--sensitivity-tokens", "64"), "give --sensitivity, too"),
        (("--sensitivity", "--sensitivity-tokens", "0"), "--sensitivity-tokens must be between 1 and"),
    ],
)
def test_options_that_make_no_sense(run, arguments, match):
    status, out, err = run("q4_0.hbf", *arguments)
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and match in err


# --- labels, fronts, plots ------------------------------------------------------------------------------------------------------


def test_labels_tell_models_apart():
    assert labels(["/a/m.hbf", "b/n.hbf"]) == ["m.hbf", "n.hbf"]
    assert labels(["/x/a/m.hbf", "/x/b/m.hbf", "m.hbf"]) == [os.path.join("a", "m.hbf"), os.path.join("b", "m.hbf"), "m.hbf"]
    assert labels(["a/m.hbf", "a/m.hbf"]) == ["m.hbf", "m.hbf"]


def test_front():
    sizes, losses = [5, 1, 3, 3, 4, 2, 6], [0.1, 0.9, 0.3, 0.3, 0.5, math.nan, 0.1]
    assert front(sizes, losses) == [1, 2, 0]
    assert front([], []) == [] and front([1.0], [math.inf]) == []


@pytest.mark.parametrize("log", [False, True])
def test_labels_of_points_do_not_hide_each_other(log):
    rng = np.random.default_rng(3)
    plot = Plot("t", "x", "y", (0.0, 10.0), (0.1, 10.0), 1000, 420, log_y=log)
    spots = [(5 + rng.normal() * 0.3, 1.0 + 0.1 * rng.random()) for _ in range(12)]
    for i, (x, y) in enumerate(spots):
        plot.point(x, y, f"model-{i}.hbf", "red")
    plot.point(math.nan, 1.0, "nowhere", "red")
    svg = ET.fromstring(plot.svg())
    texts = [t for t in svg.findall("{*}text") if t.get("class") == "tick halo"]
    assert sorted(t.text for t in texts) == sorted(f"model-{i}.hbf" for i in range(12))
    boxes = [(float(t.get("x")), float(t.get("y")) - 9, float(t.get("x")) + 6 * len(t.text), float(t.get("y"))) for t in texts]
    for i, a in enumerate(boxes):
        assert a[0] >= plot.LEFT and a[2] <= 1000 - plot.RIGHT and a[1] >= plot.TOP and a[3] <= 420 - plot.BOTTOM
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], "two labels overlap"


def test_bars_and_maps_show_their_values():
    bars = ET.fromstring(horizontal_bars("t", "x", [("one", 2.0, "red", "tip"), ("two <", 1.0, "red", ""), ("bad", math.nan, "red", "")]))
    widths = [float(r.get("width")) for r in bars.findall("{*}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01) and widths[2] == 0.5
    assert horizontal_bars("t", "x", []) == "" == horizontal_bars("t", "x", [("a", 0.0, "red", "")])
    cells = {(0, 0): (1.0, "most"), (0, 1): (0.1, "middle"), (1, 0): (0.01, "least"), (1, 1): (-1.0, "none"), (1, 2): (math.nan, "nan")}
    plot = ET.fromstring(heat_map("t", "x", ["0", "1", "2"], ["a", "b"], cells, "nats"))
    shade = {r.find("{*}title").text: float(r.get("fill-opacity")) for r in plot.findall("{*}rect") if r.find("{*}title") is not None}
    assert shade["most"] == shade["nan"] == 1 and shade["least"] == shade["none"] == 0.06
    assert shade["middle"] == pytest.approx((1 + 0.06) / 2, abs=0.01), "half way on the logarithmic scale"
    assert heat_map("t", "x", ["0"], ["a"], {(0, 0): (0.0, "")}, "") == ""


def test_shortened():
    assert shortened("short", 5) == "short"
    assert shortened("a-rather-long-name.hbf", 11) == "a-rat…e.hbf" and len(shortened("x" * 99, 40)) == 40
