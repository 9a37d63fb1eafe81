"""The list of figures: each can be drawn, and docs/figures.md is what it says."""

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from consilience.paper.catalogue import FIGURES, listing

ROOT = Path(__file__).parents[2]


def test_the_page_of_figures_is_up_to_date():
    page = ROOT / "docs" / "figures.md"
    assert page.read_text() == listing(), "Run `make docs`."


def test_names_are_distinct():
    names = [entry.name for entry in FIGURES]
    assert len(set(names)) == len(names)
    assert not {"all", "list"} & set(names)


@pytest.mark.parametrize("entry", FIGURES, ids=lambda entry: entry.name)
def test_each_figure_can_be_asked_for(entry):
    parameters = inspect.signature(import_module(entry.module).draw).parameters
    assert next(iter(parameters)) == "folder"
    assert parameters["quick"].default is False
    assert ("runs" in parameters) == bool(entry.runs)


def test_the_list_imports_nothing_heavy():
    code = (
        "import sys, consilience.paper.catalogue; "
        "print([m for m in ('torch', 'matplotlib', 'numpy', 'scipy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout == "[]\n"
