"""How every figure of the project looks, and how it gets to the disk.

A figure is drawn inside :func:`style` and written by :func:`save`:

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> from matplotlib.figure import Figure
    >>> from consilience.lab.figures import save, style
    >>> with style():
    ...     figure = Figure(figsize=(4, 3))
    ...     axes = figure.subplots()
    ...     _ = axes.plot([1, 2, 3], [1, 4, 9], label="squares")
    ...     _ = axes.legend()
    ...     paths = save(figure, Path(mkdtemp()), "squares")
    >>> [path.name for path in paths]
    ['squares.svg', 'squares.png']

``Figure`` rather than ``pyplot``: no display, no global state, nothing to close.

Colour never carries a meaning alone. The palette is ordered so that neighbours differ in
lightness (readable in grey) and stay apart for the colour-blind, and the cycle of lines changes
the dashes together with the colour.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

__all__ = ["DASHES", "INK", "MARKERS", "PALETTE", "SURFACE", "save", "style"]

INK = "#000000"
"""Text, arrows, outlines."""

PALETTE = ("#004488", "#DDAA33", "#BB5566", "#6699CC", "#000000")
"""Colours of series in order of use; the first two differ most.

The high-contrast scheme of Paul Tol's "Colour schemes" (SRON technical note, 2021), with one
colour of the medium-contrast scheme between.
"""

DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
"""Dashes that go with the palette, one each."""

MARKERS = ("o", "s", "^", "D", "X")
"""Markers that go with the palette, one each."""

SURFACE = "cividis"
"""The colour map of surfaces: its lightness grows with the value, for every kind of eye."""

_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.formatter.use_mathtext": True,
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.prop_cycle": cycler(color=PALETTE) + cycler(linestyle=DASHES),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9.5,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "figure.titlesize": 11,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "image.cmap": SURFACE,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.facecolor": "white",
    "svg.hashsalt": "consilience",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the project's style while this context lasts; nothing outside it changes."""
    with mpl.rc_context(_SETTINGS):
        yield


def save(figure: Figure, folder: str | Path, name: str, *, dpi: int = 160) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` into ``folder``, each of them wholly or not at all.

    The same figure gives the same bytes: no date, no random identifiers.

    Args:
        figure: The figure to write.
        folder: Where to write; it is made if it does not exist.
        name: The name of the files, without an ending.
        dpi: Dots per inch of the PNG.

    Returns:
        The two paths, the vector file first.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for ending, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        path = folder / f"{name}.{ending}"
        handle, draft = tempfile.mkstemp(dir=folder, prefix=f".{name}-", suffix=f".{ending}")
        os.close(handle)
        try:
            with mpl.rc_context({"svg.hashsalt": _SETTINGS["svg.hashsalt"]}):
                figure.savefig(draft, dpi=dpi, metadata=metadata)
            Path(draft).chmod(0o644)
            Path(draft).replace(path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
        written.append(path)
    return written
