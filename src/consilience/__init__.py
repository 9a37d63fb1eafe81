"""Consilience: train PyTorch models on what their environments agree about."""

from consilience._version import __version__
from consilience.agreement import Agreement
from consilience.observation.environments import environment_mean
from consilience.rules import (
    AndMask,
    GeometricMean,
    MajoritySign,
    Mean,
    Rule,
    SandMask,
    SoftMask,
    Statistic,
    Tally,
    XorMask,
    null_keep_rate,
    quorum,
)

__all__ = [
    "Agreement",
    "AndMask",
    "GeometricMean",
    "MajoritySign",
    "Mean",
    "Rule",
    "SandMask",
    "SoftMask",
    "Statistic",
    "Tally",
    "XorMask",
    "__version__",
    "environment_mean",
    "null_keep_rate",
    "quorum",
]
