"""What was tried for speed, beside what is done: `docs/performance.md` says why.

OMP_NUM_THREADS=1 python -m benchmarks.trials --clock processor
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import CLOCKS, in_turns
from consilience.observation.environments import Partition
from consilience.observation.operators.convolution import weight_gradient
from consilience.observation.shares import Loop, LoopShares, ProductShares, integer_product, signs
from consilience.rules import Statistic

VOTES = frozenset({Statistic.VOTES})
Trial = Mapping[str, Callable[[], object]]


def ignore(statistic: Statistic, amount: Tensor) -> None:
    del statistic, amount


def of_signs(rows: int, width: int) -> Trial:
    """The votes of single rows on a square weight: a product of signs."""
    left, right = torch.randn(rows, width), torch.randn(rows, width)

    def bfloat16() -> Tensor:
        a, b = left.sign().bfloat16(), right.sign().bfloat16()
        return sum((x.t() @ y).float() for x, y in zip(a.split(256), b.split(256), strict=True))

    return {
        "the ordinary product": lambda: left.t() @ right,
        "signs in int8": lambda: integer_product(signs(left), signs(right), torch.float32),
        "signs in bfloat16": bfloat16,
        "signs in float32": lambda: left.sign().t() @ right.sign(),
    }


def of_environments(environments: int, each: int, width: int) -> Trial:
    """The votes of environments of several rows on a square weight: a product for each."""
    rows = environments * each
    left, right = torch.randn(rows, width), torch.randn(rows, width)
    partition = Partition(rows, tuple(range(0, rows + 1, each)))
    shares = ProductShares(left, right, partition, torch.Size([width, width]))

    def batched(size: int) -> None:
        a, b = left.view(environments, each, width), right.view(environments, each, width)
        total, votes = torch.zeros(width, width), torch.zeros(width, width)
        for start in range(0, environments, size):
            found = a[start : start + size].transpose(1, 2) @ b[start : start + size]
            total.add_(found.sum(0))
            votes.add_(found.sign_().sum(0))

    return {
        "the ordinary product": lambda: left.t() @ right,
        "an environment at a time, in tiles of the weight": partial(shares.tally, VOTES, ignore),
        "four environments at a time, the whole weight": partial(batched, 4),
    }


def of_convolution(rows: int, channels: int, out: int, size: int) -> Trial:
    """The votes of single rows on a convolution of 3 x 3."""
    x, weight = torch.randn(rows, channels, size, size), torch.randn(out, channels, 3, 3)
    gradient = torch.randn(rows, out, size, size)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    kernel = weight_gradient(x, gradient, weight, *settings)
    partition = Partition(rows, tuple(range(rows + 1)))
    shares = LoopShares(Loop(kernel), 0, partition, weight.shape)

    def unfolded() -> None:
        inputs = F.unfold(x, 3, padding=1).transpose(1, 2)
        outputs = gradient.flatten(2).transpose(1, 2)
        shape = torch.Size([out, 9 * channels])
        ProductShares(outputs, inputs, partition, shape).tally(VOTES, ignore)

    return {
        "the ordinary weight gradient": lambda: kernel(0, rows),
        "its own kernel for each row, folded in tiles": lambda: shares.tally(VOTES, ignore),
        "its own kernel for each row, not folded": lambda: [
            kernel(row, row + 1) for row in range(rows)
        ],
        "unfolded, a product for each row": unfolded,
    }


TRIALS: dict[str, Callable[[], Trial]] = {
    "128 rows, 256 wide": partial(of_signs, 128, 256),
    "512 rows, 1024 wide": partial(of_signs, 512, 1024),
    "32 environments of 128 rows, 256 wide": partial(of_environments, 32, 128, 256),
    "8 environments of 64 rows, 1024 wide": partial(of_environments, 8, 64, 1024),
    "128 to 128 channels at 16 x 16, 40 rows": partial(of_convolution, 40, 128, 128, 16),
    "512 to 512 channels at 4 x 4, 40 rows": partial(of_convolution, 40, 512, 512, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="for each trial")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| what | way | times the ordinary (quartiles) |\n| --- | --- | --- |")
    for name, make in TRIALS.items():
        torch.manual_seed(0)
        trial = make()
        floor = next(iter(trial))
        found = in_turns(trial, floor, seconds=options.seconds, clock=options.clock)
        for way, (_, ratio, _) in found.items():
            if way != floor:
                print(
                    f"| {name} | {way} | {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |"
                )


if __name__ == "__main__":
    main()
