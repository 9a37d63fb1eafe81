"""Convolutions, plain and transposed, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from consilience.observation.calls import Call, Plan, operator
from consilience.observation.operators.sums import sum_shares
from consilience.observation.shares import Loop, LoopShares, Shares


def weight_gradient(
    x: Tensor,
    outputs: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Callable[[int, int], list[Tensor]]:
    """Return what gives the weight's gradient from a range of arranged slices."""

    def run(start: int, stop: int) -> list[Tensor]:
        if start == stop:
            return [torch.zeros_like(weight)]
        _, gradient, _ = torch.ops.aten.convolution_backward(
            outputs[start:stop],
            x[start:stop],
            weight,
            None,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            [False, True, False],
        )
        return [gradient]

    return run


@operator("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *others: Any,
    **named: Any,
) -> Plan:
    """Observe a convolution: its own weight-gradient kernel, an environment at a time.

    Not: rows elsewhere than in dimension 0; a kernel made from data (dynamic filters).
    """
    transposed = "transpose" in call.name
    order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    rest = dict(zip(order, others, strict=False)) | named
    dims = weight.dim() - 2
    if call.weight(input) is not None or call.is_data(weight):
        raise call.unsupported("its input comes from a parameter, or its weight from data")
    if input.dim() != dims + 2:
        raise call.unsupported("its input has no dimension for rows")
    layout = call.layout(input)
    if layout.dim != 0:
        raise call.unsupported("its input does not hold its rows in dimension 0")
    partition = call.partition(input, layout)
    w, b = call.weight(weight), call.weight(bias)

    def spread(value: Any) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))

    stride, dilation = spread(stride), spread(rest.get("dilation", 1))
    output_padding, groups = spread(rest.get("output_padding", 0)), rest.get("groups", 1)
    widths: list[int] = []
    if isinstance(padding, str):
        full = [
            d * (k - 1) if padding == "same" else 0
            for d, k in zip(dilation, weight.shape[2:], strict=True)
        ]
        padding = [amount // 2 for amount in full]
        # Where "same" cannot pad evenly, one more goes to the far end.
        for amount in reversed(full):
            widths += [0, amount % 2]
    else:
        padding = spread(padding)

    count, target = len(call.weights), weight.shape
    channels = 0 if bias is None else len(bias)

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        (gradient,) = gradients
        found: list[Shares | None] = [None] * count
        if gradient is None:
            return found
        if w is not None:
            x, like = saved
            x = x.to(gradient.dtype)
            if any(widths):
                x = torch.nn.functional.pad(x, widths)
            x, outputs = partition.arrange(x), partition.arrange(gradient)
            like = like.to(gradient.dtype)

            run = weight_gradient(
                x, outputs, like, stride, padding, dilation, transposed, output_padding, groups
            )
            found[w] = LoopShares(Loop(run), 0, partition, target)
        if b is not None:
            shape = torch.Size([channels, *[1] * dims])
            shares = sum_shares(gradient, 0, shape, partition)
            shares.shape = torch.Size([channels])
            found[b] = shares
        return found

    return Plan((input, weight.detach()) if w is not None else (), shares_of, layout)


@operator("convolution", "_convolution")
def general(
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *_: Any,
) -> Plan:
    """Observe the general form, which the others are cases of."""
    call.name = "conv_transpose" if transposed else "conv"
    return convolution(
        call,
        input,
        weight,
        bias,
        stride,
        padding,
        dilation=dilation,
        output_padding=output_padding,
        groups=groups,
    )
