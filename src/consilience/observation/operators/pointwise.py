"""Arithmetic that broadcasts a bare parameter against rows: ``x + w``, ``x * w``, ``where``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from consilience.observation.calls import Call, Place, Plan, fill, operator, recording
from consilience.observation.layout import Layout, Scattered, after_index
from consilience.observation.operators.products import conjugate
from consilience.observation.operators.sums import sum_shares
from consilience.observation.shares import Shares

FUNCTIONS = (
    "add",
    "sub",
    "subtract",
    "rsub",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "pow",
    "float_power",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "where",
    "lerp",
    "addcmul",
    "addcdiv",
    "atan2",
    "hypot",
    "clamp",
    "clip",
    "clamp_min",
    "clamp_max",
    "fmod",
    "remainder",
    "ldexp",
    "special_xlog1py",
    "logaddexp",
    "logaddexp2",
    "xlogy",
    "copysign",
    "masked_fill",
)


def aligned_layout(call: Call, tensors: Sequence[Tensor], full: int) -> tuple[Layout, int]:
    """Return where the rows are once all tensors are broadcast, and how many slices there are."""
    found: dict[int, tuple[Layout, int]] = {}
    for tensor in tensors:
        if call.weight(tensor) is None and call.is_data(tensor):
            layout = call.layout(tensor)
            size = tensor.shape[layout.dim]
            at = layout.dim + full - tensor.dim()
            if at in found and not found[at][0].same_as(Layout(at, layout.index)):
                raise call.unsupported("its operands hold different rows")
            found[at] = (Layout(at, layout.index), size)
    if len(found) != 1:
        raise call.unsupported("its operands hold rows in different dimensions")
    return next(iter(found.values()))


@operator(*FUNCTIONS, *(name + "_" for name in FUNCTIONS), "max", "min")
def pointwise(call: Call, *args: Any, **kwargs: Any) -> Plan:
    """Observe a function of components that broadcasts its arguments.

    Not: writing data into a parameter in place; ``out=``; a rounding mode.
    """
    flat = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    in_place = call.name.endswith("_")
    name = call.name.rstrip("_")
    if in_place and call.weight(args[0]) is not None:
        raise call.unsupported("it would change a parameter in place by data")
    if kwargs.get("out") is not None:
        raise call.unsupported("with `out`")
    if kwargs.get("rounding_mode") is not None:
        raise call.unsupported("with a rounding mode, it has no gradient")
    shape = torch.broadcast_shapes(*(t.shape for t in flat))  # type: ignore[no-untyped-call]
    layout, size = aligned_layout(call, flat, len(shape))
    partition = call.mode.partition(size, layout)
    call.drop_repeats()
    function = getattr(torch, name) if in_place else call.func
    shapes, targets = call.shapes, [tensor.shape for tensor, _ in call.weights]
    again = recording(flat[0].device.type)
    factors, saved = _factors(call, name, args, kwargs)
    template: Any = None
    if factors is None:
        saved = tuple(flat)
        places = {id(tensor): Place(i) for i, tensor in enumerate(flat)}
        wanted = [places[id(argument)].index for argument in call.arguments]
        template = fill((args, kwargs), lambda tensor: places[id(tensor)])
    if in_place:
        # What the function overwrites is needed as it was.
        saved = tuple(tensor.clone() if tensor is args[0] else tensor for tensor in saved)

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        (gradient,) = gradients
        if gradient is None:
            return [None] * len(targets)
        if factors is not None:
            amounts = [
                gradient * (conjugate(saved[factor.index]) if isinstance(factor, Place) else factor)
                if factor is not None
                else gradient
                for factor in factors
            ]
        else:
            amounts = _slopes(function, template, saved, wanted, gradient, again)
        found = []
        for amount, like, target in zip(amounts, shapes, targets, strict=True):
            shares = sum_shares(amount, layout.dim, like, partition)
            shares.shape = target
            found.append(shares)
        return found

    return Plan(saved, shares_of, layout)


def _factors(
    call: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any] | None, tuple[Tensor, ...]]:
    """Return what the gradient is to be multiplied by for each weight, where that is simple."""
    other = args[1] if len(args) > 1 else kwargs.get("other")
    alpha = kwargs.get("alpha", 1)
    factors: list[Any] = []
    saved: list[Tensor] = []
    for argument in call.arguments:
        first = argument is args[0]
        if name in ("mul", "multiply"):
            factor = other if first else args[0]
            if isinstance(factor, Tensor):
                saved.append(factor)
                factor = Place(len(saved) - 1)
            factors.append(factor)
        elif name == "add":
            factors.append(None if first or alpha == 1 else alpha)
        elif name in ("sub", "subtract"):
            factors.append(None if first else -alpha)
        elif name == "rsub":
            factors.append(-alpha if first else None)
        elif name == "masked_fill":
            mask = args[1] if len(args) > 1 else kwargs["mask"]
            saved.append(~mask if first else mask)
            factors.append(Place(len(saved) - 1))
        else:
            return None, ()
    return factors, tuple(saved)


def _slopes(
    function: Callable[..., Any],
    template: Any,
    saved: Sequence[Tensor],
    wanted: Sequence[int],
    gradient: Tensor,
    again: Callable[[], AbstractContextManager[Any]],
    shape: Sequence[int] | None = None,
) -> list[Tensor]:
    """Differentiate the function once more, with each weight repeated for every component."""
    shape = gradient.shape if shape is None else shape
    wide = {i: saved[i].detach().expand(shape).clone().requires_grad_() for i in set(wanted)}
    args, kwargs = fill(template, lambda place: wide.get(place.index, saved[place.index].detach()))
    with again():
        out = function(*args, **kwargs)
    found = torch.autograd.grad(out, [wide[i] for i in wanted], gradient.to(out.dtype))
    return list(found)


@operator(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "poisson_nll_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
def loss_of_components(call: Call, *args: Any, **kwargs: Any) -> Plan:
    """Observe a loss of components (learned centres, a learned scale), however it is reduced."""
    flat = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in flat))  # type: ignore[no-untyped-call]
    layout, size = aligned_layout(call, flat, len(shape))
    partition = call.mode.partition(size, layout)
    places = {id(tensor): Place(i) for i, tensor in enumerate(flat)}
    wanted = [places[id(argument)].index for argument in call.arguments]
    template = fill((args, kwargs), lambda tensor: places[id(tensor)])
    shapes, function = call.shapes, call.func
    again = recording(flat[0].device.type)

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        (gradient,) = gradients
        if gradient is None:
            return [None] * len(shapes)
        amounts = _slopes(function, template, saved, wanted, gradient, again, shape)
        return [
            sum_shares(amount, layout.dim, like, partition)
            for amount, like in zip(amounts, shapes, strict=True)
        ]

    reduction = kwargs.get("reduction", next((a for a in reversed(args) if type(a) is int), 1))
    return Plan(
        tuple(flat), shares_of, layout if reduction == 0 else Scattered("its rows were summed up")
    )


@operator("prelu")
def prelu(call: Call, input: Tensor, weight: Tensor) -> Plan:  # noqa: A002
    """Observe ``max(0, x) + w * min(0, x)``, with a weight per channel or one for all."""
    if call.weight(weight) is None or call.weight(input) is not None:
        raise call.unsupported("its input comes from a parameter")
    layout = call.layout(input)
    partition = call.partition(input, layout)
    target = weight.shape
    shape = torch.Size([1] * input.dim())
    if weight.numel() > 1:
        shape = torch.Size([1, weight.numel(), *[1] * (input.dim() - 2)])

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        (gradient,) = gradients
        if gradient is None:
            return [None]
        shares = sum_shares(gradient * saved[0].clamp(max=0), layout.dim, shape, partition)
        shares.shape = target
        return [shares]

    return Plan((input,), shares_of, layout)


@operator("cat", "concat", "concatenate")
def cat(call: Call, tensors: Sequence[Tensor], dim: int = 0, *, axis: int | None = None) -> Plan:
    """Observe a concatenation of rows with a parameter repeated for each (a class token).

    Not: along the dimension that holds the rows.
    """
    full = tensors[0].dim()
    dim = (dim if axis is None else axis) % full
    layout, size = aligned_layout(call, tensors, full)
    if layout.dim == dim:
        raise call.unsupported("it appends a parameter to the dimension that holds the rows")
    partition = call.mode.partition(size, layout)
    call.drop_repeats()
    spans, start = [], 0
    for tensor in tensors:
        if (position := call.weight(tensor)) is not None:
            spans.append((position, start, tensor.shape[dim]))
        start += tensor.shape[dim]
    shapes, targets = call.shapes, [tensor.shape for tensor, _ in call.weights]
    if len(spans) != len(targets):
        raise call.unsupported("a parameter stands in it twice")

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        del saved
        (gradient,) = gradients
        found: list[Shares | None] = [None] * len(targets)
        if gradient is None:
            return found
        for i, start, size in spans:
            shares = sum_shares(gradient.narrow(dim, start, size), layout.dim, shapes[i], partition)
            shares.shape = targets[i]
            found[i] = shares
        return found

    return Plan((), shares_of, layout)


@operator("hstack", "column_stack")
def hstack(call: Call, tensors: Sequence[Tensor]) -> Plan:
    """Observe a concatenation along the second dimension."""
    if any(tensor.dim() < 2 for tensor in tensors):
        raise call.unsupported("it appends a parameter to the dimension that holds the rows")
    return cat(call, tensors, 1)


@operator("stack")
def stack(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Plan:
    """Observe a stack of rows with a parameter that is repeated for each."""
    full = tensors[0].dim()
    dim %= full + 1
    layout, size = aligned_layout(call, tensors, full)
    partition = call.mode.partition(size, layout)
    call.drop_repeats()
    places = [
        (position, i)
        for i, tensor in enumerate(tensors)
        if (position := call.weight(tensor)) is not None
    ]
    shapes, targets = call.shapes, [tensor.shape for tensor, _ in call.weights]
    if len(places) != len(targets):
        raise call.unsupported("a parameter stands in it twice")

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        del saved
        (gradient,) = gradients
        found: list[Shares | None] = [None] * len(targets)
        if gradient is None:
            return found
        for i, at in places:
            shares = sum_shares(gradient.select(dim, at), layout.dim, shapes[i], partition)
            shares.shape = targets[i]
            found[i] = shares
        return found

    return Plan((), shares_of, Layout(layout.dim + (layout.dim >= dim), layout.index))


@operator("__setitem__")
def setitem(call: Call, target: Tensor, index: Any, value: Tensor) -> Plan:
    """Observe ``x[:, 0] = w``: a parameter written into every row.

    Not: writing rows into a parameter.
    """
    if call.weight(value) is None:
        raise call.unsupported("it writes rows into a parameter")
    layout = call.layout(target)
    parts = index if isinstance(index, tuple) else (index,)
    whole = len(parts) > layout.dim and all(part == slice(None) for part in parts[: layout.dim + 1])
    basic = all(part is Ellipsis or isinstance(part, (int, slice)) for part in parts)
    written = layout if basic and whole else after_index(target, index, layout, call.mode.rows)
    if isinstance(written, Scattered):
        raise call.unsupported("the rows that it writes a parameter into cannot be told")
    size = target.shape[layout.dim] if written is layout else len(written.rows_of(0, 1))
    partition = call.mode.partition(size, written)
    call.drop_repeats()
    like, wanted = call.shapes[0], call.weights[0][0].shape

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        del saved
        (gradient,) = gradients
        if gradient is None:
            return [None]
        shares = sum_shares(gradient[index], written.dim, like, partition)
        shares.shape = wanted
        return [shares]

    return Plan((), shares_of, layout)
