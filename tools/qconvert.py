"""qconvert: a checkpoint becomes a small file that runs, or is written for other programs.

qconvert model.safetensors --bits 4            model.q4_0.hbf beside it
qconvert HuggingFaceTB/SmolLM2-135M-Instruct   fetched from the hub first
qconvert model.q4_0.hbf --to gguf              for llama.cpp
qconvert my-model/ --method feedback           runs the model on a text first, and quantizes by what its matrices read
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .console import UsageError, run

if TYPE_CHECKING:
    from ..formats.checkpoint import Checkpoint
    from ..formats.convert import ConversionResult
    from ..formats.recipe import Recipe

EXAMPLES = """
Examples:

  qconvert model.safetensors --bits 4

  qconvert my-model/ --bits 8 -o my-model.hbf

  qconvert smollm2 --to safetensors -o smollm2

  qconvert my-model.q4_0.hbf --to gguf

  qconvert my-model/ --method feedback --format nl4 --tensor 'attn_[kv].weight=q6_r'
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
    bits: Annotated[Optional[int], typer.Option(metavar="4|8|16", help="bits per weight (default 4)")] = None,  # noqa: UP045
    format: Annotated[Optional[str], typer.Option(metavar="NAME", help="a block format, such as q4_1, instead of --bits")] = None,  # noqa: UP045
    to: Annotated[Kind, typer.Option(help="kind of output")] = Kind.hbf,
    method: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="nearest|search|feedback",
            help="how scales are chosen (default: search for 4 bits, else nearest); feedback runs the model on a text first",
        ),
    ] = None,
    calibrate: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="text to run (- is stdin), or statistics: of qcalibrate --gram, or llama.cpp's imatrix"),
    ] = None,
    tokens: Annotated[Optional[int], typer.Option(min=1, max=1 << 26, metavar="N", help="tokens of that text (default 24576)")] = None,  # noqa: UP045
    tensor: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="REGEX=FORMAT", help="format of the matrices in whose names a pattern is found; the last one counts"),
    ] = None,
    recipe_file: Annotated[Optional[Path], typer.Option("--recipe", metavar="FILE", help="bits, method and formats from a file")] = None,  # noqa: UP045
    save_recipe: Annotated[Optional[Path], typer.Option(metavar="FILE", help="write what was asked for to a file for --recipe")] = None,  # noqa: UP045
    threads: Annotated[Optional[int], typer.Option("--threads", "-t", min=1, max=1024, metavar="N", help="default: all processors")] = None,  # noqa: UP045
    allow_nonfinite: Annotated[bool, typer.Option("--allow-nonfinite", help="replace NaN and infinity instead of refusing them")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Convert a checkpoint to a quantized file."""
    import os

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads are ours: before NumPy is imported
    from ..formats.checkpoint import open_checkpoint
    from ..formats.sources import default_output, resolve_source
    from .display import note

    start = time.perf_counter()
    if bits is not None and format is not None:
        raise UsageError("--bits and --format: give one of them")
    path = resolve_source(source, note)
    with open_checkpoint(path) as checkpoint:
        recipe = _recipe(checkpoint, to, bits, format, method, tensor or [], recipe_file)
        knows = recipe is not None and (calibrate is not None or recipe.method == "feedback")
        if (calibrate is not None or tokens is not None) and not knows:
            raise UsageError("--calibrate and --tokens: say how to quantize; they go with --method feedback or search")
        if knows and to is not Kind.hbf:
            raise UsageError(f"--to {to.value}: conversion by what matrices read writes a .hbf file; convert that with --to {to.value}")
        target = output or _default(checkpoint, source, path, to, recipe, default_output)
        _refuse_overwriting(target, save_recipe, checkpoint, [name for name in (calibrate, recipe_file) if name not in (None, "-")])
        for text in checkpoint.notes:
            note(text)
        if recipe is not None and knows:
            from .calibrated import convert_calibrated

            result = convert_calibrated(checkpoint, target, recipe, calibrate, tokens, threads, allow_nonfinite)
        else:
            result = _convert(checkpoint, target, to, recipe, threads, allow_nonfinite)
    if save_recipe is not None:
        from ..formats.recipe_file import write_recipe

        assert recipe is not None
        write_recipe(save_recipe, recipe)
    seconds = time.perf_counter() - start
    for text in result.notes:
        note(text)
    if json:
        _print_json(result, path, seconds)
    else:
        _print_table(result, path, seconds)


def _refuse_overwriting(target: Path, recipe: Path | None, checkpoint: Checkpoint, read: list[str | Path]) -> None:
    """Raises OutputError, before any work is done, for outputs that are also read, or that cannot be written."""
    from ..formats.atomic import check_output
    from ..formats.convert import inputs
    from ..formats.errors import OutputError

    check_output(target, inputs=read)
    if recipe is not None:
        check_output(recipe, inputs=[*inputs(checkpoint), *(name for name in read if name != recipe)])
        if recipe.is_dir() or os.path.realpath(recipe) == os.path.realpath(target):
            raise OutputError(recipe, "is a folder" if recipe.is_dir() else "is also the output; choose another file for the recipe")


def _recipe(
    checkpoint: Checkpoint, to: Kind, bits: int | None, format: str | None, method: str | None, tensors: list[str], file: Path | None
) -> Recipe | None:
    """What was asked for, on the command line before what is in a recipe file; None to write the weights as they are."""
    from dataclasses import replace

    from ..formats.recipe import Recipe
    from ..formats.recipe_file import read_recipe

    found = Recipe() if file is None else read_recipe(file)
    if bits is not None or format is not None:
        found = replace(found, bits=bits, format=format)
    if method is not None:
        found = replace(found, method=method)
    named = []
    for text in tensors:
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern:
            raise UsageError(f"--tensor {text}: must be REGEX=FORMAT, such as 'attn_v=q6_r'")
        named.append((pattern, name))
    found = replace(found, tensors=(*found.tensors, *named))
    if found.bits is None and found.format is None:
        as_it_is = to is Kind.safetensors or (to is Kind.gguf and checkpoint.kind == "hbf")
        if found.method is not None and to is Kind.safetensors:
            raise UsageError("--method: says how to quantize; give --bits or --format with it")
        if as_it_is and found.tensors:
            raise UsageError("--tensor: says how to quantize; give --bits or --format with it")
        if as_it_is:
            return None
        found = replace(found, bits=4)
    return found


def _default(checkpoint: Checkpoint, source: str, path: Path, to: Kind, recipe: Recipe | None, default_output) -> Path:  # type: ignore[no-untyped-def]
    """The output's path where none was given. What was fetched into a cache goes to the current folder."""
    name = recipe.asked if recipe else "dequantized" if to is Kind.safetensors else _main_format(checkpoint)
    found: Path = default_output(path, to.value, name)
    if Path(source).exists() or path.parent == Path(source).parent:
        return found
    return Path.cwd() / default_output(Path(source), to.value, name).name


def _main_format(checkpoint: Checkpoint) -> str:
    """The format that most weights have."""
    weights: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        weights[tensor.format] = weights.get(tensor.format, 0) + tensor.size
    return max(weights, key=lambda name: weights[name])


def _convert(
    checkpoint: Checkpoint, target: Path, to: Kind, recipe: Recipe | None, threads: int | None, allow_nonfinite: bool
) -> ConversionResult:
    from .display import progress

    with progress(target.name, checkpoint.nbytes) as bar:
        if to is Kind.gguf:
            from ..formats.export_gguf import export_gguf

            return export_gguf(checkpoint, target, recipe, threads=threads, allow_nonfinite=allow_nonfinite, advance=bar.advance)
        if to is Kind.safetensors:
            from ..formats.export_huggingface import export_huggingface

            return export_huggingface(checkpoint, target, recipe, threads=threads, allow_nonfinite=allow_nonfinite, advance=bar.advance)
        from ..formats.convert import convert

        assert recipe is not None
        return convert(checkpoint, target, recipe, threads=threads, allow_nonfinite=allow_nonfinite, advance=bar.advance)


def _print_table(result: ConversionResult, source: Path, seconds: float) -> None:
    from .display import one_line, size_text, table

    counts: dict[str, list[int]] = {}
    for tensor in result.tensors:
        row = counts.setdefault(tensor.format, [0, 0, 0])
        row[0] += 1
        row[1] += tensor.size
        row[2] += tensor.nbytes
    rows = [
        (name, count, f"{weights:,}", size_text(nbytes), f"{8 * nbytes / weights:.2f}")
        for name, (count, weights, nbytes) in sorted(counts.items(), key=lambda item: -item[1][2])
    ]
    table(("format", "tensors", "weights", "size", "bits per weight"), rows, right=(1, 2, 3, 4))
    reasons: dict[tuple[str, str], list[str]] = {}
    for tensor in result.exceptions():
        reasons.setdefault((tensor.format, tensor.reason), []).append(tensor.name)
    if reasons:
        print(f"\nnot {result.asked}:")
        for (name, reason), names in reasons.items():
            print(f"  {name}: {reason}: {_names(names)}")
    padded = [f"{one_line(tensor.name)} ({tensor.shape[-1]} to {tensor.padded})" for tensor in result.tensors if tensor.padded]
    if padded:
        print(f"\ncolumns filled up with zeros: {_some(padded)}")
    for name, reason in result.left_out.items():
        print(f"left out: {one_line(name)} {reason}")
    worst = result.worst
    if worst is not None and worst.cosine < 1:
        print(f"\nworst cosine: {worst.cosine:.6f} ({one_line(worst.name)}, {worst.format})")
    print(
        f"\n{one_line(source.name)} {size_text(result.bytes_before)} → {one_line(result.path)} {size_text(result.bytes_after)}, "
        f"{result.bits_per_weight:.3f} bits per weight, {seconds:.1f} s"
    )


def _names(names: list[str]) -> str:
    """Names of tensors, those that differ only in the layer's number as one."""
    import re

    from .display import one_line

    groups: dict[str, int] = {}
    for name in names:
        key = re.sub(r"\d+", "*", name)
        groups[key] = groups.get(key, 0) + 1
    single = {re.sub(r"\d+", "*", name): name for name in names}
    return _some([f"{one_line(key)} ({count})" if count > 1 else one_line(single[key]) for key, count in groups.items()], 24)


def _some(texts: list[str], most: int = 12) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _print_json(result: ConversionResult, source: Path, seconds: float) -> None:
    from .display import print_json

    formats: dict[str, int] = {}
    for tensor in result.tensors:
        formats[tensor.format] = formats.get(tensor.format, 0) + 1
    worst = result.worst
    print_json(
        {
            "source": str(source),
            "output": str(result.path),
            "kind": result.kind,
            "asked": result.asked,
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "bits_per_weight": result.bits_per_weight,
            "formats": formats,
            "exceptions": [{"name": t.name, "format": t.format, "reason": t.reason} for t in result.exceptions()],
            "worst": None if worst is None else {"name": worst.name, "format": worst.format, "cosine": worst.cosine},
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "source": t.source,
                    "format": t.format,
                    "method": t.method,
                    "bytes": t.nbytes,
                    "cosine": t.cosine,
                    "nmse": t.nmse,
                    "padded_columns": t.padded or None,
                    "replaced": t.replaced,
                }
                for t in result.tensors
            ],
            "left_out": result.left_out,
            "notes": result.notes,
            "seconds": seconds,
        }
    )


def main() -> int:
    """The command: returns its exit status. Errors become one line on stderr."""
    return run(lambda: app(standalone_mode=False))


if __name__ == "__main__":
    raise SystemExit(main())
