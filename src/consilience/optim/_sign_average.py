"""The exponential average of a gradient's signs, and what both temporal masks ask of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from consilience.rules._threshold import check_threshold


def bar(threshold: float, beta: float, steps: float | None, dtype: torch.dtype) -> float:
    r"""Return the number that :math:`|a|` must exceed for a component to be kept.

    The test is :math:`|a| \ge \tau`, or :math:`|a| \ge \tau (1 - \beta^t)` where ``steps`` says
    that the bias of an average that began at 0 is to be corrected. What rounding may have taken
    from the average is forgiven: an error of an ulp in every step adds up to
    :math:`1 / (1 - \beta)` of them, and without that slack signs that always agreed would not
    pass a threshold of 1.
    """
    reachable = 1.0 if steps is None else 1 - beta**steps
    return threshold * reachable - _slack(beta, dtype)


def _slack(beta: float, dtype: torch.dtype) -> float:
    return 2 * torch.finfo(dtype).eps / (1 - beta)


def keep_above_(values: Tensor, average: Tensor, least: float) -> Tensor:
    """Set values to 0 in place where ``abs(average) <= least``.

    The derivative of hard shrinkage is this in one pass, without a boolean in between.
    """
    torch.ops.aten.hardshrink_backward.grad_input(values, average, least, grad_input=values)
    return values


def average_dtype(parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's averages: its own, and single for half precision.

    Averages that move by a thousandth in each step stand still in half precision.
    """
    return parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32


def check_beta(name: str, value: Any) -> float:
    """Return the rate of an average as a float, or raise if it does not lie in [0, 1)."""
    if not isinstance(value, Real):
        raise TypeError(f"`{name}` should be a number in [0, 1). Found `{name} = {value!r}`.")
    beta = float(value)
    if not 0 <= beta < 1:  # also refuses NaN
        raise ValueError(f"`{name}` should lie in [0, 1). Found `{name} = {value!r}`.")
    return beta


def check_temporal(name: str, beta: Any, threshold: Any, *, bias_correction: bool) -> None:
    """Raise if an average of signs and its threshold do not make a mask."""
    beta, threshold = check_beta(name, beta), check_threshold(threshold)
    if threshold == 1 and beta > 0 and not bias_correction:
        raise ValueError(
            "`threshold` should lie below 1 where the average of the signs starts at 0 and is not "
            f"corrected for it: it comes near 1 and never gets there. Found `threshold = 1` with "
            f"`{name} = {beta}`. Set `bias_correction = True`, or take a lower threshold."
        )


def check_votes_of(parameter: Tensor, name: str, beta: float) -> None:
    """Raise if a parameter cannot have an average of its gradient's signs."""
    if not parameter.is_floating_point():
        raise TypeError(
            "Parameters should be real and of floating point: a complex number has no sign. Found "
            f"one of {parameter.dtype}. Optimize `torch.view_as_real` of it."
        )
    dtype = average_dtype(parameter)
    if _slack(beta, dtype) > 0.01:
        raise ValueError(
            f"`{name}` should be at most {1 - 200 * torch.finfo(dtype).eps:.6g} for parameters of "
            f"{parameter.dtype}, whose votes are averaged in {dtype}: beyond, rounding would "
            f"decide. Found `{name} = {beta!r}`."
        )


def check_gradients(groups: Iterable[dict[str, Any]], who: str) -> None:
    """Raise if a gradient is sparse or not finite. Waits for the device, once."""
    named = list(_named_gradients(groups))
    for name, gradient in named:
        if gradient.is_sparse:
            raise RuntimeError(
                f"{who} does not support sparse gradients: a component without an entry has not "
                f"voted. Found one for {name}. Set `sparse = False` on the embedding."
            )
    # A sum is finite only if all its terms are. Where it is not, it may also have overflowed.
    sums = [(torch.view_as_real(g) if g.is_complex() else g).sum() for _, g in named]
    if all(map(math.isfinite, _to_floats(sums))):
        return
    for name, gradient in named:
        odd = int((~gradient.isfinite()).sum())
        if odd:
            raise RuntimeError(
                f"{who} needs finite gradients: one that is not would stay in its averages for "
                f"ever. Found {odd} of {gradient.numel()} components of {name} infinite or NaN. "
                "Nothing was changed. Use `torch.amp.GradScaler` (it skips such steps), clip, or "
                "lower the learning rate."
            )


def _named_gradients(groups: Iterable[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for g, group in enumerate(groups):
        names = group.get("param_names")
        for i, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                yield f"`{names[i]}`" if names else f"parameter {i} of group {g}", parameter.grad


def _to_floats(scalars: list[Tensor]) -> list[float]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for scalar in scalars:
        by_device.setdefault(scalar.device, []).append(scalar.to(torch.float64))
    return [value for found in by_device.values() for value in torch.stack(found).tolist()]
