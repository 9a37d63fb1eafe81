"""How the two classes of the synthetic dataset are drawn: colour and marker, never colour alone."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from consilience.lab.figures import PALETTE

COLOURS = (PALETTE[0], PALETTE[1])
TINTS = ("#d6e0ec", "#f7ecd2")
NAMES = ("class 0", "class 1")


def scatter(axes: Axes, points: np.ndarray, y: np.ndarray, *, size: float = 9) -> None:
    """Draw points ``[rows, 2]``: discs for class 0, triangles for class 1."""
    for label, marker in ((0, "o"), (1, "^")):
        chosen = points[y == label]
        axes.scatter(
            chosen[:, 0],
            chosen[:, 1],
            s=size,
            marker=marker,
            color=COLOURS[label],
            edgecolors="#222222",
            linewidths=0.3,
            label=NAMES[label],
        )


def bare(axes: Axes, extent: float) -> None:
    """Show a square around the origin without ticks, both axes alike."""
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent), xticks=[], yticks=[], aspect="equal")
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, color="#999999", linewidth=0.7)


def spiral_oracle(extent: float, revolutions: float, scale: float, pixels: int = 400) -> np.ndarray:
    """Return which class the mechanism gives each point of a square, ``[pixels, pixels]``.

    A point of radius r and angle a is nearer to the arm of class 0 where cos(a - 2 pi n r) > 0.
    """
    ticks = np.linspace(-extent, extent, pixels) * scale
    x, y = np.meshgrid(ticks, ticks)
    radius, angle = np.hypot(x, y), np.arctan2(y, x)
    return np.asarray(np.cos(angle - 2 * np.pi * revolutions * radius) <= 0, dtype=float)


def shade(axes: Axes, classes: np.ndarray, extent: float) -> None:
    """Tint the region of each class ``[pixels, pixels]`` and draw the boundary between them."""
    box = (-extent, extent, -extent, extent)
    axes.contourf(classes, levels=[-0.5, 0.5, 1.5], colors=TINTS, extent=box, zorder=0)
    axes.contour(classes, levels=[0.5], colors="#444444", linewidths=0.9, extent=box, zorder=1)
