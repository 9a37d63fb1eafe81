"""Figure 2: inconsistent gradient directions, and consistent ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from torch import Tensor

from consilience import GeometricMean
from consilience.lab.figures import INK, PALETTE, save, style
from consilience.paper._surfaces import gradients, lattice, mean_loss

POINTS = {"A and B pull at different parameters": (0.5, 0.5), "A and B agree": (-0.85, -0.75)}
SPAN = 0.42
LOOKS = {
    "A": (PALETTE[0], ""),
    "B": (PALETTE[1], "////"),
    "arithmetic mean": (PALETTE[2], ""),
    "geometric mean": (PALETTE[3], "...."),
}


def draw(folder: Path, *, quick: bool = False) -> list[Path]:
    """Draw where the gradients of both landscapes of figure 1 point, and their two means.

    At (0.5, 0.5), between the minimum that both share and the one where valleys cross, the two
    gradients are orthogonal up to a trace, and that trace has the other sign. The arithmetic mean
    keeps both (a logical OR); the geometric mean keeps no component, as there is none that they
    agree about (a logical AND). Near the shared minimum all four steps point the same way.

    Args:
        folder: Where to write `gradient-directions.svg` and `gradient-directions.png`.
        quick: Fewer points.

    Returns:
        The files written.
    """
    with style():
        figure = Figure(figsize=(7.6, 6.4))
        grid = figure.subplots(2, 2, height_ratios=(2.2, 1))
        for (title, point), top, low in zip(POINTS.items(), *grid, strict=True):
            at = torch.tensor(point, dtype=torch.float64)
            both = gradients(at)
            steps = {
                "A": -both[0],
                "B": -both[1],
                "arithmetic mean": -both.mean(0),
                "geometric mean": -GeometricMean(threshold=1.0).combine(both),
            }
            _contours(top, point, 61 if quick else 241)
            _arrows(top, point, steps)
            top.set_title(f"At {point}: {title}")
            _bars(low, steps)
        grid[1, 0].set_ylabel("component of the step")
        handles, labels = grid[1, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        return save(figure, folder, "gradient-directions")


def _contours(axes: Axes, point: tuple[float, float], count: int) -> None:
    points = lattice(count)
    axes.contour(
        points[..., 0].numpy(),
        points[..., 1].numpy(),
        mean_loss(points).numpy(),
        levels=np.linspace(0.04, 0.96, 24),
        colors="#b8b8b8",
        linewidths=0.7,
    )
    axes.set(xlim=(point[0] - SPAN, point[0] + SPAN), ylim=(point[1] - SPAN, point[1] + SPAN))
    axes.set(aspect="equal", xlabel="$\\theta_1$", ylabel="$\\theta_2$")
    axes.grid(visible=False)


def _arrows(axes: Axes, point: tuple[float, float], steps: dict[str, Tensor]) -> None:
    """Draw steps from one point; side by side where they would hide each other."""
    scale = 0.32 / max(float(step.norm()) for step in steps.values())
    mean = steps["arithmetic mean"]
    alike = float(steps["geometric mean"].norm()) > 0
    aside = 0.03 * torch.stack([-mean[1], mean[0]]) / mean.norm() * alike
    for place, (name, step) in enumerate(steps.items()):
        start = torch.tensor(point, dtype=step.dtype) + (place - 1.5) * aside
        end = start + scale * step
        if float(step.norm()) > 0:
            arrow = axes.annotate(
                "",
                end.tolist(),
                start.tolist(),
                arrowprops={
                    "arrowstyle": "-|>,head_width=0.3,head_length=0.6",
                    "linewidth": 3.2,
                    "color": LOOKS[name][0],
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )
            assert arrow.arrow_patch is not None  # noqa: S101
            arrow.arrow_patch.set_path_effects([Stroke(linewidth=4.6, foreground=INK), Normal()])
            if not alike:
                axes.annotate(name, end.tolist(), (4, 4), textcoords="offset points")
        else:
            axes.annotate(f"{name}:\nno step", point, (-58, -34), textcoords="offset points")
    axes.plot(*point, "o", color="white", markeredgecolor=INK, markersize=7, zorder=5)


def _bars(axes: Axes, steps: dict[str, Tensor]) -> None:
    for place, (name, step) in enumerate(steps.items()):
        colour, hatch = LOOKS[name]
        axes.bar(
            np.arange(2) + 0.2 * (place - 1.5),
            step.tolist(),
            0.18,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
            label=name,
        )
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks([0, 1], ["$\\theta_1$", "$\\theta_2$"])
    axes.grid(visible=False, axis="x")
