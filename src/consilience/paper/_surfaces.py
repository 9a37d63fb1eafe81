r"""The two-parameter landscapes of figure 1, and descent on them.

The paper gives the places of the two minima, (-0.5, -0.5) and (0.8, 0.8), and says how the losses
of its two observations look; it gives no formula. Here, with the well :math:`w(q) = q / (1 + q)`,

.. math:: L_A = w(|\theta - c|^2 / 0.5) \, w((\theta_1 - 0.8)^2 / 0.18), \quad
          L_B = w(|\theta - c|^2 / 0.5) \, w((\theta_2 - 0.8)^2 / 0.18), \quad c = (-0.5, -0.5).

Both are zero at c, a round well that they share. Each is zero along a valley of its own, too, and
where the valleys cross, at (0.8, 0.8), the mean has its second minimum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHARED = (-0.5, -0.5)
CROSSING = (0.8, 0.8)
LOW, HIGH = -1.3, 1.3
STARTS = (
    (0.55, 0.4),
    (1.15, 0.15),
    (0.2, 1.15),
    (1.2, 1.05),
    (-1.1, 0.55),
    (0.55, -1.1),
    (-1.15, -0.9),
    (-0.2, 0.1),
)

Loss = Callable[[Tensor], Tensor]
"""A function from points ``[..., 2]`` to losses ``[...]``."""


def loss_a(points: Tensor) -> Tensor:
    """Return the loss of environment A, whose valley is a vertical line."""
    return _shared(points) * _well((points[..., 0] - CROSSING[0]) ** 2 / 0.18)


def loss_b(points: Tensor) -> Tensor:
    """Return the loss of environment B, whose valley is a horizontal line."""
    return _shared(points) * _well((points[..., 1] - CROSSING[1]) ** 2 / 0.18)


def mean_loss(points: Tensor) -> Tensor:
    """Return the mean over both environments."""
    return (loss_a(points) + loss_b(points)) / 2


def product_loss(points: Tensor) -> Tensor:
    """Return the geometric mean of both losses."""
    return (loss_a(points) * loss_b(points)).sqrt()


def gradients(points: Tensor) -> Tensor:
    """Return both environments' gradients, ``[2, ..., 2]``."""
    points = points.detach().requires_grad_()
    found = [torch.autograd.grad(loss(points).sum(), points)[0] for loss in (loss_a, loss_b)]
    return torch.stack(found)


def descend(
    direction: Callable[[Tensor], Tensor], start: Tensor, *, rate: float = 0.02, steps: int = 4000
) -> Tensor:
    """Follow minus a field of directions from points ``[k, 2]``; return ``[steps + 1, k, 2]``."""
    path = [start]
    for _ in range(steps):
        path.append(path[-1] - rate * direction(path[-1]))
    return torch.stack(path)


def lattice(count: int, high: float = HIGH) -> Tensor:
    """Return points ``[count, count, 2]`` that cover a figure's plane, from LOW to ``high``."""
    axis = torch.linspace(LOW, high, count, dtype=torch.float64)
    second, first = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([first, second], -1)


def _well(q: Tensor) -> Tensor:
    return q / (1 + q)


def _shared(points: Tensor) -> Tensor:
    center = torch.tensor(SHARED, dtype=points.dtype)
    return _well((points - center).square().sum(-1) / 0.5)
