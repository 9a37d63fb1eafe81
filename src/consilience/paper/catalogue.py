"""Every figure and table that `consilience figure` can make, by name. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A figure or table of the paper (or beyond it) and where it is made.

    Attributes:
        name: What one types after `consilience figure`.
        module: The module that has `draw(folder: Path, *, quick: bool = False) -> list[Path]`,
            which returns the files that it wrote.
        title: What it shows, in a line.
        source: Where it stands in the paper.
        cost: What it takes on two cores, in words.
        runs: The command that trains what it draws, or nothing. Where there is one, `draw` also
            takes `runs: Path`, the folder of `--runs`.
    """

    name: str
    module: str
    title: str
    source: str
    cost: str
    runs: str = ""


THEORY: tuple[Entry, ...] = ()
SYNTHETIC: tuple[Entry, ...] = ()

FIGURES: tuple[Entry, ...] = THEORY + SYNTHETIC
