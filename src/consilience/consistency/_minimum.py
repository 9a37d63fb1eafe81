"""Whether theta* is a minimum of the mean loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from consilience.consistency._landscape import Landscape
from consilience.consistency._quasi_newton import InverseHessian
from consilience.consistency._question import Question


def check_minimum(question: Question) -> None:
    """Raise if the mean loss can fall by more than is tolerated from theta*, and say how far.

    Descends along paths on which the mean loss never rises, from theta* and from points next to it
    (at a saddle or a maximum the gradient is zero, too).
    """
    if math.isinf(question.tolerance):
        return
    landscape, tolerance = question.landscape, question.tolerance * question.epsilon
    origin = landscape.origin
    level = sum(question.heights) / len(question.heights)
    generator = torch.Generator().manual_seed(0)
    nudge = torch.randn(landscape.size, generator=generator, dtype=torch.float64).to(origin)
    nudge *= 1e-3 * max(1.0, float(origin.norm())) / nudge.norm()
    for _ in range(40):
        if _mean(landscape, origin + nudge) - level <= 0.1 * tolerance:
            break
        nudge /= 2
    for start in (origin, origin + nudge, origin - nudge):
        lower, end = _descend(landscape, start, level - tolerance)
        if lower < level - tolerance:
            _, slope = _mean_slope(landscape, origin)
            raise ValueError(
                "Parameter `parameters` should be a minimum of the mean loss, up to "
                f"`tolerance * epsilon` = {tolerance:.3g}. Found a descent from it, on which the "
                f"mean loss falls from {level:.6g} to {lower:.6g} or below, at a distance of "
                f"{float((end - origin).norm()):.3g} (the gradient's norm is "
                f"{float(slope.norm()):.3g}). Train further, or raise `tolerance`."
            )


def _descend(landscape: Landscape, start: Tensor, goal: float) -> tuple[float, Tensor]:
    """Descend the mean loss by L-BFGS along a path that never rises."""
    here, geometry = start, InverseHessian()
    value, slope = _mean_slope(landscape, here)
    share = 1e-2 * max(1.0, float(start.norm())) / max(1e-30, float(slope.norm()))
    past = 0
    for _ in range(40):
        way = -geometry(slope)
        fall = float(way @ slope)
        if not fall < 0:
            break
        for _ in range(30):
            end = here + share * way
            along = [_mean(landscape, here + part * (end - here)) for part in (0.25, 0.5, 0.75, 1)]
            levels = [value, *along]
            if levels[-1] <= value + 1e-4 * share * fall and levels == sorted(levels, reverse=True):
                break
            share /= 2
        else:
            break
        new_value, new_slope = _mean_slope(landscape, end)
        geometry.learn(end - here, new_slope - slope)
        here, value, slope, share = end, new_value, new_slope, min(1.0, 4 * share)
        # Once it is clear that this is no minimum, a few steps more show how far it is.
        past += value < goal
        if past > 10:
            break
    return value, here


def _mean(landscape: Landscape, point: Tensor) -> float:
    count = landscape.environments
    return sum(landscape.value(e, point) for e in range(count)) / count


def _mean_slope(landscape: Landscape, point: Tensor) -> tuple[float, Tensor]:
    count = landscape.environments
    found = [landscape.value_and_gradient(e, point) for e in range(count)]
    slope = torch.stack([gradient for _, gradient in found]).mean(0)
    return sum(value for value, _ in found) / count, slope
