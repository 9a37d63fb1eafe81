"""What a step of TemporalAndAdam costs, as a multiple of a step of torch's Adam.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_step.py

Both step on parameters and gradients of the shapes of a ResNet-18, in turns, so that what disturbs
one disturbs the other; the ratio is taken round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from consilience.optim import TemporalAndAdam, TemporalAndMask

TARGET = 1.3


def resnet18_shapes(classes: int = 1000) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a ResNet-18: 62 tensors, 11.7 million components."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            for inputs in (channels, width):
                shapes += [(width, inputs, 3, 3), (width,), (width,)]
            if channels != width:
                shapes += [(width, channels, 1, 1), (width,), (width,)]
            channels = width
    return [*shapes, (classes, channels), (classes,)]


def make_parameters(seed: int = 0) -> list[Tensor]:
    """Return parameters of a ResNet-18's shapes with gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameters: list[Tensor] = []
    for shape in resnet18_shapes():
        parameter = nn.Parameter(0.05 * torch.randn(shape, generator=generator))
        parameter.grad = 0.01 * torch.randn(shape, generator=generator)
        parameters.append(parameter)
    return parameters


Step = Callable[[], Any]
FLOOR = "torch.optim.Adam(foreach=True)"
WAYS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    FLOOR: lambda p: torch.optim.Adam(p, foreach=True),
    "torch.optim.Adam(foreach=False)": lambda p: torch.optim.Adam(p, foreach=False),
    "torch.optim.Adam(fused=True)": lambda p: torch.optim.Adam(p, fused=True),
    "TemporalAndAdam": TemporalAndAdam,
    "TemporalAndAdam(bias_correction=True)": partial(TemporalAndAdam, bias_correction=True),
    "TemporalAndAdam(weight_decay=0.05)": partial(TemporalAndAdam, weight_decay=0.05),
    "TemporalAndAdam(foreach=False)": partial(TemporalAndAdam, foreach=False),
    "TemporalAndMask(Adam(foreach=True), on='gradient')": lambda p: TemporalAndMask(
        torch.optim.Adam(p, foreach=True), 0.79, 0.36
    ),
    "TemporalAndMask(Adam(foreach=True), on='update')": lambda p: TemporalAndMask(
        torch.optim.Adam(p, foreach=True), 0.79, 0.36, "update"
    ),
    "TemporalAndMask(Adam(foreach=True), on='frozen')": lambda p: TemporalAndMask(
        torch.optim.Adam(p, foreach=True), 0.79, 0.36, "frozen"
    ),
}


def measure(rounds: int = 30, threads: int = 1, warm_up: int = 3) -> list[dict[str, Any]]:
    """Time all ways in turns, and return a row for each.

    Args:
        rounds: How often each way steps while timed.
        threads: Threads of torch.
        warm_up: Rounds before those.

    Returns:
        Rows with `way`, `milliseconds` (median), and `ratio`, `low`, `high`: median and quartiles
        over rounds of the time as a multiple of that of Adam in the same round.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps: dict[str, Step] = {name: make(make_parameters()).step for name, make in WAYS.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(warm_up + rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if turn >= warm_up:
                    times[name].append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    rows = []
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times[FLOOR], strict=True)]
        low, median, high = (
            statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * [ratios[0]]
        )
        rows.append(
            {
                "way": name,
                "threads": threads,
                "milliseconds": 1e3 * statistics.median(found),
                "ratio": median,
                "low": low,
                "high": high,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON and not a table")
    options = parser.parse_args()
    rows = measure(options.rounds, options.threads)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("| step | milliseconds | times Adam (quartiles) |\n| --- | --- | --- |")
    for row in rows:
        spread = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        print(f"| `{row['way']}` | {row['milliseconds']:.1f} | {spread} |")


if __name__ == "__main__":
    main()
