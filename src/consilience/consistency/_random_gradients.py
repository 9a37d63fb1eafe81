r"""What the AND-mask leaves of random gradients.

The setting of the paper's second proposition: every environment's gradient of every component is
drawn independently from :math:`N(0, \sigma^2)`, so nothing is shared. How much of the mean
gradient is left after the mask? `threshold` is the mask's :math:`\tau`; the paper's number of
agreeing signs is :math:`t = d (\tau + 1) / 2`, so :math:`t = 0.8 d` is ``threshold=0.6``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from consilience.rules import quorum
from consilience.rules._threshold import check_threshold

__all__ = ["MonteCarlo", "decay_rate", "expected_norm", "norm_bound", "simulate_norm"]


def expected_norm(voters: int, threshold: float, *, size: int = 1, deviation: float = 1.0) -> float:
    r"""Return the exact :math:`E \|m_\tau \odot \nabla L\|^2` of random gradients.

    Given that :math:`u` of the :math:`d` gradients of a component are positive, their absolute
    values are independent half-normal variables, so the mean's square has the expectation
    :math:`\sigma^2 [(1 - 2/\pi)/d + 2 (2u - d)^2 / (\pi d^2)]`, and

    .. math:: E = n \sigma^2 \sum_{u: |2u - d| \ge \tau d} \binom{d}{u} 2^{-d}
              \left[\frac{1 - 2/\pi}{d} + \frac{2 (2u - d)^2}{\pi d^2}\right].

    With ``threshold=0`` nothing is masked, and this is :math:`n \sigma^2 / d`.

    Args:
        voters: The number :math:`d` of environments.
        threshold: The mask's threshold, in [0, 1].
        size: The number :math:`n` of components.
        deviation: The standard deviation :math:`\sigma` of a gradient's component.

    Example:
        >>> round(expected_norm(80, 0.0), 4)
        0.0125
        >>> round(expected_norm(80, 0.2), 4)
        0.0038
    """
    quorum = _quorum(voters, threshold)
    _check_scale(size, deviation)
    least = (voters + quorum + 1) // 2  # the least number of positive signs that is enough
    total, ways, all_ways = 0.0, math.comb(voters, least), 2**voters
    for positive in range(least, voters + 1):
        votes = 2 * positive - voters
        square = (1 - 2 / math.pi) / voters + 2 * votes**2 / (math.pi * voters**2)
        # As many negative signs are as likely, and another case unless it is a tie.
        total += (2 if votes else 1) * (ways / all_ways) * square
        ways = ways * (voters - positive) // (positive + 1)
    return size * deviation**2 * total


def norm_bound(
    voters: int,
    threshold: float,
    *,
    size: int = 1,
    deviation: float = 1.0,
    form: Literal["corrected", "printed"] = "corrected",
) -> float:
    r"""Return the second proposition's bound on :func:`expected_norm`.

    The proof bounds :math:`\sum_{u=t}^{d} \binom{d}{u}` by its largest term times the number of
    terms, which is :math:`d - t + 1`:

    ============= ==========================================================
    ``corrected`` :math:`n \sigma^2 (d - t + 1) \binom{d}{t} 2^{1 - d}`
    ``printed``   :math:`n \sigma^2 (d - t) \binom{d}{t} 2^{1 - d}`; **not a bound**
    ============= ==========================================================

    The printed form counts one term too few. At full agreement, :math:`t = d`, it is 0.

    Example:
        >>> norm_bound(4, 1.0), norm_bound(4, 1.0, form="printed")
        (0.125, 0.0)
        >>> round(expected_norm(4, 1.0), 4)
        0.0909
    """
    if form not in ("corrected", "printed"):
        raise ValueError(
            f"Parameter `form` should be 'corrected' or 'printed'. Found `form = {form!r}`."
        )
    least = (voters + _quorum(voters, threshold) + 1) // 2  # the paper's t, rounded up
    _check_scale(size, deviation)
    terms = voters - least + (1 if form == "corrected" else 0)
    largest: float = math.comb(voters, least) / 2 ** (voters - 1)
    return size * deviation**2 * terms * largest


def decay_rate(threshold: float) -> float:
    r"""Return :math:`c` such that the masked squared norm falls like :math:`c^{-d}`.

    With :math:`r = (\tau + 1) / 2`, the binomial coefficient grows like :math:`q^d`,
    :math:`q = r^{-r} (1 - r)^{-(1 - r)}`, and so :math:`c = 2 / q`: from 1 at ``threshold=0``
    (no exponential decay) to 2 at ``threshold=1``. (The paper's proof prints the rate as
    :math:`2 - q` in place of :math:`2 / q`.)

    Example:
        >>> round(decay_rate(0.6), 2)
        1.21
    """
    share = (check_threshold(threshold) + 1) / 2
    entropy = -share * math.log(share)
    if share < 1:
        entropy -= (1 - share) * math.log(1 - share)
    return 2 / math.exp(entropy)


@dataclass(frozen=True)
class MonteCarlo:
    """A mean over random draws and its standard error.

    Attributes:
        mean: The estimate.
        error: Its standard error.
        draws: How many draws it is made of.
    """

    mean: float
    error: float
    draws: int


def simulate_norm(
    voters: int,
    threshold: float,
    *,
    size: int = 1,
    deviation: float = 1.0,
    draws: int = 100,
    generator: torch.Generator | None = None,
) -> MonteCarlo:
    """Estimate :func:`expected_norm` by drawing gradients and masking them.

    Args:
        voters: The number of environments.
        threshold: The mask's threshold, in [0, 1].
        size: The number of components.
        deviation: The standard deviation of a gradient's component.
        draws: How many times to draw all gradients; 2 or more, for an error.
        generator: Where the numbers come from; by default a new generator with seed 0.

    Example:
        >>> found = simulate_norm(4, 1.0, size=1000)
        >>> abs(found.mean - expected_norm(4, 1.0, size=1000)) < 4 * found.error
        True
    """
    quorum = _quorum(voters, threshold)
    _check_scale(size, deviation)
    if draws < 2:
        raise ValueError(f"Parameter `draws` should be 2 or more. Found `draws = {draws}`.")
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    norms = torch.empty(draws, dtype=torch.float64)
    for draw in range(draws):
        mean, votes = torch.zeros(size, dtype=torch.float64), torch.zeros(size)
        for _ in range(voters):  # one environment at a time: memory for `size` numbers alone
            gradient = torch.randn(size, generator=generator)
            mean += gradient
            votes += gradient.sign()
        norms[draw] = (deviation * mean / voters)[votes.abs() >= quorum].square().sum()
    return MonteCarlo(float(norms.mean()), float(norms.std() / math.sqrt(draws)), draws)


def _check_scale(size: int, deviation: float) -> None:
    if size < 1:
        raise ValueError(f"Parameter `size` should be 1 or more. Found `size = {size}`.")
    if not (deviation >= 0 and math.isfinite(deviation)):
        raise ValueError(
            f"Parameter `deviation` should be 0 or more. Found `deviation = {deviation}`."
        )


def _quorum(voters: int, threshold: float) -> int:
    """Return the least absolute sum of signs that keeps a component, of checked arguments."""
    if voters < 1 or voters != int(voters):
        raise ValueError(
            f"Parameter `voters` should be a whole number, 1 or more. Found `voters = {voters}`."
        )
    return quorum(voters, check_threshold(threshold))
