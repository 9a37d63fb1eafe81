"""What a rule is: a function from a tally to the gradient that the optimizer sees."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from consilience.rules._tally import Statistic, Tally


class Rule(ABC):
    """A function from a tally to the gradient that the optimizer sees.

    A subclass declares in :attr:`statistics` what it reads beside the gradient (nothing else
    is counted), and implements :meth:`__call__`. A rule holds settings, never state.
    """

    statistics: ClassVar[frozenset[Statistic]] = frozenset({Statistic.VOTES})

    def __init_subclass__(cls, **options: object) -> None:
        """Check what a subclass declares."""
        super().__init_subclass__(**options)
        if not all(isinstance(statistic, Statistic) for statistic in cls.statistics):
            raise TypeError(
                f"`{cls.__name__}.statistics` should hold statistics, as `Statistic.VOTES`. Found "
                f"`{cls.statistics!r}`."
            )

    @abstractmethod
    def __call__(self, tally: Tally) -> Tensor:
        """Return the gradient that the optimizer should see, of the shape of a parameter."""

    def keep(self, tally: Tally) -> Tensor | None:
        """Return the weight in [0, 1] that each component keeps; None where all is kept.

        Reports read this, and steps that hold masked weights back.
        """
        del tally
        return None

    def null_keep_rate(self, voters: int) -> float | None:
        """Return the share of components that random signs would keep; None if not defined."""
        del voters
        return None

    def combine(self, gradients: Tensor) -> Tensor:
        """Apply the rule to gradients that are stacked already, as ``[environments, ...]``.

        Each ``gradients[e]`` is the gradient of environment ``e``'s own loss, and the loss is
        the mean over environments.
        """
        return self(Tally.of(gradients, self.statistics))

    def __repr__(self) -> str:
        """Read as the constructor call, without the settings that stand at their default."""
        settings = [
            f"{parameter.name}={getattr(self, parameter.name)!r}"
            for parameter in inspect.signature(type(self)).parameters.values()
            if getattr(self, parameter.name, parameter.default) != parameter.default
        ]
        return f"{type(self).__name__}({', '.join(settings)})"
