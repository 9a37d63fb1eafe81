"""The training loop: epochs, evaluation, checkpoints, and going on after a kill, bit for bit."""

from __future__ import annotations

import contextlib
import fcntl
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from consilience.data import EnvironmentBatchSampler, Rows
from consilience.lab import runs
from consilience.lab.errors import LabError
from consilience.lab.settings import Settings
from consilience.lab.synthetic import make_data, make_method
from consilience.methods import Method, predictions

OnEpoch = Callable[[dict[str, Any]], None]
PATIENCE = 10.0
"""Seconds to wait for another process: one whose command was killed ends with its epoch."""


def train(
    directory: Path,
    method_name: str,
    settings: Settings,
    seed: int,
    *,
    on_epoch: OnEpoch = lambda _: None,
) -> dict[str, Any]:
    """Train one run to its end, or go on with it, and return its summary.

    After each epoch the metrics and a checkpoint are on disk. A run that is killed and called
    again gives the same numbers, bit for bit, as one that is not.

    Args:
        directory: A run directory with its configuration written.
        method_name: What to train.
        settings: Resolved settings.
        seed: Where data, initial weights, order of rows and dropout come from.
        on_epoch: Called with the metrics of each epoch, those of earlier sittings included.
    """
    run = runs.open_run(directory)
    done = run.summary()
    if done is not None:
        return done
    with _alone(directory), _one_thread(), torch.random.fork_rng(devices=[]):
        done = run.summary()  # another process may just have finished it
        if done is not None:
            return done
        torch.manual_seed(seed)
        rows, test = _data(settings, seed)
        method = make_method(method_name, settings, seed)
        sampler = EnvironmentBatchSampler(
            rows.env, settings.environments_per_batch, settings.batch_size, seed=seed
        )
        finished = _resume(directory, method, sampler)
        entry: dict[str, Any] = {}
        for entry in runs.read_metrics(directory / runs.METRICS):
            on_epoch(entry)
        stopped = _why_stop(entry, settings) if entry else None
        for epoch in range(finished + 1, settings.epochs + 1):
            if stopped:
                break
            entry = _epoch(epoch, method, sampler, (rows, test), settings)
            runs.append_metrics(directory, entry)
            _save(directory, epoch, method, sampler)
            on_epoch(entry)
            stopped = _why_stop(entry, settings)
        summary = {"epochs": entry["epoch"], "stopped": stopped, "last": runs.finite(entry)}
        runs.mark_done(directory, summary)
        return summary


def _data(settings: Settings, seed: int) -> tuple[Rows, Rows]:
    """Return the rows of training and of test."""
    data = make_data(settings, seed)
    try:
        return data.train(), data.test(settings.test_rows)
    except ValueError as error:  # such rows cannot be drawn
        raise LabError(str(error)) from None


def _epoch(
    epoch: int,
    method: Method,
    sampler: EnvironmentBatchSampler,
    data: tuple[Rows, Rows],
    settings: Settings,
) -> dict[str, Any]:
    rows, test = data
    start = time.perf_counter()
    drops = len([drop for drop in settings.drops if epoch > int(drop * settings.epochs)])
    for group in method.optimizer.param_groups:
        group["lr"] = settings.learning_rate * 0.1**drops
    for module in method.modules().values():
        module.train()
    steps = [method.step(*rows[torch.tensor(batch)]) for batch in sampler]
    trained = time.perf_counter() - start
    return {
        "epoch": epoch,
        "train_accuracy": accuracy(method.model, rows),
        "test_accuracy": accuracy(method.model, test),
        "train_loss": math.fsum(step.loss for step in steps) / len(steps),
        "kept": math.fsum(step.kept for step in steps) / len(steps),
        "null_keep_rate": steps[-1].null_keep_rate,
        "seconds": time.perf_counter() - start,
        "train_seconds": trained,
        "learning_rate": settings.learning_rate * 0.1**drops,
    }


@torch.no_grad()
def accuracy(model: nn.Module, rows: Rows) -> float:
    """Return the share of rows that a model labels rightly."""
    model.eval()
    right = 0
    for start in range(0, len(rows), 4096):
        x, y, _ = rows[start : start + 4096]
        right += int((predictions(model(x)) == y).sum())
    return right / len(rows)


def _why_stop(entry: dict[str, Any], settings: Settings) -> str | None:
    loss = entry["train_loss"]
    if loss is None or not math.isfinite(loss):
        return "the loss is not finite"
    memorized = entry["train_accuracy"] > 0.97 and entry["test_accuracy"] < 0.60
    if settings.stop_memorizing and memorized:
        return "train accuracy above 97% with test accuracy below 60%"
    return None


def _save(directory: Path, epoch: int, method: Method, sampler: EnvironmentBatchSampler) -> None:
    tensors: dict[str, Tensor] = {"random": torch.get_rng_state()}
    for name, module in method.modules().items():
        tensors |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    for index, state in method.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    notes = {"epoch": epoch, "sampler": sampler.state_dict(), "method": method.state_dict()}
    runs.write_checkpoint(directory, tensors, notes)


def _resume(directory: Path, method: Method, sampler: EnvironmentBatchSampler) -> int:
    """Take up the checkpoint, if there is one, and return how many epochs are finished."""
    found = runs.read_checkpoint(directory / runs.CHECKPOINT)
    if found is None:
        runs.trim_metrics(directory, 0)
        return 0
    tensors, notes = found
    try:
        for name, module in method.modules().items():
            module.load_state_dict(_below(tensors, name))
        optimizer: dict[int, dict[str, Tensor]] = {}
        for name, value in _below(tensors, "optimizer").items():
            index, key = name.split(".")
            optimizer.setdefault(int(index), {})[key] = value
        method.optimizer.load_state_dict({**method.optimizer.state_dict(), "state": optimizer})
        method.load_state_dict(notes["method"])
        sampler.load_state_dict(notes["sampler"])
        torch.set_rng_state(tensors["random"])
        epoch = int(notes["epoch"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split("\n\t")[:2])
        raise LabError(
            f"`{directory / runs.CHECKPOINT}` does not fit this configuration: {why} "
            "Nothing was changed. Move the run directory away and run the command again."
        ) from None
    runs.trim_metrics(directory, epoch)
    return epoch


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = len(prefix) + 1
    return {k[start:]: v for k, v in tensors.items() if k.startswith(f"{prefix}.")}


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold a run directory, which the operating system lets go of however the process ends."""
    with runs.explaining(directory):
        file = (directory / ".lock").open("w")
    with file:
        deadline = time.monotonic() + PATIENCE
        while not _hold(file):
            if time.monotonic() > deadline:
                raise LabError(
                    f"Another process is running `{directory}`. Wait for it, or choose another "
                    "`--name` or `--runs`."
                )
            time.sleep(0.1)
        for draft in directory.glob(".*.part"):  # of a process that was killed while writing
            draft.unlink()
        yield


def _hold(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: sums then have one order, and numbers one value."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_per_epoch(method_name: str, settings: Settings) -> float:
    """Measure a few steps and an evaluation, and return what an epoch takes on a free core.

    By the processor's time, which other work on the machine hardly disturbs.
    """
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rows, _ = _data(settings, 0)
        method = make_method(method_name, settings, 0)
        sampler = EnvironmentBatchSampler(
            rows.env, settings.environments_per_batch, settings.batch_size
        )
        times = []
        for batch, _ in zip(sampler, range(4), strict=False):
            start = time.process_time()
            method.step(*rows[torch.tensor(batch)])
            times.append(time.process_time() - start)
        start = time.process_time()
        accuracy(method.model, rows)
        return min(times) * len(sampler) + time.process_time() - start
