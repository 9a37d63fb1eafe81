"""The command line: `consilience run`, `search`, `list`, `report` and `figure`.

Help and wrong arguments are answered without importing torch.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from consilience import __version__
from consilience.lab import jobs, runs, settings
from consilience.lab.errors import LabError, nearest
from consilience.lab.progress import Progress, clock, results_markdown, results_table, runs_table
from consilience.lab.settings import Settings
from consilience.paper.catalogue import FIGURES

USAGE = f"""\
usage: consilience COMMAND [...]

  run synthetic     train methods on the synthetic memorization dataset
  search synthetic  try settings at random from the paper's ranges
  list [RUNS]       what is in a directory of runs, and its results
  report RUNS       make one HTML page of a directory of runs
  figure NAME       draw a figure or table of the paper, or `all`

`consilience COMMAND --help` shows every flag with its default. Version {__version__}.
"""

console = Console(highlight=False)
Asked = TypeVar("Asked")
_OWN_DEFAULT = ""  # the help says it in words


@dataclass(frozen=True)
class RunSynthetic:
    """Train methods on the synthetic memorization dataset.

    The same command again goes on where it was interrupted; what is finished stays.

    Defaults are the preset's: `--preset authors-code --help` shows the other's.
    """

    method: Annotated[tuple[str, ...], arg(metavar="METHOD [METHOD ...]")] = ("and-mask", "erm")
    """What to train: erm, and-mask, geometric-mean, sand-mask, soft-mask, xor-mask, majority-sign,
    mean, irm, dann."""
    preset: Annotated[str, arg(metavar="NAME")] = "paper"
    """Where the defaults come from: paper or authors-code."""
    seeds: int = 1
    """How many seeds."""
    first_seed: int = 0
    """The first of them."""
    runs: Path = Path("runs")
    """Where run directories go."""
    name: Annotated[str | None, arg(metavar="NAME", help_behavior_hint=_OWN_DEFAULT)] = None
    """What to call these runs. Default: the method, and the settings that are not the preset's."""
    workers: int = 0
    """How many runs at a time; 0 for one on each core."""
    dry_run: bool = False
    """Print the resolved configuration and an estimate of the time, and train nothing."""
    settings: OmitArgPrefixes[Settings] = field(default_factory=Settings)


@dataclass(frozen=True)
class SearchSynthetic:
    """Try settings drawn at random from the paper's ranges; rank them by test accuracy.

    Trial i of a seed is always the same, and the same command goes on with them.

    Selecting on test accuracy is what the paper does; it flatters.
    """

    method: Annotated[str, arg(metavar="METHOD")]
    """What to search for: erm, and-mask, geometric-mean, irm or dann."""
    trials: int = 20
    """How many settings to try."""
    seed: int = 0
    """Where settings, and data and weights of all trials, come from."""
    preset: Annotated[str, arg(metavar="NAME")] = "paper"
    """Where all that is not drawn comes from."""
    runs: Path = Path("runs")
    """Where run directories go."""
    workers: int = 0
    """How many runs at a time; 0 for one on each core."""
    dry_run: bool = False
    """Print the settings that would be tried, and an estimate of the time."""
    epochs: int = 0
    """Epochs of each trial; 0 for the preset's."""


@dataclass(frozen=True)
class List:
    """Show what is in a directory of runs, and its results over seeds."""

    runs: Annotated[Positional[Path], arg(metavar="[RUNS]")] = Path("runs")
    """A directory that `consilience run` wrote to."""
    markdown: bool = False
    """Print the results alone, as a table in Markdown."""


@dataclass(frozen=True)
class Report:
    """Make one self-contained HTML page of a directory of runs."""

    runs: Annotated[Positional[Path], arg(metavar="RUNS")]
    """A directory that `consilience run` wrote to."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint=_OWN_DEFAULT)] = None
    """Where to write the page. Default: report.html in the directory of runs."""


@dataclass(frozen=True)
class Figure:
    """Draw a figure or table of the paper, or all of them."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """What to draw; `list` shows the names, `all` draws everything."""
    out: Path = Path("figures")
    """The folder to write to."""
    runs: Path = Path("runs")
    """The directory of runs, for figures that show trained networks."""
    quick: bool = False
    """A coarser version in less time."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the process exits with status 2 on what a user can put right."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(given)
    except LabError as error:
        _complain(str(error))
        sys.exit(2)
    except BrokenPipeError:  # whoever read the output, `head` for one, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as a shell says of SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        _complain(f"`{error.filename}`: {error.strerror}.")
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("\nInterrupted. The same command goes on from the last finished epoch.")
        sys.exit(130)


def _dispatch(given: list[str]) -> None:
    if not given or given[0] in ("-h", "--help", "help"):
        console.print(Text(USAGE), end="")
        return
    if given[0] == "--version":
        console.print(__version__)
        return
    command, rest = given[0], given[1:]
    if command in ("run", "search"):
        if rest[:1] in ([], ["-h"], ["--help"]):
            raise LabError(f"Say what to {command}: `consilience {command} synthetic`.")
        command, rest = f"{command} {rest[0]}", rest[1:]
    if command not in _COMMANDS:
        known = ", ".join(f"`{name}`" for name in _COMMANDS)
        near = nearest(command, [*_COMMANDS, "--version"])
        raise LabError(f"There is no command `{command}`.{near} Commands: {known}.")
    _COMMANDS[command](rest)


def _run_synthetic(rest: list[str]) -> None:
    base = settings.preset(_preset_of(rest))
    asked = _parse(RunSynthetic, rest, "run synthetic", RunSynthetic(settings=base))
    settings.check_methods(asked.method, asked.settings, base)
    if asked.seeds < 1:
        raise LabError(f"`--seeds` should be 1 or more. Found {asked.seeds}.")
    # Seed by seed, so that methods take turns: a fair comparison of their cost, and an early look.
    todo = [
        jobs.make_job(asked.runs, _label(asked, method), method, asked.settings, seed)
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds)
        for method in dict.fromkeys(asked.method)
    ]
    command = shlex.join(["consilience", "run", "synthetic", *rest])
    _run(todo, command, workers=asked.workers, dry_run=asked.dry_run, folder=asked.runs)


def _label(asked: RunSynthetic, method: str) -> str:
    if not asked.name:
        return settings.label(method, asked.preset, asked.settings)
    return asked.name if len(asked.method) == 1 else f"{asked.name} {method}"


def _search_synthetic(rest: list[str]) -> None:
    from consilience.lab.search import trials  # noqa: PLC0415

    asked = _parse(SearchSynthetic, rest, "search synthetic")
    base = settings.preset(asked.preset)
    drawn = trials(asked.method, base, asked.trials, asked.seed, epochs=asked.epochs)
    prefix = "search" if asked.preset == "paper" else f"search {asked.preset}"
    todo = [
        jobs.make_job(
            asked.runs, f"{prefix} {asked.method} trial={trial:03}", asked.method, tried, asked.seed
        )
        for trial, tried in enumerate(drawn)
    ]
    command = shlex.join(["consilience", "search", "synthetic", *rest])
    _run(todo, command, workers=asked.workers, dry_run=asked.dry_run, folder=asked.runs)
    if not asked.dry_run:
        _show_best(todo, base)


def _show_best(todo: list[jobs.Job], base: Settings) -> None:
    ranked = []
    for job in todo:
        summary = runs.open_run(job.directory).summary()
        if summary is not None:
            ranked.append((summary["last"]["test_accuracy"], job))
    ranked.sort(key=lambda entry: -entry[0])
    console.print("Best by test accuracy, with the settings that differ from the preset's:")
    for test, job in ranked[:5]:
        flags = settings.flags(settings.changes(job.settings, base.resolve()))
        console.print(Text(f"  {100 * test:5.1f}%  {job.name}  {flags}"), soft_wrap=True)


def _run(todo: list[jobs.Job], command: str, *, workers: int, dry_run: bool, folder: Path) -> None:
    if workers < 0:
        raise LabError(f"`--workers` should be 0 or more. Found {workers}.")
    workers = min(workers or jobs.cores(), len(todo))
    if dry_run:
        _show(todo, workers)
        return
    for note in jobs.prepare(todo, command):
        console.print(Text(note), soft_wrap=True)
    with Progress(todo, console) as progress:
        troubles = jobs.run_all(todo, workers, on_epoch=progress.epoch, on_end=progress.end)
    finished = [runs.open_run(job.directory) for job in todo]
    console.print(results_table(finished))
    console.print(Text(f"Next: consilience report {shlex.quote(str(folder))}"), soft_wrap=True)
    if troubles:
        raise LabError("\n".join(str(trouble) for trouble in troubles))


def _show(todo: list[jobs.Job], workers: int) -> None:
    seconds = jobs.estimate(todo)
    read = {job.label: job.settings.read_by(job.method) for job in todo}
    first, *others = read.values()
    same = {k: v for k, v in first.items() if all(k in o and o[k] == v for o in others)}
    _show_settings("all" if others else next(iter(read)), same)
    for label, values in read.items() if others else ():
        _show_settings(label, {k: v for k, v in values.items() if k not in same})
    console.print()
    for job, estimate in zip(todo, seconds, strict=True):
        console.print(Text(f"{job.directory}: {clock(estimate)}"), soft_wrap=True)
    total = max(sum(seconds) / workers, *seconds)
    many = "One run" if len(todo) == 1 else f"{len(todo)} runs, {workers} at a time"
    console.print(f"\n{many}: about {clock(total)} if the cores are free.")


def _show_settings(title: str, values: Mapping[str, Any]) -> None:
    console.print(Text(title), style="bold")
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        console.print(Text(f"  {flag:26} {settings.brief(value)}"))


def _list(rest: list[str]) -> None:
    asked = _parse(List, rest, "list")
    found, troubles = [], []
    for directory in runs.run_directories(asked.runs):
        try:
            run = runs.open_run(directory)
            run.metrics(), run.summary()
            found.append(run)
        except LabError as error:  # noqa: PERF203 (the others are listed all the same)
            troubles.append(str(error))
    if not found and not troubles:
        raise LabError(
            f"There are no runs in `{asked.runs}`. `consilience run synthetic --runs "
            f"{asked.runs}` makes some."
        )
    found.sort(key=runs.place)
    if asked.markdown:
        print(results_markdown(found))
    else:
        console.print(runs_table(found))
        if any(run.done for run in found):
            console.print()
            console.print(results_table(found))
    if troubles:
        raise LabError("\n".join(troubles))


def _report(rest: list[str]) -> None:
    asked = _parse(Report, rest, "report")
    from consilience.lab.report import write_report  # noqa: PLC0415 (imports torch)

    path = write_report(asked.runs, asked.out or asked.runs / "report.html")
    console.print(Text(str(path)), soft_wrap=True)


def _figure(rest: list[str]) -> None:
    asked = _parse(Figure, rest, "figure")
    if asked.name == "list":
        console.print(_figures())
        return
    chosen = [entry for entry in FIGURES if asked.name in (entry.name, "all")]
    if not chosen:
        names = [entry.name for entry in FIGURES]
        raise LabError(
            f"There is no figure `{asked.name}`.{nearest(asked.name, names)} "
            "`consilience figure list` shows all."
        )
    missing: list[str] = []
    for entry in chosen:
        console.print(Text(f"{entry.name}: {entry.title}"), style="bold", soft_wrap=True)
        trained = {"runs": asked.runs} if entry.runs else {}
        try:
            with runs.explaining(asked.out):
                asked.out.mkdir(parents=True, exist_ok=True)
                for path in import_module(entry.module).draw(
                    asked.out, quick=asked.quick, **trained
                ):
                    console.print(Text(f"  {path}"), soft_wrap=True)
        except LabError as error:  # the other figures of `all` are drawn all the same
            missing.append(f"{entry.name}: {error}")
    if missing:
        raise LabError("\n".join(missing))


def _figures() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for entry in FIGURES:
        table.add_row(entry.name, Text(f"{entry.title} ({entry.source}; {entry.cost})"))
    return table


def _parse(kind: type[Asked], rest: list[str], command: str, default: Asked | None = None) -> Asked:
    base: dict[str, Any] = {} if default is None else {"default": default}
    prog, config = f"consilience {command}", (FlagCreatePairsOff,)
    found: Asked = tyro.cli(kind, args=rest, prog=prog, config=config, **base)
    return found


def _preset_of(rest: Sequence[str]) -> str:
    """Return the preset asked for, ahead of parsing, since all defaults come from it."""
    for i, word in enumerate(rest):
        if word == "--preset" and i + 1 < len(rest):
            return rest[i + 1]
        if word.startswith("--preset="):
            return word.removeprefix("--preset=")
    return "paper"


def _complain(message: str) -> None:
    Console(stderr=True, highlight=False).print(Text(message, style="red"), soft_wrap=True)


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "run synthetic": _run_synthetic,
    "search synthetic": _search_synthetic,
    "list": _list,
    "report": _report,
    "figure": _figure,
}


if __name__ == "__main__":
    main()
