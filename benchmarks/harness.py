"""Time and memory of steps, in turns.

What is timed is a step without its optimizer: forgetting the last gradient, the forward pass, the
loss, the backward pass, and what else the way needs until the gradient that it is for lies in
`.grad`. An ordinary step is the same without any of the latter.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]

BURST = 0.02
"""A sample is a burst of steps that takes about as many seconds, or a single longer one."""


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


class Timing(NamedTuple):
    """Seconds of a step, and its ratio to the step of the floor that was timed beside it."""

    seconds: Spread
    ratio: Spread
    samples: int


@contextmanager
def threads(count: int) -> Any:
    """Let torch use some threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""By the processor's clock, other programs' work on a shared machine does not count."""


def time_of(step: Step, repeats: int = 1, clock: str = "wall") -> float:
    read = CLOCKS[clock]
    started = read()
    for _ in range(repeats):
        step()
    return (read() - started) / repeats


def in_turns(
    steps: Mapping[str, Step],
    floor: str,
    *,
    seconds: float,
    least: int = 3,
    burst: float = BURST,
    clock: str = "wall",
) -> dict[str, Timing]:
    """Time steps in rounds, in an order that is drawn anew for each.

    A round holds the floor and whoever had less than its share of the time so far, so that slow
    steps sit out most rounds. Each ratio is taken within a round: what slows the machine down for
    longer than a round slows down both.

    Args:
        steps: By name.
        floor: The name of the one that the others are multiples of.
        seconds: For all of them together.
        least: Samples of each, however long they take.
        burst: Seconds of a sample, for steps that take less.
        clock: Of CLOCKS. The processor's is for one thread.

    Returns:
        A timing for each name.
    """
    repeats = {}
    for name, step in steps.items():
        if burst:  # the first step of all is not typical
            step()
        repeats[name] = max(1, round(burst / max(1e-9, time_of(step, 1, clock)))) if burst else 1
    names = list(steps)
    order = random.Random(0)  # noqa: S311 - no secret
    spent = dict.fromkeys(names, 0.0)
    samples: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    while True:
        elapsed = time.perf_counter() - started
        if elapsed > seconds and min(map(len, samples.values())) >= least:
            break
        share = elapsed / len(names)
        # Once time is up, only who has too few samples goes on.
        late = elapsed > seconds
        chosen = [
            name
            for name in names
            if name == floor or len(samples[name]) < least or (not late and spent[name] <= share)
        ]
        order.shuffle(chosen)
        found = {}
        for name in chosen:
            found[name] = time_of(steps[name], repeats[name], clock)
            spent[name] += found[name] * repeats[name]
        for name, value in found.items():
            samples[name].append(value)
            ratios[name].append(value / found[floor])
    return {
        name: Timing(Spread.of(samples[name]), Spread.of(ratios[name]), len(samples[name]))
        for name in names
    }


def peak_bytes(step: Step) -> int:
    """Return the most that torch held during a step, above what it held before.

    Read off each allocation and release of torch's allocator on the CPU, as its profiler lists
    them. What kernels take from the system without it (scratch space of oneDNN and MKL) is not
    seen.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return most
