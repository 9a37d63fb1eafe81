"""The score by search: climbs from theta* along paths that never leave the region."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.consistency._landscape import Landscape
from consilience.consistency._minimum import check_minimum
from consilience.consistency._progress import Progress
from consilience.consistency._quasi_newton import InverseHessian
from consilience.consistency._question import Question
from consilience.consistency._result import Inconsistency, Witness

FINE = 64
"""Points on each segment of a witness at which the region's condition is checked."""


def search(
    question: Question,
    *,
    starts: int = 8,
    steps: int = 200,
    radius: float | None = None,
    checks: int = 8,
    seed: int = 0,
) -> Inconsistency:
    """A lower bound of the score, by constrained ascent from theta*, with its witness.

    Each climb leaves theta* in its own direction and then ascends the other environment's loss,
    along the border of the region once it is there. Steps follow the geometry of the region's own
    loss, learned on the way (L-BFGS). A step counts only if the region's condition holds at
    `checks` points along its straight line; a path that is to be the witness is checked at 64, and
    cut off where it fails.

    Args:
        question: What is asked.
        starts: Climbs per pair.
        steps: The most steps of a climb.
        radius: How far from theta* a climb may go; by default 1000 max(1, norm of theta*).
        checks: Points at which the condition is checked on each segment.
        seed: Of the directions.
    """
    landscape, pairs = question.landscape, question.pairs
    for name, number in (("starts", starts), ("steps", steps), ("checks", checks)):
        if number < 1 or number != int(number):
            raise ValueError(
                f"Parameter `{name}` should be a whole number, 1 or more. "
                f"Found `{name} = {number}`."
            )
    if radius is None:
        radius = 1e3 * max(1.0, float(landscape.origin.norm()))
    if not (radius > 0 and math.isfinite(radius)):
        raise ValueError(
            f"Parameter `radius` should be positive and finite. Found `radius = {radius}`."
        )
    check_minimum(question)
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.full((landscape.environments,) * 2, math.nan, dtype=torch.float64)
    best: tuple[float, tuple[int, int], list[Tensor]] | None = None
    # The difference can be large from below as well. Against theta* that is rare (it takes a loss
    # that falls): a quarter of the climbs; against the same point it is as likely: a half.
    below = 2 if question.against == "point" else 4
    line = Progress("climbs", len(pairs) * starts, shown=question.progress)
    for e, other in pairs:
        climb = _Climb(question, (e, other), radius, checks)
        for start in range(starts):
            sign = -1.0 if start % below == 1 else 1.0
            direction = _direction(landscape, other, start, sign, generator)
            values, points = climb.run(direction, sign, steps)
            top = max(range(len(values)), key=values.__getitem__)
            if best is None or values[top] > best[0]:
                # What is handed out as a witness is looked at more closely.
                inside = climb.inside(points[: top + 1], FINE)
                top = max(range(inside), key=values.__getitem__)
                if best is None or values[top] > best[0]:
                    best = values[top], (e, other), points[: top + 1]
            if not values[top] <= matrix[e, other]:
                matrix[e, other] = values[top]
            line.step(f"score {best[0]:.4g}")
    assert best is not None  # noqa: S101 - there is a pair
    value, pair, path = best[0], best[1], torch.stack(best[2])
    return Inconsistency(
        value,
        method="search",
        meaning=(
            f"a lower bound, reached by the witness, within a distance of {radius:g} "
            f"({starts} climbs per pair)"
        ),
        epsilon=question.epsilon,
        against=question.against,
        matrix=matrix,
        pair=pair,
        witness=Witness(pair, value, path, landscape.unflatten(path[-1])),
        error=math.nan,
    )


def _direction(
    landscape: Landscape, other: int, start: int, sign: float, generator: torch.Generator
) -> Tensor:
    """Return the unit vector along which a climb leaves theta*."""
    if start == 0:
        _, slope = landscape.value_and_gradient(other, landscape.origin)
        if float(slope.norm()) > 0:
            unit: Tensor = sign * slope / slope.norm()
            return unit
    if landscape.size == 1:
        return torch.full_like(landscape.origin, 1.0 if start % 2 == 0 else -1.0)
    vector = torch.randn(landscape.size, generator=generator, dtype=torch.float64)
    vector /= vector.norm()
    return vector.to(landscape.origin)


@dataclass
class _Point:
    """A point of a climb with what is known there."""

    at: Tensor
    inner: float  # the region's loss, relative to theta*
    outer: float  # what is climbed
    inner_slope: Tensor
    outer_slope: Tensor


class _Climb:
    """Climbs for one pair of environments."""

    def __init__(
        self, question: Question, pair: tuple[int, int], radius: float, checks: int
    ) -> None:
        self._landscape, self._radius = question.landscape, radius
        self._e, self._other = pair
        self._epsilon, self._height = question.epsilon, question.heights[pair[0]]
        self._against = question.against
        self._origin = question.landscape.origin
        self._shares = torch.linspace(0, 1, checks + 2)[1:-1].tolist()
        self._unit = max(1.0, float(self._origin.norm()))

    def run(self, direction: Tensor, sign: float, steps: int) -> tuple[list[float], list[Tensor]]:
        """Climb; return the points of the path and the absolute difference at each."""
        here = self._look(self._origin, sign)
        path, history = [here.at], [here.outer]
        geometry, length, depth = InverseHessian(), 1e-2 * self._unit, 1e-6
        there = self._leave(direction, sign)
        for _ in range(steps):
            if there is not None:
                geometry.learn(there.at - here.at, there.inner_slope - here.inner_slope)
                here = there
                path.append(here.at)
                history.append(here.outer)
                if not math.isfinite(here.outer) or self._settled(history):
                    break
            there, length, depth = self._ascend(here, geometry, sign, length, depth)
            if there is None:
                break
        return [math.inf if math.isnan(value) else abs(value) for value in history], path

    def inside(self, path: list[Tensor], checks: int) -> int:
        """Return how many points of a path are reached without leaving the region."""
        shares = torch.linspace(0, 1, checks + 2)[1:].tolist()
        for count, (first, last) in enumerate(itertools.pairwise(path), start=1):
            if not all(
                abs(self._inner(first + share * (last - first))) <= self._epsilon
                for share in shares
            ):
                return count
        return len(path)

    def _settled(self, history: list[float]) -> bool:
        """Return whether the last six steps gained next to nothing."""
        return len(history) > 6 and history[-1] - history[-7] <= 1e-6 * abs(history[-1])

    def _look(self, at: Tensor, sign: float) -> _Point:
        inner, inner_slope = self._landscape.value_and_gradient(self._e, at)
        outer, outer_slope = self._landscape.value_and_gradient(self._other, at)
        if self._against == "point":
            outer, outer_slope = outer - inner, outer_slope - inner_slope
        else:
            outer -= self._height
        return _Point(at, inner - self._height, sign * outer, inner_slope, sign * outer_slope)

    def _inner(self, at: Tensor) -> float:
        return self._landscape.value(self._e, at) - self._height

    def _connected(self, first: Tensor, last: Tensor) -> bool:
        """Return whether the region's condition holds along a segment (its end is known)."""
        return all(
            abs(self._inner(first + share * (last - first))) <= self._epsilon
            for share in self._shares
        )

    def _leave(self, direction: Tensor, sign: float) -> _Point | None:
        """Walk straight from theta* until about half of epsilon is used up."""
        length, reached = 1e-3 * self._unit, 0.0
        for _ in range(60):
            inner = abs(self._inner(self._origin + min(length, self._radius) * direction))
            if inner <= 0.9 * self._epsilon:
                reached = min(length, self._radius)
                if inner >= 0.3 * self._epsilon or length >= min(self._radius, 1e6 * self._unit):
                    break
                length *= 2
            elif reached > 0:
                length = (reached + length) / 2
                if length < 1.01 * reached:
                    break
            else:
                length /= 4
        end = self._origin + reached * direction
        if reached == 0 or not self._connected(self._origin, end):
            return None
        return self._look(end, sign)

    def _ascend(
        self, here: _Point, geometry: InverseHessian, sign: float, length: float, depth: float
    ) -> tuple[_Point | None, float, float]:
        """Return the next point of a climb, or None where no step upwards is left.

        Also the length to try next, and how far below the border to aim.
        """
        way, normal = geometry(here.outer_slope), geometry(here.inner_slope)
        # How fast the region's loss changes along its own normal.
        rate = float(here.inner_slope @ normal)
        side = math.copysign(1.0, here.inner)
        leaving = side * float(here.inner_slope @ way)
        ways = [way]
        if abs(here.inner) > 0.9 * self._epsilon and leaving > 0 and rate > 0:
            ways = [way - (side * leaving / rate) * normal, way]  # along the border, or up to it
        for candidate in ways:
            norm = float(candidate.norm())
            tried = length if norm > 0 and math.isfinite(norm) else 0.0
            while tried > 1e-7 * self._unit:
                end = self._within(here.at + tried / norm * candidate, normal, rate, depth)
                if end is not None:
                    there = self._look(end, sign)
                    if there.outer > here.outer and abs(there.inner) <= self._epsilon:
                        if self._connected(here.at, end):
                            return there, 2 * tried, 1e-6
                        depth = min(0.5, max(1e-2, 4 * depth))
                tried /= 2
        return None, length, depth

    def _within(self, end: Tensor, normal: Tensor, rate: float, depth: float) -> Tensor | None:
        """Bring a point back into the region and the radius; None if it is too far out."""
        for _ in range(6):
            away = end - self._origin
            distance = float(away.norm())
            if distance > self._radius:
                end = self._origin + away * (self._radius / distance * (1 - 1e-6))
            inner = self._inner(end)
            if abs(inner) <= self._epsilon:
                return end
            if not (rate > 0 and math.isfinite(inner)):
                return None
            aim = math.copysign((1 - depth) * self._epsilon, inner)
            end = end - (inner - aim) / rate * normal
        return None
