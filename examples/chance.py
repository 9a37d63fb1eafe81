"""What a threshold lets through when the environments agree on nothing.

    python examples/chance.py

Three tables, as they stand in docs/rules.md: which thresholds differ at all, how much of pure
noise each lets through, and how strong pure noise is after the mask and its rescalings.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable

import torch

from consilience import AndMask, Mean, Rule, null_keep_rate, quorum

THRESHOLDS = (0.2, 0.4, 0.6, 0.8, 1.0)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(rate: float) -> str:
    if rate == 1:
        return "all"
    return f"{100 * rate:.3g}%" if rate >= 1e-4 else f"{rate:.1e}"


def lattice(voters: int) -> str:
    """Write which thresholds are different from each other, and what each keeps by chance."""
    steps, above = [], 0.0
    for votes in range(voters % 2, voters + 1, 2):  # votes are odd where voters are
        rate = share(null_keep_rate(voters, votes / voters))
        if votes:
            steps.append(f"above {above:.3g} up to {votes / voters:.3g}: {rate}")
            above = votes / voters
    return "; ".join(steps)


def lattices() -> str:
    rows = [[str(voters), lattice(voters)] for voters in (2, 3, 4, 5, 6, 8, 10)]
    return table(["voters", "thresholds that differ, and the share of noise each keeps"], rows)


def rates() -> str:
    rows = [
        [
            str(voters),
            *(f"{share(null_keep_rate(voters, t))} ({quorum(voters, t)})" for t in THRESHOLDS),
        ]
        for voters in (2, 3, 4, 5, 8, 10, 16, 32, 64, 80, 128, 256)
    ]
    return table(["voters", *map(str, THRESHOLDS)], rows)


def noise(size: int, seeds: int) -> str:
    """Measure the mean square of what rules make of pure noise, as a multiple of the mean's."""
    rules: list[Rule] = [
        Mean(),
        AndMask(0.2),
        AndMask(0.2, rescale="count"),
        AndMask(0.2, rescale="count", max_rescale=3.0),
        AndMask(0.2, rescale="norm"),
    ]
    found: list[list[float]] = [[] for _ in rules]
    for seed in range(seeds):
        random = torch.Generator().manual_seed(seed)
        gradients = torch.randn(80, size, generator=random)
        plain = gradients.mean(0).square().mean()
        for rule, measured in zip(rules, found, strict=True):
            measured.append((rule.combine(gradients).square().mean() / plain).item())
    rows = [
        [f"`{rule}`", f"{statistics.mean(measured):.2f} ± {statistics.stdev(measured):.2f}"]
        for rule, measured in zip(rules, found, strict=True)
    ]
    return table(["rule", "strength of noise, mean gradient = 1"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--size", type=int, default=100_000, help="components of the noise")
    parser.add_argument("--seeds", type=int, default=5, help="draws of the noise")
    options = parser.parse_args()
    print(lattices(), rates(), noise(options.size, options.seeds), sep="\n\n")


if __name__ == "__main__":
    main()
