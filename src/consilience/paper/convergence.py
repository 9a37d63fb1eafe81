"""Proposition 1: masked gradient descent meets small masked gradients, at a rate of 1/k."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from consilience import AndMask
from consilience.lab.figures import DASHES, PALETTE, save, style
from consilience.paper import _numbers

ENVIRONMENTS, ROWS, SHARED, PRIVATE = 8, 20, 4, 4
THRESHOLDS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Descent:
    """What AND-masked gradient descent met.

    Attributes:
        norms: The squared norm of the masked gradient before each step.
        losses: The mean loss before each step, and at the end.
        rate: The learning rate, 1 / L.
    """

    norms: Tensor
    losses: Tensor
    rate: float

    def lowest(self) -> Tensor:
        """Return the smallest squared norm met up to each step."""
        return self.norms.cummin(0).values

    def bound(self) -> Tensor:
        """Return the proposition's bound on it, 2 (loss at the start) / (rate k), step by step."""
        steps = torch.arange(1, len(self.norms) + 1)
        return 2 * self.losses[0] / (self.rate * steps)


def problem(seed: int) -> tuple[Tensor, Tensor]:
    """Draw logistic regression with weak shared and strong private features.

    Returns:
        Inputs ``[environments, rows, features]`` and labels ``[environments, rows]``, which the
        shared features alone tell apart, or those of each environment.
    """
    generator = torch.Generator().manual_seed(seed)
    features = SHARED + ENVIRONMENTS * PRIVATE
    y = torch.randint(0, 2, (ENVIRONMENTS, ROWS), generator=generator).double()
    x = 0.5 * torch.randn(ENVIRONMENTS, ROWS, features, generator=generator, dtype=torch.float64)
    sign = (2 * y - 1).unsqueeze(-1)
    x[..., :SHARED] += 0.5 * sign
    for e in range(ENVIRONMENTS):
        own = slice(SHARED + e * PRIVATE, SHARED + (e + 1) * PRIVATE)
        x[e, :, own] += 2 * sign[e]
    return x, y


def descend(x: Tensor, y: Tensor, rule: AndMask, steps: int) -> Descent:
    """Run AND-masked gradient descent from zero, at the learning rate 1 / L.

    L bounds the curvature of the mean logistic loss: a quarter of the largest eigenvalue of the
    inputs' second moment.
    """
    moment = torch.einsum("erf,erg->fg", x, x) / (x.shape[0] * x.shape[1])
    rate = 4 / float(torch.linalg.eigvalsh(moment)[-1])
    theta = torch.zeros(x.shape[-1], dtype=x.dtype)
    norms, losses = torch.empty(steps, dtype=x.dtype), torch.empty(steps + 1, dtype=x.dtype)
    for step in range(steps):
        logits = x @ theta
        losses[step] = F.binary_cross_entropy_with_logits(logits, y)
        # The gradient of each environment's own mean loss.
        found = torch.einsum("er,erf->ef", torch.sigmoid(logits) - y, x) / x.shape[1]
        masked = rule.combine(found)
        norms[step] = masked.square().sum()
        theta = theta - rate * masked
    losses[steps] = F.binary_cross_entropy_with_logits(x @ theta, y)
    return Descent(norms, losses, rate)


def draw(folder: Path, *, quick: bool = False, seed: int = 0) -> list[Path]:
    """Draw the smallest masked gradient met so far against the proposition's bound.

    Logistic regression over eight environments, at the learning rate 1 / L. The proposition is
    about the plain mask alone: rescaled by count, as the paper does in practice, a step can be much
    longer than the learning rate 1 / L allows.

    Args:
        folder: Where to write `convergence` as SVG and PNG, and its numbers as JSON and CSV.
        quick: Fewer steps.
        seed: Where the data come from.

    Returns:
        The files written.
    """
    steps = 100 if quick else 10_000
    x, y = problem(seed)
    rows: list[dict[str, Any]] = []
    with style():
        figure = Figure(figsize=(6.0, 4.2))
        axes = figure.subplots()
        count = torch.arange(1, steps + 1)
        for threshold, colour, dashes in zip(THRESHOLDS, PALETTE, DASHES, strict=False):
            descent = descend(x, y, AndMask(threshold), steps)
            lowest, bound = descent.lowest(), descent.bound()
            label = f"threshold {threshold:g}"
            if (gone := (lowest == 0).nonzero().flatten()).numel():
                label += f" (nothing agrees after step {int(gone[0])})"
            shown = lowest.where(lowest > 0, torch.nan)
            axes.loglog(count, shown, color=colour, linestyle=dashes, label=label)
            rows += [
                {
                    "threshold": threshold,
                    "step": step,
                    "lowest": float(lowest[step - 1]),
                    "bound": float(bound[step - 1]),
                    "loss": float(descent.losses[step]),
                }
                for step in (1, 10, 100, 1000, 10_000)
                if step <= steps
            ]
        axes.loglog(
            count,
            bound,
            color=PALETTE[4],
            linewidth=2.2,
            label="bound: $2 L(\\theta^0) / (\\eta k)$",
        )
        axes.set(
            xlabel="step $k$",
            ylabel="smallest $\\|m_t \\odot \\nabla L\\|^2$ so far",
            title="AND-masked gradient descent, learning rate $1/L$",
        )
        axes.legend(loc="lower left")
        paths = save(figure, folder, "convergence")
    print(
        _numbers.table(
            ["threshold", "step", "lowest", "bound", "loss"],
            [
                [
                    f"{row['threshold']:g}",
                    f"{row['step']}",
                    f"{row['lowest']:.3g}",
                    f"{row['bound']:.3g}",
                    f"{row['loss']:.4g}",
                ]
                for row in rows
            ],
        )
    )
    settings = {"environments": ENVIRONMENTS, "rows": ROWS, "seed": seed, "steps": steps}
    return [*paths, *_numbers.write(folder, "convergence", settings, rows)]
