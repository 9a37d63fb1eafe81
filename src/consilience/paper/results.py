"""Results by method: accuracy on training environments and on test, every seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from consilience.lab.figures import PALETTE, save, style
from consilience.lab.report.readings import Group, Spread
from consilience.paper import _numbers
from consilience.paper._families import choose

STYLES: dict[str, dict[str, Any]] = {
    "train": {"marker": "D", "facecolors": "white", "edgecolors": PALETTE[1], "linewidths": 1.4},
    "test": {"marker": "o", "facecolors": PALETTE[0], "edgecolors": "white", "linewidths": 0.5},
}


def draw(folder: Path, *, quick: bool = False, runs: Path = Path("runs")) -> list[Path]:
    """Draw train and test accuracy of each method at the last epoch, and write them beside.

    Of the configurations of a method that were run, the one with the most seeds stands for it,
    and the best on test among equals.

    Args:
        folder: Where to write `results.svg`, `.png`, `.json` and `.csv`.
        quick: Nothing to shorten.
        runs: The folder of runs.

    Returns:
        The files written.

    Raises:
        LabError: Where there is no run to show; it names the commands.
    """
    del quick
    chosen = choose(runs)
    print(_numbers.table(["method", "seeds", "train", "test", "least test"], _rows(chosen)))
    print("\n".join(f"{name}: {group.label}" for name, group in chosen.items()))
    with style():
        figure = Figure(figsize=(6.6, 1.3 + 0.36 * len(chosen)))
        axes = figure.subplots()
        for row, group in enumerate(chosen.values()):
            for name, height in (("train", 0.13), ("test", -0.13)):
                values = [v for r in group.counted if (v := r.last(f"{name}_accuracy")) is not None]
                axes.scatter(
                    [100 * value for value in values],
                    np.full(len(values), -row + height),
                    s=26,
                    alpha=0.85,
                    label=name if row == 0 else None,
                    zorder=3,
                    **STYLES[name],
                )
        axes.axvline(50, color="#444444", linestyle=":", linewidth=1.2, label="guessing")
        names = [f"{name} ({len(group.counted)})" for name, group in chosen.items()]
        axes.set(
            xlim=(38, 102),
            yticks=[-row for row in range(len(chosen))],
            yticklabels=names,
            ylim=(0.5 - len(chosen), 0.5),
            xlabel="accuracy at the last epoch, % (in brackets: seeds)",
        )
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside upper center", ncols=3)
        files = save(figure, folder, "results")
    rows: list[dict[str, Any]] = [
        {"method": name, "label": group.label, "seed": r.run.seed if r.run else None}
        | {key: r.last(key) for key in ("train_accuracy", "test_accuracy", "kept")}
        for name, group in chosen.items()
        for r in group.counted
    ]
    settings = {name: group.settings for name, group in chosen.items()}
    return files + _numbers.write(folder, "results", settings, rows)


def _rows(chosen: dict[str, Group]) -> list[list[str]]:
    rows = []
    for name, group in chosen.items():
        train, test = group.spread("train_accuracy"), group.spread("test_accuracy")
        least = "-" if test is None else f"{test.low:.2%}"
        rows.append([name, str(len(group.counted)), _spread(train), _spread(test), least])
    return rows


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    around = "" if spread.deviation is None else f" ± {100 * spread.deviation:.2f}"
    return f"{spread.mean:.2%}{around}"
