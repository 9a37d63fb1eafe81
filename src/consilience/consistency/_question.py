"""What is asked of every method alike, once it has been checked."""

from __future__ import annotations

from dataclasses import dataclass

from consilience.consistency._landscape import Landscape
from consilience.consistency._result import Against


@dataclass(frozen=True)
class Question:
    """A score that is asked for.

    Attributes:
        landscape: The losses and theta*.
        heights: The losses at theta*.
        epsilon: How much worse than at theta* an environment may fare.
        against: What losses are compared with.
        pairs: The pairs (e, e') that are wanted.
        tolerance: How far above a minimum theta* may be, as a share of epsilon.
        progress: Whether to show progress.
    """

    landscape: Landscape
    heights: list[float]
    epsilon: float
    against: Against
    pairs: list[tuple[int, int]]
    tolerance: float
    progress: bool
