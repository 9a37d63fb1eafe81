"""Agreement over time on the synthetic dataset: one environment a step, masks against Adam.

    python -m consilience.paper.temporal --seeds 5

makes the runs that are missing and prints the table; `consilience figure temporal` draws them.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from consilience.data import Rows, SyntheticMemorization
from consilience.lab import jobs
from consilience.lab import runs as run_files
from consilience.lab.errors import LabError, nearest
from consilience.lab.figures import DASHES, PALETTE, save, style
from consilience.models import MLP
from consilience.optim import (
    PUBLISHED_SETTINGS,
    TemporalAndAdam,
    TemporalAndMask,
    temporal_null_keep_rate,
)
from consilience.paper import _numbers

EXPERIMENT = "temporal"
CHECKPOINT = "checkpoint.pt"

SLOW_ADAM: Mapping[str, Any] = {"lr": 2e-4, "betas": (0.97, 0.99), "eps": 1e-12}
"""A cycle through 32 environments is 32 steps: averages that span it, and steps that are small
against it."""


@dataclass(frozen=True)
class Case:
    """An optimizer with its settings, under a name.

    Attributes:
        title: How tables and figures call it.
        family: What it is compared as: cases of a family differ in one setting.
        settings: What `optimizer` is made of.
        optimizer: `adam`, `gradient` (a temporal mask on the gradient that Adam sees) or
            `algorithm` (the paper's temporal AND-mask Adam).
    """

    title: str
    family: str
    optimizer: str
    settings: Mapping[str, Any]

    def make(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Return the optimizer of some parameters."""
        settings = dict(self.settings)
        if self.optimizer == "adam":
            return Adam(parameters, **settings)
        if self.optimizer == "algorithm":
            return TemporalAndAdam(parameters, **settings)
        mask = {key: settings.pop(key) for key in ("beta", "threshold", "rescale")}
        return TemporalAndMask(Adam(parameters, **settings), **mask)


def _gradient(threshold: float, **changes: Any) -> Case:
    settings = {"beta": 0.97, "rescale": "count", "weight_decay": 1e-5, **SLOW_ADAM, **changes}
    title = f"mask on the gradient, τ = {threshold:g}"
    if "beta" in changes:
        title += f", β = {changes['beta']:g}"
    if "rescale" in changes:
        title += ", no rescaling"
    family = "other" if changes else "gradient"
    return Case(title, family, "gradient", {"threshold": threshold, **settings})


def _algorithm(threshold: float) -> Case:
    return Case(
        f"temporal AND-mask Adam, τ = {threshold:g}",
        "algorithm",
        "algorithm",
        {
            "lr": 1e-3,
            "betas": (0.97, 0.99, 0.97),
            "threshold": threshold,
            "eps": 1e-10,
            "weight_decay": 1.0,
        },
    )


CASES: Mapping[str, Case] = {
    "adam": Case("Adam", "adam", "adam", {"lr": 1e-3}),
    "adam-slow": Case(
        "Adam, settings of the mask", "adam", "adam", {**SLOW_ADAM, "weight_decay": 1e-5}
    ),
    **{f"gradient-{t:g}": _gradient(t) for t in (0.5, 0.6, 0.7)},
    "gradient-0.6-short": _gradient(0.6, beta=0.79),
    "gradient-0.7-plain": _gradient(0.7, rescale="none", weight_decay=1e-6),
    **{f"algorithm-{t:g}": _algorithm(t) for t in (0.0, 0.5, 0.6)},
    "published": Case(
        "temporal AND-mask Adam, published settings",
        "published",
        "algorithm",
        PUBLISHED_SETTINGS[0],
    ),
}
"""What is compared, by the names that `--cases` takes."""

LEARNED = 0.99
"""The test accuracy from which a run counts as having learned the mechanism."""

SHOWN = ("adam", "published", "algorithm-0.6", "gradient-0.6")
"""What the figure draws as curves."""


@dataclass(frozen=True)
class Setting:
    """What all cases share: data, network, batches, length.

    Attributes:
        environments: Environments, and length of a signature.
        rows_per_environment: Rows of each.
        batch_size: Rows of a step, all of one environment.
        epochs: Passes over all rows.
        drops: Where the learning rate is divided by 10, as shares of the epochs.
        hidden_units: Width of the three hidden layers.
    """

    environments: int = 32
    rows_per_environment: int = 1280
    batch_size: int = 256
    epochs: int = 100
    drops: tuple[float, ...] = (0.7, 0.9)
    hidden_units: int = 256


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m consilience.paper.temporal",
        description="Train on one environment a step; what is finished is left alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="which cases")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of runs")
    parser.add_argument("--epochs", type=int, default=Setting.epochs, help="length of a run")
    asked = parser.parse_args(arguments)
    try:
        for name in asked.cases:
            if name not in CASES:
                raise LabError(f"There is no case `{name}`.{nearest(name, CASES)}")
        for seed in range(asked.seeds):
            for name in asked.cases:
                setting = replace(Setting(), epochs=asked.epochs)
                train(asked.runs, name, seed, setting, report=print)
        print(_table(_read(asked.runs)))
    except LabError as error:
        sys.exit(f"error: {error}")


def train(
    folder: Path,
    name: str,
    seed: int,
    setting: Setting,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train one case, or go on with it, and return the summary of the run.

    Every epoch passes over all rows: it cycles through the environments, each cycle in a new
    order and with a batch of each environment. Metrics and a checkpoint are written after each
    epoch, and a run that is killed goes on from there with the same numbers.

    Args:
        folder: The folder of runs.
        name: One of `CASES`.
        seed: Where data, initial weights and the order of rows come from.
        setting: Data, network and length.
        report: Called with a line when the run is over.
    """
    case = CASES[name]
    directory = folder / EXPERIMENT / f"{name}_seed={seed}"
    run = run_files.write_config(
        directory,
        {
            "experiment": EXPERIMENT,
            "label": name,
            "seed": seed,
            "settings": {"method": case.optimizer, **case.settings, **vars(setting)},
            "command": "python -m consilience.paper.temporal",
            "versions": jobs.versions(),
            "commit": jobs.commit(),
        },
    )
    done = run.summary()
    if done is not None:
        return done
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        summary = _Training(directory, case, seed, setting).finish()
    finally:
        torch.set_num_threads(threads)
    run_files.mark_done(directory, summary)
    last = summary["last"]
    report(
        f"{name}, seed {seed}: train {last['train_accuracy']:.1%}, "
        f"test {last['test_accuracy']:.1%}{' (stopped)' if summary['stopped'] else ''}"
    )
    return summary


class _Training:
    def __init__(self, directory: Path, case: Case, seed: int, setting: Setting) -> None:
        self.directory, self.case, self.setting = directory, case, setting
        data = SyntheticMemorization.preset(
            "paper",
            environments=setting.environments,
            shortcut_dimensions=setting.environments,
            rows_per_environment=setting.rows_per_environment,
            seed=seed,
        )
        self.rows, self.test = data.train(), data.test()
        generator = torch.Generator().manual_seed(seed)
        self.model: nn.Module = MLP(
            data.dimensions, hidden_units=setting.hidden_units, generator=generator
        )
        self.optimizer = case.make(list(self.model.parameters()))
        self.order = torch.Generator().manual_seed(seed)
        self.rate = self.optimizer.param_groups[0]["lr"]

    def finish(self) -> dict[str, Any]:
        """Train to the end, or until the shortcuts are learned by heart."""
        finished = self._resume()
        entry = run_files.read_metrics(self.directory / run_files.METRICS)[-1] if finished else {}
        stopped = _why_stop(entry)
        for epoch in range(finished + 1, self.setting.epochs + 1):
            if stopped:
                break
            entry = self._epoch(epoch)
            run_files.append_metrics(self.directory, entry)
            self._save(epoch)
            stopped = _why_stop(entry)
        return {"epochs": entry["epoch"], "stopped": stopped, "last": run_files.finite(entry)}

    def _epoch(self, epoch: int) -> dict[str, Any]:
        start = time.perf_counter()
        drops = sum(epoch > int(drop * self.setting.epochs) for drop in self.setting.drops)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * 0.1**drops
        losses, kept = [], []
        for step, batch in enumerate(self._batches(), start=1):
            x, y, _ = self.rows[batch]
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            losses.append(loss.item())
            if step % self.setting.environments == 0:  # at the end of each cycle
                kept.append(_share_kept(self.optimizer))
        return {
            "epoch": epoch,
            "train_accuracy": _accuracy(self.model, self.rows),
            "test_accuracy": _accuracy(self.model, self.test),
            "train_loss": math.fsum(losses) / len(losses),
            "kept": math.fsum(kept) / len(kept),
            "null_keep_rate": _null_keep_rate(self.case),
            "seconds": time.perf_counter() - start,
        }

    def _batches(self) -> list[Tensor]:
        """Return the rows of each step: cycles through the environments, a batch of each."""
        environments, rows = self.setting.environments, self.setting.rows_per_environment
        shuffled = torch.stack(
            [e * rows + torch.randperm(rows, generator=self.order) for e in range(environments)]
        )
        return [
            batch[e]
            for batch in torch.split(shuffled, self.setting.batch_size, dim=1)
            for e in torch.randperm(environments, generator=self.order).tolist()
        ]

    def _save(self, epoch: int) -> None:
        file = io.BytesIO()
        state = {
            "epoch": epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
        }
        torch.save(state, file)
        run_files.write_bytes(self.directory / CHECKPOINT, file.getvalue())

    def _resume(self) -> int:
        path = self.directory / CHECKPOINT
        if not path.exists():
            run_files.trim_metrics(self.directory, 0)
            return 0
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])
        run_files.trim_metrics(self.directory, state["epoch"])
        epoch: int = state["epoch"]
        return epoch


@torch.no_grad()
def _accuracy(model: nn.Module, rows: Rows) -> float:
    right: int = int((model(rows.x).argmax(1) == rows.y).sum())
    return right / len(rows)


def _share_kept(optimizer: Optimizer) -> float:
    """Return the share of components that the mask keeps now; 1 without a mask."""
    if isinstance(optimizer, TemporalAndAdam):
        group = optimizer.param_groups[0]
        averages = [optimizer.state[p]["sign_avg"] for p in group["params"]]
        threshold = group["threshold"]
    elif isinstance(optimizer, TemporalAndMask):
        averages = [v["sign_avg"] for v in optimizer.state_dict()["temporal_and_mask"].values()]
        threshold = optimizer.threshold
    else:
        return 1.0
    kept = sum(int((average.abs() >= threshold).sum()) for average in averages)
    total: int = sum(average.numel() for average in averages)
    return kept / total


def _null_keep_rate(case: Case) -> float | None:
    if case.optimizer == "adam":
        return None
    beta = case.settings["beta"] if "beta" in case.settings else case.settings["betas"][2]
    return temporal_null_keep_rate(beta, case.settings["threshold"])


def _why_stop(entry: Mapping[str, Any]) -> str | None:
    """Return the paper's reason to stop a run: it has learned the shortcuts."""
    if entry and entry["train_accuracy"] > 0.97 and entry["test_accuracy"] < 0.60:
        return "train accuracy above 97% with test accuracy below 60%"
    return None


def draw(folder: Path, *, quick: bool = False, runs: Path = Path("runs")) -> list[Path]:
    """Draw curves of test accuracy and the last one against the threshold, and print the table.

    Args:
        folder: Where to write `temporal.svg`, `.png`, `.json` and `.csv`.
        quick: Nothing to shorten.
        runs: The folder of runs.

    Returns:
        The files written.

    Raises:
        LabError: Where there is no run to show; it names the command.
    """
    del quick
    found = _read(runs)
    print(_table(found))
    with style():
        figure = Figure(figsize=(9.6, 4.2))
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        _curves(left, found)
        _thresholds(right, found)
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside upper left", ncols=3, handlelength=3
        )
        files = save(figure, folder, "temporal")
    settings = {name: {"title": c.title, **c.settings} for name, c in CASES.items()}
    rows = [
        {"case": name, "seed": run.seed, **last}
        for name, members in found.items()
        for run, last in members
    ]
    return files + _numbers.write(folder, "temporal", {"cases": settings}, rows)


Found = dict[str, list[tuple[run_files.Run, dict[str, Any]]]]


def _read(folder: Path) -> Found:
    """Return the finished runs of each case, and what their last epoch came to."""
    found: Found = {}
    if any(Path(folder).glob(f"{EXPERIMENT}/*/{run_files.CONFIG}")):
        for run in run_files.find_runs(folder, EXPERIMENT):
            summary = run.summary()
            if summary is not None and run.label in CASES:
                found.setdefault(run.label, []).append((run, summary["last"]))
    if not found:
        raise LabError(
            f"There is no finished run of `{EXPERIMENT}` in `{folder}`. These make them: "
            f"python -m consilience.paper.temporal --runs {folder}"
        )
    return {name: found[name] for name in CASES if name in found}


def _table(found: Found) -> str:
    """Return mean and deviation over seeds, and how many seeds learned the mechanism."""
    rows = []
    for name, members in found.items():
        train, test = (
            np.array([last[f"{part}_accuracy"] for _, last in members])
            for part in ("train", "test")
        )
        chance = members[0][1]["null_keep_rate"]
        rows.append(
            [
                CASES[name].title,
                str(len(members)),
                _spread(train),
                _spread(test),
                f"{test.min():.1%}",
                f"{(test >= LEARNED).sum()} of {len(test)}",
                "-" if chance is None else f"{chance:.2g}",
            ]
        )
    head = ["optimizer", "seeds", "train", "test", "least test", "learned", "chance keeps"]
    return _numbers.table(head, rows)


def _spread(values: np.ndarray) -> str:
    around = f" ± {100 * values.std(ddof=1):.1f}" if len(values) > 1 else ""
    return f"{values.mean():.1%}{around}"


def _curves(axes: Axes, found: Found) -> None:
    """Draw test accuracy against epochs, a line for each seed."""
    names = [name for name in SHOWN if name in found]
    for name, colour, dashes in zip(names, PALETTE, DASHES, strict=False):
        for i, (run, _) in enumerate(found[name]):
            entries = run.metrics()
            epochs = [entry["epoch"] for entry in entries]
            values = [100 * entry["test_accuracy"] for entry in entries]
            label = CASES[name].title if i == 0 else None
            axes.plot(epochs, values, color=colour, linestyle=dashes, linewidth=1.1, label=label)
            stopped = (run.summary() or {}).get("stopped")
            axes.plot(epochs[-1], values[-1], "x" if stopped else "o", color=colour, markersize=5)
    axes.plot([], [], "x", color="#444444", markersize=5, label="stopped: has learned shortcuts")
    axes.axhline(50, color="#444444", linestyle=":", linewidth=1)
    axes.set(xlabel="epoch (160 steps of one environment each)", ylabel="test accuracy, %")
    axes.set_ylim(40, 102)


def _thresholds(axes: Axes, found: Found) -> None:
    """Draw the last test accuracy of every seed against the threshold."""
    families = {"gradient": "mask on the gradient", "algorithm": "temporal AND-mask Adam"}
    for (family, label), colour, marker in zip(families.items(), PALETTE, "os", strict=False):
        points = [
            (CASES[name].settings["threshold"], 100 * last["test_accuracy"])
            for name, members in found.items()
            if CASES[name].family == family
            for _, last in members
        ]
        if points:
            x, y = np.array(points).T
            shift = 0.008 if family == "algorithm" else -0.008
            axes.plot(x + shift, y, marker, color=colour, alpha=0.75, linestyle="", label=label)
    axes.axhline(50, color="#444444", linestyle=":", linewidth=1)
    axes.set(xlabel="threshold τ (0: no mask)", ylabel="test accuracy after the last epoch, %")
    axes.set(xlim=(-0.05, 1), ylim=(40, 102))
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.9))


if __name__ == "__main__":
    main()
