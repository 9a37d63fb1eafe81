"""The synthetic memorization dataset in four dimensions: two of mechanism, two of shortcut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from consilience.data import SyntheticMemorization
from consilience.lab.figures import save, style
from consilience.paper._classes import bare, scatter, shade, spiral_oracle

BLUR = 0.16
"""Deviation of the blobs: without it, all rows of a class and environment would be one dot."""


def draw(folder: Path, *, quick: bool = False, seed: int = 0) -> list[Path]:
    """Draw two environments, their pool and test data, with the boundaries that classify each.

    Signatures are placed by hand, one along each axis, and blurred so that rows can be told
    apart; the dataset itself draws them at random and does not blur them.

    Args:
        folder: Where to write `dataset.svg` and `dataset.png`.
        quick: Fewer points.
        seed: Where the points come from.

    Returns:
        The files written.
    """
    rows = 80 if quick else 240
    data = SyntheticMemorization(
        environments=2,
        rows_per_environment=rows,
        shortcut_dimensions=0,
        spiral_scale=1.0,
        seed=seed,
    )
    train, test = data.train(), data.test(rows)
    random = np.random.default_rng(seed)
    x, y, env = train.x.numpy(), train.y.numpy(), train.env.numpy()
    signature = np.array([[1.0, 0.0], [0.0, 1.0]])[env]
    shortcut = (2 * y - 1)[:, None] * signature + BLUR * random.standard_normal((len(y), 2))
    a, b = env == 0, env == 1
    columns = [
        ("environment A", x[a], shortcut[a], y[a], (1.0, 0.0)),
        ("environment B", x[b], shortcut[b], y[b], (0.0, 1.0)),
        ("A and B pooled", x, shortcut, y, (1.0, 1.0)),
        ("test", test.x.numpy(), 0.65 * random.standard_normal((rows, 2)), test.y.numpy(), None),
    ]
    with style():
        figure = Figure(figsize=(8.4, 4.9))
        grid = figure.subplots(2, 4)
        for i, (name, mechanism, blobs, labels, normal) in enumerate(columns):
            upper, lower = grid[0, i], grid[1, i]
            upper.set_title(name)
            shade(upper, spiral_oracle(1.12, data.revolutions, 1.0), 1.12)
            scatter(upper, mechanism, labels, size=7)
            bare(upper, 1.12)
            if normal is not None:
                _half_planes(lower, normal)
            scatter(lower, blobs, labels, size=7)
            bare(lower, 1.8)
        grid[0, 0].set_ylabel("mechanism\n(the same everywhere)")
        grid[1, 0].set_ylabel("shortcut\n(each environment's own)")
        grid[1, 3].set_xlabel("no boundary helps")
        grid[1, 2].set_xlabel("one line does for both")
        handles, names = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, markerscale=1.8)
        return save(figure, folder, "dataset")


def _half_planes(axes: Axes, normal: tuple[float, float]) -> None:
    ticks = np.linspace(-1.8, 1.8, 200)
    x, y = np.meshgrid(ticks, ticks)
    shade(axes, np.asarray(normal[0] * x + normal[1] * y > 0, dtype=float), 1.8)
