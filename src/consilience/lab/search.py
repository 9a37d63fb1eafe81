"""Settings drawn at random from the ranges of the paper's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from consilience.lab.errors import LabError, nearest
from consilience.lab.settings import Settings

_NETWORK: Mapping[str, Sequence[Any]] = {
    "hidden_units": (256, 512),
    "hidden_layers": (3, 5),
    "batch_size": (64, 128, 256),
    "optimizer": ("adam", "sgd"),
    "batch_norm": (False, True),
}
_REGULARIZED: Mapping[str, Sequence[Any]] = {
    **_NETWORK,
    "learning_rate": (1e-3, 1e-2, 1e-1),
    "dropout": (0.0, 0.5),
}
_L1, _L2 = (1e-6, 1e-5, 1e-4), (1e-5, 1e-4, 1e-3)

RANGES: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "erm": _REGULARIZED,
    "and-mask": {**_REGULARIZED, "rescale": ("none", "count")},
    "geometric-mean": {**_REGULARIZED, "rescale": ("none", "count")},
    "irm": {
        **_NETWORK,
        "learning_rate": (1e-3, 1e-2, 1e-1, 1.0),
        "penalty_weight": (10.0, 100.0, 1000.0),
        "annealing_steps": (0, 1, 2, 4, 8),
    },
    "dann": {
        **{k: v for k, v in _REGULARIZED.items() if k != "hidden_layers"},
        "domain_weight": (0.1, 1.0, 10.0),
    },
}
"""What is drawn for each method: the paper's tables. DANN's table gives its networks two layers
and no weight for the domain loss; the three weights are ours."""


def trials(
    method: str, base: Settings, count: int, seed: int, *, epochs: int = 0
) -> list[Settings]:
    """Return `count` settings for a method, drawn independently from the paper's ranges.

    At most one of L1 and L2 is used. Every trial stops once it has memorized, as in the paper.

    Example:
        >>> [s.penalty_weight for s in trials("irm", Settings(), 3, seed=0)]
        [10.0, 10.0, 10.0]
    """
    if method not in RANGES:
        raise LabError(
            f"There are no ranges to search for `{method}`.{nearest(method, RANGES)} "
            f"Methods: {', '.join(RANGES)}."
        )
    for flag, value, least in (("--trials", count, 1), ("--seed", seed, 0)):
        if value < least:
            raise LabError(f"`{flag}` should be {least} or more. Found {value}.")
    found = []
    for trial in range(count):
        draw = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(trial,)))
        chosen = {
            name: options[int(draw.integers(len(options)))]
            for name, options in RANGES[method].items()
        }
        penalty = ("none", "l1", "l2")[draw.integers(3)]
        l1, l2 = _L1[draw.integers(3)], _L2[draw.integers(3)]
        if method == "irm":
            penalty = "none"  # its table has neither
        found.append(
            replace(
                base,
                **chosen,
                l1=l1 if penalty == "l1" else 0.0,
                l2=l2 if penalty == "l2" else 0.0,
                epochs=epochs or base.epochs,
                stop_memorizing=True,
            )
        )
    return found
