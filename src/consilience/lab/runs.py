"""Run directories: what a run leaves on disk, how it is written, and how it is read.

A run lives in ``RUNS/<experiment>/<name>/``::

    config.json             what was run: resolved settings, seed, label, command, versions, commit
    metrics.jsonl           a line per epoch
    checkpoint.safetensors  the model, and all that is needed to go on
    done.json               there once the run is finished

Everything but ``metrics.jsonl`` is replaced in one step. An epoch is written in the order metrics,
checkpoint, so a run that is killed has at most one line more than its checkpoint knows of; that
line (and a last line cut in half) is dropped when the run goes on.

Reading configurations and metrics needs neither torch nor safetensors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilience.lab.errors import LabError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
CONFIG = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.safetensors"
DONE = "done.json"
_Kinds = type | tuple[type, ...]
_NUMBER, _NUMBER_OR_NULL = (int, float), (int, float, type(None))
CONFIG_KEYS: Mapping[str, _Kinds] = {
    "format": int,
    "experiment": str,
    "label": str,
    "seed": int,
    "settings": dict,
    "command": str,
    "versions": dict,
    "commit": (str, type(None)),
}
"""What ``config.json`` has, and of which kind."""
METRIC_KEYS: Mapping[str, _Kinds] = {
    "epoch": int,
    "train_accuracy": _NUMBER,
    "test_accuracy": _NUMBER,
    "train_loss": _NUMBER_OR_NULL,
    "kept": _NUMBER,
    "null_keep_rate": _NUMBER_OR_NULL,
    "seconds": _NUMBER,
}
"""What every line of ``metrics.jsonl`` has, and of which kind.

``epoch`` counts from 1; accuracies and ``kept`` (the share of gradient components kept, averaged
over the steps of the epoch) lie in [0, 1]; ``null_keep_rate`` is the share that random signs would
keep, or null for a method without votes; ``train_loss`` is the mean over the steps of the epoch (it
is null where it is not finite); ``seconds`` is what this epoch took, evaluation included.
"""
_SUMMARY: Mapping[str, _Kinds] = {"epochs": int, "stopped": (str, type(None)), "last": dict}
_MISSING = object()


@dataclass(frozen=True)
class Run:
    """A run directory that has been opened, with its configuration.

    Attributes:
        path: The directory.
        config: What ``config.json`` says (see :data:`CONFIG_KEYS`).
    """

    path: Path
    config: dict[str, Any]

    @property
    def experiment(self) -> str:
        """What was run, `synthetic` for one."""
        return str(self.config["experiment"])

    @property
    def name(self) -> str:
        """The directory's name, which tells runs of an experiment apart."""
        return self.path.name

    @property
    def label(self) -> str:
        """What runs that differ in nothing but the seed share; tables and curves group by it."""
        return str(self.config["label"])

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as resolved."""
        return dict(self.config["settings"])

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return (self.path / DONE).exists()

    def summary(self) -> dict[str, Any] | None:
        """Return what ``done.json`` says: `epochs`, `stopped` and the last metrics; or None.

        `stopped` is null, or says why the run ended before its last epoch.
        """
        if not self.done:
            return None
        found = _read_object(self.path / DONE)
        _check_kinds(self.path / DONE, found, _SUMMARY)
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``, oldest first; empty before the first epoch."""
        return read_metrics(self.path / METRICS)

    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the tensors of the checkpoint and its notes, or None before the first epoch."""
        return read_checkpoint(self.path / CHECKPOINT)

    def model_state(self) -> dict[str, Tensor] | None:
        """Return the model's state dict as of the last finished epoch, or None before the first."""
        found = self.checkpoint()
        if found is None:
            return None
        tensors, _ = found
        prefix = "model."
        return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}


def open_run(path: Path) -> Run:
    """Open a run directory for reading."""
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise LabError(f"`{path}` is no run directory: it has no {CONFIG}.")
    config = _read_object(path / CONFIG)
    if config.get("format", FORMAT) != FORMAT:
        raise LabError(
            f"`{path / CONFIG}` has format {config['format']}; this version of consilience "
            f"reads format {FORMAT}."
        )
    _check_kinds(path / CONFIG, config, CONFIG_KEYS)
    return Run(path, config)


def find_runs(runs: Path, experiment: str | None = None) -> list[Run]:
    """Return all runs below `runs`, or those of one experiment, in the order of their names."""
    return sorted(map(open_run, run_directories(runs, experiment)), key=place)


def place(run: Run) -> tuple[str, str, int, str]:
    """Return what runs are sorted by."""
    return run.experiment, run.label, run.seed, run.name


def run_directories(runs: Path, experiment: str | None = None) -> list[Path]:
    """Return the run directories below `runs`, or those of one experiment, unopened."""
    runs = existing(runs)
    pattern = f"{experiment or '*'}/*/{CONFIG}"
    return sorted(path.parent for path in runs.glob(pattern))


def existing(runs: Path) -> Path:
    """Return a directory of runs, once it is clear that it is one."""
    runs = Path(runs)
    if runs.exists() and not runs.is_dir():
        raise LabError(f"`{runs}` is no directory. Give the one that `--runs` wrote to.")
    if not runs.exists():
        raise LabError(
            f"There is no directory `{runs}`. `consilience run synthetic --runs {runs}` makes it."
        )
    return runs


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file. A last line cut in half by a kill is left out; other damage raises."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise LabError(_damaged(path, f"it is no text ({error.reason})")) from None
    except OSError as error:
        raise LabError(_damaged(path, f"it cannot be read ({error.strerror})")) from None
    lines = text.split("\n")
    whole = lines[:-1]  # what follows the last newline is nothing, or half a line
    for number, line in enumerate(whole, start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise LabError(_damaged(path, f"line {number} is no JSON ({error.msg})")) from None
        if not isinstance(entry, dict):
            raise LabError(_damaged(path, f"line {number} is no object"))
        _check_kinds(path, entry, METRIC_KEYS, f"line {number}: ")
        if entry["epoch"] != number:
            raise LabError(_damaged(path, f"line {number} is of epoch {entry['epoch']}"))
        found.append(entry)
    return found


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read a checkpoint: its tensors by name, and its notes; None where there is none."""
    if not path.exists():
        return None
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (imports torch)

    try:
        with safe_open(path, framework="pt") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
        raise LabError(_damaged(path, f"{type(error).__name__}: {error}")) from None
    return tensors, notes


def write_config(directory: Path, config: Mapping[str, Any]) -> Run:
    """Make a run directory, or open the one that is there if its settings are the same.

    Versions, commit and command may differ; experiment, seed and settings may not.
    """
    if (directory / CONFIG).exists():
        run = open_run(directory)
        for key in ("experiment", "seed"):
            if run.config[key] != config[key]:
                raise LabError(_another(directory, key, run.config[key], config[key]))
        there, here = run.settings, json.loads(json.dumps(config["settings"]))
        for key in sorted(there.keys() | here.keys()):
            if there.get(key) != here.get(key):
                raise LabError(_another(directory, key, there.get(key), here.get(key)))
        return run
    with explaining(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG, {"format": FORMAT, **config})
    return open_run(directory)


def append_metrics(directory: Path, entry: Mapping[str, Any]) -> None:
    """Append the line of one epoch. Numbers that are not finite become null."""
    with explaining(directory), (directory / METRICS).open("a") as file:
        file.write(json.dumps(finite(entry)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with None in place of each number that is not finite."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()
    }


def trim_metrics(directory: Path, epochs: int) -> None:
    """Keep the first `epochs` lines: those that the checkpoint knows of."""
    path = directory / METRICS
    entries = read_metrics(path)
    if len(entries) < epochs:
        raise LabError(
            _damaged(path, f"it has {len(entries)} lines and the checkpoint knows {epochs} epochs")
        )
    if path.exists():
        text = "".join(json.dumps(entry) + "\n" for entry in entries[:epochs])
        write_bytes(path, text.encode())


def write_checkpoint(
    directory: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
) -> None:
    """Replace the checkpoint by tensors and notes (anything that JSON can hold)."""
    from safetensors.torch import save  # noqa: PLC0415 (imports torch)

    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_bytes(directory / CHECKPOINT, save(whole, {"notes": json.dumps(notes)}))


def mark_done(directory: Path, summary: Mapping[str, Any]) -> None:
    """Write the done mark."""
    write_json(directory / DONE, summary)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file in one step."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step: whoever reads it finds the old content or the new."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explaining(path):
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write into a sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = (
                f"The disk is full: `{path}` could not be written. Epochs finished before are "
                "safe. Make room and run the same command again; it goes on from there."
            )
        else:
            message = (
                f"`{path}` could not be written: {error.strerror}. "
                "Choose another place: `--runs DIR`, or `--out` for a report or figures."
            )
        raise LabError(message) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError) as error:  # no JSON, no text, or no file that may be read
        raise LabError(_damaged(path, str(error))) from None
    if not isinstance(found, dict):
        raise LabError(_damaged(path, "it holds no object"))
    return found


def _check_kinds(
    path: Path, entry: Mapping[str, Any], wanted: Mapping[str, _Kinds], where: str = ""
) -> None:
    """Raise where an entry of a file lacks a key, or has something else under it."""
    for key, kinds in wanted.items():
        if not isinstance(entry.get(key, _MISSING), kinds):
            why = f"`{key}` is {json.dumps(entry[key])}" if key in entry else f"it has no `{key}`"
            raise LabError(_damaged(path, where + why))


def _damaged(path: Path, why: str) -> str:
    return (
        f"`{path}` is damaged: {why}. Nothing was changed. Move the run directory away "
        "and run the command again to start that run anew."
    )


def _another(directory: Path, key: str, there: object, here: object) -> str:
    return (
        f"`{directory}` holds a run of another configuration: `{key}` is {there!r} there and "
        f"{here!r} here. Nothing was changed. Choose another `--name` or `--runs`."
    )
