"""What reaches someone who installs: every package in the wheel, the commands, one version, an import that costs nothing."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import halfbyte

ROOT = Path(halfbyte.__file__).parent
IN_CHECKOUT = (ROOT / "pyproject.toml").exists()
needs_checkout = pytest.mark.skipif(not IN_CHECKOUT, reason="needs the checkout's pyproject.toml")
TOP = ("quant", "formats", "engine", "tools")


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def packages():
    """Every folder under the four top ones (and the root) that holds Python files."""
    found = {"halfbyte"}
    for top in TOP:
        for path in (ROOT / top).rglob("*.py"):
            folder = path.parent.relative_to(ROOT)
            if "__pycache__" not in folder.parts:
                found.add(".".join(("halfbyte", *folder.parts)))
    return found


@needs_checkout
def test_every_package_is_listed_and_nothing_else():
    """setuptools silently leaves out what is not listed."""
    assert set(project()["tool"]["setuptools"]["packages"]) == packages()
    for name in packages():
        folder = ROOT.joinpath(*name.split(".")[1:])
        assert (folder / "__init__.py").exists(), f"{folder} has modules but no __init__.py"


@needs_checkout
def test_the_wheel_holds_every_module_and_no_test(tmp_path):
    source = tmp_path / "source"  # a copy: building writes into the tree
    ignore = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "models", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=ignore)
    # uses the setuptools of the build requirements when they can be had, and this environment's otherwise
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {f"halfbyte/{path.relative_to(ROOT).as_posix()}" for top in TOP for path in (ROOT / top).rglob("*.py")}
    modules.add("halfbyte/__init__.py")
    assert {name for name in names if name.endswith(".py")} == modules
    assert any(name.endswith("LICENSE") for name in names)
    assert "halfbyte/py.typed" in names
    assert "halfbyte/engine/measure/data/austen.txt" in names  # the text that qreport measures on
    assert "halfbyte/engine/convert/data/calibration.txt" in names  # the text that models are calibrated on
    assert {name.split("/")[0] for name in names} == {"halfbyte", f"halfbyte-{halfbyte.__version__}.dist-info"}


def test_one_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", halfbyte.__version__)
    assert importlib.metadata.version("halfbyte") == halfbyte.__version__
    if IN_CHECKOUT:
        assert project()["project"]["version"] == halfbyte.__version__


@needs_checkout
def test_every_command_exists():
    for name, target in project()["project"]["scripts"].items():
        module, function = target.split(":")
        path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
        assert path.exists(), f"{name} points at {module}, which is missing"
        names = {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}
        assert function in names, f"{name}: {module} has no function {function}"


@needs_checkout
def test_everything_imported_is_required():
    """A module of the project imports only what `dependencies` or an extra brings; what those bring in turn does not count."""
    here = project()["project"]
    required = {re.split(r"[^\w-]", line)[0].lower() for line in here["dependencies"]}
    extra = {re.split(r"[^\w-]", line)[0].lower() for name in ("plots",) for line in here["optional-dependencies"][name]}
    of_module = {"prompt_toolkit": "prompt-toolkit", "llvmlite": "numba", "click": "typer", "pygments": "rich"}
    for top in TOP:
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules = [node.module]
                for module in {m.split(".")[0] for m in modules} - sys.stdlib_module_names - {"halfbyte"}:
                    assert of_module.get(module, module).lower() in required | extra, f"{path}: {module} is not a dependency"


@needs_checkout
def test_imports_run_one_way():
    """quant ← formats ← engine ← tools: no module imports from a room above its own."""
    for height, top in enumerate(TOP):
        for path in (ROOT / top).rglob("*.py"):
            depth = len(path.relative_to(ROOT).parts) - 1
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.ImportFrom) or not node.module:
                    continue
                parts = node.module.split(".")
                above = parts[1] if parts[0] == "halfbyte" and len(parts) > 1 else parts[0] if node.level == depth + 1 else None
                if above in TOP:
                    assert TOP.index(above) <= height, f"{path.relative_to(ROOT)} imports {node.module}"


def test_importing_the_package_is_free():
    code = "import sys; import halfbyte; print([m for m in ('numpy', 'numba', 'llvmlite', 'tokenizers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = halfbyte.nonsense


@needs_checkout
def test_license_and_changelog():
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")[:200]
    assert project()["project"]["license"] == "Apache-2.0"
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert "Unreleased" in changelog or halfbyte.__version__ in changelog
