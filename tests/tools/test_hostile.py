"""Attempts to break the tools: odd files, odd streams, odd numbers, hostile templates, misuse of the engine.

The rule: exit status not 0, one line on stderr that begins with "error:", no traceback, no hang, no output left, and nothing that a
terminal would obey.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from halfbyte import Engine
from halfbyte.engine.generate.params import SamplingError, SamplingParams
from halfbyte.engine.generate.sampler import Sampler
from halfbyte.engine.model import ModelError, TokenError, Work
from halfbyte.engine.run.cache import CacheFullError, SequenceError
from halfbyte.engine.text.template import ChatTemplate, TemplateError
from halfbyte.formats.huggingface.hub import HubError, fetch_model
from halfbyte.formats.json_file import DEEPEST, read_object
from halfbyte.formats.mapped import open_stream
from halfbyte.formats.tokenizer.pretokenizers import TokenizerError
from halfbyte.formats.tokenizer.to_gguf import gguf_keys
from halfbyte.quant.errors import HalfbyteError
from halfbyte.tools import qcalibrate, qconvert, qinspect, qreport, qrun
from halfbyte.tools.chat.chat import ChatError, Commands, Conversation
from halfbyte.tools.terminal import console
from halfbyte.tools.terminal.display import print_json
from support import tiny
from support.fakes import FakeEngine

HOSTILE = "\x1b[31mred\x9b2J\x07\u202e\x7f"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "model"
    tiny.write_folder(path)
    return path


@pytest.fixture
def own(folder, tmp_path):
    """A copy of the folder, to be broken."""
    return shutil.copytree(folder, tmp_path / "own")


@pytest.fixture(scope="module")
def engine(folder):
    with Engine(folder, threads=2, capacity=512) as engine:
        yield engine


def refused(status, capfd, *words):
    """Asserts the rule; returns stderr."""
    out, err = capfd.readouterr()
    assert status not in (0, None)
    assert sum(line.startswith("error:") for line in err.splitlines()) == 1, err
    assert "Traceback" not in err and "defect" not in err
    assert all(c.isprintable() or c in "\n\t" for c in out + err), err
    for word in words:
        assert word in err
    return err


def call(monkeypatch, tool, *arguments):
    monkeypatch.setattr(sys, "argv", [tool.__name__.rpartition(".")[2], *map(str, arguments)])
    return tool.main()


def spawn(tool, *arguments, **options):
    command = [sys.executable, "-m", f"halfbyte.tools.{tool}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=30, **options)


# Files


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("tool", ["qinspect", "qrun", "qconvert", "qbench", "qreport"])
def test_a_named_pipe_is_refused_and_not_waited_for(tool, tmp_path):
    pipe = tmp_path / "model.hbf"
    os.mkfifo(pipe)
    more = {"qrun": ["hi"], "qreport": ["--reference", pipe]}.get(tool, [])
    done = spawn(tool, pipe, *more)
    assert done.returncode == 1
    assert done.stderr.count(b"error: ") == 1 and b"not a regular file" in done.stderr
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_what_is_there_and_cannot_be_read_is_not_taken_for_absent(name, own, tmp_path, monkeypatch, capfd):
    (own / name).unlink(missing_ok=True)
    (own / name).symlink_to(tmp_path / "nowhere")
    refused(call(monkeypatch, qconvert, own, "-o", tmp_path / "out.hbf"), capfd, name, "link to a file that is not there")
    assert not (tmp_path / "out.hbf").exists()


@pytest.mark.parametrize("broken", [b"", b"{}", b"[]", b'{"model": null}', b"\xff\xfe", b'{"a":' + b"[" * 100_000])
@pytest.mark.parametrize("kind", ["hbf", "safetensors", "gguf"])
def test_a_broken_tokenizer_is_not_converted(broken, kind, own, tmp_path, monkeypatch, capfd):
    (own / "tokenizer.json").write_bytes(broken)
    target = tmp_path / "out"
    refused(call(monkeypatch, qconvert, own, "--to", kind, "-o", target), capfd, "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("added_tokens", 5), ("normalizer", [1]), ("normalizer", {"type": "Sequence", "normalizers": [5]}), ("post_processor", 5)],
)
def test_odd_tokenizers_are_no_gguf_tokenizers(key, value):
    odd = {**json.loads(tiny.tokenizer_json()), key: value}
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        gguf_keys(json.dumps(odd).encode())


def test_names_of_special_tokens_that_are_no_texts_are_passed_over():
    assert "tokenizer.ggml.eos_token_id" not in gguf_keys(tiny.tokenizer_json(), {"eos_token": [1], "bos_token": {"content": {}}})


def test_json_that_is_nested_deeply_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a":' + "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1) + "}")
    assert read_object(path)
    path.write_text('{"a":' + "[" * DEEPEST + "]" * DEEPEST + "}")
    with pytest.raises(HalfbyteError, match="nested deeper"):
        read_object(path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_theta": 1e-300}, "'rope_theta'"),
        ({"rope_theta": 0}, "'rope_theta'"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'rope_theta'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, "'rope_scaling.factor'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e30}}, "'rope_scaling.factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 0.0, "low_freq_factor": 1, "high_freq_factor": 4,
                           "original_max_position_embeddings": 64}}, "'rope_scaling.factor'"),
        ({"hidden_size": 10**400}, "'hidden_size'"),
        ({"rms_norm_eps": 2.0}, "at most 1"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_model_are_refused_by_their_key(changes, word, own, tmp_path, monkeypatch, capfd):
    tiny.write_json(own / "config.json", {**tiny.llama_config(), **changes})
    err = refused(call(monkeypatch, qconvert, own, "-o", tmp_path / "out.hbf"), capfd, "config.json", word)
    assert len(err) < 300
    assert not (tmp_path / "out.hbf").exists()


@pytest.mark.parametrize("value", ["1e400", "NaN", "1e20", "-1e12"])
def test_sampling_defaults_out_of_range_are_refused(value, own, tmp_path, monkeypatch, capfd):
    (own / "generation_config.json").write_text(f'{{"top_k": {value}}}')
    refused(call(monkeypatch, qconvert, own, "-o", tmp_path / "out.hbf"), capfd, "generation_config.json", "top_k")


def test_a_context_that_no_machine_holds_is_refused(folder, capfd):
    for context in (10**20, 1 << 62, 4_000_000_000_000):
        refused(qrun.main([str(folder), "hi", "--context", str(context)]), capfd, "--context")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_as_text_and_recipe(folder, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for tool, *arguments in (
        ("qreport", folder, "--reference", folder, "--chunk", 64, "--text", pipe),
        ("qcalibrate", folder, "-o", tmp_path / "out", "--text", pipe),
        ("qconvert", folder, "-o", tmp_path / "out", "--calibrate", pipe, "--method", "search"),
        ("qconvert", folder, "-o", tmp_path / "out", "--recipe", pipe),
    ):
        done = spawn(tool, *arguments)  # nobody writes: it is empty, not waited for
        assert done.returncode == 1 and done.stderr.count(b"error: ") == 1, done
    assert list(tmp_path.iterdir()) == [pipe]

    def write():
        with open(pipe, "w") as stream:
            time.sleep(0.3)
            stream.write('{"bits": 8}')

    writer = threading.Thread(target=write)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer is there from the beginning
    writer.start()
    time.sleep(0.1)
    with open_stream(pipe) as stream:
        os.close(descriptor)
        assert stream.read() == b'{"bits": 8}'
    writer.join()


def test_no_output_over_what_is_read(own, tmp_path, monkeypatch, capfd):
    text, recipe = tmp_path / "text.txt", tmp_path / "recipe.json"
    text.write_text("some words " * 200)
    recipe.write_text('{"bits": 8}')
    before = {path: path.read_bytes() for path in (*own.iterdir(), text, recipe)}
    out = tmp_path / "out.hbf"
    config = own / "config.json"
    for tool, *arguments in (
        (qconvert, own, "-o", out, "--save-recipe", config),
        (qconvert, own, "-o", out, "--save-recipe", out),
        (qconvert, own, "-o", out, "--save-recipe", tmp_path),
        (qconvert, own, "-o", out, "--save-recipe", tmp_path / "none" / "x"),
        (qconvert, own, "-o", recipe, "--recipe", recipe),
        (qconvert, own, "-o", text, "--calibrate", text, "--method", "search"),
        (qconvert, own, "-o", out, "--calibrate", text, "--method", "search", "--save-recipe", text),
        (qcalibrate, own, "-o", config),
        (qcalibrate, own, "-o", text, "--text", text),
        (qreport, own, "--reference", own, "--chunk", 64, "--html", config),
    ):
        refused(call(monkeypatch, tool, *arguments), capfd)
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "recipe.json", "text.txt"]
    assert call(monkeypatch, qconvert, own, "-o", out, "--recipe", recipe, "--save-recipe", recipe) in (0, None)
    assert json.loads(recipe.read_bytes()) == {"bits": 8}


# Streams and the terminal


def test_text_from_files_reaches_no_terminal_as_control_characters(own, monkeypatch, capfd):
    config = {**tiny.llama_config(), f"key {HOSTILE}": HOSTILE, "_name_or_path": [HOSTILE]}
    tiny.write_json(own / "config.json", config)
    for arguments in ([own], [own, "--json"]):
        assert call(monkeypatch, qinspect, *arguments) in (0, None)
        out, err = capfd.readouterr()
        assert "red" in out
        assert all(c.isprintable() or c in "\n\t" for c in out + err)
    assert json.loads(out)["metadata"][f"key {HOSTILE}"] == HOSTILE
    tiny.write_json(own / "config.json", {**config, "hidden_act": HOSTILE})
    refused(qrun.main([str(own), "hi"]), capfd, "hidden_act")


def test_json_stays_the_same_json_when_it_is_made_safe(capsys):
    value = {HOSTILE: ["\ud800", "é字\n", "\U000e0001", None, 1.5]}
    print_json(value)
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert "é字" in out and out.replace("\n", "").isprintable()


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX")
def test_closed_and_endless_streams(folder, tmp_path):
    def shell(line):
        python = f"{sys.executable} -m halfbyte.tools"
        return subprocess.run(["sh", "-c", line.replace("TOOL", python)], capture_output=True, timeout=30, cwd=tmp_path)

    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        done = shell(f"TOOL.qconvert {folder} --fast -o out.hbf {closed}")
        assert done.returncode == 0 and not done.stderr
        assert shell("TOOL.qinspect out.hbf --verify").returncode == 0  # what was printed did not go into the file
        (tmp_path / "out.hbf").unlink()
    done = shell(f"TOOL.qrun {folder} < /dev/zero")
    assert done.returncode == 2 and done.stderr.startswith(b"error: the prompt on stdin is longer than")


def test_a_stream_of_another_encoding_gets_escapes(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    assert console.run(lambda: print("a … b")) == 0
    assert stream.buffer.getvalue().split() == [b"a", b"\\u2026", b"b"]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_in_the_middle_of_an_import_is_ctrl_c(capfd):
    def main():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ImportError("numpy is broken") from None  # what C code makes of it

    before = signal.getsignal(signal.SIGINT)
    assert console.run(main) == console.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("address", ["", "zap://x", "http://[::1", "nothing", "http://", f"http://x/{HOSTILE}", "http://x:99999999"])
def test_an_endpoint_that_is_no_address(address, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(HubError, match="HF_ENDPOINT"):
        fetch_model("a/b")


# Chat


def test_chats_are_saved_whatever_is_in_them_and_odd_names_are_refused(tmp_path):
    conversation = Conversation(FakeEngine("hello"), SamplingParams())
    commands = Commands(conversation)
    conversation.messages = [{"role": "user", "content": "a \ud800 b"}, {"role": "assistant", "content": "é"}]
    commands.run(f"/save {tmp_path / 'chat.json'}")
    kept = list(conversation.messages)
    conversation.reset()
    commands.run(f"/load {tmp_path / 'chat.json'}")
    assert conversation.messages == kept
    for command in ("/save", "/load"):
        for name in ("n" * 300, "a\0b", str(tmp_path), "/dev/null"):
            with pytest.raises(ChatError):
                commands.run(f"{command} {name}")
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


# Templates


NEST = (
    "{% set ns = namespace(a=[1], b=[1]) %}"
    "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
BIG = "{% set x = 'x' * 10000000 %}{% set ns = namespace(l=[]) %}{% for i in range(100000) %}"

BOMBS = {
    "loop": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "power": "{{ 2 ** 100000000 }}",
    "squares": "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "times": "{{ 'x' * 10 ** 10 }}",
    "list times": "{{ [1] * 10 ** 10 }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "join": "{{ (['x' * 1000] * 100000) | join }}",
    "join method": "{{ 'x'.join(['y' * 1000] * 100000) }}",
    "center": "{{ 'x' | center(10 ** 10) }}",
    "map center": "{{ ['x'] | map('center', 10 ** 10) | list }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 10, 1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=10 ** 10) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "replace": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "replace method": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "indent": "{{ ('x\n' * 100000) | indent(99999) }}",
    "tojson": "{{ messages | tojson(indent=10 ** 10) }}",
    "slice": "{{ range(10) | slice(10 ** 9) | list }}",
    "sum": "{{ ([['x'] * 100000] * 100000) | sum(start=[]) | length }}",
    "lipsum": "{{ lipsum(n=10 ** 6) }}",
    "output": "{% set x = 'y' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
    "macro": "{% set x = 'y' * 1000000 %}{% macro m() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}{{ m() }}",
    "kept": BIG + "{% set ns.l = ns.l + [x.upper()] %}{% endfor %}",
    "sliced": BIG + "{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "blocks": BIG + "{% set z %}{{ x }}{% endset %}{% set ns.l = ns.l + [z] %}{% endfor %}",
    "ranges": BIG + "{% set ns.l = ns.l + [range(100000) | list] %}{% endfor %}",
    "nested": NEST + "{{ ns.a }}",
    "nested json": NEST + "{{ ns.a | tojson }}",
    "nested equal": NEST + "{{ ns.a == ns.b }}",
    "nested in": NEST + "{{ ns.a in [ns.b] }}",
    "nested sort": NEST + "{{ [ns.a, ns.b] | sort }}",
    "nested test": NEST + "{{ ns.a is eq ns.b }}",
    "source": "{{ a }}" * 100_000,
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_a_template_that_would_take_all_time_or_memory_is_stopped(source):
    start = time.process_time()
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert time.process_time() - start < 8


def test_templates_may_do_what_real_ones_do():
    source = (
        "{%- set ns = namespace(text='', last=0) -%}{%- for m in messages[::-1] -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}"
        "{%- for m in messages -%}{%- if m.role == 'user' and not loop.last or m.content in ['', none] -%}"
        "{%- set ns.text = ns.text + '<' ~ m.content.strip().replace('a', 'b') | upper ~ '>' -%}{%- else -%}"
        "{{- '%s:%05d' % (m.role, loop.index) -}}{{- '{:>4}'.format(7) -}}{{- {'k': (1, [2])} | tojson(indent=1) -}}"
        "{%- endif -%}{%- endfor -%}{{- ns.text -}}{{- [1, 2, 3] | join('+') -}}{{- 'x' | center(5) -}}{{- (3, 4)[1:] | list -}}"
    )
    text = ChatTemplate(source, {}).render([{"role": "user", "content": " ab "}, {"role": "assistant", "content": "c"}])
    assert text == 'assistant:00002   7{\n "k": [\n  1,\n  [\n   2\n  ]\n ]\n}<BB>1+2+3  x  [4]'
    long = [{"role": role, "content": "word " * 20_000} for _ in range(20) for role in ("user", "assistant")]
    chatty = (
        "{% for m in messages %}"
        "{{ m.role ~ ': ' ~ m.content | trim ~ '\n' if m == messages[0] or m != messages[-1] else m.content }}{% endfor %}"
    )
    assert len(ChatTemplate(chatty, {}).render(long)) > 3_900_000


# The engine


def test_ids_and_penalties_beyond_all_bounds():
    for field, value in (("stop_ids", [1 << 31]), ("logit_bias", {10**30: 1.0}), ("stop_ids", [-1])):
        with pytest.raises(SamplingError, match="token id"):
            SamplingParams(**{field: value})
    logits = np.linspace(-5, 5, 300).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would be a line of Python's on the user's stderr
        for extreme in (
            {"repetition_penalty": 1e300}, {"repetition_penalty": 1e-300}, {"frequency_penalty": 1e308}, {"presence_penalty": -1e308},
            {"logit_bias": {5: 1e308}}, {"logit_bias": {5: -1e308}, "temperature": 1.0},
        ):  # fmt: skip
            try:
                Sampler(SamplingParams(**extreme)).sample(logits, [1, 2, 299, 299], 2)
            except HalfbyteError:
                pass


def test_sizes_of_the_cache_are_checked(folder):
    for wrong in (0, -1, "x", 1.5, True):
        with pytest.raises(ModelError, match="whole number"):
            Engine(folder, context=wrong)
        with pytest.raises(ModelError, match="whole number"):
            Engine(folder, capacity=wrong)
    for huge in (1 << 70, 1 << 62):
        with pytest.raises(CacheFullError, match="less context"):
            Engine(folder, context=huge)


def test_prompts_that_are_none(engine):
    for wrong in (["a"], [1.5], [None], [5, {"role": "user"}]):
        with pytest.raises(TokenError, match="whole numbers"):
            engine.generate(wrong)
    for wrong in (None, 5):
        with pytest.raises(TypeError, match="prompt"):
            engine.generate(wrong)
    with pytest.raises(TypeError, match="SamplingParams"):
        engine.generate("hi", 3)
    with pytest.raises(HalfbyteError, match="no name"):
        Engine("")


def test_sequences_of_another_engine_change_nothing(engine, folder):
    mine = engine.open_sequence()
    before = engine.next_logits(mine, [1, 2, 3]).copy()
    with Engine(folder, threads=1) as other:
        theirs = other.open_sequence()
        other.next_logits(theirs, [7])
        free = engine.model.cache.free_positions
        fresh = engine.open_sequence()
        for attempt in (
            lambda: engine.next_logits(theirs, [1]),
            lambda: engine.truncate_sequence(theirs, 0),
            lambda: engine.close_sequence(theirs),
            lambda: engine.step([Work(fresh, [1, 2]), Work(theirs, [1])]),
        ):
            with pytest.raises(SequenceError, match="another engine"):
                attempt()
        assert engine.model.cache.free_positions == free and fresh.length == 0
        other.close_sequence(theirs)
    with pytest.raises(SequenceError, match="-1"):
        engine.truncate_sequence(mine, -1)
    with pytest.raises(ModelError, match="open_sequence"):
        engine.step([Work(None, [1])])
    engine.truncate_sequence(mine, 0)
    assert np.array_equal(engine.next_logits(mine, [1, 2, 3]), before)
    engine.close_sequence(mine)


def test_threads_may_share_an_engine(engine):
    prompts = ["a", "bc", "def", "ghij"]
    alone = [[piece.ids for piece in engine.generate(prompt, max_tokens=12)] for prompt in prompts]
    logits = [engine.logits([i, i + 1]) for i in range(4)]
    failed = []

    def work(number):
        try:
            for _ in range(4):
                assert [piece.ids for piece in engine.generate(prompts[number], max_tokens=12)] == alone[number]
                assert np.array_equal(engine.logits([number, number + 1]), logits[number])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)


def test_a_closed_engine_says_so_and_generators_end(folder):
    engine = Engine(folder, threads=2)
    answer = engine.generate("hi", max_tokens=20)
    next(answer)
    dropped = engine.generate("ho", max_tokens=20)
    next(dropped)
    del dropped
    failed = []

    def work():
        try:
            while True:
                engine.logits([1, 2])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    engine.close()
    engine.close()
    thread.join(30)
    assert [type(error) for error in failed] == [ModelError]
    for attempt in (lambda: next(answer), lambda: engine.logits([1]), lambda: list(engine.generate("x"))):
        with pytest.raises(ModelError, match="closed"):
            attempt()


def test_qbench_prints_paths_safely(monkeypatch, capfd):
    from halfbyte.engine.measure import benchmark
    from halfbyte.formats import sources
    from halfbyte.tools import qbench

    result = SimpleNamespace(
        threads=1, prefill_tok_s=[1.0], decode_tok_s=[1.0], weight_bytes_per_token=1, memory_read_gb_s=1.0, share_of_memory_limit=0.5,
        kv_type="f16", kv_bytes_per_token=1.0,
    )
    monkeypatch.setattr(benchmark, "benchmark", lambda *_: result)

    monkeypatch.setattr(sources, "resolve_source", lambda name: Path(f"/x/{HOSTILE}"))
    monkeypatch.setattr("halfbyte.engine.engine.Engine", lambda *_, **__: FakeEngine("x"))
    assert qbench.main(["x"]) == 0
    out = capfd.readouterr().out
    assert "red" in out and all(c.isprintable() or c == "\n" for c in out)
