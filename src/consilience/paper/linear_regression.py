"""The authors' linear regression: how every weight evolves, rule by rule.

Four environments of one row each. Row ``e`` has the value 3 on feature ``e``, which no other row
has, and 0.3 on the last feature, which all have; every target is 1. The setting is that of the
notebook which accompanies the paper: start at N(0, 0.1), learning rate 0.3 that falls by 0.9995 a
step, weight decay 0.01 after each step, 1000 steps, on all four rows, on the first two, and on the
last two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from consilience import AndMask, GeometricMean, Mean, Rule
from consilience.lab.figures import DASHES, PALETTE, save, style
from consilience.paper import _numbers

RULES: dict[str, Rule] = {
    "mean": Mean(),
    "AND-mask": AndMask(threshold=1.0),
    "geometric mean": GeometricMean(threshold=1.0),
}
SPLITS = {"all four": slice(0, 4), "first two": slice(0, 2), "last two": slice(2, 4)}
X = 3 * torch.cat([torch.eye(4), torch.full((4, 1), 0.1)], dim=1)


def train(rule: Rule, x: Tensor, steps: int, seed: int) -> Tensor:
    """Train on rows; return the weights before every step and at the end, ``[steps + 1, 5]``."""
    weights = 0.1 * torch.randn(5, generator=torch.Generator().manual_seed(seed))
    path, rate = [weights], 0.3
    for _ in range(steps):
        rate *= 0.9995
        gradients = (x @ weights - 1).unsqueeze(1) * x  # every row is an environment
        weights = weights - rate * rule.combine(gradients)
        weights = weights - 0.01 * rate * weights
        path.append(weights)
    return torch.stack(path)


def loss(x: Tensor, weights: Tensor) -> float:
    """Return the mean loss on rows."""
    return float((0.5 * (x @ weights - 1) ** 2).mean())


def draw(folder: Path, *, quick: bool = False, seed: int = 0) -> list[Path]:
    """Draw the evolution of all weights for three rules and three sets of environments.

    Averaging lands on the patchwork, and on another one for each set of environments. The AND-mask
    and the geometric mean land on the shared feature, whichever environments they see.

    Args:
        folder: Where to write `linear-regression` as SVG and PNG, its numbers as JSON and CSV.
        quick: Fewer steps.
        seed: Where the first weights come from.

    Returns:
        The files written.
    """
    steps = 100 if quick else 1000
    rows: list[dict[str, Any]] = []
    with style():
        figure = Figure(figsize=(9.6, 5.8))
        grid = figure.subplots(3, 5, sharex=True, sharey="col")
        for (name, rule), axes in zip(RULES.items(), grid, strict=True):
            for place, (split, chosen) in enumerate(SPLITS.items()):
                path = train(rule, X[chosen], steps, seed)
                others = [e for e in range(4) if e not in range(4)[chosen]]
                rows.append(
                    {
                        "rule": name,
                        "environments": split,
                        **{f"weight_{i}": float(path[-1, i]) for i in range(5)},
                        "loss": loss(X[chosen], path[-1]),
                        "loss_on_the_others": loss(X[others], path[-1]) if others else None,
                    }
                )
                for weight, panel in enumerate(axes):
                    panel.plot(
                        path[:, weight],
                        color=PALETTE[place],
                        linestyle=DASHES[place],
                        linewidth=(2.4, 1.8, 1.8)[place],
                        label=split,
                    )
            axes[0].set_ylabel(f"{name}\nweight")
            for panel in axes[:4]:
                panel.set_ylim(-0.3, 0.6)
        for weight, panel in enumerate(grid[0]):
            panel.set_title("shared feature" if weight == 4 else f"only environment {weight}")
        for panel in grid[-1]:
            panel.set_xlabel("step")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, title="trained on environments", loc="outside lower center", ncols=3
        )
        paths = save(figure, folder, "linear-regression")
    print(
        _numbers.table(
            ["rule", "trained on", "weights", "loss", "on the others"],
            [
                [
                    row["rule"],
                    row["environments"],
                    " ".join(f"{row[f'weight_{i}']:6.3f}" for i in range(5)),
                    f"{row['loss']:.2g}",
                    "" if (other := row["loss_on_the_others"]) is None else f"{other:.2g}",
                ]
                for row in rows
            ],
        )
    )
    settings = {"steps": steps, "seed": seed, "rate": 0.3, "weight_decay": 0.01}
    return [*paths, *_numbers.write(folder, "linear-regression", settings, rows)]
