"""Gradient-masked averaging."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from consilience.rules._rule import Rule
from consilience.rules._tally import Statistic, Tally
from consilience.rules._threshold import (
    chance_of_at_least,
    check_threshold,
    check_voters,
    mean_beyond,
    quorum,
)


class SoftMask(Rule):
    r"""The mean gradient, scaled by how far the environments' signs agree.

    .. math:: m_j g_j, \quad m_j = \begin{cases} 1 & a_j \ge \tau \\ a_j & a_j < \tau
        \end{cases}, \quad a_j = \frac{1}{d} \Big| \sum_{e=1}^{d} \mathrm{sign}\,
        [\nabla L_e]_j \Big|

    From *Gradient Masked Averaging for Federated Learning* (Tenison, Sreeramadas, Mugunthan,
    Oyallon, Rish and Belilovsky, 2022). An :class:`AndMask` that lets through a little where it
    would let through nothing, so that training moves where nothing agrees yet.

    Args:
        threshold: :math:`\tau`, in [0, 1]. At 0 it is the plain gradient.

    Warning:
        It does not stop noise: with :math:`d` environments, random signs agree to about
        :math:`0.8 / \sqrt{d}`, and that share of them passes.

    Example:
        >>> import torch
        >>> gradients = torch.tensor([[1.0, 3.0, 2.0], [3.0, 5.0, 2.0], [2.0, -2.0, -1.0]])
        >>> SoftMask(threshold=1.0).combine(gradients)
        tensor([2.0000, 0.6667, 0.3333])
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = check_threshold(threshold)

    def __call__(self, tally: Tally) -> Tensor:
        """Return the gradient scaled by agreement."""
        # Where all signs cancel, 0 times what is not finite is NaN: still not finite.
        return self.keep(tally).mul_(tally.gradient).to(tally.gradient.dtype)

    def keep(self, tally: Tally) -> Tensor:
        """Return 1 where enough environments agree, and their agreement elsewhere."""
        voters = max(tally.voters, 1)
        # `threshold` replaces what is not above its bound, so the agreement goes in negated: what
        # reaches the quorum becomes -1. The bound stands between two whole numbers of votes.
        least = (quorum(tally.voters, self.threshold) - 0.5) / voters
        negated = tally.get(Statistic.VOTES).abs().div_(-voters)
        return F.threshold(negated, -least, -1.0, inplace=True).neg_()

    def null_keep_rate(self, voters: int) -> float:
        """Return the mean of the mask over random signs."""
        check_voters(voters)
        if voters == 0:
            return 1.0
        least = quorum(voters, self.threshold)
        below = mean_beyond(1, voters) - mean_beyond(least, voters)
        return chance_of_at_least(least, voters) + max(0.0, below) / voters
