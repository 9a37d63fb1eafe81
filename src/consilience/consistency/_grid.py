"""The score on a grid, for up to three parameters: the connected region found by labelling."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from consilience.consistency._extra import scipy
from consilience.consistency._minimum import check_minimum
from consilience.consistency._progress import Progress
from consilience.consistency._question import Question
from consilience.consistency._result import Inconsistency, Witness, largest

POINTS = {1: 20001, 2: 501, 3: 101}
_COARSE = {1: 513, 2: 129, 3: 41}
"""Nodes along each axis while a box is fitted."""
_BYTES_PER_NODE = 80
"""Values, masks, labels and the coordinates of a node, with what SciPy copies of them."""

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Box:
    """A grid that has theta* on a node.

    Attributes:
        step: The grid's step along each axis.
        below: How many nodes each axis has on the lower side of theta*.
        points: How many nodes each axis has.
    """

    step: Floats
    below: NDArray[np.int64]
    points: int

    @classmethod
    def around(cls, low: Floats, high: Floats, points: int) -> Box:
        """Return a grid from ``-low`` to ``high`` around theta*, or a little more."""
        step = (low + high) / (points - 2)
        below = np.clip(np.ceil(low / step), 1, points - 2).astype(np.int64)
        return cls(step, below, points)

    def axes(self) -> list[Floats]:
        """Return the coordinates along each axis, relative to theta*."""
        nodes = np.arange(self.points)
        return [(nodes - below) * step for below, step in zip(self.below, self.step, strict=True)]

    def offsets(self, nodes: NDArray[Any]) -> Floats:
        """Return the coordinates of nodes ``[k, n]``, relative to theta*."""
        offsets: Floats = (nodes - self.below) * self.step
        return offsets


@dataclass(frozen=True)
class Region:
    """The region N of an environment on a grid.

    Attributes:
        box: The grid.
        inside: Which nodes belong to the connected component of theta*.
        halved: The same as every second node alone would show it.
        open: Whether it reaches the edge of the box, and so may go on outside.
        thin: Whether it has no node all of whose neighbours are inside, so that the grid may have
            lost most of it.
    """

    box: Box
    inside: Mask
    halved: Mask
    open: bool
    thin: bool


def grid(
    question: Question,
    *,
    points: int | None = None,
    width: float | Sequence[float] | None = None,
    memory: float | None = None,
) -> Inconsistency:
    """The score over all nodes of a grid that belong to the connected region of theta*.

    Args:
        question: What is asked.
        points: Nodes along each axis; by default 20001, 501 or 101 in 1, 2 or 3 dimensions.
        width: Half the width of the box around theta*, for all axes or one by one. By default a
            box is fitted to each environment's region.
        memory: How many bytes the work may take; by default half of what is free.
    """
    points = check_grid(question.landscape.size, points, memory)
    half = None if width is None else _half_width(question.landscape.size, width)
    check_minimum(question)
    matrix = torch.full((len(question.heights),) * 2, math.nan, dtype=torch.float64)
    upper = matrix.clone()
    best: tuple[float, Region, NDArray[Any]] | None = None
    doubts = []
    environments = sorted({e for e, _ in question.pairs})
    line = Progress("environments", len(environments), shown=question.progress)
    for e in environments:
        region = find_region(question, e, points, half)
        if region.open:
            doubts.append(f"that of environment {e} goes on beyond the edge of the grid")
        if region.thin:
            doubts.append(f"that of environment {e} is thinner than a cell")
        for other in [b for a, b in question.pairs if a == e]:
            value, at, above = _largest_within(question, region, e, other)
            matrix[e, other], upper[e, other] = value, above
            if best is None or value > best[0]:
                best = value, region, at
        line.step(f"score {float(np.nanmax(matrix.numpy())):.4g}")
    assert best is not None  # noqa: S101 - there is a pair
    value, pair = largest(matrix)
    origin = question.landscape.origin
    path = origin + torch.from_numpy(region_path(best[1], best[2])).to(origin)
    meaning = f"exact up to a grid of {points} nodes along each axis"
    if doubts:
        meaning = f"at least this, on {points} nodes along each axis: regions are not seen whole"
        meaning += f" ({'; '.join(doubts)})"
    return Inconsistency(
        value,
        method="grid",
        meaning=meaning,
        epsilon=question.epsilon,
        against=question.against,
        matrix=matrix,
        pair=pair,
        witness=Witness(pair, value, path, question.landscape.unflatten(path[-1])),
        error=math.inf if doubts else max(0.0, largest(upper)[0] - value),
    )


def _largest_within(
    question: Question, region: Region, e: int, other: int
) -> tuple[float, NDArray[Any], float]:
    """Return a pair's score within a region, the node that has it, and how large it may truly be.

    What the grid misses is judged in two ways: by the nodes next to the region, between which and
    it the true border runs, and by how much the region at half the resolution would have missed
    (a region thinner than the cells falls apart on them).
    """
    landscape = question.landscape
    near = scipy("ndimage").binary_dilation(region.inside, np.ones((3,) * landscape.size))
    nodes = np.argwhere(near | region.halved)
    spots = landscape.origin + torch.from_numpy(region.box.offsets(nodes)).to(landscape.origin)
    losses = landscape.values(other, spots).double()
    base = question.heights[e]
    if question.against == "point":
        losses -= landscape.values(e, spots).double()
        base = 0.0
    found = (losses - base).abs().cpu().numpy()
    inside, halved = region.inside[tuple(nodes.T)], region.halved[tuple(nodes.T)]
    if np.isnan(found[inside]).any():
        raise ValueError(
            f"Losses should be numbers. Found NaN in environment {other} within the region that "
            f"environment {e} holds for as good as theta*."
        )
    at = int(np.where(inside, found, -math.inf).argmax())
    value = float(found[at])
    beyond = np.nan_to_num(found[~halved | inside], nan=math.inf, posinf=math.inf).max()
    return value, nodes[at], max(float(beyond), 2 * value - float(found[halved].max()))


def check_grid(size: int, points: int | None, memory: float | None) -> int:
    """Return the nodes along each axis, or raise if there are too many, or too many axes.

    Before any work is done.
    """
    if size > 3:
        raise ValueError(
            f"`method='grid'` handles up to 3 parameters. Found {size}. Use `method='search'` or "
            "`method='quadratic'`."
        )
    points = POINTS[size] if points is None else points
    if points < 5:
        raise ValueError(f"Parameter `points` should be 5 or more. Found `points = {points}`.")
    needed = float(points) ** size * _BYTES_PER_NODE
    if memory is None:
        try:
            memory = 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):  # not every system tells
            memory = 2e9
    if needed > memory:
        fitting = int((memory / _BYTES_PER_NODE) ** (1 / size))
        raise MemoryError(
            f"A grid of {points}^{size} nodes needs about {needed / 1e9:.3g} GB, more than the "
            f"{memory / 1e9:.3g} GB allowed. Take `points={max(5, fitting)}` or fewer, or raise "
            "`memory`."
        )
    return points


def _half_width(size: int, width: float | Sequence[float]) -> Floats:
    half = np.asarray(width, np.float64)
    if half.shape not in ((), (size,)) or not ((half > 0) & np.isfinite(half)).all():
        raise ValueError(
            f"Parameter `width` should be positive: one number, or one for each of {size} axes. "
            f"Found `width = {width}`."
        )
    return np.broadcast_to(half, (size,))


def find_region(question: Question, e: int, points: int, half: Floats | None = None) -> Region:
    """Find environment ``e``'s region on a grid that fits it, or on the box that is given."""
    origin, size = question.landscape.origin, question.landscape.size
    if half is not None:
        low, high = half.copy(), half.copy()
        fitted = True
    else:
        scale = max(1.0, float(origin.abs().max()))
        low, high = np.full(size, scale), np.full(size, scale)
        fitted = False
    limit = 1e6 * float(max(low.max(), high.max()))
    floor_low, floor_high = np.zeros(size), np.zeros(size)
    while not fitted:
        box = Box.around(low, high, _COARSE[size])
        inside = _component(_sublevel(question, e, box), box.below)
        left, right = _edges(inside)
        # A side that had to grow may not shrink again: a region thinner than the cells of a coarse
        # grid looks small on it, and would have the box go to and fro.
        floor_low = np.where(left, np.minimum(2 * low, limit), floor_low)
        floor_high = np.where(right, np.minimum(2 * high, limit), floor_high)
        new_low, new_high = _fit(box, inside, low, high)
        new_low, new_high = np.maximum(new_low, floor_low), np.maximum(new_high, floor_high)
        # Opposite sides should not differ beyond what a grid resolves.
        new_low, new_high = np.maximum(new_low, 0.1 * new_high), np.maximum(new_high, 0.1 * new_low)
        ratio = (new_low + new_high) / (low + high)
        fitted = bool(((ratio > 0.7) & (ratio < 1.5)).all() or (new_low + new_high < 1e-12).any())
        low, high = new_low, new_high
    while True:
        box = Box.around(low, high, points)
        within = _sublevel(question, e, box)
        inside = _component(within, box.below)
        left, right = _edges(inside)
        grow = (left | right) & (half is None) & (np.maximum(low, high) < limit)
        if not grow.any():
            halved = np.zeros_like(inside)
            every = tuple(slice(below % 2, None, 2) for below in box.below)
            halved[every] = _component(within[every], box.below // 2)
            thin = not scipy("ndimage").binary_erosion(inside).any()
            return Region(box, inside, halved, bool(left.any() or right.any()), thin)
        low, high = np.where(grow & left, 1.5 * low, low), np.where(grow & right, 1.5 * high, high)


def _fit(box: Box, inside: Mask, low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Return how far a region reaches below and above theta*, or an eighth if that is not seen."""
    nodes = np.argwhere(inside)
    first, last = nodes.min(0) - box.below, nodes.max(0) - box.below
    # With a margin of two steps.
    return (
        np.where(first < 0, (2 - first) * box.step, low / 8),
        np.where(last > 0, (last + 2) * box.step, high / 8),
    )


def _edges(inside: Mask) -> tuple[Mask, Mask]:
    """Return along which axes a region touches the lower and the upper edge of its box."""
    axes = range(inside.ndim)
    return (
        np.array([inside.take(0, axis).any() for axis in axes]),
        np.array([inside.take(-1, axis).any() for axis in axes]),
    )


def _sublevel(question: Question, e: int, box: Box) -> Mask:
    """Return which nodes of a box environment ``e`` holds for as good as theta*."""
    landscape, height = question.landscape, question.heights[e]
    axes = [torch.from_numpy(axis) for axis in box.axes()]
    shape = (box.points,) * len(axes)
    within = np.empty(math.prod(shape), dtype=bool)
    for start in range(0, len(within), 65536):  # never all coordinates at once
        nodes = torch.arange(start, min(start + 65536, len(within)))
        index = torch.stack(torch.unravel_index(nodes, shape), 1)
        offsets = torch.stack([axis[index[:, i]] for i, axis in enumerate(axes)], 1)
        values = landscape.values(e, landscape.origin + offsets.to(landscape.origin)).double()
        within[start : start + len(nodes)] = (
            ((values - height).abs() <= question.epsilon).cpu().numpy()
        )
    return within.reshape(shape)


def _component(within: Mask, center: NDArray[np.int64]) -> Mask:
    """Return the part of a set of nodes that is connected (across faces) with a node."""
    labels, _ = scipy("ndimage").label(within)
    component: Mask = labels == labels[tuple(center)]
    return component


def region_path(region: Region, node: NDArray[Any]) -> Floats:
    """Return a path of neighbouring nodes from theta* to a node, relative to theta*."""
    # A rim of outside nodes keeps flat indices from wrapping around.
    inside = np.pad(region.inside, 1)
    start = int(np.ravel_multi_index(tuple(region.box.below + 1), inside.shape))
    goal = int(np.ravel_multi_index(tuple(node + 1), inside.shape))
    strides = np.array(inside.strides) // inside.itemsize
    fresh = inside.ravel().copy()
    fresh[start] = False
    came = np.zeros(inside.size, dtype=np.int64)
    front = np.array([start])
    while fresh[goal]:
        reached = []
        for step in (*strides, *-strides):
            there = front + step
            there = there[fresh[there]]
            fresh[there] = False
            came[there] = there - step
            reached.append(there)
        front = np.concatenate(reached)
    path = [goal]
    while path[-1] != start:
        path.append(int(came[path[-1]]))
    nodes = np.stack(np.unravel_index(path[::-1], inside.shape), 1) - 1
    return region.box.offsets(nodes)
