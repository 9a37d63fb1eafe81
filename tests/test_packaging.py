"""The package as it is declared and as it is pinned."""

import ast
import subprocess
import sys
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import consilience

ROOT = Path(__file__).parents[1]


def constraints():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                (pin,) = requirement.specifier
                assert pin.operator == "==", line
                assert requirement.name.lower() not in pins, line
                pins[canonicalize_name(requirement.name)] = pin.version
    return pins


def test_version_is_said_once():
    assert distribution("consilience").version == consilience.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {consilience.__version__}\n" in citation


def direct():
    """The distributions that the project asks for, but for what only benchmarks need."""
    for line in requires("consilience"):
        requirement = Requirement(line)
        if requirement.name != "consilience" and "bench" not in str(requirement.marker):
            yield requirement


def with_all_they_need(names, seen):
    for name in names:
        if name not in seen:
            seen.add(name)
            others = map(Requirement, requires(name) or ())
            wanted = [o for o in others if o.marker is None or o.marker.evaluate({"extra": ""})]
            with_all_they_need([canonicalize_name(other.name) for other in wanted], seen)
    return seen


def test_every_dependency_is_pinned_above_its_lower_bound():
    pins = constraints()
    for requirement in direct():
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), requirement


def test_what_dependencies_bring_is_pinned():
    asked = [canonicalize_name(requirement.name) for requirement in direct()]
    missing = with_all_they_need(asked, set()) - set(constraints())
    # PyTorch with CUDA brings its own libraries, at versions that it names itself.
    assert not {name for name in missing if not name.startswith(("nvidia-", "triton", "cuda-"))}


LIBRARY = ("__init__.py", "agreement.py", "rules", "observation", "optim", "consistency")


def imported(path):
    """The packages that a file imports when it is imported, not inside of its functions."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.If | ast.Try)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in late:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_the_library_needs_torch_and_numpy_alone():
    allowed = {"torch", "numpy", "consilience", *sys.stdlib_module_names}
    allowed.add("typing_extensions")  # comes with torch
    source = ROOT / "src" / "consilience"
    for part in LIBRARY:
        for path in [source / part] if part.endswith(".py") else (source / part).rglob("*.py"):
            assert set(imported(path)) <= allowed, path


def test_types_are_announced():
    assert (ROOT / "src" / "consilience" / "py.typed").exists()


def python(*words):
    return subprocess.run(  # noqa: S603
        [sys.executable, *words], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("extra", ["tyro", "rich"])
def test_the_command_says_what_it_needs(extra):
    """Without the extra `lab`, a sentence and not a traceback."""
    without = f"import sys; sys.modules['{extra}'] = None"
    found = python("-c", f"{without}; from consilience.__main__ import main; main()")
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert f"needs the extra `lab`, and `{extra}` is not installed" in found.stderr


def test_the_command_is_a_module_too():
    assert python("-m", "consilience", "--help").stdout.startswith("usage: consilience")


def test_a_wheel_holds_the_package_alone():
    """Types and what the report is made of go along; tests, docs and benchmarks do not."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {
        "packages": ["src/consilience"]
    }
    files = {path.suffix for path in (ROOT / "src" / "consilience").rglob("*.*") if path.is_file()}
    assert files - {".pyc"} == {".py", ".typed", ".js", ".css"}
    assert not list((ROOT / "src" / "consilience").rglob("test*.py"))
