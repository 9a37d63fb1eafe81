"""Rules: pure functions from a tally to the gradient that the optimizer sees."""

from consilience.rules._rule import Rule
from consilience.rules._tally import Statistic, Tally

__all__ = ["Rule", "Statistic", "Tally"]
