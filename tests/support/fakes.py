"""An engine and a tokenizer without a model, for the tests of what stands around the engine.

Tokens 0 to 255 are bytes; 256 is the end of text, 257 another special token. The "model" recites: after the prompt it says the
bytes of a script, and then the end of text.
"""

import sys
import time

import numpy as np

from support import TESTS

EOS, MARK, VOCABULARY = 256, 257, 260


class FakeTokenizer:
    vocabulary_size = VOCABULARY
    eos_ids = frozenset({EOS})
    special_ids = frozenset({EOS, MARK})
    strips_space = False
    bos_id = None
    add_bos = False
    chat_template = "fake"

    def ready(self):
        return self

    def encode(self, text, special=False, bos=False):
        ids, data = [], text.encode()
        while data:
            if special and data.startswith(b"<eos>"):
                ids.append(EOS)
                data = data[5:]
            else:
                ids.append(data[0])
                data = data[1:]
        return ids

    def token_bytes(self, id):
        return bytes([id]) if id < 256 else {EOS: b"<eos>", MARK: b"<mark>"}.get(id, b"")

    def decode(self, ids, skip_special=True):
        shown = [self.token_bytes(i) for i in ids if i not in self.special_ids or not skip_special]
        return b"".join(shown).decode("utf-8", "replace")


class FakeEngine:
    """scripts: what it answers, one script per answer in turn (the last one again and again); a list holds token ids.
    pause: seconds that a step takes.

    open: sequences that were opened and not closed. For each answer, fed: the lists of ids that came for it; prompts: all that
    the sequence held when the answer began.
    """

    def __init__(self, *scripts, context=64, template=True, noise=0.0, pause=0.0):
        self.tokenizer, self.context = FakeTokenizer(), context
        self.template = "fake" if template else None
        self.scripts = [list(s.encode()) if isinstance(s, str) else list(s) for s in scripts]
        self.noise, self.pause = noise, pause
        self.open, self.fed, self.prompts, self.hook = {}, [], [], None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def prompt_ids(self, messages):
        return self.tokenizer.encode("".join(f"{m['role'][0]}:{m['content']}\n" for m in messages) + "a:")

    def open_sequence(self):
        sequence = _Sequence()
        self.open[id(sequence)] = sequence
        return sequence

    def close_sequence(self, sequence):
        del self.open[id(sequence)]

    def truncate_sequence(self, sequence, length):
        assert id(sequence) in self.open and length <= len(sequence.ids)
        del sequence.ids[length:]
        sequence.said = None
        return length

    def extend_sequence(self, sequence, token_ids):
        self.next_logits(sequence, token_ids)

    def sample_next(self, sequence, token_ids, sampler):
        return sampler.sample(self.next_logits(sequence, token_ids))

    def next_logits(self, sequence, token_ids):
        assert id(sequence) in self.open, "a step on a sequence that is closed"
        if self.hook is not None:
            self.hook(sequence, token_ids)
        time.sleep(self.pause)
        if sequence.said is not None and list(token_ids) == [sequence.next]:
            sequence.said += 1
        elif sequence.said is None or sequence.said > 0:  # not another part of the same prompt: a new answer
            sequence.said, sequence.answer = 0, len(self.fed)
            self.fed.append([])
            self.prompts.append(b"")
        self.fed[sequence.answer].append(list(token_ids))
        sequence.ids += token_ids
        assert len(sequence.ids) <= self.context
        if sequence.said == 0:
            self.prompts[sequence.answer] = bytes(i for i in sequence.ids if i < 256)
        script = self.scripts[min(sequence.answer, len(self.scripts) - 1)]
        logits = np.full(VOCABULARY, -10.0, np.float32)
        if self.noise:
            logits += np.random.default_rng(sequence.said).normal(0, self.noise, VOCABULARY).astype(np.float32)
        sequence.next = script[sequence.said] if sequence.said < len(script) else EOS
        logits[sequence.next] = 10.0
        return logits


class _Sequence:
    """ids: what it holds. said: tokens of the answer so far, or None before a prompt. next: what the model would say."""

    def __init__(self):
        self.ids, self.said, self.answer, self.next = [], None, -1, -1


CHILD = """
import os, sys
from halfbyte.tools import qrun
def fake(arguments):
    sys.path.insert(0, {tests!r})
    from support.fakes import FakeEngine
    return FakeEngine({engine})
qrun.open_engine = fake
status = qrun.main({arguments!r})
{after}
sys.exit(status)
"""


def child(*arguments, engine='"Hello, world"', after=""):
    """A command that runs qrun with a fake engine; engine: how it is made, after: what is done when qrun has left, both Python."""
    return [sys.executable, "-c", CHILD.format(tests=str(TESTS), engine=engine, arguments=["model", *arguments], after=after)]
