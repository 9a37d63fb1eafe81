"""The sign of the majority."""

from __future__ import annotations

from torch import Tensor

from consilience.rules._rule import Rule
from consilience.rules._tally import Statistic, Tally
from consilience.rules._threshold import chance_of_at_least, check_voters


class MajoritySign(Rule):
    r"""The sign of the majority of the environments' signs, and 0 where they balance.

    .. math:: \mathrm{sign} \Big( \sum_{e=1}^{d} \mathrm{sign}\, [\nabla L_e]_j \Big)

    From *signSGD: Compressed Optimisation for Non-Convex Problems* (Bernstein, Wang,
    Azizzadenesheli and Anandkumar, ICML 2018): signSGD with majority vote. Every
    environment has one vote, however steep it is.

    Warning:
        All components come out at -1, 0 or 1, so the learning rate is the length of every
        step in every direction. Choose it far smaller than for other rules, and let it decay.
        There is no scale that could be taken off a sign: with a `GradScaler`, unscale before
        the rule is applied.

    Example:
        >>> import torch
        >>> gradients = torch.tensor([[1.0, 2.0, -3.0], [3.0, -4.0, -1.0], [-9.0, 0.0, 0.5]])
        >>> MajoritySign().combine(gradients)
        tensor([ 1.,  0., -1.])
    """

    def __call__(self, tally: Tally) -> Tensor:
        """Return the sign of the votes."""
        # 0 times what is not finite is NaN: it stays in sight.
        signs = tally.get(Statistic.VOTES).sign().add_(tally.gradient, alpha=0)
        return signs.to(tally.gradient.dtype)

    def keep(self, tally: Tally) -> Tensor:
        """Return 1 where there is a majority and 0 elsewhere."""
        return tally.get(Statistic.VOTES).abs().ge_(1)

    def null_keep_rate(self, voters: int) -> float:
        """Return the share of components where random signs have a majority."""
        check_voters(voters)
        return chance_of_at_least(1, voters) if voters else 0.0
