"""The paper map: every item of the paper has a row, and what a row names is there."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from consilience.paper.catalogue import FIGURES

PAGE = Path(__file__).parents[1] / "docs" / "paper-map.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| item", "| ---"))
]
SYMBOLS = sorted({name for row in ROWS for name in re.findall(r"`(consilience\.[\w.]+)`", row[1])})


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_every_symbol_is_there(symbol):
    found = import_module("consilience")
    for i, name in enumerate(symbol.split(".")[1:], start=2):
        if not hasattr(found, name):
            import_module(".".join(symbol.split(".")[:i]))
        found = getattr(found, name)


def test_every_item_of_the_paper_has_a_row():
    items = " ".join(row[0] for row in ROWS)
    for kind, count in {"Equation": 5, "Figure": 18, "Table": 3, "Proposition": 3}.items():
        for number in range(1, count + 1):
            assert re.search(rf"\b{kind} {number}\b", items, re.IGNORECASE), (kind, number)
    assert "Algorithm 1" in items


def test_every_row_has_code_or_says_why_not():
    for item, code, command in ROWS:
        assert code.startswith(("`consilience.", "not yet: ", "not here: ")), item
        assert command == "-" or re.fullmatch(r"`(consilience|python) [^`]+`", command), item


def test_every_figure_of_the_paper_that_can_be_drawn_is_named():
    commands = {row[2].strip("`") for row in ROWS}
    for entry in FIGURES:
        if entry.source != "beyond it":
            assert f"consilience figure {entry.name}" in commands, entry.name
