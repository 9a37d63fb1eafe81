"""Figure 11: the arithmetic and the geometric mean of ever less consistent surfaces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from torch import Tensor

from consilience.consistency import (
    arithmetic_mean,
    geometric_mean,
    quadratic_inconsistency,
)
from consilience.lab.figures import INK, SURFACE, save, style

CURVATURES = (1.0, 0.5, 0.1, 0.01)
"""H_A is diag(a, 2 - a) and H_B is diag(2 - a, a): the arithmetic mean is always the identity."""
POINT = (0.7, 0.7)


def draw(folder: Path, *, quick: bool = False) -> list[Path]:
    """Draw pairs of quadratic surfaces whose arithmetic mean is always the same.

    The less consistent A and B are, the flatter is their geometric mean and the shorter its
    gradient (the arrow), while the arithmetic mean does not notice.

    Args:
        folder: Where to write `hessian-means.svg` and `hessian-means.png`.
        quick: Fewer points.

    Returns:
        The files written.
    """
    with style():
        figure = Figure(figsize=(8.4, 7.1))
        grid = figure.subplots(len(CURVATURES), 4, sharex=True, sharey=True)
        for row, small in zip(grid, CURVATURES, strict=True):
            pair = torch.tensor([[small, 2 - small], [2 - small, small]], dtype=torch.float64)
            hessians = (pair[0], pair[1], arithmetic_mean(pair), geometric_mean(pair))
            for axes, hessian in zip(row, hessians, strict=True):
                surface = _surface(axes, hessian, 41 if quick else 161)
            score = float(quadratic_inconsistency(pair, 1.0))
            row[0].set_ylabel(f"$I^\\epsilon = {score:.3g}\\,\\epsilon$\n$\\theta_2$")
        titles = ("A", "B", "arithmetic mean", "geometric mean")
        for axes, title in zip(grid[0], titles, strict=True):
            axes.set_title(title)
        for axes in grid[-1]:
            axes.set_xlabel("$\\theta_1$")
        figure.colorbar(surface, ax=grid, label="loss", shrink=0.5, aspect=30)
        return save(figure, folder, "hessian-means")


def _surface(axes: Axes, hessian: Tensor, count: int) -> ContourSet:
    axis = np.linspace(-1, 1, count)
    first, second = np.meshgrid(axis, axis)
    a, b = hessian.tolist()
    levels = np.linspace(0, 1, 21)
    values = (a * first**2 + b * second**2) / 2
    surface = axes.contourf(first, second, values, levels=levels, cmap=SURFACE)
    axes.contour(first, second, values, levels=levels[1::2], colors="white", linewidths=0.4)
    tip = (POINT[0] * (1 - a / 2), POINT[1] * (1 - b / 2))  # half a step of gradient descent
    arrow = axes.annotate(
        "",
        tip,
        POINT,
        arrowprops={"arrowstyle": "-|>", "color": "white", "linewidth": 1.4, "mutation_scale": 11},
    )
    assert arrow.arrow_patch is not None  # noqa: S101
    arrow.arrow_patch.set_path_effects([Stroke(linewidth=3.6, foreground=INK), Normal()])
    axes.plot(*POINT, "o", color="white", markeredgecolor=INK, markersize=6)
    axes.set_aspect("equal")
    axes.grid(visible=False)
    return surface
