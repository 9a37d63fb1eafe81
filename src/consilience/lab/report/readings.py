"""What a folder of runs says: every run as found, grouped by what differs in the seed alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from consilience.lab.errors import LabError
from consilience.lab.runs import CHECKPOINT, CONFIG, DONE, Run, existing, open_run

Status = Literal["finished", "unfinished", "failed", "damaged"]

CHANCE = {"synthetic": 0.5}
"""Accuracy of guessing, by experiment."""


@dataclass(frozen=True)
class Reading:
    """A run directory as found.

    Attributes:
        path: The directory.
        run: The opened run; None where its configuration cannot be read.
        metrics: One entry per epoch; empty before the first, or where they cannot be read.
        status: `finished`; `unfinished` (no done mark); `failed` (the loss is not finite);
            `damaged` (a file cannot be read).
        why: A sentence about the status; empty for an ordinary finished run.
    """

    path: Path
    run: Run | None
    metrics: list[dict[str, Any]]
    status: Status
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether tables and figures may count this run: it went as far as it was to go."""
        return self.status in ("finished", "failed")

    def last(self, key: str) -> float | None:
        """Return a metric of the last epoch; None where there is none."""
        value = self.metrics[-1].get(key) if self.metrics else None
        return None if value is None else float(value)


@dataclass(frozen=True)
class Spread:
    """Mean and spread of a number over seeds.

    Attributes:
        mean: The mean.
        deviation: The sample standard deviation (n - 1); None for one seed.
        low: The least.
        high: The largest.
        count: Over how many seeds.
    """

    mean: float
    deviation: float | None
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Spread of the values that are there; None where there is none."""
        found = np.array([v for v in values if v is not None], dtype=float)
        if found.size == 0:
            return None
        deviation = float(found.std(ddof=1)) if found.size > 1 else None
        return cls(
            float(found.mean()), deviation, float(found.min()), float(found.max()), found.size
        )


@dataclass(frozen=True)
class Curves:
    """A metric over epochs, for each seed and over seeds.

    Attributes:
        epochs: Epochs, from 1 ``[epochs]``.
        each: The metric of each seed ``[seeds, epochs]``, NaN where a run has no such epoch.
    """

    epochs: np.ndarray
    each: np.ndarray

    def over_seeds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean, least and largest over the seeds that have the epoch, NaN where none has."""
        there = ~np.isnan(self.each)
        count = there.sum(0)
        some = count > 0
        total = np.where(there, self.each, 0.0).sum(0)
        mean = np.divide(total, count, out=np.full(len(count), np.nan), where=some)
        low = np.where(some, np.where(there, self.each, np.inf).min(0, initial=np.inf), np.nan)
        high = np.where(some, np.where(there, self.each, -np.inf).max(0, initial=-np.inf), np.nan)
        return mean, low, high


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed.

    Attributes:
        experiment: What was run.
        label: What the runs share.
        readings: The runs, in the order of their seeds.
    """

    experiment: str
    label: str
    readings: list[Reading]

    @property
    def counted(self) -> list[Reading]:
        """The runs that tables and figures count."""
        return [reading for reading in self.readings if reading.counts]

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing, where it is known."""
        return CHANCE.get(self.experiment)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of these runs, without the seed."""
        run = self.readings[0].run
        found = {} if run is None else flat(run.settings)
        return {key: value for key, value in found.items() if key != "seed"}

    def spread(self, key: str) -> Spread | None:
        """Return mean and spread of a metric at the last epoch, over the counted runs."""
        return Spread.of(reading.last(key) for reading in self.counted)

    def curves(self, key: str) -> Curves:
        """Return a metric over epochs, of every run that has a first epoch."""
        runs = [reading.metrics for reading in self.readings if reading.metrics]
        epochs = max(map(len, runs), default=0)
        each = np.full((len(runs), epochs), np.nan)
        for row, metrics in zip(each, runs, strict=True):
            values = (entry.get(key) for entry in metrics)
            row[: len(metrics)] = [math.nan if value is None else value for value in values]
        return Curves(np.arange(1, epochs + 1), each)

    def median(self) -> Reading | None:
        """Return the counted run whose test accuracy is the median (the lower of two)."""
        ranked = sorted(self.counted, key=_test_accuracy)
        return ranked[(len(ranked) - 1) // 2] if ranked else None


def read(runs: Path) -> list[Reading]:
    """Read every run below a folder, the damaged ones too.

    Args:
        runs: Where `consilience run --runs` put them, the folder of one experiment, or one run.

    Raises:
        LabError: Where there is no such folder, or no run in it.
    """
    runs = existing(runs)
    found = {path.parent for depth in ("", "*/", "*/*/") for path in runs.glob(depth + CONFIG)}
    # A run directory that lost its configuration is still one that somebody misses.
    found |= {path.parent for path in runs.glob("*/*/" + DONE)}
    if not found:
        raise LabError(
            f"There is no run below `{runs}`. Make some with "
            f"`consilience run synthetic --runs {runs}`."
        )
    readings = [_read(path) for path in found]
    return sorted(readings, key=_place)


def groups(readings: Sequence[Reading]) -> list[Group]:
    """Group runs by experiment and label, in the order of the readings."""
    found: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        if reading.run is not None:
            found.setdefault((reading.run.experiment, reading.run.label), []).append(reading)
    return [Group(*key, members) for key, members in found.items()]


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: `{"data": {"seed": 1}}` to `{"data.seed": 1}`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _read(path: Path) -> Reading:
    run: Run | None = None
    metrics: list[dict[str, Any]] = []
    try:
        run = open_run(path)
        metrics = run.metrics()
        summary = run.summary()
    except LabError as error:
        return Reading(path, run, metrics, "damaged", str(error))
    if summary is None:
        return Reading(path, run, metrics, "unfinished", _progress(run, metrics))
    status, why = _ending(run, metrics, summary)
    return Reading(path, run, metrics, status, why)


def _ending(run: Run, metrics: list[dict[str, Any]], summary: dict[str, Any]) -> tuple[Status, str]:
    if not metrics:
        return "damaged", "It is marked done and has no metrics."
    if not (run.path / CHECKPOINT).is_file():
        return "damaged", "It is marked done and its checkpoint is gone."
    lost = [entry["epoch"] for entry in metrics if entry["train_loss"] is None]
    if lost and lost[-1] == metrics[-1]["epoch"]:
        return "failed", f"Its loss is not finite: from epoch {lost[0]}."
    stopped = summary.get("stopped")
    return "finished", f"Stopped early: {stopped}." if stopped else ""


def _progress(run: Run, metrics: list[dict[str, Any]]) -> str:
    epochs = flat(run.settings).get("epochs")
    whole = f" of {epochs}" if isinstance(epochs, int) else ""
    return (
        f"{len(metrics)}{whole} epochs: it is running or was interrupted. The same command goes on."
    )


def _place(reading: Reading) -> tuple[str, str, int, str]:
    if reading.run is None:
        return "\x7f", "", 0, str(reading.path)
    return reading.run.experiment, reading.run.label, reading.run.seed, reading.path.name


def _test_accuracy(reading: Reading) -> tuple[float, int]:
    value = reading.last("test_accuracy")
    seed = reading.run.seed if reading.run is not None else 0
    return (-1.0 if value is None else value), seed
