"""Learning curves of all methods: train accuracy above, test accuracy below."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from consilience.lab.figures import PALETTE, save, style
from consilience.paper._families import choose

COLUMNS = 5


def draw(folder: Path, *, quick: bool = False, runs: Path = Path("runs")) -> list[Path]:
    """Draw accuracy over epochs for each method: each seed, their mean, and their range.

    A cross ends a run that the paper's rule stopped once it had memorized.

    Args:
        folder: Where to write `learning-curves.svg` and `.png`.
        quick: Nothing to shorten.
        runs: The folder of runs.

    Returns:
        The files written.

    Raises:
        LabError: Where there is no run to show; it names the commands.
    """
    del quick
    chosen = choose(runs)
    columns = min(COLUMNS, len(chosen))
    blocks = math.ceil(len(chosen) / columns)
    with style():
        figure = Figure(figsize=(1.9 * columns + 0.6, 2.9 * blocks + 0.7))
        grid = figure.subplots(2 * blocks, columns, sharey=True, squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for i, (name, group) in enumerate(chosen.items()):
            block, column = divmod(i, columns)
            for row, (key, colour) in enumerate((("train", PALETTE[2]), ("test", PALETTE[0]))):
                axes = grid[2 * block + row, column]
                axes.set_visible(True)
                curves = group.curves(f"{key}_accuracy")
                mean, low, high = (100 * values for values in curves.over_seeds())
                axes.fill_between(curves.epochs, low, high, color=colour, alpha=0.15, linewidth=0)
                for each in curves.each:
                    axes.plot(curves.epochs, 100 * each, color=colour, ls="-", lw=0.5, alpha=0.5)
                    last = np.flatnonzero(~np.isnan(each))[-1]
                    if curves.epochs[last] < group.settings["epochs"]:  # and be it the first
                        axes.plot(curves.epochs[last], 100 * each[last], "x", ms=4, color=colour)
                axes.plot(curves.epochs, mean, color=colour, linestyle="-", linewidth=1.6)
                axes.axhline(50, color="#444444", linestyle=":", linewidth=1)
                axes.set(
                    xlim=(0, group.settings["epochs"]), ylim=(36, 103), yticks=[40, 60, 80, 100]
                )
                if row == 0:
                    axes.set_title(f"{name} ({len(curves.each)})")
                if row == 1:
                    axes.set_xlabel("epoch")
                axes.tick_params(labelbottom=row == 1)
                if column == 0:
                    axes.set_ylabel(f"{key}, %")
        figure.legend(handles=_key(), loc="outside lower center", ncols=2 if columns < 3 else 4)
        return save(figure, folder, "learning-curves")


def _key() -> list[Artist]:
    grey = "#666666"
    return [
        Line2D([], [], color=grey, linestyle="-", linewidth=1.6, label="mean over seeds"),
        Patch(color=grey, alpha=0.25, linewidth=0, label="from the worst seed to the best"),
        Line2D([], [], color=grey, marker="x", ms=4, ls="", label="ended before the last epoch"),
        Line2D([], [], color="#444444", linestyle=":", linewidth=1, label="guessing"),
    ]
