"""One self-contained HTML page of a folder of runs: tables, curves, and what networks learned."""

from __future__ import annotations

from pathlib import Path

from consilience.lab.errors import LabError
from consilience.lab.report._page import MOST_PLANES, page
from consilience.lab.report._planes import Learned, Plane, learned, planes
from consilience.lab.report.readings import Group, groups, read
from consilience.lab.runs import explaining, write_bytes

__all__ = ["write_report"]


def write_report(runs: Path, out: Path | None = None) -> Path:
    """Write the report of a folder of runs as one HTML file that needs nothing but itself.

    Damaged, failed and unfinished runs are named in it; they do not stop it. The same runs give
    the same file.

    Args:
        runs: A folder that `consilience run` wrote to, one experiment in it, or one run.
        out: Where to write. Default: `report.html` in `runs`.

    Returns:
        The file written.

    Raises:
        LabError: Where there is no run, or the file cannot be written.
    """
    runs = Path(runs)
    readings = read(runs)
    ordered = sorted(groups(readings), key=_rank)
    listens: dict[Path, Learned] = {}
    decides: dict[Path, list[Plane]] = {}
    troubles: list[str] = []
    for group in ordered:
        if group.experiment != "synthetic":
            continue
        median = group.median()
        for reading in group.counted:
            if reading.run is None:
                continue
            try:
                listens[reading.path] = learned(reading.run)
                if reading is median and len(decides) < MOST_PLANES:
                    decides[reading.path] = planes(reading.run)
            except LabError as error:
                troubles.append(str(error))
    out = runs / "report.html" if out is None else Path(out)
    with explaining(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    text = page(runs, readings, ordered, learned=listens, planes=decides, troubles=troubles)
    write_bytes(out, text.encode())
    return out


def _rank(group: Group) -> tuple[str, float, str]:
    """Order by experiment, best test accuracy first and nothing finished last, then by label."""
    test = group.spread("test_accuracy")
    return group.experiment, 1.0 if test is None else -test.mean, group.label
