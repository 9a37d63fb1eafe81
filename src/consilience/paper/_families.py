"""Which runs stand for which method of the paper, and the command that makes each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from consilience.lab.errors import LabError
from consilience.lab.report.readings import Group, groups, read
from consilience.lab.runs import CONFIG
from consilience.lab.settings import PRESETS

FAMILIES: Mapping[str, str] = {
    "AND-mask": "--method and-mask",
    "geometric mean": "--method geometric-mean",
    "IRM": "--method irm",
    "DANN": "--method dann",
    "ERM": "--method erm --l2 0 --stop-memorizing",
    "ERM, L2": "--method erm --stop-memorizing",
    "ERM, L1": "--method erm --l2 0 --l1 1e-5 --stop-memorizing",
    "ERM, dropout": "--method erm --l2 0 --dropout 0.5 --stop-memorizing",
    "ERM, batch norm": "--method erm --l2 0 --batch-norm --stop-memorizing",
}
"""Methods of the paper's figures, and the flags of `consilience run synthetic` for each.

ERM memorizes within three epochs, and the paper's rule stops it there."""

DATA = (
    "environments",
    "shortcut_dimensions",
    "rows_per_environment",
    "revolutions",
    "shortcut_scale",
    "spiral_scale",
)
"""Settings of the data: runs on other data than the preset's are not compared here."""

_RULES = {"and-mask": "AND-mask", "geometric-mean": "geometric mean", "irm": "IRM", "dann": "DANN"}


def command(flags: str, runs: Path, seeds: int = 10) -> str:
    """Return the command that makes runs.

    Example:
        >>> command("--method irm", Path("runs"))
        'consilience run synthetic --method irm --seeds 10 --runs runs'
    """
    return f"consilience run synthetic {flags} --seeds {seeds} --runs {runs}"


def family(group: Group) -> str | None:
    """Return which family a group of runs belongs to; None where it belongs to none.

    ERM with two regularizers at a time belongs to none, and so do trials of a search.
    """
    settings = group.settings
    base = asdict(PRESETS["paper"])
    if group.label.startswith("search ") or any(settings.get(k) != base[k] for k in DATA):
        return None
    method = settings["method"]
    if method != "erm":
        return _RULES.get(method)
    on = [
        name
        for key, name in (
            ("l2", "L2"),
            ("l1", "L1"),
            ("dropout", "dropout"),
            ("batch_norm", "batch norm"),
        )
        if settings[key]
    ]
    if len(on) > 1:
        return None
    return f"ERM, {on[0]}" if on else "ERM"


def choose(
    runs: Path, names: Sequence[str] = tuple(FAMILIES), *, whole: bool = False
) -> dict[str, Group]:
    """Return the finished runs of each family, the most seeds first, then the best on test.

    Says which command makes the families that are missing, of those that are asked for.

    Args:
        runs: The folder of runs.
        names: The families.
        whole: Whether to leave out runs that were to stop once they memorize.

    Raises:
        LabError: Where there is none at all.
    """
    found: dict[str, list[Group]] = {}
    for group in synthetic(runs):
        name = family(group)
        stopping = whole and group.settings.get("stop_memorizing")
        if name is not None and group.counted and not stopping:
            found.setdefault(name, []).append(group)
    chosen = {name: max(found[name], key=_rank) for name in names if name in found}
    flags = {
        name: FAMILIES[name].replace(" --stop-memorizing", "") if whole else FAMILIES[name]
        for name in names
    }
    missing = [command(flags[name], runs) for name in names if name not in found]
    if not chosen:
        raise LabError(_say(f"There is no finished run on the preset's data in `{runs}`.", missing))
    if missing:
        print(_say("Methods that were not run are left out.", missing))
    return chosen


def synthetic(runs: Path) -> list[Group]:
    """Return the groups of synthetic runs in a folder; none where there is no run at all."""
    if not any(Path(runs).glob(f"*/*/{CONFIG}")):
        return []
    return [g for g in groups(read(runs)) if g.experiment == "synthetic"]


def _say(what: str, commands: Sequence[str]) -> str:
    return "\n".join(
        [f"{what} These commands make what is missing:", *(f"  {c}" for c in commands)]
    )


def _rank(group: Group) -> tuple[int, float]:
    test = group.spread("test_accuracy")
    return len(group.counted), -1.0 if test is None else test.mean
