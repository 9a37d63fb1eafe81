"""The masked geometric mean."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from consilience.rules._masking import keep_agreed
from consilience.rules._rescaling import Rescale, check_rescale, rescale_kept
from consilience.rules._rule import Rule
from consilience.rules._tally import Statistic, Tally
from consilience.rules._threshold import check_threshold, null_keep_rate, quorum


class GeometricMean(Rule):
    r"""The geometric mean of the environments' gradients where their signs agree, 0 elsewhere.

    .. math:: m_j\, \mathrm{sign}(g_j)\, d \exp\Big( \frac{1}{d} \sum_{e=1}^{d}
        \log\big( |c_{e,j}| + 10^{-10} \big) \Big)

    with :math:`m` the :class:`AndMask`, :math:`g` the mean gradient and
    :math:`c_e = \nabla L_e / d` the share of environment :math:`e` in it. From *Learning
    explanations that are hard to vary* (ICLR 2021), section 2.2. A direction that is flat in one
    environment is slow, however steep it is in another: with a mean of curvatures 1 and 100,
    descent follows 50.5, with a geometric mean 10.

    Where :math:`\tau < 1` lets dissenters pass, the paper leaves the mean open. This is what the
    authors' code does: the sign is that of the mean gradient, and the magnitudes of dissenters
    count like all others.

    Args:
        threshold: :math:`\tau`, in [0, 1].
        rescale: As for :class:`AndMask`; ``"norm"`` restores the norm of the plain gradient.
        max_rescale: As for :class:`AndMask`.

    Warning:
        - A zero gradient counts as :math:`10^{-10}`. One among shares of size :math:`c`
          multiplies the mean by :math:`(10^{-10} / c)^{1/d}`: with :math:`c = 1`, by 1e-5 for two
          environments and by 0.8 for a hundred. And where all shares are far below
          :math:`10^{-10}`, what is kept is not: it is :math:`10^{-10} d`.
        - Adaptive optimizers (Adam) undo magnitudes; what is left of the difference to
          :class:`AndMask` is then small.
        - Rows of unknown environment count in the sign and not in the magnitude.
        - Where the gradient is not finite, neither is the result.

    Example:
        >>> import torch
        >>> gradients = torch.tensor([[1.0, 2.0, -2.0], [4.0, -4.0, -8.0]])
        >>> GeometricMean(threshold=1.0).combine(gradients)
        tensor([ 2.,  0., -4.])
    """

    statistics: ClassVar[frozenset[Statistic]] = frozenset({Statistic.VOTES, Statistic.LOGS})

    def __init__(
        self,
        threshold: float,
        rescale: Rescale | bool = "none",
        max_rescale: float | None = None,
    ) -> None:
        self.threshold = check_threshold(threshold)
        self.rescale, self.max_rescale = check_rescale(rescale, max_rescale)

    def __call__(self, tally: Tally) -> Tensor:
        """Return the geometric mean where enough environments agree."""
        votes, gradient, voters = tally.get(Statistic.VOTES), tally.gradient, tally.voters
        # With no voters the sum of logarithms is 0, and so is the factor d in front.
        mean = tally.get(Statistic.LOGS).div(max(voters, 1)).exp_().mul_(voters)
        mean.mul_(gradient.sign()).add_(gradient, alpha=0)
        kept = keep_agreed(mean, votes, quorum(voters, self.threshold))
        if self.rescale != "none":
            keep = self.keep(tally)
            kept = rescale_kept(kept, gradient, keep, self.rescale, self.max_rescale)
        return kept.to(gradient.dtype)

    def keep(self, tally: Tally) -> Tensor:
        """Return 1 where enough environments agree and 0 elsewhere."""
        return tally.get(Statistic.VOTES).abs().ge_(quorum(tally.voters, self.threshold))

    def null_keep_rate(self, voters: int) -> float:
        """Return the share of components that random signs would keep."""
        return null_keep_rate(voters, self.threshold)
