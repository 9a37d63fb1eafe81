"""The geometry of a loss, learned from gradients along the way (limited-memory BFGS)."""

from __future__ import annotations

from collections import deque

from torch import Tensor


class InverseHessian:
    """An estimate of a loss's inverse Hessian; always positive definite.

    Args:
        memory: How many of the last steps it is made of.
    """

    def __init__(self, memory: int = 20) -> None:
        self._pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=memory)

    def learn(self, step: Tensor, change: Tensor) -> None:
        """Take in a step and the change of the gradient that came with it."""
        curvature = float(step @ change)
        # What is concave or lost in rounding has no place in a positive definite estimate.
        if curvature > 1e-10 * float(step.norm() * change.norm()) and float(change @ change) > 0:
            self._pairs.append((step, change, curvature))

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the product with a vector (the two-loop recursion of Nocedal)."""
        vector, weights = vector.clone(), []
        for step, change, curvature in reversed(self._pairs):
            weight = float(step @ vector) / curvature
            weights.append(weight)
            vector -= weight * change
        if self._pairs:
            _, change, curvature = self._pairs[-1]
            vector *= curvature / float(change @ change)
        for (step, change, curvature), weight in zip(self._pairs, reversed(weights), strict=True):
            vector += (weight - float(change @ vector) / curvature) * step
        return vector
