"""Number of training environments against test accuracy, for the AND-mask and for ERM."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from consilience.lab.errors import LabError
from consilience.lab.figures import DASHES, MARKERS, PALETTE, save, style
from consilience.lab.report.readings import Group, Spread
from consilience.lab.settings import PRESETS
from consilience.paper import _numbers
from consilience.paper._families import command, synthetic

ENVIRONMENTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PER_BATCH = 32
"""Environments in a batch, or all where there are fewer. With 3000 / D epochs of D environments,
every D from 32 on then takes the same number of steps on batches of the same size."""
SEEDS = 5
METHODS = {"and-mask": "AND-mask", "erm": "ERM"}


def draw(
    folder: Path, *, quick: bool = False, runs: Path = Path("runs"), seeds: int = SEEDS
) -> list[Path]:
    """Draw test accuracy against the number of training environments.

    Every seed is a dot and the line joins the best seeds, which is what the paper shows. Runs
    that are not there yet are left out; the commands that make them are printed, with what they
    would cost by the runs that are there. The same command makes more of the figure later. The
    commands ask for the paper's stopping rule, without which most of the time would go into
    networks that have memorized long ago.

    Args:
        folder: Where to write `environments.svg`, `.png`, `.json` and `.csv`.
        quick: Nothing to shorten.
        runs: The folder of runs.
        seeds: How many seeds there should be.

    Returns:
        The files written.

    Raises:
        LabError: Where there is no run to show; it names the commands.
    """
    del quick
    chosen = choose(runs)
    todo = _missing(chosen, runs, seeds)
    if not chosen:
        raise LabError("\n".join(["No run varies the number of environments.", *todo]))
    if todo:
        print("\n".join(todo))
    head = ["method", "environments", "epochs", "seeds", "best test", "mean test", "train"]
    print(_numbers.table([*head, "minutes"], [_row(*key, group) for key, group in chosen.items()]))
    with style():
        figure = Figure(figsize=(6.4, 3.6))
        axes = figure.subplots()
        for method in METHODS:
            _line(axes, method, {d: g for (m, d), g in chosen.items() if m == method})
        axes.axhline(50, color="#444444", linestyle=":", linewidth=1.2, label="guessing")
        shown = sorted({d for _, d in chosen})
        axes.set_xscale("log", base=2)
        axes.set(
            xticks=shown,
            xticklabels=[str(d) for d in shown],
            xlabel="number of training environments",
            ylabel="test accuracy, %",
            ylim=(42, 103),
        )
        axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        files = save(figure, folder, "environments")
    rows: list[dict[str, Any]] = [
        {"method": method, "environments": d, "epochs": len(r.metrics), "seed": r.run.seed}
        | {key: r.last(key) for key in ("train_accuracy", "test_accuracy")}
        | {"seconds": sum(entry["seconds"] for entry in r.metrics)}
        for (method, d), group in chosen.items()
        for r in group.counted
        if r.run is not None
    ]
    settings = {f"{m}, {d} environments": group.settings for (m, d), group in chosen.items()}
    return files + _numbers.write(folder, "environments", settings, rows)


def choose(runs: Path) -> dict[tuple[str, int], Group]:
    """Return the finished runs of each method and number of environments.

    All other settings are the preset's, with the paper's stopping rule or without. Where the
    number of epochs was varied, the most seeds win, and then the best on test.
    """
    base = asdict(PRESETS["paper"])
    free = (
        "method",
        "environments",
        "environments_per_batch",
        "epochs",
        "drops",
        "stop_memorizing",
    )
    found: dict[tuple[str, int], list[Group]] = {}
    for group in synthetic(runs):
        settings = group.settings
        d, per_batch = settings["environments"], settings["environments_per_batch"]
        fixed = all(settings[k] == base[k] for k in settings if k not in free)
        if (
            settings["method"] in METHODS
            and fixed
            and tuple(settings["drops"]) == base["drops"]
            and per_batch == min(d, PER_BATCH)
            and group.counted
        ):
            found.setdefault((settings["method"], d), []).append(group)
    return {key: max(found[key], key=_rank) for key in sorted(found)}


def _rank(group: Group) -> tuple[int, float]:
    test = group.spread("test_accuracy")
    return len(group.counted), 0.0 if test is None else test.high


def _missing(chosen: dict[tuple[str, int], Group], runs: Path, seeds: int) -> list[str]:
    """Return the commands that make what is missing, and what that would cost."""
    lines = []
    costs: list[float | None] = []
    for d in ENVIRONMENTS:
        methods = []
        for method in METHODS:
            there = len(chosen[method, d].counted) if (method, d) in chosen else 0
            if there < seeds:
                methods.append(method)
                costs += [_cost(chosen, method, d)] * (seeds - there)
        if methods:
            batch = f" --environments-per-batch {PER_BATCH}" if d > PER_BATCH else ""
            flags = f"--method {' '.join(methods)} --environments {d}{batch} --stop-memorizing"
            lines.append("  " + command(flags, runs, seeds))
    if not lines:
        return []
    known = [cost for cost in costs if cost is not None]
    price = "`--dry-run` says what each takes"
    if len(known) == len(costs):
        price = f"about {sum(known) / 3600:.1f} hours of one core, by the runs that are there"
    return [f"These commands make what is missing ({price}):", *lines]


def _cost(chosen: dict[tuple[str, int], Group], method: str, d: int) -> float | None:
    """Return the seconds of a run of as many environments, or else of any number."""
    own = [_seconds(g).mean for key, g in chosen.items() if key == (method, d)]
    others = [_seconds(g).mean for (m, _), g in chosen.items() if m == method]
    found = own or others
    return float(np.mean(found)) if found else None


def _seconds(group: Group) -> Spread:
    found = Spread.of(sum(entry["seconds"] for entry in r.metrics) for r in group.counted)
    assert found is not None  # noqa: S101 (choose keeps groups with a finished run alone)
    return found


def _line(axes: Axes, method: str, by_environments: dict[int, Group]) -> None:
    style_of = list(METHODS).index(method)
    colour, marker = PALETTE[2 * style_of], MARKERS[style_of]
    best = []
    for d, group in by_environments.items():
        values = [100 * v for r in group.counted if (v := r.last("test_accuracy")) is not None]
        axes.scatter([d] * len(values), values, s=16, color=colour, marker=marker, alpha=0.55)
        best.append((d, max(values)))
    if best:
        axes.plot(
            *zip(*best, strict=True),
            color=colour,
            linestyle=DASHES[style_of],
            marker=marker,
            label=f"{METHODS[method]},\nbest seed",
        )


def _row(method: str, d: int, group: Group) -> list[str]:
    test, train = group.spread("test_accuracy"), group.spread("train_accuracy")
    assert test is not None  # noqa: S101 (choose keeps groups with a finished run alone)
    assert train is not None  # noqa: S101
    around = "" if test.deviation is None else f" ± {100 * test.deviation:.1f}"
    return [
        METHODS[method],
        str(d),
        str(group.settings["epochs"]),
        str(test.count),
        f"{test.high:.1%}",
        f"{test.mean:.1%}{around}",
        f"{train.mean:.1%}",
        f"{_seconds(group).mean / 60:.1f}",
    ]
