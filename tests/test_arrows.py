"""The structure of the code: which folder may know which, that no imports run in a circle, and that the page says so."""

import ast
from functools import cache
from pathlib import Path

import pytest

from support import ROOT

TOP = ("quant", "formats", "engine", "tools")

ORDER = {
    "": TOP,
    "formats": ("families", "safetensors", "gguf", "hbf", "huggingface", "tokenizer", "conversion"),
    "engine": ("kernels", "plan", "run", "text", "generate", "measure", "convert"),
    "tools": ("terminal", "report", "convert", "compare", "chat"),
}
"""Folders of a folder, from those that know none of the others to those that know all."""


@cache
def modules() -> dict[str, Path]:
    """Dotted names below the package, "formats.gguf.reader", and their files."""
    found = {}
    for top in TOP:
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def arrows() -> dict[str, set[str]]:
    """Modules and what they import of the package: anywhere in the file, under TYPE_CHECKING and in functions too."""
    return {name: imports(name, path) for name, path in modules().items()}


def imports(name: str, path: Path) -> set[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            origin = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
        elif node.module and node.module.startswith("halfbyte."):
            origin = node.module.split(".")[1:]
        else:
            continue
        for alias in node.names:
            whole = ".".join([*origin, alias.name])
            found.add(whole if whole in modules() else ".".join(origin))
    return {one for one in found if one in modules() and one != name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes along a circle of a graph, or []."""
    done: set[str] = set()
    way: list[str] = []

    def walk(node: str) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        way.append(node)
        for other in sorted(graph.get(node, ())):
            if found := walk(other):
                return found
        way.pop()
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node))), [])


def siblings(folder: str) -> dict[str, set[str]]:
    """What lies in a folder, modules and folders, and which of these each imports."""
    prefix = folder + "." if folder else ""
    graph: dict[str, set[str]] = {}
    for name, others in arrows().items():
        if name.startswith(prefix):
            child = name[len(prefix) :].split(".")[0]
            targets = {other[len(prefix) :].split(".")[0] for other in others if other.startswith(prefix)}
            graph.setdefault(child, set()).update(targets - {child})
    return graph


def test_the_reader_of_imports_sees_them():
    assert "formats.gguf.values" in arrows()["formats.gguf.reader"]
    assert "engine.engine" in arrows()["tools.qrun"], "an import inside a function"
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_no_file_imports_itself_by_way_of_others():
    assert circle(arrows()) == []


@pytest.mark.parametrize("folder", sorted({""} | {".".join(n.split(".")[:k]) for n in modules() for k in range(1, n.count(".") + 1)}))
def test_inside_a_folder_imports_run_one_way(folder):
    assert circle(siblings(folder)) == [], f"among what lies in {folder or 'the package'}"


@pytest.mark.parametrize("folder", ORDER)
def test_folders_know_only_those_before_them(folder):
    order, graph = ORDER[folder], siblings(folder)
    assert {child for child in graph if (ROOT / folder.replace(".", "/") / child).is_dir()} == set(order)
    for place, child in enumerate(order):
        assert not graph[child] & set(order[place + 1 :]), f"{child} imports what comes after it"


def test_the_page_names_every_folder():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for folder, order in ORDER.items():
        for child in order:
            assert f"{child}/" in page, f"docs/architecture.md does not name {folder}/{child}"
