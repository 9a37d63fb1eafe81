"""What `agreement.apply()` costs, against two reads and one write of the parameters.

    OMP_NUM_THREADS=1 python -m benchmarks.applying

The yardstick is `torch.add` of two tensors of each parameter's shape into a new one.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness import CLOCKS, Spread
from benchmarks.ways import Problem
from benchmarks.workloads import WORKLOADS
from consilience import Agreement


def measure(name: str, rounds: int, clock: str) -> tuple[Spread, Spread, Spread]:
    """Return milliseconds of `apply`, of the yardstick, and their ratio."""
    problem = Problem.of(WORKLOADS[name].smaller())
    workload = problem.workload
    agreement = Agreement(problem.model, workload.rule, batchnorm="joint")
    apply, yardstick = [], []
    read = CLOCKS[clock]
    for turn in range(rounds + 2):
        problem.model.zero_grad()
        with agreement.observe(workload.labels):
            loss = problem.loss()
        loss.backward()
        started = read()
        agreement.apply()
        middle = read()
        sums = [torch.add(p.detach(), p.grad) for p in problem.parameters]
        end = read()
        del sums
        if turn >= 2:
            apply.append(1e3 * (middle - started))
            yardstick.append(1e3 * (end - middle))
    ratios = [a / b for a, b in zip(apply, yardstick, strict=True)]
    return Spread.of(apply), Spread.of(yardstick), Spread.of(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | parameters | `apply`, ms | two reads, one write, ms | ratio (quartiles) |")
    print("| --- | --- | --- | --- | --- |")
    for name in ("mlp-32x128", "wide-8x64", "fast-resnet", "bert"):
        apply, yardstick, ratio = measure(name, options.rounds, options.clock)
        model = WORKLOADS[name].name.split(",")[0]
        size = sum(p.numel() for p in WORKLOADS[name].build().parameters())
        print(
            f"| {model} | {size:,} | {apply.median:.2f} | {yardstick.median:.2f} | "
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |"
        )


if __name__ == "__main__":
    main()
