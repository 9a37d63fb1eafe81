"""Figure 4: how long the averaged and the masked gradient are when there is nothing to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from consilience.consistency import expected_norm, norm_bound, simulate_norm
from consilience.lab.figures import PALETTE, save, style
from consilience.paper import _numbers

SIZE = 3000
THRESHOLD = 0.6
"""The paper's t = 0.8 d is a threshold of 2 * 0.8 - 1."""
VOTERS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200)


def draw(folder: Path, *, quick: bool = False, seed: int = 0) -> list[Path]:
    r"""Draw :math:`E \|\nabla L\|^2` and :math:`E \|m_t \odot \nabla L\|^2` of random gradients.

    3000 parameters, gradients from a standard normal distribution, t = 0.8 d: theory, Monte Carlo
    and the bounds of the second proposition, printed and corrected. A masked norm that is zero in
    every draw cannot stand on a logarithmic axis; the table says where that is.

    Args:
        folder: Where to write `random-gradients` as SVG and PNG, and its numbers as JSON and CSV.
        quick: Fewer draws.
        seed: Where the gradients come from.

    Returns:
        The files written.
    """
    draws = 10 if quick else 200
    rows: list[dict[str, Any]] = []
    for voters in VOTERS:
        row: dict[str, Any] = {"environments": voters}
        for name, threshold in (("mean", 0.0), ("masked", THRESHOLD)):
            generator = torch.Generator().manual_seed(seed + voters)
            found = simulate_norm(voters, threshold, size=SIZE, draws=draws, generator=generator)
            row[name] = expected_norm(voters, threshold, size=SIZE)
            row[f"{name}_measured"], row[f"{name}_error"] = found.mean, found.error
        row["bound"] = norm_bound(voters, THRESHOLD, size=SIZE)
        row["printed_bound"] = norm_bound(voters, THRESHOLD, size=SIZE, form="printed")
        rows.append(row)
    settings = {"parameters": SIZE, "threshold": THRESHOLD, "draws": draws, "seed": seed}
    print(
        _numbers.table(
            ["environments", "mean", "measured", "masked", "measured", "bound", "printed bound"],
            [
                [
                    f"{row['environments']}",
                    f"{row['mean']:.4g}",
                    f"{row['mean_measured']:.4g} ± {row['mean_error']:.1g}",
                    f"{row['masked']:.3g}",
                    f"{row['masked_measured']:.3g} ± {row['masked_error']:.1g}",
                    f"{row['bound']:.3g}",
                    f"{row['printed_bound']:.3g}",
                ]
                for row in rows
            ],
        )
    )
    written = _numbers.write(folder, "random-gradients", settings, rows)
    every = range(2, max(VOTERS) + 1)
    with style():
        figure = Figure(figsize=(6.4, 4.4))
        axes = figure.subplots()
        axes.loglog(
            every,
            [expected_norm(d, 0.0, size=SIZE) for d in every],
            color=PALETTE[0],
            linestyle="-",
            label="average: exact, $n/d$",
        )
        axes.loglog(
            every,
            [expected_norm(d, THRESHOLD, size=SIZE) for d in every],
            color=PALETTE[2],
            linestyle="-",
            label="masked: exact",
        )
        axes.loglog(
            every,
            [norm_bound(d, THRESHOLD, size=SIZE) for d in every],
            color=PALETTE[4],
            linestyle="--",
            linewidth=1,
            label="masked: corrected bound",
        )
        axes.loglog(
            every,
            [norm_bound(d, THRESHOLD, size=SIZE, form="printed") for d in every],
            color=PALETTE[1],
            linestyle=":",
            label="masked: bound as printed",
        )
        for name, colour, marker in (("mean", PALETTE[0], "s"), ("masked", PALETTE[2], "o")):
            met = [row for row in rows if row[f"{name}_measured"] > 0]
            axes.errorbar(
                [row["environments"] for row in met],
                [row[f"{name}_measured"] for row in met],
                [row[f"{name}_error"] for row in met],
                color=colour,
                linestyle="none",
                marker=marker,
                markersize=4.5,
                markerfacecolor="white",
                label=f"{'average' if name == 'mean' else name}: measured",
            )
        axes.set(
            xlabel="environments $d$",
            ylabel="squared norm of the gradient",
            ylim=(1e-7, 1e4),
            title=f"{SIZE} parameters, random gradients, mask at $t = 0.8\\,d$",
        )
        axes.annotate(
            "the printed bound is 0\nup to $d = 4$, where $t = d$",
            (5, 3e-4),
            (6, 0),
            textcoords="offset points",
            fontsize=8,
        )
        axes.legend(loc="lower left")
        return [*save(figure, folder, "random-gradients"), *written]
