"""Consilience: train PyTorch models on what their environments agree about."""

from consilience._version import __version__
from consilience.agreement import Agreement
from consilience.observation.environments import environment_mean
from consilience.rules import Rule, Statistic, Tally

__all__ = ["Agreement", "Rule", "Statistic", "Tally", "__version__", "environment_mean"]
