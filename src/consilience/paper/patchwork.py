"""Figure 10: a patchwork network, two settings of its parameters, and its score."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from consilience.consistency import check_witness, inconsistency
from consilience.lab.figures import INK, PALETTE, save, style
from consilience.paper import _numbers

MINIMUM = (100.0, -45.0, 100.0, -75.0, 1.0, 1.0)
"""theta* as in the paper's figure. Its text has -50 for the second weight, which fits less well."""
VARIED = (100.0, -45.0, 100.0, -75.0, 1.0, -0.5)
EPSILON = 0.01
RADII = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
TOLERANCE = 1.0
"""The construction is no minimum: descent can take its mean loss from 0.0032 to 0.00037. That is
less than epsilon, which is all that is asked."""


def target(x: Tensor) -> Tensor:
    """Return the function that is to be learned: two ramps between three flat parts."""
    return (10 * (x - 0.4)).clamp(0, 1) + (10 * (x - 0.7)).clamp(0, 1)


def network(theta: Tensor, x: Tensor) -> Tensor:
    """Return equation 3: two sigmoid neurons with their weights, and their sum."""
    first = torch.sigmoid(theta[0] * x + theta[1])
    second = torch.sigmoid(theta[2] * x + theta[3])
    return theta[4] * first + theta[5] * second


def environments(count: int = 2001) -> dict[str, Tensor]:
    """Return the inputs of A, [0, 0.5), and of B, [0.5, 1]."""
    x = torch.linspace(0, 1, count, dtype=torch.float64)
    return {"A": x[x < 0.5], "B": x[x >= 0.5]}


def loss(x: Tensor, theta: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (network(theta, x) - target(x)).square().mean()


def draw(folder: Path, *, quick: bool = False, seed: int = 0) -> list[Path]:
    """Draw the network at theta* and with its sixth weight changed, and its score.

    Each neuron serves one environment, so the second one's weight can be anything as far as A is
    concerned. The score is therefore infinite; what the figure shows is how far B's loss gets
    within a distance of theta*, by search (a lower bound, whose witnesses are checked here).

    Args:
        folder: Where to write `patchwork` as SVG and PNG, and its numbers as JSON and CSV.
        quick: Fewer radii and climbs.
        seed: Of the search's directions.

    Returns:
        The files written.
    """
    inputs = environments(201 if quick else 2001)
    losses = [partial(loss, x) for x in inputs.values()]
    best, varied = (torch.tensor(theta, dtype=torch.float64) for theta in (MINIMUM, VARIED))
    rows: list[dict[str, Any]] = []
    for radius in RADII[1:6:4] if quick else RADII:
        score = inconsistency(
            losses,
            best,
            epsilon=EPSILON,
            method="search",
            radius=radius,
            tolerance=TOLERANCE,
            starts=2 if quick else 8,
            seed=seed,
        )
        check = check_witness(losses, best, score)
        # What moving the sixth weight alone does, by as much.
        alone = best + torch.eye(6, dtype=torch.float64)[5] * radius
        rows.append(
            {
                "radius": radius,
                "score": float(score),
                "pair": "".join("AB"[e] for e in score.pair),
                "witness_holds": check.holds,
                "excess": check.excess,
                "sixth_weight_alone": abs(float(losses[1](alone)) - float(losses[0](best))),
            }
        )
    settings = {"epsilon": EPSILON, "tolerance": TOLERANCE, "seed": seed}
    for name, theta in (("minimum", best), ("varied", varied)):
        settings |= {
            f"{name}_loss_{e}": float(one(theta)) for e, one in zip("AB", losses, strict=True)
        }
    for name in ("minimum", "varied"):
        print(
            f"{name}: loss A {settings[f'{name}_loss_A']:.6f}, B {settings[f'{name}_loss_B']:.6f}"
        )
    print(
        _numbers.table(
            ["radius", "score", "pair", "witness holds", "sixth weight alone"],
            [
                [
                    f"{row['radius']:g}",
                    f"{row['score']:.4g}",
                    row["pair"],
                    "yes" if row["witness_holds"] else "NO",
                    f"{row['sixth_weight_alone']:.4g}",
                ]
                for row in rows
            ],
        )
    )
    written = _numbers.write(folder, "patchwork", settings, rows)
    with style():
        figure = Figure(figsize=(9.6, 3.7))
        left, middle, right = figure.subplots(1, 3)
        _fit(left, best, f"$\\theta^*$ = {_listed(MINIMUM)}")
        _fit(middle, varied, f"$\\tilde\\theta$ = {_listed(VARIED)}")
        middle.sharey(left)
        left.set_ylabel("$y$")
        left.legend(loc="upper left")
        _score(right, rows)
        return [*save(figure, folder, "patchwork"), *written]


def _listed(theta: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in theta) + ")"


def _fit(axes: Axes, theta: Tensor, title: str) -> None:
    x = torch.linspace(0, 1, 1001, dtype=torch.float64)
    axes.axvspan(0, 0.5, color=PALETTE[0], alpha=0.10, linewidth=0)
    axes.axvspan(0.5, 1, color=PALETTE[1], alpha=0.16, linewidth=0)
    losses = [float(loss(inputs, theta)) for inputs in environments().values()]
    for name, center, value in zip("AB", (0.25, 0.75), losses, strict=True):
        axes.text(center, -0.27, f"{name}: loss {value:.4f}", ha="center", fontsize=8.5)
    axes.plot(x, target(x), color=INK, linestyle="--", linewidth=2.2, label="target")
    axes.plot(x, network(theta, x), color=PALETTE[2], linestyle="-", label="network")
    axes.set(title=title, xlabel="$x$", xlim=(0, 1), ylim=(-0.4, 2.3))


def _score(axes: Axes, rows: list[dict[str, Any]]) -> None:
    radii = np.array([row["radius"] for row in rows])
    axes.loglog(
        radii, [row["score"] for row in rows], "o-", color=PALETTE[2], label="score (search)"
    )
    axes.loglog(
        radii,
        [row["sixth_weight_alone"] for row in rows],
        ":",
        color=INK,
        label="sixth weight alone",
    )
    axes.axhline(EPSILON, color=PALETTE[0], linestyle="--", linewidth=1.2)
    axes.text(radii[-1], EPSILON * 1.15, "$\\epsilon$: fully consistent", ha="right", fontsize=8.5)
    axes.set(title="$I^\\epsilon(\\theta^*)$ within a distance", xlabel="distance from $\\theta^*$")
    axes.set_xticks(ticks := [0.25, 0.5, 1, 2, 4, 8], [f"{tick:g}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.legend(loc="upper left")
