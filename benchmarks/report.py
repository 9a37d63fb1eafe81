"""What a run of the benchmarks found, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.ways import FLOOR, OURS

Result = Mapping[str, Any]


def machine(result: Result) -> str:
    """Return on what it was measured."""
    found = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['processor']}, {found['cores']} cores; {versions}"


def table(result: Result, threads: int) -> str:
    """Return a table of the ratios of all ways, and of memory."""
    lines = [
        "| workload | ordinary step, ms | target | Agreement (quartiles) | memory | others |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for line in result["lines"]:
        if line["threads"] != threads:
            continue
        ways = line["ways"]
        ours = ways[OURS]
        others = [
            f"{name} {short(way['ratio'])}"
            for name, way in sorted(ways.items(), key=lambda item: item[1]["ratio"])
            if name not in (FLOOR, OURS)
        ]
        others += [f"{name}: {why}" for name, why in line["left_out"].items()]
        spread = f"{ours['low']:.2f} to {ours['high']:.2f}"
        lines.append(
            f"| {line['workload']} | {1e3 * ways[FLOOR]['seconds']:.1f} | {line['target']:.2f} | "
            f"**{ours['ratio']:.2f}** ({spread}) | {extra_memory(line):.1f} | "
            f"{'; '.join(others)} |"
        )
    return "\n".join(lines)


def extra_memory(line: Result, way: str = OURS) -> float:
    """Return the peak above that of an ordinary step, in floats per parameter."""
    ways = line["ways"]
    extra = ways[way]["peak_bytes"] - ways[FLOOR]["peak_bytes"]
    return float(extra / 4 / line["parameters"])


def short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def memory_table(result: Result) -> str:
    """Return a table of the peaks of memory above that of an ordinary step."""
    lines = [line for line in result["lines"] if line["threads"] == 1]
    names = [
        name
        for name in dict.fromkeys(name for line in lines for name in line["ways"])
        if name != FLOOR
    ]
    text = [
        "| workload | MB of parameters | " + " | ".join(names) + " |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for line in lines:
        cells = [
            f"{extra_memory(line, name):.1f}" if name in line["ways"] else "-" for name in names
        ]
        size = line["parameters"] * 4 / 2**20
        text.append(f"| {line['workload']} | {size:.1f} | {' | '.join(cells)} |")
    return "\n".join(text)


MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


def draw(result: Result, folder: Path, name: str) -> list[Path]:
    """Draw the ratios of all ways, a line of the picture per workload; return the files."""
    from matplotlib.figure import Figure

    from consilience.lab.figures import INK, PALETTE, save, style

    lines = [line for line in result["lines"] if line["threads"] == 1]
    names = list(dict.fromkeys(name for line in lines for name in line["ways"]))
    names = [OURS, *(name for name in names if name not in (FLOOR, OURS))]
    with style():
        figure = Figure(figsize=(7.2, 1.5 + 0.42 * len(lines)))
        axes = figure.subplots()
        for i, way in enumerate(names):
            found = [
                (line["ways"][way]["ratio"], -row)
                for row, line in enumerate(lines)
                if way in line["ways"]
            ]
            ours = way == OURS
            axes.plot(
                [ratio for ratio, _ in found],
                [row for _, row in found],
                linestyle="none",
                marker=MARKS[i % len(MARKS)],
                markersize=8 if ours else 6,
                color=PALETTE[0] if ours else PALETTE[1 + i % (len(PALETTE) - 1)],
                markerfacecolor=None if ours else "white",
                markeredgewidth=1.3,
                zorder=4 if ours else 3,
                label=way,
            )
        for row, line in enumerate(lines):
            mark = axes.plot(
                2 * [line["target"]], [-row - 0.32, -row + 0.32], color=INK, linestyle="-"
            )
        if lines:
            mark[0].set_label("target")
        axes.axvline(1, color="#888888", linestyle="-", linewidth=1)
        axes.set_xscale("log")
        ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200) if t <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks([-row for row in range(len(lines))], [line["workload"] for line in lines])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("time of a step, in ordinary steps (one thread)")
        figure.legend(loc="outside lower center", ncols=3)
        return save(figure, folder, name)
