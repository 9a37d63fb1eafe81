"""The picture of section 2.1: the region N that an environment holds for as good as a minimum."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy import ndimage
from torch import Tensor

from consilience.consistency import inconsistency
from consilience.lab.figures import INK, PALETTE, save, style
from consilience.paper._surfaces import (
    CROSSING,
    HIGH,
    LOW,
    SHARED,
    lattice,
    loss_a,
    loss_b,
    mean_loss,
)

EPSILON = 0.1
RADIUS = 2.0
"""How far the search may go: the valleys are endless, and the picture is not."""
HATCHES = ("////", "\\\\\\\\")


def draw(folder: Path, *, quick: bool = False) -> list[Path]:
    """Draw both environments' regions around both minima of figure 1, and the scores.

    Around the minimum that they share, what A holds for as good B does too. Around the crossing
    of valleys, A's region is the whole of its valley, and along it B's loss climbs to the top. The
    path is the search's witness: it stays in one environment's region and ends where the other
    fares worst. The scores are those of the search, which finds a lower bound; around the shared
    minimum the grid, which needs a bounded region, confirms it.

    Args:
        folder: Where to write `region.svg` and `region.png`.
        quick: A coarser picture and fewer climbs.

    Returns:
        The files written.
    """
    with style():
        figure = Figure(figsize=(8.4, 4.9))
        panels = {
            "The minimum that A and B share": (SHARED, HIGH),
            "Where their valleys cross": (CROSSING, CROSSING[0] + RADIUS + 0.2),
        }
        for axes, (name, (minimum, high)) in zip(
            figure.subplots(1, 2), panels.items(), strict=True
        ):
            start = torch.tensor(minimum, dtype=torch.float64)
            score = inconsistency(
                [loss_a, loss_b],
                start,
                epsilon=EPSILON,
                method="search",
                radius=RADIUS,
                starts=2 if quick else 8,
            )
            assert score.witness is not None  # noqa: S101 - a search has one
            _regions(axes, start, lattice(81 if quick else 601, high))
            path = score.witness.path.numpy()
            axes.plot(path[:, 0], path[:, 1], color=INK, linestyle="-", linewidth=2)
            axes.plot(*path[-1], "o", color=INK, markersize=7)
            axes.plot(*minimum, "P", color="white", markeredgecolor=INK, markersize=11)
            axes.set_title(f"{name}:  $I^\\epsilon \\geq$ {score / EPSILON:.2f} $\\epsilon$")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4)
        return save(figure, folder, "region")


def _regions(axes: Axes, start: Tensor, points: Tensor) -> None:
    """Shade where each loss is within epsilon of that of a point, connected with the point."""
    first, second = points[..., 0].numpy(), points[..., 1].numpy()
    axes.contour(
        first,
        second,
        mean_loss(points).numpy(),
        levels=np.linspace(0.05, 0.95, 10),
        colors="#c4c4c4",
        linewidths=0.6,
    )
    center = np.unravel_index(int((points - start).square().sum(-1).argmin()), first.shape)
    for loss, colour, hatch in zip((loss_a, loss_b), PALETTE, HATCHES, strict=False):
        within = (loss(points) - loss(start)).abs().numpy() <= EPSILON
        labels, _ = ndimage.label(within)
        inside = (labels == labels[center]).astype(float)
        with mpl.rc_context({"hatch.color": colour}):
            axes.contourf(
                first, second, inside, levels=[0.5, 2], colors=[colour], alpha=0.3, hatches=[hatch]
            )
        axes.contour(first, second, inside, levels=[0.5], colors=[colour], linewidths=1.5)
    axes.set(xlim=(LOW, first.max()), ylim=(LOW, second.max()), aspect="equal")
    axes.set(xlabel="$\\theta_1$", ylabel="$\\theta_2$")
    axes.grid(visible=False)


def _legend() -> list[Patch | Line2D]:
    regions = [
        Patch(
            facecolor=(colour, 0.3),
            edgecolor=colour,
            hatch=hatch,
            label=f"$N^\\epsilon_{name}$: as good as $\\theta^*$ for {name}",
        )
        for name, colour, hatch in zip("AB", PALETTE, HATCHES, strict=False)
    ]
    return [
        *regions,
        Line2D(
            [],
            [],
            color="white",
            markeredgecolor=INK,
            marker="P",
            markersize=10,
            linestyle="none",
            label="$\\theta^*$",
        ),
        Line2D([], [], color=INK, marker="o", linestyle="-", label="witness"),
    ]
