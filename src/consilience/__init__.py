"""Consilience: train PyTorch models on what their environments agree about."""

from consilience._version import __version__
from consilience.rules import Rule, Statistic, Tally

__all__ = ["Rule", "Statistic", "Tally", "__version__"]
