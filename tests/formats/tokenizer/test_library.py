"""What the tokenizers library stumbles over is refused in one line, and no text is lost without a word."""

import json
import subprocess
import sys

import pytest
import tokenizers

from halfbyte.engine.text.tokenizer import Tokenizer, TokenizerError
from halfbyte.formats.errors import printable
from halfbyte.formats.tokenizer.from_gguf import checked
from halfbyte.formats.tokenizer.library import build_tokenizer, guarded
from halfbyte.formats.tokenizer.to_gguf import gguf_keys
from halfbyte.quant.errors import HalfbyteError
from support import small_tokenizers as small
from support import tiny


def mark(name):
    return {"SpecialToken": {"id": name, "type_id": 0}}


def text(name="A"):
    return {"Sequence": {"id": name, "type_id": 0}}


def template(single, ids=None, name="<|im_end|>"):
    special = {} if ids is None else {name: {"id": name, "ids": ids, "tokens": [name] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": [text("A"), text("B")], "special_tokens": special}


def with_processor(processor, source=None):
    return json.dumps({**json.loads(source or small.byte_level()), "post_processor": processor}).encode()


BROKEN = [
    (template([mark("<s>"), text()]), "special token '<s>', which is not among its special_tokens"),
    (template([mark("<|im_end|>"), text()], [9999]), "special token '<|im_end|>' with the id 9999, which is no token"),
    (template([mark("<|im_end|>")], [682]), "leaves out the text"),
    (template([]), "leaves out the text"),
    (template([text("B")]), "leaves out the text"),
    (template([text(), text()]), "more than the one text"),
    (template([text(), text("B")]), "more than the one text"),
]


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a sequence"])
@pytest.mark.parametrize(("processor", "message"), BROKEN)
def test_templates_that_lose_text_or_name_no_token_are_refused(capfd, processor, message, nested):
    if nested:
        processor = {"type": "Sequence", "processors": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}, processor]}
    raw = with_processor(processor)
    for use in (Tokenizer, checked, gguf_keys):
        with pytest.raises(TokenizerError) as caught:
            use(raw)
        assert str(caught.value).startswith("tokenizer.json: ") and message in str(caught.value)
    assert capfd.readouterr() == ("", ""), "known before the library is asked, which would write lines of its own"


@pytest.mark.parametrize(
    "processor",
    [
        template([mark("<|im_end|>"), text()], [682]),
        template([text(), mark("<|im_end|>")], [682]),
        {**template([text()]), "pair": [mark("<s>"), text("A"), text("B")]},
        {"type": "RobertaProcessing", "sep": ["<s>", 9], "cls": ["<|im_end|>", 682], "trim_offsets": True, "add_prefix_space": False},
        None,
    ],
)
def test_other_post_processors_change_nothing(processor):
    assert Tokenizer(with_processor(processor)).encode("Hello there") == Tokenizer(small.byte_level()).encode("Hello there")


def test_a_table_in_the_cache_does_not_hide_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr("halfbyte.engine.text.token_table.LEAST_BYTES", 1)
    for _ in range(2):
        with pytest.raises(TokenizerError, match="leaves out the text"):
            Tokenizer(with_processor(template([mark("<|im_end|>")], [682])), wait=False).encode("Hello")
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize(("processor", "message"), [BROKEN[0], BROKEN[2]])
@pytest.mark.parametrize("arguments", [(), ("--raw",)])
def test_qrun_says_so_in_one_line(tmp_path, processor, message, arguments):
    tiny.write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(with_processor(processor, tiny.tokenizer_json()))
    command = [sys.executable, "-m", "halfbyte.tools.qrun", str(tmp_path), "Hello", "-n", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: tokenizer.json: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_panics_are_named_wherever_they_come():
    """A panic is an exception beside Exception, which `except Exception` lets through."""
    panicking = json.loads(small.byte_level())
    panicking["model"]["continuing_subword_prefix"] = "a prefix longer than the second part of a merge"
    with pytest.raises(BaseException) as caught:
        tokenizers.Tokenizer.from_str(json.dumps(panicking))
    assert not isinstance(caught.value, Exception), "the library does not panic at this any more; find something else"
    for use in (Tokenizer, checked, build_tokenizer):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be used"):
            use(json.dumps(panicking).encode())


def test_what_is_guarded_keeps_what_has_a_name():
    class Panic(BaseException):
        pass

    def raising(error):
        def call():
            raise error

        return call

    named = HalfbyteError("named")
    for error in (named, KeyboardInterrupt(), MemoryError()):
        with pytest.raises(type(error)) as caught:
            guarded(raising(error))
        assert caught.value is error
    for error in (Panic("a\nb"), ValueError("a\nb")):
        with pytest.raises(TokenizerError) as caught:
            guarded(raising(error), "here")
        assert str(caught.value) == f"here: cannot be used: {printable(error)}" and "\n" not in str(caught.value)
    assert guarded(lambda: 3) == 3


def test_a_panic_that_nobody_named_is_no_traceback(capsys):
    from halfbyte.tools.terminal.console import FAILED, run

    class Panic(BaseException):
        pass

    def main():
        raise Panic("index out of bounds")

    assert run(main) == FAILED
    assert capsys.readouterr().err.startswith("error: a defect in halfbyte, please report it: Panic: index out of bounds")
