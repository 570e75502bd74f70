"""qconvert: a checkpoint becomes a small file that runs, or is written for other programs.

qconvert model.safetensors --bits 4            model.int4.hbf beside it
qconvert HuggingFaceTB/SmolLM2-135M-Instruct   fetched from the hub first
qconvert my-model/ --format q4_0 --to gguf     for llama.cpp
qconvert my-model/ --size 900MB                the best file of that size
qconvert my-model/ --fast                      in seconds, without running the model
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .convert.calibrated import Text
from .convert.text import print_result, print_result_json
from .terminal.console import UsageError, run

if TYPE_CHECKING:
    from ..engine.convert.mix import MixResult
    from ..formats.checkpoint import Checkpoint
    from ..formats.conversion.convert import ConversionResult
    from ..formats.conversion.recipe import Recipe
    from .convert.task import Task

EXAMPLES = """
Examples:

  qconvert model.safetensors --bits 4

  qconvert my-model/ --bits 8 -o my-model.hbf

  qconvert smollm2 --to safetensors -o smollm2

  qconvert my-model/ --format iq4_nl --to gguf

  qconvert my-model/ --size 900MB --calibrate my-text.txt --save-recipe mine.json

  qconvert my-model/ --fast
"""


class Kind(StrEnum):
    """What can be written."""

    hbf = "hbf"
    gguf = "gguf"
    safetensors = "safetensors"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
def qconvert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="a Hugging Face folder, a .safetensors, .gguf or .hbf file, a name on the hub, or smollm2 (a small demo model)",
        ),
    ],
    output: Annotated[Optional[Path], typer.Option("-o", "--output", metavar="OUT", help="default: beside the source")] = None,  # noqa: UP045
    bits: Annotated[Optional[int], typer.Option(metavar="4|8|16", help="bits (default 4: a mix of formats, 4.75 in all)")] = None,  # noqa: UP045
    format: Annotated[Optional[str], typer.Option(metavar="NAME", help="a block format, such as q4_1, instead of --bits")] = None,  # noqa: UP045
    to: Annotated[Kind, typer.Option(help="kind of output")] = Kind.hbf,
    method: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="nearest|search|feedback",
            help="how codes are chosen (default: feedback, which runs the model on a text; nearest for 8 bits and more)",
        ),
    ] = None,
    size: Annotated[Optional[str], typer.Option(metavar="BYTES", help="the best mix of formats for a file of, say, 900MB")] = None,  # noqa: UP045
    bpw: Annotated[Optional[float], typer.Option(metavar="BITS", help="… for so many bits per weight, such as 4.6")] = None,  # noqa: UP045
    max_kl: Annotated[Optional[float], typer.Option(metavar="NATS", help="the smallest mix whose KL divergence is at most that")] = None,  # noqa: UP045
    fast: Annotated[bool, typer.Option("--fast", help="do not run the model: seconds instead of minutes, and less accurate")] = False,
    calibrate: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="text to run (- is stdin), or statistics: of qcalibrate --gram, or llama.cpp's imatrix"),
    ] = None,
    tokens: Annotated[Optional[int], typer.Option(min=1, max=1 << 26, metavar="N", help="tokens to run (default 24576)")] = None,  # noqa: UP045
    blend: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, max=0.9, metavar="SHARE", help="with --calibrate: share of the built-in text among them (default 0.2)"),
    ] = None,
    tensor: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="REGEX=FORMAT", help="format of the matrices in whose names a pattern is found; the last one counts"),
    ] = None,
    recipe_file: Annotated[Optional[Path], typer.Option("--recipe", metavar="FILE", help="bits, method and formats from a file")] = None,  # noqa: UP045
    save_recipe: Annotated[Optional[Path], typer.Option(metavar="FILE", help="write the formats chosen to a file, for --recipe")] = None,  # noqa: UP045
    threads: Annotated[Optional[int], typer.Option("--threads", "-t", min=1, max=1024, metavar="N", help="default: all processors")] = None,  # noqa: UP045
    allow_nonfinite: Annotated[bool, typer.Option("--allow-nonfinite", help="replace NaN and infinity instead of refusing them")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Convert a checkpoint to a quantized file."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads are ours: before NumPy is imported
    from ..formats.opening import open_checkpoint
    from ..formats.safetensors.judge import judge_headers
    from ..formats.sources import resolve_source
    from .convert.task import Wishes, make_task
    from .terminal.display import note

    start = time.perf_counter()
    if bits is not None and format is not None:
        raise UsageError("--bits and --format: give one of them")
    wishes = Wishes(to.value, bits, format, method, size, bpw, max_kl, fast, calibrate, tuple(tensor or ()), recipe_file)
    path = resolve_source(source, note)
    with open_checkpoint(path) as checkpoint:
        judge_headers(checkpoint.files)
        task = make_task(checkpoint, wishes)
        if task.way == "plain":
            for option, value in (("--calibrate", calibrate), ("--tokens", tokens), ("--blend", blend)):
                if value is not None:
                    raise UsageError(f"{option}: no text is run for this conversion; it goes with --method feedback or search")
        target = output or _default(source, path, to, task.label)
        if save_recipe is not None and task.recipe is None:
            raise UsageError("--save-recipe: the weights are written as they are, there is no recipe")
        _refuse_overwriting(target, save_recipe, checkpoint, [name for name in (calibrate, recipe_file) if name not in (None, "-")])
        for text in [*checkpoint.notes, *task.notes]:
            note(text)
        result, mix = _run(checkpoint, target, to, task, Text(calibrate, tokens, blend), threads, allow_nonfinite)
    recipe = mix.recipe if mix is not None else task.recipe
    if save_recipe is not None:
        from ..formats.conversion.recipe_file import write_recipe

        assert recipe is not None
        write_recipe(save_recipe, recipe)
    seconds = time.perf_counter() - start
    for text in result.notes:
        note(text)
    if json:
        print_result_json(result, path, seconds, mix)
    else:
        print_result(result, path, seconds, mix)


def _run(
    checkpoint: Checkpoint, target: Path, to: Kind, task: Task, text: Text, threads: int | None, allow_nonfinite: bool
) -> tuple[ConversionResult, MixResult | None]:
    """Does the task."""
    from .convert.calibrated import convert_by_inputs, convert_mixed, waiting_file

    if task.way == "plain":
        return _convert(checkpoint, target, to, task.recipe, threads, allow_nonfinite), None
    assert task.recipe is not None
    if task.way == "goal":
        assert task.goal is not None
        mix = convert_mixed(checkpoint, target, task.recipe, task.goal, text, threads, allow_nonfinite)
        return mix.conversion, mix
    if to is Kind.hbf:
        return convert_by_inputs(checkpoint, target, task.recipe, text, threads, allow_nonfinite), None
    with waiting_file(target) as path:
        first = convert_by_inputs(checkpoint, path, task.recipe, text, threads, allow_nonfinite)
        from ..formats.opening import open_checkpoint

        with open_checkpoint(path) as quantized:
            result = _convert(quantized, target, to, None, threads, allow_nonfinite)
    # What was lost was lost on the way to the waiting file.
    made = {tensor.name: tensor for tensor in first.tensors}
    for tensor in result.tensors:
        before = made.get(tensor.name)
        if before is not None:
            tensor.source, tensor.cosine, tensor.nmse, tensor.method = before.source, before.cosine, before.nmse, before.method
            tensor.kept = before.kept
    result.asked, result.bytes_before = first.asked, first.bytes_before
    result.notes = [*first.notes, *result.notes]
    return result, None


def _refuse_overwriting(target: Path, recipe: Path | None, checkpoint: Checkpoint, read: list[str | Path]) -> None:
    """Raises OutputError, before any work is done, for outputs that are also read, or that cannot be written."""
    from ..formats.atomic import check_output
    from ..formats.conversion.convert import inputs
    from ..formats.errors import OutputError

    check_output(target, inputs=read)
    if recipe is not None:
        check_output(recipe, inputs=[*inputs(checkpoint), *(name for name in read if name != recipe)])
        if recipe.is_dir() or os.path.realpath(recipe) == os.path.realpath(target):
            raise OutputError(recipe, "is a folder" if recipe.is_dir() else "is also the output; choose another file for the recipe")


def _default(source: str, path: Path, to: Kind, label: str) -> Path:
    """The output's path where none was given. What was fetched into a cache goes to the current folder."""
    from ..formats.sources import default_output

    found = default_output(path, to.value, label)
    if Path(source).exists() or path.parent == Path(source).parent:
        return found
    return Path.cwd() / default_output(Path(source), to.value, label).name


def _convert(
    checkpoint: Checkpoint, target: Path, to: Kind, recipe: Recipe | None, threads: int | None, allow_nonfinite: bool
) -> ConversionResult:
    from .terminal.display import progress

    with progress(target.name, checkpoint.nbytes) as bar:
        if to is Kind.gguf:
            from ..formats.conversion.to_gguf import export_gguf

            return export_gguf(checkpoint, target, recipe, threads=threads, allow_nonfinite=allow_nonfinite, advance=bar.advance)
        if to is Kind.safetensors:
            from ..formats.conversion.to_huggingface import export_huggingface

            return export_huggingface(checkpoint, target, recipe, threads=threads, allow_nonfinite=allow_nonfinite, advance=bar.advance)
        from ..formats.conversion.convert import convert

        assert recipe is not None
        return convert(checkpoint, target, recipe, threads=threads, allow_nonfinite=allow_nonfinite, advance=bar.advance)


def main() -> int:
    """The command: returns its exit status. Errors become one line on stderr."""
    return run(lambda: app(standalone_mode=False))


if __name__ == "__main__":
    raise SystemExit(main())
