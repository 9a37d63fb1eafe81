"""Invariant learning consistency: the expected score of what an algorithm finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from consilience.consistency._extra import scipy
from consilience.consistency._landscape import Parameters
from consilience.consistency._progress import Progress
from consilience.consistency._result import Inconsistency
from consilience.consistency._score import check_options, inconsistency

__all__ = ["ILC", "Difference", "ilc"]

Start = TypeVar("Start")


@dataclass(frozen=True)
class Difference:
    """How much more consistent one algorithm is than another.

    Attributes:
        mean: The mean difference of ILC.
        interval: A confidence interval of it.
        paired: Whether both ran from the same initialisations, so that differences were taken
            run by run.
    """

    mean: float
    interval: tuple[float, float]
    paired: bool


class ILC(float):
    """The invariant learning consistency: minus the mean score; see :func:`ilc`.

    Attributes:
        interval: A confidence interval (Student's t) over initialisations.
        confidence: Its level.
        scores: The score of each run.
        seeds: The seed of each run's initialisation.
    """

    interval: tuple[float, float]
    confidence: float
    scores: list[Inconsistency]
    seeds: list[int]

    def __new__(cls, value: float, /, **facts: Any) -> Self:
        """Make a number with attributes."""
        self = super().__new__(cls, value)
        self.__dict__.update(facts)
        return self

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"ILC({float(self):.6g}, interval=({low:.6g}, {high:.6g}), "
            f"confidence={self.confidence:g}, n={len(self.scores)})"
        )

    def __str__(self) -> str:
        return float.__repr__(self)

    def minus(self, other: ILC) -> Difference:
        """Return how much more consistent this algorithm is than another one.

        Run by run if both started from the same seeds (as :func:`ilc` does by default), which
        takes out what the initialisation does; as two samples (Welch) otherwise.
        """
        level = min(self.confidence, other.confidence)
        if self.seeds == other.seeds:
            pairs = zip(self.scores, other.scores, strict=True)
            gains = [float(theirs) - float(ours) for ours, theirs in pairs]
            mean, interval = _interval(gains, level)
            return Difference(mean, interval, paired=True)
        mean = float(self) - float(other)
        if not math.isfinite(mean):
            return Difference(mean, (math.nan, math.nan), paired=False)
        parts = [_spread(run.scores) ** 2 / len(run.scores) for run in (self, other)]
        freedom = (
            sum(parts) ** 2
            / sum(
                part**2 / (len(run.scores) - 1)
                for part, run in zip(parts, (self, other), strict=True)
            )
            if sum(parts) > 0
            else 1.0
        )
        half = _quantile(level, freedom) * math.sqrt(sum(parts))
        return Difference(mean, (mean - half, mean + half), paired=False)


def ilc(
    train: Callable[[Start], Parameters],
    initial: Callable[[torch.Generator], Start],
    epsilon: float,
    n: int,
    *,
    losses: Sequence[Callable[[Any], Tensor]],
    seed: int = 0,
    confidence: float = 0.95,
    progress: bool = False,
    **options: Any,
) -> ILC:
    r"""Return an algorithm's invariant learning consistency, estimated over initialisations.

    .. math:: \mathrm{ILC} = - E_{\theta^0} \left[ I^\epsilon(A_\infty(\theta^0)) \right]

    Args:
        train: The algorithm: from an initialisation to the minimum that it converges to, on
            the data of all environments.
        initial: Draws an initialisation, using the generator that it is given and nothing else.
        epsilon: The score's epsilon.
        n: How many initialisations; 2 or more, for an interval.
        losses: One function per environment, as in :func:`inconsistency`.
        seed: Run ``i`` draws from a generator with the seed ``seed + i``: two algorithms with the
            same seed start from the same points, and :meth:`ILC.minus` compares them run by run.
        confidence: The level of the interval.
        progress: Whether to write progress to standard error.
        **options: For :func:`inconsistency`: `method` and what it takes.

    Returns:
        An :class:`ILC`: a float with `interval`, `scores` and `minus`. One infinite score makes
        the mean infinite, and the interval says nothing then; look at `scores`.

    Example:
        Two environments that both ask for a product of 1; the second one is scaled. How curved
        the losses are depends on where descent ends, and that on where it starts:

        >>> import torch
        >>> losses = [lambda w: (w.prod() - 1) ** 2, lambda w: 4 * (w.prod() - 1) ** 2]
        >>> def train(w):
        ...     w = w.clone().requires_grad_()
        ...     for _ in range(200):
        ...         mean = sum(loss(w) for loss in losses) / 2
        ...         w = (w - 0.05 * torch.autograd.grad(mean, w)[0]).detach().requires_grad_()
        ...     return w.detach()
        >>> def initial(generator):
        ...     return 0.5 + torch.rand(2, generator=generator)
        >>> found = ilc(train, initial, 0.1, 3, losses=losses, damping=0.1)
        >>> found.interval[0] <= found <= found.interval[1]
        True
    """
    if n < 2 or n != int(n):
        raise ValueError(
            f"Parameter `n` should be a whole number, 2 or more, for an interval. Found `n = {n}`."
        )
    if not 0 < confidence < 1:
        raise ValueError(
            f"Parameter `confidence` should lie between 0 and 1. Found `confidence = {confidence}`."
        )
    # Before the work, not after it.
    scipy("stats")
    own = ("method", "against", "tolerance", "pairs")
    check_options(
        epsilon,
        options.get("method", "quadratic"),
        options.get("against", "minimum"),
        options.get("tolerance", 0.0),
        {name: value for name, value in options.items() if name not in own},
    )
    line = Progress("runs", n, shown=progress)
    scores = []
    for run in range(n):
        solution = train(initial(torch.Generator().manual_seed(seed + run)))
        scores.append(inconsistency(losses, solution, epsilon=epsilon, **options))
        line.step(f"score {float(scores[-1]):.4g}")
    mean, (low, high) = _interval([-float(score) for score in scores], confidence)
    return ILC(
        mean,
        interval=(low, high),
        confidence=confidence,
        scores=scores,
        seeds=list(range(seed, seed + n)),
    )


def _spread(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _quantile(confidence: float, freedom: float) -> float:
    return float(scipy("stats").t.ppf((1 + confidence) / 2, freedom))


def _interval(values: Sequence[float], confidence: float) -> tuple[float, tuple[float, float]]:
    """Return the mean and Student's interval; not a number where a value is infinite."""
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        return mean, (math.nan, math.nan)
    half = _quantile(confidence, len(values) - 1) * _spread(values) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)
