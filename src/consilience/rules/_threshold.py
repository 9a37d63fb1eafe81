"""Thresholds: what they ask of the voters, and what chance passes them."""

from __future__ import annotations

import math
from functools import lru_cache
from numbers import Integral, Real

_SLACK = 1e-6

_EXACT_UP_TO = 4096
"""Voters up to which binomials are summed as integers; beyond, logarithms are near enough."""


def quorum(voters: int, threshold: float) -> int:
    r"""Return the least :math:`|\mathrm{votes}|` that keeps a component.

    .. math:: \lceil \tau d - 10^{-6} \rceil

    with :math:`\tau` the threshold and :math:`d` the voters. Votes are whole numbers, so the
    paper's test :math:`|\mathrm{votes}| \ge \tau d` is a comparison of integers. The small slack
    lets a threshold mean the fraction that was written: in floating point ``0.07 * 100`` lies
    above 7, and ``mean(sign) >= 1`` is wrong for some numbers of voters.

    Args:
        voters: The number of environments that voted.
        threshold: The threshold of a rule, in [0, 1].

    Example:
        >>> quorum(voters=10, threshold=0.8)
        8
        >>> quorum(voters=3, threshold=0.5)
        2
    """
    check_voters(voters)
    return math.ceil(votes_asked(voters, check_threshold(threshold)))


def votes_asked(voters: int, threshold: float) -> float:
    """Return threshold times voters, as the whole number that it misses by rounding alone."""
    asked = threshold * voters
    nearest = round(asked)
    return nearest if abs(asked - nearest) <= _SLACK else asked


def null_keep_rate(voters: int, threshold: float) -> float:
    r"""Return the share of components that pass a threshold when signs are coin flips.

    .. math:: P(|S| \ge q), \quad S = \sum_{e=1}^{d} s_e, \quad s_e = \pm 1
        \text{ with probability } 1/2

    with :math:`q` the :func:`quorum` of :math:`d` voters. It is the level of noise of a mask: a
    mask that keeps no more than this has found nothing that the environments agree on. Exact
    up to 4096 voters, to about eight digits beyond.

    It supposes that no gradient is zero. Where gradients are zero (a dead ReLU, a word that a
    batch does not contain) chance keeps fewer.

    Args:
        voters: The number of environments that voted.
        threshold: The threshold of a rule, in [0, 1].

    Example:
        Three environments allow two outcomes only, all agree or two against one, so every
        threshold above 1/3 is the same one, and keeps a quarter of pure noise:

        >>> null_keep_rate(voters=3, threshold=0.4), null_keep_rate(voters=3, threshold=1.0)
        (0.25, 0.25)
        >>> null_keep_rate(voters=16, threshold=1.0)
        3.0517578125e-05
    """
    return chance_of_at_least(quorum(voters, threshold), voters)


@lru_cache(maxsize=1024)
def chance_of_at_least(least: int, voters: int) -> float:
    """Return the chance that the votes of ``voters`` fair coins are ``least`` or more in size."""
    if least <= 0:
        return 1.0
    # Votes of 2u - d come from u positive signs. Both tails are alike.
    first = (voters + least + 1) // 2
    if voters <= _EXACT_UP_TO:
        ways = total = math.comb(voters, first)
        for positive in range(first, voters):
            ways = ways * (voters - positive) // (positive + 1)
            total += ways
        return 2 * total / (1 << voters)
    term = total_ratio = 1.0
    for positive in range(first, voters):
        term *= (voters - positive) / (positive + 1)
        total_ratio += term
        if term < total_ratio * 1e-17:
            break
    return min(1.0, 2 * _chance_of(first, voters) * total_ratio)


def mean_beyond(least: int, voters: int) -> float:
    """Return the mean size of the votes of fair coins, counted as 0 where it is below ``least``."""
    # (2u - d) C(d, u), summed from u = k to d, telescopes to k C(d, k).
    first = (voters + least + 1) // 2
    return 2 * first * _chance_of(first, voters)


def _chance_of(positive: int, voters: int) -> float:
    """Return the chance of a number of positive signs among fair coins."""
    if voters <= _EXACT_UP_TO:
        return math.comb(voters, positive) / (1 << voters)
    return math.exp(
        math.lgamma(voters + 1)
        - math.lgamma(positive + 1)
        - math.lgamma(voters - positive + 1)
        - voters * math.log(2)
    )


def check_threshold(threshold: float) -> float:
    """Return the threshold as a float, or raise if it does not lie in [0, 1]."""
    if not isinstance(threshold, Real) or isinstance(threshold, bool):
        raise TypeError(
            "Parameter `threshold` should be a number in [0, 1]. "
            f"Found `threshold = {threshold!r}`."
        )
    if not 0 <= threshold <= 1:  # also refuses NaN
        raise ValueError(
            f"Parameter `threshold` should lie in [0, 1]. Found `threshold = {threshold!r}`."
        )
    value: float = float(threshold)
    return value


def check_voters(voters: int) -> None:
    """Raise if a number of voters is negative or no integer."""
    if not isinstance(voters, Integral) or voters < 0:
        raise ValueError(
            f"Parameter `voters` should be an integer, 0 or more. Found `voters = {voters!r}`."
        )
