"""Charts as inline SVG; colours come from the page's style sheet, so that they follow its theme."""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from consilience.lab.report.readings import Curves

WIDTH, HEIGHT = 340, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 34
WARM, COOL = (0xE6, 0x6A, 0x1F), (0x1F, 0x77, 0xC9)
"""Class 1 and class 0; the style sheet has them too."""
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
MOST_POINTS = 300
"""A curve with more epochs than this is thinned: a screen shows no more."""


@dataclass(frozen=True)
class Series:
    """A metric to draw: mean line, band over seeds, and a thin line per seed.

    Attributes:
        name: What it is called, `test` for one.
        style: The style sheet's class, which sets colour and dashes.
        curves: Its values.
    """

    name: str
    style: str
    curves: Curves


@dataclass(frozen=True)
class Axis:
    """The vertical axis: from value to [0, 1], where its ticks are, and how values read."""

    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]
    read: Callable[[float], str]


def percent(value: float) -> str:
    """Return a share in percent, with more digits near both ends; very small ones as a power.

    Example:
        >>> percent(1.0), percent(0.4998), percent(0.99996), percent(0.00031), percent(4.7e-10)
        ('100%', '50.0%', '>99.99%', '0.031%', '4.7·10⁻¹⁰')
    """
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    if value < 1e-4:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits}·{_power(-int(power))}"
    if value < 0.01:
        return f"{float(f'{100 * value:.2g}'):g}%"
    if value >= 0.99995:  # or it would look like all of them
        return ">99.99%"
    return f"{100 * value:.{1 if value < 0.9995 else 2}f}%"


def accuracy_axis(lowest: float) -> Axis:
    """Axis of accuracies: from 40%, or from 0 where something lies below that."""
    start = 0.4 if lowest >= 0.4 else 0.0
    ticks = (0.4, 0.6, 0.8, 1.0) if start else (0.0, 0.25, 0.5, 0.75, 1.0)
    top = 1.02  # a line at 100% should be seen whole
    return Axis(lambda v: (v - start) / (top - start), [(t, f"{t:.0%}") for t in ticks], percent)


def share_axis(lowest: float) -> Axis:
    """Logarithmic axis of shares up to 100%, with a place for 0 at the bottom.

    Args:
        lowest: The least share above 0 that will be drawn.
    """
    decades = min(12, max(2, math.ceil(-math.log10(lowest) - 1e-9)))
    whole = decades + 0.7  # what is left below the last decade is for 0

    def place(value: float) -> float:
        if value <= 0:
            return 0.0
        return max(0.0, (whole + min(0.0, math.log10(value))) / whole)

    step = 1 if decades <= 4 else 2 if decades <= 8 else 3
    ticks = [(0.0, "0")] + [(10.0**-d, _power(d)) for d in range(0, decades + 1, step)]
    return Axis(place, ticks, percent)


def curves(
    series: Sequence[Series], axis: Axis, *, level: tuple[float, str] | None, what: str
) -> str:
    """Draw metrics over epochs.

    Args:
        series: The metrics; the last one lies on top.
        axis: The vertical axis.
        level: A horizontal line and its name: chance.
        what: A sentence for those who cannot see the picture.
    """
    epochs = max((len(s.curves.epochs) for s in series), default=0)
    if epochs == 0:
        return '<p class="empty">No epoch is finished yet.</p>'
    picked = _thin(epochs)
    parts = [_frame(axis, epochs)]
    if level is not None:
        y = _y(axis, level[0])
        name = y + 12 if y + 14 < HEIGHT - BOTTOM else y - 4
        parts.append(
            f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="level-name" x="{WIDTH - RIGHT}" y="{name:.1f}">'
            f"{escape(level[1])}</text>"
        )
    lines = []
    for one in series:
        there = picked[picked < len(one.curves.epochs)]
        mean, low, high = (values[there] for values in one.curves.over_seeds())
        if len(one.curves.each) > 1:
            parts.append(_band(axis, there, (low, high), epochs, one.style))
            parts += [
                _line(axis, there, seed[there], epochs, f"{one.style} seed")
                for seed in one.curves.each[:20]
            ]
        parts.append(_line(axis, there, mean, epochs, f"{one.style} mean"))
        read = [None if math.isnan(v) else axis.read(v) for v in mean]
        lines.append({"name": one.name, "values": read})
    data = escape(json.dumps({"epochs": (picked + 1).tolist(), "lines": lines}), quote=True)
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/>')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(what)}" '
        f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-most="{epochs}" '
        f'data-curves="{data}">{"".join(parts)}</svg>'
    )


def plane(
    chance_of_one: np.ndarray, extent: float, marks: Sequence[tuple[float, float, int]], what: str
) -> str:
    """Draw what a network says on a plane: the probability of class 1 as colour.

    Class 1 is warm and class 0 cool; what the network is unsure of lets the page shine through.

    Args:
        chance_of_one: Probability of class 1 ``[n, n]``, rows from top to bottom.
        extent: The plane reaches from -extent to extent both ways.
        marks: Points to show: x, y and class (1: filled disc, 0: ring).
        what: A sentence for those who cannot see the picture.
    """
    side = 200
    dots = []
    for x, y, label in marks:
        px, py = ((1 + x / extent) / 2 * side, (1 - y / extent) / 2 * side)
        dots.append(f'<circle class="class{label}" cx="{px:.1f}" cy="{py:.1f}" r="2.6"/>')
    return (
        f'<svg class="plane" viewBox="0 0 {side} {side}" role="img" aria-label="{escape(what)}">'
        f'<image href="{decision(chance_of_one)}" width="{side}" height="{side}"/>'
        f"{''.join(dots)}</svg>"
    )


def decision(chance_of_one: np.ndarray) -> str:
    """Return an image of what a network says as a data address: opacity grows with certainty."""
    level = np.rint(30 * np.clip(chance_of_one, 0, 1)).astype(np.uint8)
    opacity = [round(235 * abs(2 * index / 30 - 1)) for index in range(31)]
    palette = [(*(WARM if index > 15 else COOL), opacity[index]) for index in range(31)]
    return png(palette, level)


def png(palette: Sequence[tuple[int, int, int, int]], index: np.ndarray) -> str:
    """Return an indexed image as a data address.

    Args:
        palette: Up to 256 colours with opacity (red, green, blue, alpha).
        index: Which colour each pixel has ``[height, width]``.
    """
    height, width = index.shape
    scanlines = np.concatenate([np.zeros((height, 1), np.uint8), index], axis=1)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(value for colour in palette for value in colour[:3])),
        (b"tRNS", bytes(colour[3] for colour in palette)),
        (b"IDAT", zlib.compress(scanlines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _power(decade: int) -> str:
    return "1" if decade == 0 else "10⁻" + str(decade).translate(SUPERSCRIPT)


def _thin(epochs: int) -> np.ndarray:
    """Return the positions of the epochs to draw, the first and the last among them."""
    return np.unique(np.linspace(0, epochs - 1, min(epochs, MOST_POINTS)).round().astype(int))


def _x(position: float, epochs: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (position / max(1, epochs - 1))


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, axis.place(value)))


def _frame(axis: Axis, epochs: int) -> str:
    parts = []
    for value, name in axis.ticks:
        y = _y(axis, value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{name}</text>'
        )
    bottom = HEIGHT - BOTTOM
    for epoch in sorted({1, (1 + epochs) // 2, epochs}):
        x = _x(epoch - 1, epochs)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{epoch}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">epoch</text>'
    )
    return "".join(parts)


def _points(axis: Axis, positions: np.ndarray, values: np.ndarray, epochs: int) -> list[str]:
    return [
        f"{_x(p, epochs):.1f},{_y(axis, v):.1f}"
        for p, v in zip(positions.tolist(), values.tolist(), strict=True)
    ]


def _line(axis: Axis, positions: np.ndarray, values: np.ndarray, epochs: int, style: str) -> str:
    """Draw a line, broken where there is no value; a value alone becomes a dot."""
    path = []
    for where in _stretches(~np.isnan(values)):
        points = _points(axis, positions[where], values[where], epochs)
        path.append("M" + "L".join(points if len(points) > 1 else points * 2))
    return f'<path class="line {style}" d="{"".join(path)}"/>' if path else ""


def _band(
    axis: Axis,
    positions: np.ndarray,
    between: tuple[np.ndarray, np.ndarray],
    epochs: int,
    style: str,
) -> str:
    low, high = between
    path = []
    for where in _stretches(~np.isnan(low)):
        there = _points(axis, positions[where], high[where], epochs)
        back = _points(axis, positions[where], low[where], epochs)[::-1]
        path.append("M" + "L".join(there + back) + "Z")
    return f'<path class="band {style}" d="{"".join(path)}"/>' if path else ""


def _stretches(there: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each unbroken stretch of True."""
    positions = np.flatnonzero(there)
    return [s for s in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if s.size]
