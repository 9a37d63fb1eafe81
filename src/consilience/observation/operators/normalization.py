"""Scales and shifts behind a normalization; batch normalization, which couples rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from consilience.observation.calls import Call, Plan, operator
from consilience.observation.layout import Layout
from consilience.observation.operators.sums import sum_shares
from consilience.observation.shares import Shares


def _affine(
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    shape: torch.Size,
    normalize: Callable[..., Tensor],
    *buffers: Tensor,
) -> Plan:
    """Observe ``normalize(x) * w + b``; what was normalized is computed again in the backward."""
    layout = call.layout(input)
    partition = call.partition(input, layout)
    w, b = call.weight(weight), call.weight(bias)
    like = [tensor.shape for tensor, _ in call.weights]

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        gradient = gradients[0]
        found: list[Shares | None] = [None] * len(like)
        if gradient is None:
            return found
        if w is not None:
            amount = gradient * normalize(*saved).to(gradient.dtype)
            found[w] = sum_shares(amount, layout.dim, shape, partition)
        if b is not None:
            found[b] = sum_shares(gradient, layout.dim, shape, partition)
        for share, size in zip(found, like, strict=True):
            if share is not None:
                share.shape = size
        return found

    return Plan((input, *buffers) if w is not None else (), shares_of, layout)


def _check_outside(call: Call, input: Tensor, count: int) -> None:  # noqa: A002
    if call.layout(input).dim >= input.dim() - count:
        raise call.unsupported("it normalizes over the dimension that holds the rows")


@operator("layer_norm", "rms_norm")
def layer_norm(
    call: Call,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Plan:
    """Observe layer and RMS normalization.

    Not: over the dimension that holds the rows.
    """
    shape = torch.Size(normalized_shape)
    _check_outside(call, input, len(shape))
    if call.name == "rms_norm":
        eps = rest[0] if rest else named.get("eps")
        return _affine(
            call, input, weight, None, shape, lambda x: torch.rms_norm(x, shape, None, eps)
        )
    bias = rest[0] if rest else named.get("bias")
    eps = rest[1] if len(rest) > 1 else named.get("eps", 1e-5)
    return _affine(
        call, input, weight, bias, shape, lambda x: torch.layer_norm(x, shape, None, None, eps)
    )


def _channels(input: Tensor) -> torch.Size:  # noqa: A002
    return torch.Size([input.shape[1], *[1] * (input.dim() - 2)])


def _check_first(call: Call, input: Tensor) -> None:  # noqa: A002
    if call.layout(input).dim != 0:
        raise call.unsupported("its input does not hold its rows in dimension 0")


@operator("group_norm")
def group_norm(
    call: Call,
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Plan:
    """Observe group normalization.

    Not: rows elsewhere than in dimension 0.
    """
    _check_first(call, input)
    return _affine(
        call,
        input,
        weight,
        bias,
        _channels(input),
        lambda x: torch.group_norm(x, num_groups, None, None, eps),
    )


@operator("instance_norm")
def instance_norm(
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    _momentum: float,
    eps: float,
    *_: Any,
) -> Plan:
    """Observe instance normalization, by its own or by running statistics.

    Not: rows elsewhere than in dimension 0.
    """
    _check_first(call, input)
    if use_input_stats:

        def normalize(x: Tensor) -> Tensor:
            return torch.instance_norm(x, None, None, None, None, True, 0.0, eps, False)

        return _affine(call, input, weight, bias, _channels(input), normalize)
    assert running_mean is not None  # noqa: S101 - torch requires them here
    assert running_var is not None  # noqa: S101
    return _affine(
        call,
        input,
        weight,
        bias,
        _channels(input),
        lambda x, mean, var: torch.batch_norm(x, None, None, mean, var, False, 0.0, eps, False),
        running_mean,
        running_var,
    )


@operator("batch_norm")
def batch_norm(
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    _momentum: float,
    eps: float,
    *_: Any,
) -> Plan:
    """Observe batch normalization's scale and shift: rows' shares, by whatever statistics.

    In training mode an error, until ``Agreement(..., batchnorm=...)`` says what to do.
    """
    _check_first(call, input)
    if training or running_mean is None or running_var is None:
        # Reached only with `batchnorm="joint"`: see `per_environment` for the other way.
        return _affine(
            call,
            input,
            weight,
            bias,
            _channels(input),
            lambda x: torch.batch_norm(x, None, None, None, None, True, 0.0, eps, False),
        )
    return _affine(
        call,
        input,
        weight,
        bias,
        _channels(input),
        lambda x, mean, var: torch.batch_norm(x, None, None, mean, var, False, 0.0, eps, False),
        running_mean,
        running_var,
    )


def per_environment(
    call: Call,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Layout]:
    """Normalize each environment by its own statistics.

    Running statistics move once, towards the mean of the environments' statistics.
    """
    _check_first(call, input)
    layout = call.layout(input)
    partition = call.partition(input, layout)
    arranged = partition.arrange(input)
    bounds = [*partition.bounds]
    if partition.known < partition.size:
        bounds.append(partition.size)  # rows of unknown environment are a group of their own
    parts, means, variances = [], [], []
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        part = arranged[start:stop]
        mean = torch.zeros(input.shape[1], dtype=torch.float64).to(part)
        variance = torch.ones_like(mean)
        parts.append(
            torch.nn.functional.batch_norm(part, mean, variance, None, None, True, 1.0, eps)
        )
        means.append(mean)
        variances.append(variance)
    out = torch.cat(parts)
    if partition.order is not None:
        back = torch.argsort(partition.order_on(out.device))
        out = out.index_select(0, back)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(torch.stack(means).mean(0).to(running_mean), momentum)
            running_var.lerp_(torch.stack(variances).mean(0).to(running_var), momentum)
    return out, layout
