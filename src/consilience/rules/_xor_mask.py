"""The XOR-mask."""

from __future__ import annotations

from torch import Tensor

from consilience.rules._masking import keep_where
from consilience.rules._rule import Rule
from consilience.rules._tally import Statistic, Tally
from consilience.rules._threshold import check_threshold, null_keep_rate, quorum


class XorMask(Rule):
    r"""The mean gradient where the environments' signs disagree: what :class:`AndMask` drops.

    .. math:: (1 - m_j)\, g_j, \quad m \text{ the AND-mask}

    From *Learning explanations that are hard to vary* (ICLR 2021), section 3.1, where it is the
    control of the AND-mask: it keeps the shortcuts and loses the mechanism. AND and XOR of one
    threshold sum to the mean gradient.

    Args:
        threshold: :math:`\tau` of the AND-mask, in [0, 1]. At 0 nothing is left.

    Warning:
        An instrument to look at gradients with, not a way to train.

    Example:
        >>> import torch
        >>> gradients = torch.tensor([[1.0, 2.0, -3.0], [3.0, -4.0, -1.0]])
        >>> XorMask(threshold=1.0).combine(gradients)
        tensor([ 0., -1.,  0.])
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = check_threshold(threshold)

    def __call__(self, tally: Tally) -> Tensor:
        """Return the gradient where too few environments agree."""
        disagreement = tally.get(Statistic.VOTES).abs().neg_()
        return keep_where(tally.gradient, disagreement, 1 - quorum(tally.voters, self.threshold))

    def keep(self, tally: Tally) -> Tensor:
        """Return 1 where too few environments agree and 0 elsewhere."""
        return tally.get(Statistic.VOTES).abs().lt_(quorum(tally.voters, self.threshold))

    def null_keep_rate(self, voters: int) -> float:
        """Return the share of components that random signs would keep."""
        return 1.0 - null_keep_rate(voters, self.threshold)
