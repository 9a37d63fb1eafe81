"""What more environments cost, with the number of rows fixed: time and memory.

    OMP_NUM_THREADS=1 python -m benchmarks.scaling

Times are multiples of an ordinary step, taken in turns with it; memory is the peak above that of an
ordinary step, in floats per parameter, of the very first step (in which agreement checks more) and
of a later one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.harness import CLOCKS, in_turns, peak_bytes, threads
from benchmarks.ways import FLOOR, OURS, WAYS, Problem
from benchmarks.workloads import WORKLOADS

ROWS = {"mlp-32x128": 1024, "wide-8x64": 512}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for each model")
    parser.add_argument("--environments", type=int, nargs="+", default=[2, 4, 16, 64, 256])
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    for name, rows in ROWS.items():
        counts = [*options.environments, rows]
        steps, peaks = {}, {}
        sizes = sum(p.numel() for p in Problem.of(WORKLOADS[name]).parameters)
        for count in counts:
            workload = replace(WORKLOADS[name], environments=count, each=rows // count)
            for way in (FLOOR, OURS):
                if way == FLOOR and count != counts[0]:
                    continue
                key = FLOOR if way == FLOOR else str(count)
                first = peak_bytes(WAYS[way].step(Problem.of(workload)))
                steps[key] = WAYS[way].step(Problem.of(workload))
                steps[key]()
                peaks[key] = (first, peak_bytes(steps[key]))
        with threads(1):
            found = in_turns(steps, FLOOR, seconds=options.seconds, clock=options.clock)
        base = found[str(counts[0])].ratio.median
        print(f"\n{name.split('-')[0]}, {rows} rows, {4 * sizes / 2**20:.1f} MB of parameters\n")
        print("| environments | time, in ordinary steps | against two | memory | first step |")
        print("| --- | --- | --- | --- | --- |")
        for count in counts:
            ratio = found[str(count)].ratio
            memory = [
                (mine - floor) / 4 / sizes
                for mine, floor in zip(peaks[str(count)], peaks[FLOOR], strict=True)
            ]
            print(
                f"| {count} | {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) | "
                f"{ratio.median / base:.2f} | {memory[1]:.1f} | {memory[0]:.1f} |"
            )


if __name__ == "__main__":
    main()
