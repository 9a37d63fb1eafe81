"""The plain gradient."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from consilience.rules._rule import Rule
from consilience.rules._tally import Statistic, Tally


class Mean(Rule):
    r"""The plain gradient: what training without environments does.

    .. math:: g = \frac{1}{d} \sum_{e=1}^{d} \nabla L_e

    The baseline of every comparison, and ``AndMask(threshold=0)`` without the counting.

    Example:
        >>> import torch
        >>> Mean().combine(torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
        tensor([ 2., -1.])
    """

    statistics: ClassVar[frozenset[Statistic]] = frozenset()

    def __call__(self, tally: Tally) -> Tensor:
        """Return the gradient as it is."""
        return tally.gradient

    def null_keep_rate(self, voters: int) -> float:
        """Return 1: all is kept, whatever the signs."""
        del voters
        return 1.0
