"""Figure 1: what averaging the gradients of two landscapes forgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke
from torch import Tensor

from consilience import GeometricMean
from consilience.lab.figures import INK, SURFACE, save, style
from consilience.paper._surfaces import (
    CROSSING,
    HIGH,
    LOW,
    SHARED,
    STARTS,
    Loss,
    descend,
    gradients,
    lattice,
    loss_a,
    loss_b,
    mean_loss,
    product_loss,
)

Field = Callable[[Tensor], Tensor]

AGREED = ("#3c4a5c", "#9aa4b0", "#eef0f2")
"""Shades for none, one and both of the components."""


def draw(folder: Path, *, quick: bool = False) -> list[Path]:
    """Draw both means of two landscapes, each of them, and descent from the same starts on all.

    On the arithmetic mean, descent ends in either of two minima that look alike. On A or B alone,
    or on their geometric mean, it does not end where the valleys cross, as that is no minimum
    there but a point of a valley. The geometric mean of the two gradients, component by component
    and zero where their signs differ, stops where they differ: between the two minima nothing
    moves. (From the far corner both environments push both parameters down, and it arrives at the
    crossing, too: agreement of signs is a local matter.)

    Args:
        folder: Where to write `landscapes.svg` and `landscapes.png`.
        quick: Fewer points and steps.

    Returns:
        The files written.
    """
    count, steps = (61, 300) if quick else (241, 6000)
    start = torch.tensor(STARTS, dtype=torch.float64)
    rule = GeometricMean(threshold=1.0)
    panels: list[tuple[str, Loss | None, Field]] = [
        ("Arithmetic mean of A and B", mean_loss, lambda p: gradients(p).mean(0)),
        ("Geometric mean of A and B", product_loss, _downhill_of_the_product),
        ("Geometric mean of the gradients", None, lambda p: rule.combine(gradients(p))),
        ("A alone", loss_a, lambda p: gradients(p)[0]),
        ("B alone", loss_b, lambda p: gradients(p)[1]),
    ]
    with style():
        figure = Figure(figsize=(9.6, 6.4))
        grid = figure.subplots(2, 3)
        for axes, (title, loss, field) in zip(grid.flat, panels, strict=False):
            if loss is None:
                _agreement(axes, count)
            else:
                surface = _surface(axes, loss, count)
            _paths(axes, descend(field, start, steps=steps))
            axes.set_title(title)
        key = grid[1, 2]
        key.axis("off")
        figure.colorbar(
            surface,
            cax=key.inset_axes((0.02, 0.12, 0.75, 0.05)),
            orientation="horizontal",
            label="loss",
            ticks=[0, 0.3, 0.6, 0.9],
        )
        key.legend(handles=_legend(), loc="upper left", labelspacing=0.9)
        return save(figure, folder, "landscapes")


def _downhill_of_the_product(points: Tensor) -> Tensor:
    """Return the way down on the geometric mean, at an even pace.

    Its gradient jumps along the valleys; that of the product, which has the same paths, does not.
    """
    points = points.detach().requires_grad_()
    product = (loss_a(points) * loss_b(points)).sum()
    (slope,) = torch.autograd.grad(product, points)
    paced: Tensor = slope / (slope.norm(dim=-1, keepdim=True) + 0.3)
    return paced


def _surface(axes: Axes, loss: Loss, count: int) -> ContourSet:
    points = lattice(count)
    values = loss(points).numpy()
    first, second = points[..., 0].numpy(), points[..., 1].numpy()
    levels = np.linspace(0, 0.95, 20)
    filled = axes.contourf(first, second, values, levels=levels, cmap=SURFACE, extend="max")
    axes.contour(first, second, values, levels=levels[1::2], colors="white", linewidths=0.4)
    return filled


def _agreement(axes: Axes, count: int) -> None:
    """Shade how many of the two components A and B agree about the sign of."""
    points = lattice(count)
    signs = gradients(points).sign()
    agreed = (signs[0] == signs[1]).sum(-1).numpy()
    axes.contourf(
        points[..., 0].numpy(),
        points[..., 1].numpy(),
        agreed,
        levels=[-0.5, 0.5, 1.5, 2.5],
        colors=AGREED,
    )


def _paths(axes: Axes, paths: Tensor) -> None:
    halo = [Stroke(linewidth=3.4, foreground=INK), Normal()]
    for path in paths.transpose(0, 1).numpy():
        axes.plot(*path.T, color="white", linewidth=1.6, linestyle="-", path_effects=halo)
    _dots(axes, paths[-1], markersize=5, color=INK, markeredgecolor="white")
    _dots(axes, paths[0], markersize=7, color="white", markeredgecolor=INK)
    for minimum in (SHARED, CROSSING):
        axes.plot(*minimum, "+", color=INK, markersize=15, markeredgewidth=3.2)
        axes.plot(*minimum, "+", color="white", markersize=13, markeredgewidth=1.4)
    axes.set(xlim=(LOW, HIGH), ylim=(LOW, HIGH), aspect="equal")
    axes.set(xlabel="$\\theta_1$", ylabel="$\\theta_2$")
    axes.grid(visible=False)


def _dots(axes: Axes, points: Tensor, **look: Any) -> None:
    axes.plot(*points.numpy().T, "o", linestyle="none", zorder=4, **look)


def _legend() -> list[Artist]:
    dot: dict[str, Any] = {"marker": "o", "linestyle": "none"}
    names = ("no parameter: nothing moves", "one parameter", "both parameters")
    return [
        Line2D([], [], color="white", markeredgecolor=INK, markersize=7, **dot, label="start"),
        Line2D([], [], color=INK, markersize=5, **dot, label="end of descent"),
        Line2D(
            [],
            [],
            color=INK,
            marker="+",
            markersize=11,
            linestyle="none",
            label="minima of the arithmetic mean",
        ),
        Line2D([], [], linestyle="none", label="signs of gradients agree for"),
        *(
            Patch(facecolor=shade, edgecolor=INK, linewidth=0.6, label=name)
            for shade, name in zip(AGREED, names, strict=True)
        ),
    ]
