"""Many runs: one job for each method and seed, over the cores of the machine.

Imports torch only in the processes that train.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from consilience import __version__
from consilience.lab import runs
from consilience.lab.errors import LabError
from consilience.lab.settings import Settings

EXPERIMENT = "synthetic"
LONGEST_NAME = 255
"""Bytes of a directory's name that every usual file system takes."""


@dataclass(frozen=True)
class Job:
    """One run to be made.

    Attributes:
        directory: Its run directory.
        label: What it shares with the runs that differ in nothing but the seed.
        method: Its method.
        settings: Its settings, resolved.
        seed: Its seed.
    """

    directory: Path
    label: str
    method: str
    settings: Settings
    seed: int

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return self.directory.name


OnEpoch = Callable[[Job, dict[str, Any]], None]
OnEnd = Callable[[Job, dict[str, Any] | LabError], None]


def make_job(folder: Path, label: str, method: str, settings: Settings, seed: int) -> Job:
    """Return the job of one method and seed; `settings` are resolved here."""
    name = f"{label.replace(' ', '_').replace('/', '_')}_seed={seed}"
    if len(name.encode()) > LONGEST_NAME:
        raise LabError(
            f"The run directory `{name}` would have a name that is too long for a file system. "
            "Choose a short one with `--name`."
        )
    if not 0 <= seed < 2**63:
        raise LabError(f"A seed should be 0 or more, and less than 2^63. Found {seed}.")
    return Job(folder / EXPERIMENT / name, label, method, settings.resolve(), seed)


def prepare(jobs: Sequence[Job], command: str) -> list[str]:
    """Write the configuration of every job, or raise before any of them has started.

    Raises where a run directory holds another configuration, or cannot be read. Returns a sentence
    for each difference between the versions that unfinished runs were begun with and those of now.
    """
    now = {**versions(), "commit": commit()}
    about = {"command": command, "versions": versions(), "commit": now["commit"]}
    begun: Counter[str] = Counter()
    for job in jobs:
        settings = {"method": job.method, **job.settings.read_by(job.method)}
        run = runs.write_config(
            job.directory,
            {
                "experiment": EXPERIMENT,
                "label": job.label,
                "seed": job.seed,
                "settings": settings,
                **about,
            },
        )
        if run.metrics() and run.summary() is None:
            then = {**run.config["versions"], "commit": run.config["commit"]}
            begun.update(
                f"{name} {then.get(name)}, now {value}"
                for name, value in now.items()
                if then.get(name) != value
            )
    return [
        f"{'One run was' if count == 1 else f'{count} runs were'} begun with {what}: the numbers "
        "will be of both."
        for what, count in begun.items()
    ]


def run_all(
    jobs: Sequence[Job], workers: int, *, on_epoch: OnEpoch, on_end: OnEnd
) -> list[LabError]:
    """Run all jobs, and return what went wrong; one job's trouble does not stop the others.

    With one worker everything happens in this process.
    """
    waiting = [job for job in jobs if not (job.directory / runs.DONE).exists()]
    for job in jobs:
        if job not in waiting:
            summary = runs.open_run(job.directory).summary()
            assert summary is not None  # noqa: S101 (its file exists)
            on_end(job, summary)
    run = _run_here if workers == 1 or len(waiting) < 2 else _run_in_processes
    troubles: list[LabError] = []

    def ended(job: Job, result: dict[str, Any] | LabError) -> None:
        if isinstance(result, LabError):
            troubles.append(result)
        on_end(job, result)

    run(waiting, workers, on_epoch, ended)
    return troubles


def _run_here(jobs: Sequence[Job], workers: int, on_epoch: OnEpoch, on_end: OnEnd) -> None:
    del workers
    from consilience.lab.training import train  # noqa: PLC0415 (imports torch)

    for job in jobs:
        try:
            result: dict[str, Any] | LabError = train(
                job.directory,
                job.method,
                job.settings,
                job.seed,
                on_epoch=lambda entry, job=job: on_epoch(job, entry),  # type: ignore[misc]
            )
        except LabError as error:
            result = error
        on_end(job, result)


def _run_in_processes(jobs: Sequence[Job], workers: int, on_epoch: OnEpoch, on_end: OnEnd) -> None:
    context = mp.get_context("spawn")
    waiting = list(reversed(jobs))
    running: dict[Connection, tuple[Job, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(job, theirs, os.getpid()))
                process.start()
                theirs.close()
                running[ours] = (job, process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)  # noqa: S101 (for the type checker)
                job, process = running[ready]
                try:
                    kind, content = ready.recv()
                except EOFError:
                    process.join()
                    del running[ready]
                    on_end(job, LabError(_vanished(job, process.exitcode)))
                    continue
                if kind == "epoch":
                    on_epoch(job, content)
                else:
                    process.join()
                    del running[ready]
                    on_end(job, LabError(content) if kind == "error" else content)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _work(job: Job, channel: Connection, parent: int) -> None:
    """Train one job in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    from consilience.lab.training import train  # noqa: PLC0415 (imports torch)

    def tell(entry: dict[str, Any]) -> None:
        if os.getppid() != parent:  # the parent was killed; what is on disk is complete
            os._exit(1)
        channel.send(("epoch", entry))

    try:
        channel.send(
            ("done", train(job.directory, job.method, job.settings, job.seed, on_epoch=tell))
        )
    except LabError as error:
        channel.send(("error", str(error)))
    except BrokenPipeError:
        os._exit(1)


def _vanished(job: Job, code: int | None) -> str:
    return (
        f"The process that ran `{job.directory}` ended unexpectedly (exit code {code}). Its "
        "finished epochs are safe; run the same command again. If memory ran out, use fewer "
        "`--workers`."
    )


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def estimate(jobs: Iterable[Job]) -> list[float]:
    """Return how many seconds each job takes on a free core, from a few steps of each label."""
    from consilience.lab.training import seconds_per_epoch  # noqa: PLC0415 (imports torch)

    measured: dict[str, float] = {}
    found = []
    for job in jobs:
        if job.label not in measured:
            measured[job.label] = seconds_per_epoch(job.method, job.settings)
        left = job.settings.epochs
        if (job.directory / runs.CONFIG).exists():
            run = runs.open_run(job.directory)
            left = 0 if run.done else left - len(run.metrics())
        found.append(measured[job.label] * left)
    return found


def versions() -> dict[str, str]:
    """Return the versions that numbers may depend on."""
    return {
        "python": platform.python_version(),
        "consilience": __version__,
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, if it runs from one."""
    here = Path(__file__).resolve()
    root = next((p for p in here.parents if (p / ".git").exists()), None)
    if root is None or root / "src" not in here.parents:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
