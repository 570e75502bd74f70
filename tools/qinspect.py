"""qinspect: what is in a model file or folder.

qinspect model.hbf
qinspect model.gguf --json
qinspect model.hbf --verify     read all of it, hold it against its checksums
"""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal.console import run

if TYPE_CHECKING:
    from ..formats.inspect import Inspection

EXAMPLES = """
Examples:

  qinspect model.q4_0.hbf

  qinspect model.gguf --json

  qinspect model.q4_0.hbf --verify
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
def qinspect(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="a .hbf, .gguf or .safetensors file, a Hugging Face folder, a hub name, or smollm2")
    ],
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="read all tensors: checksums of a .hbf, and every weight finite")] = False,
) -> None:
    """Show header, metadata and tensors of a model."""
    from ..formats.inspect import inspect
    from ..formats.sources import resolve_source
    from .terminal.display import note, progress

    path = resolve_source(file, note)
    if verify:
        total = sum(tensor.nbytes for tensor in inspect(path).tensors)
        with progress("verify", total) as bar:
            found = inspect(path, verify=True, progress=bar.advance)
    else:
        found = inspect(path)
    if json:
        _print_json(found, verify)
    else:
        _print_text(found, verify)


def _print_text(found: Inspection, verified: bool) -> None:
    from .terminal.display import note, one_line, size_text, table

    print(f"{one_line(found.path)}: {found.kind}, {size_text(found.nbytes)}")
    for key, value in found.header.items():
        print(f"  {one_line(key)}: {_short(value)}")
    if found.metadata:
        print("\nmetadata")
        for key, value in found.metadata.items():
            print(f"  {one_line(key)}: {_short(value)}")
    print()
    recorded = any(tensor.recorded for tensor in found.tensors)
    headings = ("tensor", "shape", "format", "bytes", *(("cosine", "method", "source") if recorded else ()))
    rows = []
    for tensor in found.tensors:
        row = [tensor.name, " x ".join(map(str, tensor.shape)) or "scalar", tensor.format, f"{tensor.nbytes:,}"]
        if recorded:
            cosine = tensor.recorded.get("cosine")
            row += ["" if cosine is None else f"{cosine:.6f}", tensor.recorded.get("method", ""), tensor.recorded.get("source", "")]
        rows.append(row)
    table(headings, rows, right=(1, 3, 4))
    weights = found.weights
    print(f"\n{len(found.tensors)} tensors, {weights:,} weights, {found.bits_per_weight:.3f} bits per weight")
    print(
        ", ".join(
            f"{name}: {count} tensors, {8 * nbytes / max(1, size):.2f} bits" for name, (count, size, nbytes) in _formats(found).items()
        )
    )
    if verified:
        print(
            "verified: "
            + ("every checksum and every weight" if found.kind == "hbf" else "every weight is finite (the file has no checksums)")
        )
    for text in found.notes:
        note(text)


def _formats(found: Inspection) -> dict[str, tuple[int, int, int]]:
    """Format -> tensors, weights, bytes."""
    formats: dict[str, tuple[int, int, int]] = {}
    for tensor in found.tensors:
        count, size, nbytes = formats.get(tensor.format, (0, 0, 0))
        formats[tensor.format] = count + 1, size + tensor.size, nbytes + tensor.nbytes
    return formats


def _short(value: Any) -> str:
    from .terminal.display import one_line, plain

    text = value if isinstance(value, str) else json_module.dumps(plain(value), ensure_ascii=False)
    text = one_line(text)
    return text if len(text) <= 100 else f"{text[:97]}… ({len(text)} characters)" if isinstance(value, str) else f"{text[:99]}…"


def _print_json(found: Inspection, verified: bool) -> None:
    from .terminal.display import print_json

    tensors = []
    for tensor in found.tensors:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "format": tensor.format,
            "bytes": tensor.nbytes,
            "offset": tensor.offset,
        }
        entry |= {key: tensor.recorded[key] for key in ("cosine", "nmse", "method", "source", "checksum") if key in tensor.recorded}
        tensors.append(entry)
    print_json(
        {
            "path": str(found.path),
            "kind": found.kind,
            "bytes": found.nbytes,
            "architecture": found.architecture,
            "runs": found.runs,
            "header": found.header,
            "metadata": found.metadata,
            "weights": found.weights,
            "bits_per_weight": found.bits_per_weight,
            "formats": {name: {"tensors": n, "weights": size, "bytes": nbytes} for name, (n, size, nbytes) in _formats(found).items()},
            "tensors": tensors,
            "verified": verified,
            "notes": found.notes,
        }
    )


def main() -> int:
    """The command: returns its exit status. Errors become one line on stderr."""
    return run(lambda: app(standalone_mode=False))


if __name__ == "__main__":
    raise SystemExit(main())
