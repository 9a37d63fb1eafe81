"""The smoothed AND-mask."""

from __future__ import annotations

import math
from numbers import Real
from typing import ClassVar

from torch import Tensor

from consilience.rules._rule import Rule
from consilience.rules._tally import Statistic, Tally
from consilience.rules._threshold import check_threshold, votes_asked


class SandMask(Rule):
    r"""The mean gradient through a smoothed AND-mask that also looks at magnitudes.

    .. math:: m_j g_j, \quad m_j = \max\Big( 0, \tanh \frac{k\, (a_j - \tau)}{v_j} \Big), \quad
        a_j = \frac{1}{d} \Big| \sum_{e=1}^{d} \mathrm{sign}\, c_{e,j} \Big|, \quad
        v_j = 1 - \frac{\big( \sum_e c_{e,j} \big)^2}{d \sum_e c_{e,j}^2}

    From *SAND-mask: An Enhanced Gradient Masking Strategy for the Discovery of Invariances in
    Domain Generalization* (Shahtalebi, Gagnon-Audet, Laleh, Faramarzi, Ahuja and Rish, 2021).
    Where signs agree beyond the threshold, the mask opens the further the more alike the
    magnitudes are. Its authors' code also divides each layer by the mean of its mask; this
    does not.

    **A variance without a scale.** The paper divides by the variance of the gradients. A loss
    multiplied by 10 then has another mask, and as gradients shrink during training every mask
    saturates. Here :math:`v` is the variance over the mean square, both over environments: 0
    where all environments are alike, 1 where they cancel, and the same for a multiple of the
    loss.

    Args:
        threshold: :math:`\tau`, in [0, 1].
        sharpness: :math:`k`, positive: how fast the mask opens beyond the threshold.

    Warning:
        - At ``threshold=1`` nothing can agree beyond the threshold and everything is masked, as
          in the paper. Choose one below.
        - Gradients so small that their squares vanish (below 1e-22 in single precision) are not
          known to be alike, and open the mask no more than unlike ones.
        - There is no share that survives by chance: it depends on the magnitudes.
        - Rows of unknown environment are in the sum of shares and not in the sum of squares, so
          a large part of such rows makes :math:`v` too small.

    Example:
        >>> import torch
        >>> gradients = torch.tensor([[2.0, 1.0, 1.0], [2.0, 5.0, -0.5]])
        >>> SandMask(threshold=0.5, sharpness=1.0).combine(gradients)
        tensor([2.0000, 2.7760, 0.0000])
    """

    statistics: ClassVar[frozenset[Statistic]] = frozenset({Statistic.VOTES, Statistic.SQUARES})

    def __init__(self, threshold: float, sharpness: float = 1.0) -> None:
        self.threshold = check_threshold(threshold)
        if not isinstance(sharpness, Real) or not 0 < sharpness < math.inf:  # also refuses NaN
            raise ValueError(
                "Parameter `sharpness` should be positive and finite. "
                f"Found `sharpness = {sharpness!r}`."
            )
        self.sharpness: float = float(sharpness)

    def __call__(self, tally: Tally) -> Tensor:
        """Return the gradient through the smoothed mask."""
        gradient = tally.gradient
        # Where the mask is 0 or undefined, what is not finite becomes NaN: still not finite.
        return self.keep(tally).mul_(gradient).to(gradient.dtype)

    def keep(self, tally: Tally) -> Tensor:
        """Return the smoothed mask."""
        voters = max(tally.voters, 1)
        asked = votes_asked(tally.voters, self.threshold)
        beyond = tally.get(Statistic.VOTES).abs().sub_(asked).div_(voters)
        alike = tally.gradient.to(beyond.dtype).square()
        alike.div_(tally.get(Statistic.SQUARES)).div_(voters)
        # Squares of gradients below the square root of the smallest number vanish: 0 / 0. There
        # is then no evidence that they are alike.
        alike.nan_to_num_(nan=0.0).clamp_(max=1.0)
        variance = alike.neg_().add_(1)
        # 0 / 0 again: exactly at the threshold, which is not beyond it.
        openness = beyond.clamp_(min=0).mul_(self.sharpness).div_(variance)
        return openness.nan_to_num_(nan=0.0, posinf=math.inf).tanh_()
