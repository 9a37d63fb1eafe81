"""What one sees in a terminal: a live view of runs, and tables of results."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from consilience.lab.errors import LabError
from consilience.lab.jobs import Job
from consilience.lab.runs import Run

BAR = 20


class Progress:
    """A live view of jobs: a row for each that is running, and how many are finished.

    Where there is no terminal, a line at every tenth part of a run instead.
    """

    def __init__(self, jobs: Sequence[Job], console: Console):
        self.console = console
        self.total = len(jobs)
        self.finished = 0
        self.last: dict[Job, dict[str, Any]] = {}
        self.spent: dict[Job, float] = {}
        self.start = time.perf_counter()
        self.live = Live(
            console=console, get_renderable=self.view, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Progress:  # noqa: PYI034 (Self is not in Python 3.10)
        """Start the view."""
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal as it should be."""
        if self.console.is_terminal:
            self.live.stop()

    def epoch(self, job: Job, entry: dict[str, Any]) -> None:
        """Take in the metrics of an epoch."""
        self.last[job] = entry
        self.spent[job] = self.spent.get(job, 0.0) + entry["seconds"]
        tenth = max(job.settings.epochs // 10, 1)
        if not self.console.is_terminal and entry["epoch"] % tenth == 0:
            self._say(job, entry, f"epoch {entry['epoch']}/{job.settings.epochs}")

    def end(self, job: Job, result: dict[str, Any] | LabError) -> None:
        """Take in the end of a job."""
        self.finished += 1
        self.last.pop(job, None)
        if isinstance(result, LabError):
            text = f"{job.label}, seed {job.seed}: failed"
            self.console.print(Text(text, style="bold red"), soft_wrap=True)
        else:
            why = f", stopped: {result['stopped']}" if result["stopped"] else ""
            self._say(job, result["last"], f"done after {result['epochs']} epochs{why}")

    def _say(self, job: Job, entry: dict[str, Any], what: str) -> None:
        text = (
            f"{job.label}, seed {job.seed}: {what}, train {percent(entry['train_accuracy'])}, "
            f"test {percent(entry['test_accuracy'])}"
        )
        if _voted(entry):
            text += f", kept {percent(entry['kept'])}"
        self.console.print(Text(text), soft_wrap=True)

    def view(self) -> Table:
        """Return the view as of now."""
        table = Table(box=box.SIMPLE_HEAD, expand=False, pad_edge=False, collapse_padding=True)
        wide = BAR if self.console.width > 90 else BAR // 2
        _columns(table, left=("run",), right=("", "epoch", "train", "test", "kept", "left"))
        for job, entry in self.last.items():
            done, of = entry["epoch"], job.settings.epochs
            full = wide * done // of
            left = (of - done) * self.spent[job] / done
            table.add_row(
                Text(f"{job.label}, seed {job.seed}"),
                f"[cyan]{'━' * full}[/][dim]{'━' * (wide - full)}[/]",
                f"{done}/{of}",
                percent(entry["train_accuracy"]),
                f"[bold]{percent(entry['test_accuracy'])}[/]",
                percent(entry["kept"]) if _voted(entry) else "–",
                clock(left),
            )
        starting = not self.last and self.finished < self.total
        table.caption = (
            f"{self.finished} of {self.total} runs finished, "
            f"{clock(time.perf_counter() - self.start)} so far{', starting' if starting else ''}"
        )
        return table


RESULTS = ("seeds", "epochs", "train %", "test %", "lowest", "kept %", "seconds")
MARKDOWN = (*RESULTS[:5], "highest", "at 99%", *RESULTS[5:])
SOLVED = 0.99
"""Test accuracy from which on a seed counts as one that learned the mechanism."""


def results(found: Iterable[Run]) -> dict[str, dict[str, str]]:
    """Return mean and spread over seeds of all finished runs, by label and :data:`MARKDOWN`."""
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for run in found:
        metrics = run.metrics()
        if run.done and metrics:
            groups.setdefault(run.label, []).append(metrics)
    rows = {}
    for label, group in groups.items():
        last = [metrics[-1] for metrics in group]
        test = [entry["test_accuracy"] for entry in last]
        solved = sum(value >= SOLVED for value in test)
        low, high = wilson(solved, len(test))
        kept = [100 * entry["kept"] for entry in last if _voted(entry)]
        rows[label] = {
            "seeds": str(len(group)),
            "epochs": _range([len(metrics) for metrics in group]),
            "train %": spread([100 * entry["train_accuracy"] for entry in last]),
            "test %": spread([100 * value for value in test]),
            "lowest": f"{100 * min(test):.1f}",
            "highest": f"{100 * max(test):.1f}",
            "at 99%": f"{solved} ({100 * low:.0f} to {100 * high:.0f}%)",
            "kept %": spread(kept) if kept else "–",
            "seconds": spread([sum(entry["seconds"] for entry in m) for m in group], 0),
        }
    return rows


def wilson(successes: int, count: int) -> tuple[float, float]:
    r"""Return Wilson's 95% interval of a share.

    .. math:: \frac{p + z^2/2n \pm z \sqrt{p (1 - p) / n + z^2/4n^2}}{1 + z^2/n}

    Example:
        >>> [round(end, 3) for end in wilson(9, 10)]
        [0.596, 0.982]
    """
    z2 = 1.959964**2
    share = successes / count
    middle = share + z2 / (2 * count)
    around = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2)))
    whole = 1 + z2 / count
    # Rounding alone could put the ends of 0 and of 1 beyond them, or on the wrong side.
    low, high = (middle - around) / whole, (middle + around) / whole
    return (low if successes else 0.0), (high if successes < count else 1.0)


def results_table(found: Iterable[Run]) -> Table:
    """Return the results of finished runs for the terminal; eighty columns are enough."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    _columns(table, left=("method",), right=RESULTS)
    for label, cells in results(found).items():
        table.add_row(Text(label), *(cells[name] for name in RESULTS))
    return table


def results_markdown(found: Iterable[Run]) -> str:
    """Return the results of finished runs for a page; `at 99%` is a number of seeds.

    In brackets is Wilson's 95% interval of their share.
    """
    lines = [" | ".join(("| method", *MARKDOWN)) + " |", "| --- " + "| ---: " * len(MARKDOWN) + "|"]
    lines += [
        " | ".join((f"| {label}", *(cells[name] for name in MARKDOWN))) + " |"
        for label, cells in results(found).items()
    ]
    return "\n".join(lines)


def runs_table(found: Iterable[Run]) -> Table:
    """Return how far each run is; `stopped` is before its last epoch, and its mark says why."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    _columns(table, left=("run", "state"), right=("epoch", "train %", "test %", "kept %"))
    for run in found:
        metrics, summary = run.metrics(), run.summary()
        last = metrics[-1] if metrics else None
        state = "unfinished" if summary is None else "stopped" if summary["stopped"] else "done"
        numbers = ["", "", ""]
        if last:
            numbers = [f"{100 * last[key]:.1f}" for key in ("train_accuracy", "test_accuracy")]
            numbers.append(f"{100 * last['kept']:.1f}" if _voted(last) else "–")
        of = run.settings.get("epochs", "?")
        table.add_row(Text(f"{run.experiment}/{run.name}"), state, f"{len(metrics)}/{of}", *numbers)
    return table


def _voted(entry: dict[str, Any]) -> bool:
    """Whether there was a vote on what to keep; a method without one keeps everything."""
    return entry["null_keep_rate"] is not None


def _columns(table: Table, left: Sequence[str], right: Sequence[str]) -> None:
    """Add columns: words on the left, which fold where it is narrow; numbers on the right."""
    for name in left:
        table.add_column(name, overflow="fold", min_width=10)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± standard deviation; the mean alone for one value."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f}%"


def clock(seconds: float) -> str:
    """Return a duration as one reads it.

    Example:
        >>> clock(5), clock(65), clock(3700)
        ('5 s', '1 min 05 s', '1 h 02 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
