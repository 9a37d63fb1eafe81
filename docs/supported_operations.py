"""Write the table of docs/supported-operations.md from the registry of operators."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import consilience.observation.operators  # noqa: F401 - registers them
from consilience.observation.calls import OPERATORS

PAGE = Path(__file__).with_name("supported-operations.md")
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
FAMILIES = {
    "products": "Products",
    "convolution": "Convolutions",
    "embedding": "Look-ups",
    "normalization": "Normalizations",
    "pointwise": "Broadcasting and joining",
    "rerun": "Run again, an environment at a time",
}
HIDDEN = {"__rmatmul__", "_convolution", "_embedding_bag", "linalg_multi_dot"}
SHOWN = {"__matmul__": "@", "__getitem__": "w[i]", "__setitem__": "x[i] = w"}


def table() -> str:
    """Return the table, a family of operators after the other."""
    lines = ["| functions | what is observed, and what is not |", "| --- | --- |"]
    for module, title in FAMILIES.items():
        lines.append(f"| **{title}** | |")
        operators = dict.fromkeys(
            operator for operator in OPERATORS.values() if operator.__module__.endswith(module)
        )
        for operator in operators:
            names = [name for name, found in OPERATORS.items() if found is operator]
            inplace = any(name + "_" in names for name in names)
            names = [n for n in names if n not in HIDDEN and not (inplace and n.endswith("_"))]
            shown = ", ".join(f"`{SHOWN.get(name, name)}`" for name in names)
            words = " ".join((inspect.getdoc(operator) or "").split()).replace("``", "`")
            words = words.removeprefix("Observe ").replace("|", r"\|")
            words = words[0].upper() + words[1:]
            lines.append(f"| {shown}{', also in place' if inplace else ''} | {words} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with its table as it should be."""
    return TABLE.sub(lambda _: table(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
