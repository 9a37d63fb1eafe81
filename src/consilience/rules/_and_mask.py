"""The AND-mask."""

from __future__ import annotations

from torch import Tensor

from consilience.rules._masking import keep_agreed
from consilience.rules._rescaling import Rescale, check_rescale, rescale_kept
from consilience.rules._rule import Rule
from consilience.rules._tally import Statistic, Tally
from consilience.rules._threshold import check_threshold, null_keep_rate, quorum


class AndMask(Rule):
    r"""The mean gradient where the environments' signs agree, and 0 where they do not.

    .. math:: m_j g_j, \quad m_j = \Big[\, \tau d \le
        \Big| \sum_{e=1}^{d} \mathrm{sign}\, [\nabla L_e]_j \Big| \,\Big]

    From *Learning explanations that are hard to vary* (Parascandolo, Neitz, Orvieto, Gresele
    and Schölkopf, ICLR 2021), section 2.3, compared on integers (:func:`quorum`). The threshold
    :math:`\tau` is 1 where all signs must be the same, and 0 keeps everything. Signs
    :math:`a` to :math:`b` pass where :math:`|a - b| \ge \tau d`, so 0.6 asks eight of ten.

    Args:
        threshold: :math:`\tau`, in [0, 1].
        rescale: What to do about the magnitude that the mask takes from a layer (from one
            parameter tensor). ``"none"``, or False: nothing. ``"count"``, or True: multiply by
            the layer's size over the number of components kept, as the paper does (appendix);
            where nothing is kept, 0 stays 0. ``"norm"``: give the layer the norm that it had
            before the mask.
        max_rescale: The largest factor of the rescaling; None for no limit.

    Warning:
        - A threshold means little without the number of voters: with three, all thresholds
          above 1/3 are one and the same, and let a quarter of pure noise pass
          (:func:`null_keep_rate`).
        - A gradient of exactly zero is a vote for nobody. At ``threshold=1`` a single zero
          masks the component.
        - Rescaling by count undoes the mask on pure noise: what little passes is blown up until
          the layer moves further than it would have without a mask. ``max_rescale`` limits it.
        - A component that is not finite comes out as it came in, masked or not.

    Example:
        >>> import torch
        >>> gradients = torch.tensor([[1.0, 2.0, -3.0], [3.0, -4.0, -1.0]])
        >>> AndMask(threshold=1.0).combine(gradients)
        tensor([ 2.,  0., -2.])
        >>> AndMask(threshold=1.0, rescale="count").combine(gradients)
        tensor([ 3.,  0., -3.])
    """

    def __init__(
        self,
        threshold: float,
        rescale: Rescale | bool = "none",
        max_rescale: float | None = None,
    ) -> None:
        self.threshold = check_threshold(threshold)
        self.rescale, self.max_rescale = check_rescale(rescale, max_rescale)

    def __call__(self, tally: Tally) -> Tensor:
        """Return the gradient where enough environments agree."""
        votes, gradient = tally.get(Statistic.VOTES), tally.gradient
        kept = keep_agreed(gradient, votes, quorum(tally.voters, self.threshold))
        if self.rescale != "none":
            keep = self.keep(tally)
            kept = rescale_kept(kept, gradient, keep, self.rescale, self.max_rescale)
        return kept

    def keep(self, tally: Tally) -> Tensor:
        """Return 1 where enough environments agree and 0 elsewhere."""
        return tally.get(Statistic.VOTES).abs().ge_(quorum(tally.voters, self.threshold))

    def null_keep_rate(self, voters: int) -> float:
        """Return the share of components that random signs would keep."""
        return null_keep_rate(voters, self.threshold)
