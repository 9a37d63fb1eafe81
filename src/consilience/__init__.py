"""Consilience: train PyTorch models on what their environments agree about."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from consilience._version import __version__

if TYPE_CHECKING:
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

# Names are imported when they are first used: the command line's help must not wait for torch.
# What is not listed here is in `consilience.rules`.
_ELSEWHERE = {
    "Agreement": "consilience.agreement",
    "environment_mean": "consilience.observation.environments",
}
_MODULES = ("agreement", "consistency", "data", "models", "observation", "optim", "rules")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"consilience.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'consilience' has no attribute {name!r}")
    found = getattr(import_module(_ELSEWHERE.get(name, "consilience.rules")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
