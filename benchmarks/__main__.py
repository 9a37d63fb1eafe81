"""Time the ways to a gradient that environments agree on, in turns, against an ordinary step.

    OMP_NUM_THREADS=1 python -m benchmarks

Prints a table, and writes performance.json, performance.svg and performance.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.harness import CLOCKS, in_turns, peak_bytes, threads
from benchmarks.ways import FLOOR, WAYS, Problem, verify
from benchmarks.workloads import WORKLOADS, Workload

PACKAGES = ("consilience", "torch", "numpy", "opacus", "backpack-for-pytorch", "torchjd")
LONGEST = 30.0
"""Seconds that a step may take."""
MOST = 0.25
"""The share of the memory that is free that a way may take: more is mostly waiting for memory."""


def machine() -> dict[str, Any]:
    """Return what the times are of."""
    installed = {found.metadata["Name"] for found in distributions()}
    versions = {"python": platform.python_version()} | {
        package: version(package) for package in PACKAGES if package in installed
    }
    try:
        found = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        fields = dict(line.split(":", 1) for line in found if ":" in line)
        names = {key.strip(): value.strip() for key, value in fields.items()}
        processor = names["model name"]
        if "cpu family" in names:
            processor += f" (family {names['cpu family']}, model {names['model']})"
    except (OSError, KeyError):
        processor = platform.processor() or platform.machine()
    return {"processor": processor, "cores": os.cpu_count(), "versions": versions}


def free_bytes() -> float:
    """Return how much memory is free, as far as can be told."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return float("inf")


def why_not(name: str, workload: Workload, sizes: list[int], seconds: float) -> str | None:
    """Return why a way is left out; None if it is not.

    Args:
        name: Of the way.
        workload: What it would be timed on.
        sizes: Of the parameters.
        seconds: What an ordinary step takes.
    """
    way = WAYS[name]
    if not way.installed:
        return "not installed"
    # The stack of all, and the signs of one of them.
    needed = workload.environments * 4 * (sum(sizes) + 2 * max(sizes))
    if way.stacks and needed > MOST * free_bytes():
        return f"needs {needed / 2**30:.0f} GB"
    expected = workload.environments * seconds / 2
    if way.passes and expected > LONGEST:
        return f"a step would take about {expected:.0f} s"
    return None


def measure(
    workload: Workload,
    ways: Sequence[str],
    counts: Sequence[int],
    *,
    seconds: float,
    clock: str,
    quick: bool,
    say: Any,
) -> list[dict[str, Any]]:
    """Verify, time and weigh the ways on one workload; return a line per number of threads."""
    say(f"{workload.name}: verifying")
    chosen = [name for name in WAYS if name in ways and WAYS[name].fits(workload)]
    verify(workload, [name for name in chosen if WAYS[name].installed])
    if quick:
        workload = workload.smaller()
    problem = Problem.of(workload)
    sizes = [parameter.numel() for parameter in problem.parameters]
    floor = WAYS[FLOOR].step(problem)
    floor()
    started = time.perf_counter()
    floor()
    once = time.perf_counter() - started
    left_out = {
        name: why for name in chosen if (why := why_not(name, workload, sizes, once)) is not None
    }
    del problem, floor
    lines = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers
        peaks: dict[str, int] = {}
        steps = {}
        for name in chosen:
            if name in left_out:
                continue
            say(f"{workload.name}: memory of {name}")
            steps[name] = WAYS[name].step(Problem.of(workload))
            steps[name]()  # the first has more to check
            peaks[name] = peak_bytes(steps[name])
        for count in counts:
            say(f"{workload.name}: timing, threads: {count}")
            with threads(count):
                timings = in_turns(
                    steps,
                    FLOOR,
                    seconds=seconds if count == counts[0] else seconds / 2,
                    least=1 if quick else 3,
                    burst=0.0 if quick else 0.02,
                    clock=clock,
                )
            lines.append(
                {
                    "workload": workload.name,
                    "target": workload.target,
                    "environments": workload.environments,
                    "rows": workload.rows,
                    "parameters": sum(sizes),
                    "threads": count,
                    "clock": clock,
                    "left_out": left_out,
                    "ways": {
                        name: {
                            "seconds": timing.seconds.median,
                            "seconds_low": timing.seconds.low,
                            "seconds_high": timing.seconds.high,
                            "ratio": timing.ratio.median,
                            "low": timing.ratio.low,
                            "high": timing.ratio.high,
                            "samples": timing.samples,
                            "peak_bytes": peaks[name],
                        }
                        for name, timing in timings.items()
                    },
                }
            )
    del steps
    gc.collect()
    return lines


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[1, 2], help="of torch; one run for each"
    )
    parser.add_argument("--seconds", type=float, default=16.0, help="for a workload on one thread")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder of what is written")
    parser.add_argument(
        "--add", action="store_true", help="keep what other workloads are in the JSON already"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small workloads, a step each: is anything broken?"
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = parse(given)
    started = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {what}", flush=True)

    seconds = options.seconds
    if options.quick:
        seconds, options.threads = 0.0, options.threads[:1]
    path = options.out / "performance.json"
    lines: list[dict[str, Any]] = []
    if options.add and path.exists():
        lines = json.loads(path.read_text(encoding="utf-8"))["lines"]
    options.out.mkdir(parents=True, exist_ok=True)
    order = [workload.name for workload in WORKLOADS.values()]
    for name in options.workloads:
        lines = [line for line in lines if line["workload"] != WORKLOADS[name].name]
        lines += measure(
            WORKLOADS[name],
            [*options.ways, FLOOR],
            options.threads,
            seconds=seconds,
            clock=options.clock,
            quick=options.quick,
            say=say,
        )
        lines.sort(key=lambda line: (order.index(line["workload"]), line["threads"]))
        # After each workload, so that a run which is stopped leaves what it found.
        result = {"machine": machine(), "seed": 0, "quick": options.quick, "lines": lines}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    pictures = report.draw(result, options.out, "performance")
    print(f"\n{report.machine(result)}")
    for count in options.threads:
        print(f"\nThreads: {count}\n\n{report.table(result, count)}")
    print("\nPeak memory above an ordinary step, in floats per parameter\n")
    print(report.memory_table(result))
    print(f"\nWritten: {', '.join(str(file) for file in (path, *pictures))}")


if __name__ == "__main__":
    main()
