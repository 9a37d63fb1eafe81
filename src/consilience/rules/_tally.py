"""What is known of one parameter across environments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

LOG_FLOOR = 1e-10
"""Added to a magnitude before its logarithm is taken, as the authors' code does."""


class Statistic(Enum):
    r"""What a rule may ask to be counted over environments, component by component.

    With :math:`c_e` the share of environment :math:`e` in the gradient (the shares of all
    environments sum to it):

    ========= ==================================
    VOTES     :math:`\sum_e \mathrm{sign}(c_e)`
    TURNOUT   :math:`\sum_e [c_e \ne 0]`
    LOGS      :math:`\sum_e \log(|c_e| + 10^{-10})`
    SQUARES   :math:`\sum_e c_e^2`
    ========= ==================================
    """

    VOTES = "votes"
    TURNOUT = "turnout"
    LOGS = "logs"
    SQUARES = "squares"

    def of(self, shares: Tensor) -> Tensor:
        """Fold shares ``[environments, ...]`` into this statistic ``[...]``."""
        if self is Statistic.VOTES:
            return shares.sign().sum(0)
        if self is Statistic.TURNOUT:
            return (shares != 0).to(shares.dtype).sum(0)
        if self is Statistic.LOGS:
            return shares.abs().add_(LOG_FLOOR).log_().sum(0)
        return shares.square().sum(0)


@dataclass(frozen=True)
class Tally:
    """What is known of one parameter across environments.

    Attributes:
        gradient: The gradient of the user's own loss, that is the sum of all shares
            (of environments, and of rows whose environment is unknown).
        voters: How many environments voted on this parameter.
        votes: Sum over environments of the sign of each one's share. None where not asked for.
        turnout: How many shares are nonzero. None where not asked for.
        logs: Sum of ``log(|share| + 1e-10)``. None where not asked for.
        squares: Sum of squared shares. None where not asked for.
    """

    gradient: Tensor
    voters: int
    votes: Tensor | None = None
    turnout: Tensor | None = None
    logs: Tensor | None = None
    squares: Tensor | None = None

    @classmethod
    def of(cls, gradients: Tensor, statistics: frozenset[Statistic]) -> Tally:
        """Tally gradients stacked as ``[environments, ...]``; their mean is the gradient."""
        if not isinstance(gradients, Tensor) or gradients.is_complex():
            what = gradients.dtype if isinstance(gradients, Tensor) else type(gradients).__name__
            raise TypeError(
                "Parameter `gradients` should be a tensor of real numbers, stacked as "
                f"[environments, ...]. Found {what}."
            )
        if gradients.dim() == 0 or len(gradients) == 0:
            raise ValueError(
                "Parameter `gradients` should be stacked as [environments, ...], with one "
                f"environment or more. Found `gradients.shape = {list(gradients.shape)}`."
            )
        voters = len(gradients)
        # Half precision cannot count past 2048 (or 256), and a share may vanish in it.
        shares = gradients.to(torch.promote_types(gradients.dtype, torch.float32)) / voters
        found = {statistic.value: statistic.of(shares) for statistic in statistics}
        dtype = gradients.dtype if gradients.is_floating_point() else shares.dtype
        return cls(gradient=shares.sum(0).to(dtype), voters=voters, **found)

    def get(self, statistic: Statistic) -> Tensor:
        """Return a statistic, or raise if it was not counted."""
        found: Tensor | None = getattr(self, statistic.value)
        if found is None:
            raise ValueError(
                f"This rule reads `tally.{statistic.value}`, which was not counted. Add "
                f"`Statistic.{statistic.name}` to the rule's `statistics`."
            )
        return found
