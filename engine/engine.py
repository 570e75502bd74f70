"""The public face of the engine: a model with its text around it.

    from halfbyte import Engine

    with Engine("model.hbf") as engine:
        for piece in engine.generate("Once upon a time", max_tokens=50):
            print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

# Nothing here uses the threads of numpy's BLAS, which take 50 ms to start. Set before numpy is first imported, where that is here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from ..formats.opening import open_checkpoint
from .model import Compute, Model, Report, TokenError, Work
from .run.cache import Sequence
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .generate.answer import Answer
    from .generate.params import SamplingParams
    from .generate.sampler import Sampled, Sampler
    from .run.token_choice import Choice, SampleRequest
    from .text.template import ChatTemplate

__all__ = ["Engine", "Sequence", "Work"]


class Engine:
    """A model that is ready to run; a context manager that frees everything.

    path      a .hbf or .gguf file, or a folder with safetensors
    compute   "int8": activations as 8-bit integers in matrix products with integer weights; "f32": nothing is rounded but the weights
    threads   workers; None: the physical cores that this process may use
    context   most tokens of a sequence, prompt and answer together; None: what the model was made for
    capacity  tokens that the KV cache holds in all, for several sequences at once; None: one context
    kv_type   how the KV cache keeps keys and values: "f16", "f32", or "q8" (8-bit integers, half the memory of f16); None: f16, or f32
              with compute "f32"
    report    report(what, done, total) while weights are made ready (bytes) and kernels are compiled (number)

    Raises HalfbyteError of many kinds, each naming what was wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        compute: Compute = "int8",
        threads: int | None = None,
        context: int | None = None,
        capacity: int | None = None,
        report: Report | None = None,
        kv_type: str | None = None,
    ):
        with ExitStack() as stack:
            self.checkpoint = stack.enter_context(open_checkpoint(path))
            self.tokenizer = Tokenizer.from_files(self.checkpoint.tokenizer, wait=False)
            # In a thread, without the interpreter's lock, while weights and kernels are made ready.
            threading.Thread(target=self.checkpoint.prefetch, name="prefetch", daemon=True).start()
            self.model = Model(self.checkpoint, compute, threads, context, capacity, report, kv_type)
            stack.callback(self.model.close)
            self._closing = stack.pop_all()
        self._template: ChatTemplate | None = None
        self._template_read = False

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self.model.context

    @property
    def lock(self) -> threading.RLock:
        """Held while a step runs. An engine may be used by several threads; their steps wait for one another. Logits that `step` and
        `next_logits` gave are overwritten by the next step of any thread: hold this lock until they are used or copied."""
        return self.model.lock

    def step(self, work: Iterable[Work]) -> np.ndarray:
        """Runs tokens of any number of sequences at once; see Model.step."""
        return self.model.step(work)

    def sample(self, work: Iterable[Work], requests: Iterable[SampleRequest]) -> list[Choice]:
        """Runs such a step and chooses a token from each output, without giving the logits; see Model.sample."""
        return self.model.sample(work, requests)

    def logits(self, token_ids: List[int]) -> np.ndarray:
        """float32[n, vocabulary]: the logits after each of the n tokens."""
        sequence = self.open_sequence()
        try:
            with self.model.lock:
                return self.model.step([Work(sequence, token_ids, "all")]).copy()
        finally:
            self.close_sequence(sequence)

    def open_sequence(self) -> Sequence:
        """A new, empty sequence. Close it to free its part of the KV cache."""
        return Sequence()

    def next_logits(self, sequence: Sequence, token_ids: List[int]) -> np.ndarray:
        """float32[vocabulary]: the logits after the last of these tokens, which follow what the sequence holds.

        Valid until the next step.
        """
        return self.model.step([Work(sequence, token_ids)])[0]

    def extend_sequence(self, sequence: Sequence, token_ids: List[int]) -> None:
        """Puts these tokens behind what the sequence holds."""
        self.model.step([Work(sequence, token_ids, "none")])

    def sample_next(self, sequence: Sequence, token_ids: List[int], sampler: Sampler) -> Sampled:
        """Puts these tokens behind what the sequence holds, and chooses the one after them. Raises LogitsError, SamplingError."""
        request = sampler.request(self.model.vocabulary)
        return sampler.sampled(self.model.sample([Work(sequence, token_ids)], [request])[0])

    def truncate_sequence(self, sequence: Sequence, length: int) -> int:
        """Forgets all but the first `length` tokens of a sequence; whole pages behind them are free at once.

        Returns how many tokens are left: 0 instead of `length` where a model with sliding windows has left these too far behind, and the
        text has to be given again from its beginning.
        """
        return self.model.truncate(sequence, length)

    def close_sequence(self, sequence: Sequence) -> None:
        """Frees a sequence's pages of the KV cache."""
        self.model.release(sequence)

    # ---- text --------------------------------------------------------------------------------------------------------

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, or None."""
        if not self._template_read:
            from .text.template import ChatTemplate

            self._template, self._template_read = ChatTemplate.of(self.tokenizer), True
        return self._template

    def prompt_ids(self, prompt: str | List[Mapping[str, Any]]) -> list[int]:
        """Token ids of a prompt: text as it is, with the model's beginning-of-text token; messages through the chat template."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, bos=True)
        if self.template is None:
            from .text.template import TemplateError

            raise TemplateError(f"{self.checkpoint.path} has no chat template: give the prompt as text")
        return self.template.encode(prompt)

    def generate(
        self,
        prompt: str | List[Mapping[str, Any]] | List[int],
        params: SamplingParams | None = None,
        progress: Callable[[int, int], None] | None = None,
        **sampling: Any,
    ) -> Answer:
        """The answer to a prompt: an iterator of pieces, as they are made; the last piece has a finish reason. The Answer also keeps
        the whole text, ids, log-probabilities and timings.

        prompt    text to continue, messages ({"role", "content"}) for the chat template, or token ids
        params    or its fields as keywords: temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty,
                  logit_bias, seed, stop, stop_ids, max_tokens, logprobs. Greedy by default
        progress  progress(done, total) while a long prompt is read
        Closing the answer, or dropping it, frees the sequence.
        """
        from .generate.answer import Answer
        from .generate.params import SamplingParams

        if params is not None and sampling:
            raise TypeError("give SamplingParams or its fields, not both")
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if not isinstance(prompt, (str, Iterable)):
            raise TypeError(f"a prompt is text, messages or token ids, not {type(prompt).__name__}")
        if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
            ids = self.prompt_ids(prompt)  # type: ignore[arg-type]
        else:
            ids = _whole_numbers(prompt)
        continues = not (len(prompt) > 0 and isinstance(prompt[0], Mapping))
        return Answer(self, ids, params or SamplingParams(**sampling), progress, continues)

    # ---- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees threads, files and memory. May be called twice."""
        self._closing.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine {self.checkpoint.path} ({self.model.architecture}, {self.model.compute}, {self.model.workers.count} threads)>"


def _whole_numbers(prompt: Any) -> list[int]:
    """Token ids as a list. Raises TokenError for anything that is not a whole number, such as text in a list."""
    try:
        return [operator.index(i) for i in prompt]
    except TypeError:
        raise TokenError("token ids must be whole numbers; text goes into a str, messages into a list of mappings") from None
