"""How many voters an exponential average of signs has, and what chance lets through."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from consilience.optim._sign_average import check_beta
from consilience.rules._threshold import check_threshold


def share_of_voters(beta: float) -> float:
    r"""Return the effective number of voters of an exponential average.

    .. math:: \frac{(\sum_k w_k)^2}{\sum_k w_k^2} = \frac{1 + \beta}{1 - \beta},
        \qquad w_k = (1 - \beta)\, \beta^k

    The average of that many equal votes scatters as much as the exponential one. A mask over
    time can tell no more environments apart than this; to hear each of ``d`` environments that
    take turns, take :math:`\beta \ge (d - 1) / (d + 1)`.

    Args:
        beta: The rate of the average, in [0, 1).

    Example:
        >>> round(share_of_voters(0.9))
        19
    """
    beta = check_beta("beta", beta)
    return (1 + beta) / (1 - beta)


@lru_cache(maxsize=1024)
def temporal_null_keep_rate(beta: float, threshold: float) -> float:
    r"""Return the share of components that pass a temporal mask when signs are coin flips.

    .. math:: P(|a| \ge \tau), \qquad a = (1 - \beta) \sum_{k \ge 0} \beta^k s_k,
        \quad s_k = \pm 1 \text{ with probability } 1/2

    once the average has forgotten where it began. It is the level of noise of the mask: one that
    keeps no more than this has found nothing that steps agree on. The law of :math:`a` is a
    Bernoulli convolution, which has no density formula, but its characteristic function
    :math:`\varphi(t) = \prod_k \cos((1 - \beta) \beta^k t)` is known, and :math:`|a| \le 1`, so
    a Fourier series of period 4 is exact:

    .. math:: P(|a| < \tau) = \frac{\tau}{2} + \sum_{n \ge 1}
        \frac{2}{\pi n} \sin\!\Big(\frac{\pi n \tau}{2}\Big)\, \varphi\!\Big(\frac{\pi n}{2}\Big)

    For :math:`\beta \le 1/2`, where the newest sign outweighs all older ones and the law may live
    on a Cantor set, one comparison for each step back decides instead, in exact fractions. The
    error is below 1e-15 there, below 1e-9 for :math:`\beta \ge 0.8`, and below 1e-5 between.

    It supposes that no gradient is zero: a sign of 0 keeps fewer.

    Args:
        beta: The rate of the average of the signs, in [0, 1).
        threshold: The threshold of the mask, in [0, 1].

    Example:
        >>> round(temporal_null_keep_rate(0.9, 0.5), 4)
        0.0264
    """
    beta, threshold = check_beta("beta", beta), check_threshold(threshold)
    if threshold == 0 or beta == 0:
        return 1.0
    if beta <= 0.5:
        return 2 * _upper_tail(beta, threshold)
    n = np.arange(1, _terms(beta) + 1)
    series = np.sin(np.pi / 2 * threshold * n) / n * _characteristic(beta, np.pi / 2 * n)
    below = threshold / 2 + 2 / np.pi * float(series.sum())
    return min(1.0, max(0.0, 1 - below))


def _upper_tail(beta: float, x: float) -> float:
    """Return P(a >= x), -1 < x <= 1, where the newest sign outweighs all older ones together."""
    # The rate may jump within the rounding of a threshold, so take both as they were written.
    rate, reach = Fraction(str(beta)), Fraction(str(x))
    tail, share = 0.0, 1.0
    while share > 1e-17:
        share /= 2
        # What the older signs, which lie in [-1, 1], must reach if the newest is 1, or -1. The
        # two are at least 2 apart, so that at most one of them is open.
        low, high = (reach - 1 + rate) / rate, (reach + 1 - rate) / rate
        if low > 1:
            break
        if low > -1:
            reach = low
        else:
            tail += share
            if high > 1:
                break
            reach = high
    return tail


def _terms(beta: float) -> int:
    """Return how many terms the series needs until they lie below rounding, and 2^16 at most."""
    # With t (1 - beta) <= pi / 2, cos x <= exp(-x^2 / 2) bounds the characteristic function by
    # the normal one; there it ends for beta near 1. Beyond, it falls like t^(-ln 2 / ln(1/beta)).
    normal = 8.6 * math.sqrt((1 + beta) / (1 - beta))
    power = 10.0 ** (14 * math.log2(1 / beta)) / (1 - beta)
    last = normal if normal * (1 - beta) <= math.pi / 2 else max(power, 8 / (1 - beta))
    return min(2**16, math.ceil(last * 2 / math.pi))


def _characteristic(beta: float, t: np.ndarray) -> np.ndarray:
    product = np.ones_like(t)
    weight = 1 - beta
    while weight * t[-1] > 0.05:
        product *= np.cos(weight * t)
        weight *= beta
    # What is left are many small factors: cos x = exp(-x^2/2 - x^4/12 - x^6/45 - ...).
    logarithm = sum(
        (weight * t) ** power / (1 - beta**power) / divisor
        for power, divisor in ((2, 2), (4, 12), (6, 45))
    )
    return product * np.exp(-logarithm)
