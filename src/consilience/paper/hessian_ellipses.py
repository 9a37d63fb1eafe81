"""Figures 3 and 12: contours of the arithmetic and the geometric mean of two Hessians."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from consilience.consistency import arithmetic_mean, geometric_mean, log_determinant_ratio
from consilience.lab.figures import PALETTE, save, style

PAIRS = {"figure 3": 0.05, "figure 12": 0.01}


def draw(folder: Path, *, quick: bool = False) -> list[Path]:
    r"""Draw the contours :math:`\theta^\top H^{-1} \theta = 1` for both pairs of the paper.

    The geometric mean keeps the determinant of the two Hessians, and so the area of their
    contours. The paper's captions say that the arithmetic mean's is 5 and 25 times larger; those
    are the ratios of determinants. Areas go with their square root.

    Args:
        folder: Where to write `hessian-ellipses.svg` and `hessian-ellipses.png`.
        quick: Nothing to save here.

    Returns:
        The files written.
    """
    del quick
    with style():
        figure = Figure(figsize=(8.2, 4.7))
        for axes, (source, small) in zip(figure.subplots(1, 2), PAIRS.items(), strict=True):
            pair = torch.tensor([[small, 1.0], [1.0, small]], dtype=torch.float64)
            _ellipses(axes, pair)
            ratio = math.exp(log_determinant_ratio(pair))
            axes.set_title(
                f"diag({small:g}, 1) and diag(1, {small:g}), as in {source}\n"
                f"means: determinants 1 : {ratio:.1f}, areas 1 : {math.sqrt(ratio):.2f}"
            )
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        return save(figure, folder, "hessian-ellipses")


def _ellipses(axes: Axes, pair: Tensor) -> None:
    angle = torch.linspace(0, 2 * math.pi, 400, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()])
    both = (arithmetic_mean(pair), geometric_mean(pair))
    shapes = {
        "$H_A$": (pair[0], PALETTE[0], "-", 1.4),
        "$H_B$": (pair[1], PALETTE[1], "-", 1.4),
        "arithmetic mean $H_{A+B}$": (both[0], PALETTE[2], "--", 2.2),
        "geometric mean $H_{A\\wedge B}$": (both[1], PALETTE[4], "-", 2.2),
    }
    for label, (hessian, colour, dashes, width) in shapes.items():
        # On theta' H^-1 theta = 1: theta = H^(1/2) u with u on the unit circle.
        first, second = (hessian.sqrt().unsqueeze(1) * circle).numpy()
        axes.plot(first, second, color=colour, linestyle=dashes, linewidth=width, label=label)
    axes.set(aspect="equal", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1))
    axes.set(xlabel="$\\theta_1$", ylabel="$\\theta_2$")
