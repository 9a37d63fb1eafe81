"""The numbers behind a figure: written beside it, and printed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from consilience.lab.runs import explaining, write_bytes


def write(
    folder: Path, name: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Write `name.json` (settings and rows) and `name.csv` (rows), each wholly or not at all.

    Args:
        folder: Where to write; it is made if it does not exist.
        name: The name of the figure.
        settings: What the rows were measured with.
        rows: One or more rows with the same keys. None becomes an empty cell.

    Returns:
        The two paths.
    """
    with explaining(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    whole = json.dumps({"settings": dict(settings), "rows": list(rows)}, indent=1) + "\n"
    paths = [folder / f"{name}.json", folder / f"{name}.csv"]
    write_bytes(paths[0], whole.encode())
    write_bytes(paths[1], text.getvalue().encode())
    return paths


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text in aligned columns, the first to the left and the others to the right.

    Example:
        >>> print(table(["method", "test"], [["erm", "50%"], ["and-mask", "100%"]]))
        method    test
        erm        50%
        and-mask  100%
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)
