"""What can be set in a synthetic experiment, its presets, and which method reads what.

Imports neither torch nor anything that does: the command line's help reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from consilience.lab.errors import LabError, nearest

RULES = (
    "and-mask",
    "geometric-mean",
    "sand-mask",
    "soft-mask",
    "xor-mask",
    "majority-sign",
    "mean",
)
METHODS = ("erm", *RULES, "irm", "dann")

_READ_BY: Mapping[str, tuple[str, ...]] = {
    "hidden_layers": ("erm", *RULES, "irm"),
    "threshold": ("and-mask", "geometric-mean", "sand-mask", "soft-mask", "xor-mask"),
    "rescale": ("and-mask", "geometric-mean"),
    "max_rescale": ("and-mask", "geometric-mean"),
    "penalty_weight": ("irm",),
    "annealing_steps": ("irm",),
    "domain_weight": ("dann",),
}
"""Settings that only some methods read; the others are read by all."""


@dataclass(frozen=True)
class Settings:
    """One configuration of the synthetic experiment, without method and seed.

    Attributes:
        environments: How many environments train (D).
        shortcut_dimensions: Length of each environment's signature (d_S).
        rows_per_environment: Training rows of each environment.
        revolutions: Revolutions of the spirals.
        shortcut_scale: Standard deviation of the signatures.
        spiral_scale: What spirals are divided by; 0 for each environment's own deviation.
        test_rows: Rows of test data.
        hidden_units: Width of the network (of each of its three parts, for DANN).
        hidden_layers: Hidden layers of the network (DANN's three parts have one each).
        outputs: Outputs of the network: 2, or 1, a single logit.
        initial_bias: What the network's biases start at.
        batch_norm: Normalise each hidden layer over the batch.
        dropout: Share of hidden units dropped in training.
        epochs: Epochs of training; 0 for 3000 / environments, rounded down.
        environments_per_batch: Environments in a batch; 0 for all of them.
        batch_size: Rows of each environment in a batch.
        optimizer: Adam, or SGD with momentum 0.9.
        learning_rate: Learning rate at the start.
        drops: Parts of training after which the learning rate is divided by 10.
        l1: Coefficient of L1 regularisation.
        l2: Coefficient of L2 regularisation.
        decay: Where L1 and L2 act: after the mask, before it, or beside the optimizer.
        threshold: Agreement threshold in [0, 1] (rules).
        rescale: Make up for what the mask took from a layer: by count (the paper's: size over
            kept), by norm, or not (rules).
        max_rescale: Largest factor of rescaling; 0 for no limit (rules).
        penalty_weight: Weight of the penalty after annealing (IRM).
        annealing_steps: Steps for which the penalty's weight is 1 (IRM).
        domain_weight: Weight of the reversed domain gradient (DANN).
        stop_memorizing: Stop once train accuracy exceeds 97% while test is below 60%.
    """

    environments: int = 32
    shortcut_dimensions: int = 32
    rows_per_environment: int = 1280
    revolutions: float = 2.0
    shortcut_scale: float = 1.0
    spiral_scale: float = 0.4255
    test_rows: int = 2000
    hidden_units: int = 256
    hidden_layers: int = 3
    outputs: Literal[1, 2] = 2
    initial_bias: float = 0.01
    batch_norm: bool = False
    dropout: float = 0.0
    epochs: int = 0
    environments_per_batch: int = 0
    batch_size: int = 128
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-2
    drops: tuple[float, ...] = (0.5, 0.75)
    l1: float = 0.0
    l2: float = 1e-4
    decay: Literal["after-mask", "before-mask", "decoupled"] = "after-mask"
    threshold: float = 1.0
    rescale: Literal["none", "count", "norm"] = "count"
    max_rescale: float = 0.0
    penalty_weight: float = 100.0
    annealing_steps: int = 4
    domain_weight: float = 1.0
    stop_memorizing: bool = False

    def resolve(self) -> Settings:
        """Return the settings with 0 replaced by what it stands for, once they are checked."""
        for name, least in _AT_LEAST.items():
            if not least <= getattr(self, name) < math.inf:  # NaN is refused, too
                raise LabError(
                    f"`--{name.replace('_', '-')}` should be {least} or more. "
                    f"Found {getattr(self, name)}."
                )
        if not math.isfinite(self.initial_bias):
            raise LabError(f"`--initial-bias` should be a number. Found {self.initial_bias}.")
        if not 0 <= self.threshold <= 1:
            raise LabError(f"`--threshold` should lie in [0, 1]. Found {self.threshold}.")
        if not 0 <= self.dropout < 1:
            raise LabError(f"`--dropout` should lie in [0, 1). Found {self.dropout}.")
        if self.learning_rate == 0:
            raise LabError("`--learning-rate` should be above 0: at 0 nothing is learned.")
        if any(not 0 < drop < 1 for drop in self.drops):
            raise LabError(f"`--drops` should lie between 0 and 1. Found {self.drops}.")
        if self.max_rescale and self.rescale == "none":
            raise LabError(
                "`--max-rescale` limits a rescaling, and `--rescale none` leaves none to limit. "
                "Leave one of them out."
            )
        if 0 < self.max_rescale < 1:
            raise LabError(
                f"`--max-rescale` should be 1 or more, or 0 for no limit. Found {self.max_rescale}."
            )
        per_batch = self.environments_per_batch or self.environments
        if per_batch > self.environments:
            raise LabError(
                f"`--environments-per-batch {per_batch}` is more than there are: "
                f"`--environments {self.environments}`."
            )
        if self.rows_per_environment < self.batch_size:
            raise LabError(
                f"Too few rows for the batch asked for: `--batch-size {self.batch_size}` rows of "
                f"each environment, which has `--rows-per-environment {self.rows_per_environment}`."
                " Lower the first or raise the second."
            )
        epochs = self.epochs or 3000 // self.environments
        if epochs < 1:
            raise LabError(
                f"3000 / {self.environments} environments leaves no epoch. Say how many with "
                "`--epochs`."
            )
        return replace(self, epochs=epochs, environments_per_batch=per_batch)

    def read_by(self, method: str) -> dict[str, Any]:
        """Return the settings that a method reads, by name; JSON can hold them."""
        found = {k: v for k, v in asdict(self).items() if method in _READ_BY.get(k, METHODS)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


_AT_LEAST: Mapping[str, float] = {
    "environments": 1,
    "shortcut_dimensions": 0,
    "rows_per_environment": 1,
    "revolutions": 0,
    "shortcut_scale": 0,
    "spiral_scale": 0,
    "test_rows": 1,
    "hidden_units": 1,
    "hidden_layers": 0,
    "epochs": 0,
    "environments_per_batch": 0,
    "batch_size": 1,
    "learning_rate": 0,
    "l1": 0,
    "l2": 0,
    "max_rescale": 0,
    "penalty_weight": 0,
    "annealing_steps": 0,
    "domain_weight": 0,
}

PRESETS: Mapping[str, Settings] = {
    "paper": Settings(),
    "authors-code": Settings(
        environments=16,
        shortcut_dimensions=16,
        rows_per_environment=1024,
        revolutions=3.0,
        spiral_scale=0.0,
        outputs=1,
        epochs=150,
        batch_size=256,
        drops=(0.75,),
        l2=1e-3,
    ),
}


def preset(name: str) -> Settings:
    """Return a preset, or raise with the nearest name."""
    if name not in PRESETS:
        raise LabError(
            f"There is no preset `{name}`.{nearest(name, PRESETS)} Presets: {', '.join(PRESETS)}."
        )
    return PRESETS[name]


def check_methods(methods: tuple[str, ...], settings: Settings, base: Settings) -> None:
    """Raise for an unknown method, and for a changed setting that no method asked for reads."""
    if not methods:
        raise LabError(f"`--method` should name one or more. Methods: {', '.join(METHODS)}.")
    for method in methods:
        if method not in METHODS:
            raise LabError(
                f"There is no method `{method}`.{nearest(method, METHODS)} "
                f"Methods: {', '.join(METHODS)}."
            )
    for name in changes(settings, base):
        readers = _READ_BY.get(name, METHODS)
        if not set(readers) & set(methods):
            raise LabError(
                f"`--{name.replace('_', '-')}` does nothing for {' and '.join(methods)}: only "
                f"{', '.join(readers)} reads it. Leave it out."
            )


def changes(settings: Settings, base: Settings) -> dict[str, Any]:
    """Return the settings that differ from a base, by name."""
    return {
        field.name: getattr(settings, field.name)
        for field in fields(Settings)
        if getattr(settings, field.name) != getattr(base, field.name)
    }


def label(method: str, preset_name: str, settings: Settings) -> str:
    """Return what runs that differ in nothing but the seed are called.

    Example:
        >>> label("and-mask", "paper", Settings(l2=0.0, epochs=5))
        'and-mask epochs=5 l2=0'
    """
    base = preset(preset_name)
    words = [method] if preset_name == "paper" else [method, preset_name]
    for name, value in changes(settings, base).items():
        if method in _READ_BY.get(name, METHODS):
            words.append(f"{name.replace('_', '-')}={brief(value)}")
    return " ".join(words)


def flags(changed: Mapping[str, Any]) -> str:
    """Return settings as one types them.

    Example:
        >>> flags({"batch_norm": True, "l2": 0.001, "drops": (0.5,)})
        '--batch-norm --l2 0.001 --drops 0.5'
    """
    words = []
    for name, value in changed.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            parts = value if isinstance(value, tuple) else (value,)
            words.append(" ".join([f"--{flag}", *(brief(part) for part in parts)]))
    return " ".join(words)


def brief(value: Any) -> str:
    """Return a value of a setting as it reads in names and tables."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return ",".join(brief(v) for v in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
