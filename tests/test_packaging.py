"""The package as it is declared and as it is pinned."""

import ast
import re
import sys
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
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


def test_every_dependency_is_pinned_above_its_lower_bound():
    pins = constraints()
    for line in requires("consilience"):
        requirement = Requirement(line)
        extra = re.search(r"extra == ['\"](\w+)", line)
        if requirement.name == "consilience" or (extra and extra[1] == "bench"):
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), line


def needs_of(name, seen):
    """Every distribution that one needs, through those it needs."""
    for line in requires(name) or ():
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        other = canonicalize_name(requirement.name)
        if wanted and other not in seen:
            seen.add(other)
            needs_of(other, seen)
    return seen


@pytest.mark.parametrize("name", ["pytest-xdist", "pytest-cov", "pytest-timeout", "hypothesis"])
def test_what_dependencies_bring_is_pinned(name):
    missing = needs_of(name, {canonicalize_name(name)}) - set(constraints())
    assert not missing


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
