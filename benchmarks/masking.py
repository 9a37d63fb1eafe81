"""Ways to set the components without a quorum to zero, timed.

    OMP_NUM_THREADS=1 python benchmarks/masking.py

Prints the table of docs/decisions/masking.md: microseconds, the best of many repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from consilience.rules._masking import keep_agreed

QUORUM = 6


def where(gradient: Tensor, votes: Tensor) -> Tensor:
    return torch.where(votes.abs() >= QUORUM, gradient, 0.0)


def where_and_visible(gradient: Tensor, votes: Tensor) -> Tensor:
    return torch.where((votes.abs() >= QUORUM) | ~gradient.isfinite(), gradient, 0.0)


def product(gradient: Tensor, votes: Tensor) -> Tensor:
    return gradient * (votes.abs() >= QUORUM)


def chosen(gradient: Tensor, votes: Tensor) -> Tensor:
    return keep_agreed(gradient, votes, QUORUM)


def copy(gradient: Tensor, votes: Tensor) -> Tensor:
    del votes
    return gradient.clone()


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "`torch.where(votes.abs() >= quorum, gradient, 0)`": where,
    "the same, infinities kept in sight": where_and_visible,
    "`gradient * (votes.abs() >= quorum)`": product,
    "what the rules do, infinities kept in sight": chosen,
    "`gradient.clone()`": copy,
}


def microseconds(work: Callable[[], object], seconds: float) -> float:
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return 1e6 * best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each way and size")
    options = parser.parse_args()

    sizes = [(256, 256), (1024, 1024), (2048, 2048)]
    columns: list[dict[str, float]] = []
    for size in sizes:
        random = torch.Generator().manual_seed(0)
        gradient = torch.randn(size, generator=random)
        # Votes of eight coin flips: 29% reach the quorum, in no order that could be guessed.
        votes = (2.0 * torch.randint(2, (8, *size), generator=random) - 1).sum(0)
        column = {
            name: microseconds(partial(way, gradient, votes), options.seconds)
            for name, way in WAYS.items()
        }
        parameter = torch.nn.Parameter(torch.zeros(size))
        parameter.grad = gradient
        optimizer = torch.optim.Adam([parameter], foreach=True)
        column["a step of Adam"] = microseconds(optimizer.step, options.seconds)
        columns.append(column)
    print("| microseconds | " + " | ".join(f"{a} x {b}" for a, b in sizes) + " |")
    print("| --- |" + " --- |" * len(sizes))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
