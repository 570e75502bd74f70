"""What is to be known of models before any of them is run: their prompts as token ids, and whether their tokens are the same.

Models are run one after the other, and each may take minutes. So whatever can be refused is refused here, where checkpoints are only
opened: a file that is no model, a prompt that does not fit a context, a template that does not take a conversation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...engine.generate.answer import PromptError
from ...engine.text.template import ChatTemplate, TemplateError
from ...engine.text.tokenizer import Tokenizer
from ...formats.checkpoint import Checkpoint, model_name
from ...formats.conversion.convert import inputs
from ...formats.errors import printable
from ...formats.opening import open_checkpoint
from ...quant.errors import HalfbyteError
from ..terminal.console import UsageError
from .prompts import Prompt


class CompareError(HalfbyteError):
    """Models cannot be compared, or not on these prompts."""


@dataclass
class Candidate:
    """A model before it runs.

    name            what to call it, unlike the others
    nbytes          of its files
    context         most tokens of a sequence that it was made for
    vocabulary      number of logits
    prompts         token ids of each prompt
    continues       whether an answer goes on the prompt's text, instead of being the turn that a template begins
    same_tokens     whether token ids mean the same as those of the first model, so that ids and logits can be compared
    inputs          files that an output must not be
    notes           what the user should know, a sentence each
    """

    path: Path
    name: str
    nbytes: int
    context: int
    vocabulary: int
    prompts: list[list[int]]
    continues: bool
    same_tokens: bool = True
    inputs: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def context_for(self, first: Candidate, max_tokens: int) -> int:
        """Tokens of the longest sequence that there will be: its own prompts and the first model's, each with an answer."""
        longest = max(max(len(own), len(other)) for own, other in zip(self.prompts, first.prompts, strict=True))
        return min(self.context, longest + max_tokens)


def survey(
    paths: Sequence[Path], given: Sequence[str], prompts: Sequence[Prompt], raw: bool = False, system: str | None = None
) -> list[Candidate]:
    """Opens checkpoints one after the other and encodes the prompts. given: what the user called them.

    Raises CompareError for a model that cannot be run, and for a prompt that is empty, does not fit the model's context, or that its
    template refuses; what opening a checkpoint raises; UsageError for `system` with a model that has no template.
    """
    found: list[Candidate] = []
    first_tokens: list[str | None] = []
    for path, name in zip(paths, _names(paths, given), strict=True):
        with open_checkpoint(path) as checkpoint:
            if checkpoint.architecture is None or not checkpoint.tokenizer:
                missing = "weights only, no config.json" if checkpoint.architecture is None else "no tokenizer"
                raise CompareError(f"{printable(path, 300)}: holds {missing}: it cannot answer prompts")
            tokenizer = Tokenizer.from_files(checkpoint.tokenizer, wait=False)
            candidate = _candidate(checkpoint, name, tokenizer, prompts, raw, system)
            tokens = [tokenizer.token(i) for i in range(tokenizer.vocabulary_size)]
        if found:
            _compare(candidate, found[0], tokens, first_tokens)
        else:
            first_tokens = tokens
        found.append(candidate)
    return found


def _candidate(
    checkpoint: Checkpoint, name: str, tokenizer: Tokenizer, prompts: Sequence[Prompt], raw: bool, system: str | None
) -> Candidate:
    arch = checkpoint.architecture
    assert arch is not None
    template = None if raw else ChatTemplate.of(tokenizer)
    notes = [f"{name}: {text}" for text in checkpoint.notes]
    if template is None and not raw:
        if system is not None:
            raise UsageError(f"--system: {name} has no chat template to put it in")
        notes.append(f"{name} has no chat template; it continues the prompts, as with --raw")
    context = checkpoint.model.context
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = _encode(prompt, tokenizer, template, system)
            if not ids:
                raise PromptError("is empty: give at least one token to continue from")
            if len(ids) > context:
                raise PromptError(f"has {len(ids)} tokens, and the context holds {context}: shorten it or leave it out")
        except (TemplateError, PromptError) as error:
            raise CompareError(f"prompt {number} with {name}: {error}") from None
        encoded.append(ids)
    return Candidate(
        path=checkpoint.path,
        name=name,
        nbytes=sum(os.stat(file).st_size for file in checkpoint.files),
        context=context,
        vocabulary=checkpoint.model.vocabulary,
        prompts=encoded,
        continues=template is None,
        inputs=inputs(checkpoint),
        notes=notes,
    )


def _encode(prompt: Prompt, tokenizer: Tokenizer, template: ChatTemplate | None, system: str | None) -> list[int]:
    if template is not None:
        return template.encode(prompt.conversation(system))
    if prompt.text is None:
        raise PromptError("is a conversation, which takes a chat template; give it as text")
    return tokenizer.encode(prompt.text, bos=True)


def _compare(candidate: Candidate, first: Candidate, tokens: list[str | None], first_tokens: list[str | None]) -> None:
    """Sets `same_tokens`. Names of ids above the smaller vocabulary do not count: GGUF files name the rows that pad a matrix."""
    shared = min(len(tokens), len(first_tokens))
    candidate.same_tokens = candidate.vocabulary == first.vocabulary and tokens[:shared] == first_tokens[:shared]
    if not candidate.same_tokens:
        candidate.notes.append(
            f"{candidate.name} and {first.name} have different tokens: their answers are compared as text, without agreement and KL"
        )
    elif candidate.prompts != first.prompts:
        candidate.notes.append(
            f"{candidate.name} and {first.name} read a prompt as different tokens (another chat template, or beginning of text): "
            f"each answers its own; agreement and KL are measured on those of {first.name}"
        )


def _names(paths: Sequence[Path], given: Sequence[str]) -> list[str]:
    """A name for each model: the file's; what the user called it, where that tells two of one name apart; numbers, where nothing does."""
    names = [model_name(path) for path in paths]
    found: list[str] = []
    for name, own in zip(names, given, strict=True):
        alike = [other for same, other in zip(names, given, strict=True) if same == name]
        found.append(own if 1 < len(alike) == len(set(alike)) else name)
    return [name if name not in found[:i] else f"{name} ({1 + found[:i].count(name)})" for i, name in enumerate(found)]
