"""The score as it is handed out: a number that knows where it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

Against = Literal["minimum", "point"]
"""What another environment's loss is compared with: that of e at theta*, or at the same point."""


@dataclass(frozen=True, eq=False)
class Witness:
    """Where a score was found, so that it can be checked (:func:`check_witness`).

    Attributes:
        pair: Environments (e, e'): e for which the whole path is as good as theta*, and e' which
            sees the difference.
        value: What is claimed of the end of the path.
        path: Points ``[points, n]`` from theta* to the end, flattened; straight lines join them.
            Under ``quadratic`` the claim is about the quadratic model.
        parameters: The end of the path as the losses take it: a tensor, or named tensors (for a
            module, ``model.load_state_dict(parameters, strict=False)`` goes there).
    """

    pair: tuple[int, int]
    value: float
    path: Tensor
    parameters: Any

    @property
    def distance(self) -> float:
        """How far the end of the path is from theta*."""
        return float((self.path[-1] - self.path[0]).norm())


class Inconsistency(float):
    r"""The inconsistency score: a number, with what it means and where it was found.

    Attributes:
        method: The method that found it.
        meaning: What kind of number it is, in words: exact, a bound, or a model's.
        epsilon: The epsilon of the score.
        against: What losses were compared with.
        matrix: The score of each pair, ``[e, e']``: what environment ``e'`` loses in the region
            that environment ``e`` holds for as good as theta*. NaN where it was not asked for.
        pair: The pair that has the largest score.
        witness: The point where it is reached; None where it is infinite by a limit only.
        error: How far above the number the truth may lie, as far as the method can tell
            (``grid``); NaN where it cannot tell.
    """

    method: str
    meaning: str
    epsilon: float
    against: Against
    matrix: Tensor
    pair: tuple[int, int]
    witness: Witness | None
    error: float

    def __new__(cls, value: float, /, **facts: Any) -> Self:
        """Make a number with attributes."""
        self = super().__new__(cls, value)
        self.__dict__.update(facts)
        return self

    def __repr__(self) -> str:
        return (
            f"Inconsistency({float(self):.6g}, method={self.method!r}, epsilon={self.epsilon:g}, "
            f"pair={self.pair}, meaning={self.meaning!r})"
        )

    def __str__(self) -> str:
        return float.__repr__(self)


def check_against(against: str) -> None:
    """Raise unless this names a variant of the score."""
    if against not in ("minimum", "point"):
        raise ValueError(
            f"Parameter `against` should be 'minimum' or 'point'. Found `against = {against!r}`."
        )


def largest(matrix: Tensor) -> tuple[float, tuple[int, int]]:
    """Return the largest entry of a matrix and where it is; NaN stands for nothing."""
    filled = torch.where(matrix.isnan(), -math.inf, matrix)
    index = int(filled.argmax())
    return float(filled.flatten()[index]), (index // matrix.shape[1], index % matrix.shape[1])
