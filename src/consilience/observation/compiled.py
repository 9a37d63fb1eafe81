"""Observing a model that `torch.compile` traces.

While a graph is traced nothing can be kept on the side, so votes ride through autograd. For every
parameter there are *slots*: leaves of its shape that hold no memory. An operation that consumes a
parameter is followed by an opaque operator, which changes nothing in the forward pass, and in the
backward pass returns the ordinary gradient for the parameter and the statistics over environments
as the gradients of its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from consilience.observation.environments import Partition
from consilience.observation.errors import UnknownRowsError, UnsupportedOperationError
from consilience.observation.ledger import Ledger
from consilience.observation.operators.convolution import weight_gradient
from consilience.observation.operators.sums import sum_shares
from consilience.observation.shares import (
    Loop,
    LoopShares,
    ProductShares,
    ScatterShares,
    Shares,
)
from consilience.rules import Statistic

if TYPE_CHECKING:
    from consilience.observation.mode import ObservingMode


class Slots:
    """The slots of some parameters, and what came back through them."""

    def __init__(self, parameters: Sequence[Tensor], statistics: frozenset[Statistic]):
        self.names = [statistic.value for statistic in statistics]
        self.slots = [
            [_slot(p, (2,)), *(_slot(p, p.shape) for _ in statistics)] for p in parameters
        ]

    def collect(self, into: Ledger, names: Sequence[str], observations: int) -> None:
        """Move what came back into a ledger."""
        for i, slots in enumerate(self.slots):
            head = slots[0].grad
            if head is None:
                continue
            uses, voters = (int(value) for value in head.tolist())
            if uses > observations or i in into:
                raise UnsupportedOperationError(
                    f"Parameter `{names[i]}` was consumed more than once in one observation of a "
                    "compiled model. Signs do not add over uses: observe the model uncompiled."
                )
            count = into[i]
            count.voters += voters
            for name, slot in zip(self.names, slots[1:], strict=True):
                assert slot.grad is not None  # noqa: S101 - all slots get theirs together
                count.add(Statistic(name), slot.grad)
        self.clear()

    def clear(self) -> None:
        """Forget what came back."""
        for slots in self.slots:
            for slot in slots:
                slot.grad = None


def _slot(parameter: Tensor, shape: Sequence[int]) -> Tensor:
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    zero = torch.zeros((), dtype=dtype, device=parameter.device)
    return zero.expand(tuple(shape)).requires_grad_()


@torch.library.custom_op("consilience::tap", mutates_args=())
def tap(
    out: Tensor,
    data: Tensor,
    weight: Tensor,
    slots: list[Tensor],
    codes: Tensor,
    kind: str,
    settings: list[int],
    statistics: str,
) -> Tensor:
    """Hand on the output of an operation that consumed a parameter."""
    del data, weight, slots, codes, kind, settings, statistics
    return out.clone()


@tap.register_fake
def _(out: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(out)


@torch.library.custom_op("consilience::shares", mutates_args=())
def shares(
    gradient: Tensor,
    data: Tensor,
    weight: Tensor,
    codes: Tensor,
    kind: str,
    settings: list[int],
    statistics: str,
) -> list[Tensor]:
    """Return the gradient of a parameter, its uses and voters, and its statistics."""
    count = int(codes.max()) + 1
    at = gradient if kind == "sum" else data
    partition = _partition(at, codes, count, kind)
    found = _shares(gradient, data, weight, partition, kind, settings)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    amounts: dict[Statistic, Tensor] = {}

    def sink(statistic: Statistic, amount: Tensor) -> None:
        if statistic in amounts:
            amounts[statistic].add_(amount)
        else:
            amounts[statistic] = amount.to(dtype, copy=True)

    names = statistics.split(",") if statistics else []
    total = found.tally(frozenset(Statistic(name) for name in names), sink)
    head = torch.tensor([1.0, float(count)], dtype=dtype, device=weight.device)
    total = total.to(weight.dtype, copy=True).reshape(weight.shape)
    return [total, head, *(amounts[Statistic(name)] for name in names)]


@shares.register_fake
def _(
    gradient: Tensor,
    data: Tensor,
    weight: Tensor,
    codes: Tensor,
    kind: str,
    settings: list[int],
    statistics: str,
) -> list[Tensor]:
    del gradient, data, codes, kind, settings
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    count = len(statistics.split(",")) if statistics else 0
    wide = [torch.empty(weight.shape, dtype=dtype, device=weight.device) for _ in range(count)]
    head = torch.empty(2, dtype=dtype, device=weight.device)
    return [torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), head, *wide]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, data, weight, slots, codes, kind, settings, statistics = inputs
    ctx.save_for_backward(data, weight, codes)
    ctx.rest = (kind, settings, statistics)
    ctx.count = len(slots)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    data, weight, codes = ctx.saved_tensors
    total, *counted = shares(gradient.contiguous(), data, weight, codes, *ctx.rest)
    return gradient, None, total, counted, None, None, None, None


tap.register_autograd(_backward, setup_context=_remember)


def _partition(at: Tensor, codes: Tensor, count: int, kind: str) -> Partition:
    rows, size = len(codes), at.shape[0] if at.dim() else 0
    doubtful = at.dim() > 2 and size != rows and at.shape[1] == rows and kind != "conv"
    if size == 0 or size % rows or doubtful:
        raise UnknownRowsError(
            f"A compiled operation consumes a parameter together with a tensor of shape "
            f"{list(at.shape)}, and `env` has {rows} labels: rows should be its first dimension. "
            "Observe the model uncompiled, where rows are followed when they move."
        )
    wide = codes.cpu().repeat_interleave(size // rows)
    return Partition.of(wide, count)


def _shares(
    gradient: Tensor,
    data: Tensor,
    weight: Tensor,
    partition: Partition,
    kind: str,
    settings: Sequence[int],
) -> Shares:
    if kind == "linear":
        x = partition.arrange(data.to(gradient.dtype))
        return ProductShares(partition.arrange(gradient), x, partition, weight.shape)
    if kind == "embedding":
        entries = partition.arrange(data)
        slices = torch.arange(partition.size, device=data.device)
        slices = slices.repeat_interleave(entries[:1].numel())
        values = partition.arrange(gradient).reshape(-1, *weight.shape[1:])
        entries = entries.reshape(-1)
        real = entries != settings[0]
        return ScatterShares(entries[real], slices[real], values[real], partition, weight.shape)
    if kind == "conv":
        run = weight_gradient(
            partition.arrange(data.to(gradient.dtype)),
            partition.arrange(gradient),
            weight.detach().to(gradient.dtype),
            *_unpack(settings),
        )
        return LoopShares(Loop(run), 0, partition, weight.shape)
    amount = gradient * data if kind == "mul" else gradient
    shape = torch.Size([*weight.shape, *[1] * settings[0]])
    found = sum_shares(amount, 0, shape, partition)
    found.shape = weight.shape
    return found


def _unpack(settings: Sequence[int]) -> tuple[Any, ...]:
    dims, groups, *rest = settings
    return rest[:dims], rest[dims : 2 * dims], rest[2 * dims : 3 * dims], False, [0] * dims, groups


def trace(
    mode: ObservingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Observe one function of a forward pass that is being traced."""
    if func is Tensor.unflatten:  # which asks a base class that tracing does not know
        x, dim, sizes = args
        dim %= x.dim()
        return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
    tracked = [a for a in (*args, *kwargs.values()) if mode.slots_of(a) is not None]
    if not tracked:
        return func(*args, **kwargs)
    if func is F.linear:
        return _linear(mode, *args, **kwargs)
    if func is F.layer_norm:
        return _layer_norm(mode, *args, **kwargs)
    if func is F.embedding:
        return _embedding(mode, *args, **kwargs)
    if func in (F.conv1d, F.conv2d, F.conv3d):
        return _convolution(mode, func, *args, **kwargs)
    if func in (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__):
        return _broadcast(mode, "sum", func, *args, **kwargs)
    if func in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__):
        return _broadcast(mode, "mul", func, *args, **kwargs)
    raise UnsupportedOperationError(
        f"A parameter cannot be observed in `{func.__name__}` while it is compiled: linear layers, "
        "convolutions, embeddings, layer normalization and broadcast sums and products can. "
        "Observe the model uncompiled, or compile other parts of it."
    )


def _tapped(
    mode: ObservingMode, out: Tensor, weight: Any, data: Tensor, kind: str, settings: list[int]
) -> Tensor:
    slots = mode.slots_of(weight)
    if slots is None or not weight.requires_grad:
        return out
    found: Tensor = tap(
        out, data.detach(), weight, slots, mode.codes, kind, settings, mode.statistic_names
    )
    return found


def _linear(mode: ObservingMode, input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:  # noqa: A002
    out = F.linear(input, weight.detach(), None if bias is None else bias.detach())
    out = _tapped(mode, out, weight, input, "linear", [0])
    return out if bias is None else _tapped(mode, out, bias, input, "sum", [0])


def _layer_norm(
    mode: ObservingMode,
    input: Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    normal = F.layer_norm(input, normalized_shape, None, None, eps)
    out = normal
    if weight is not None:
        out = _tapped(mode, normal * weight.detach(), weight, normal, "mul", [0])
    if bias is not None:
        out = _tapped(mode, out + bias.detach(), bias, input, "sum", [0])
    return out


def _embedding(
    mode: ObservingMode,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    del norm_type
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise UnsupportedOperationError(
            "An embedding with further options cannot be observed while it is compiled."
        )
    out = F.embedding(input, weight.detach(), padding_idx)
    skipped = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _tapped(mode, out, weight, input, "embedding", [skipped])


def _convolution(
    mode: ObservingMode,
    func: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    dims = weight.dim() - 2

    def spread(value: Any) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))

    if isinstance(padding, str):
        raise UnsupportedOperationError(
            f"A convolution with `padding={padding!r}` cannot be observed while it is compiled: "
            "give its padding as numbers."
        )
    settings = [dims, groups, *spread(stride), *spread(padding), *spread(dilation)]
    shift = None if bias is None else bias.detach()
    out = func(input, weight.detach(), shift, stride, padding, dilation, groups)
    out = _tapped(mode, out, weight, input, "conv", settings)
    return out if bias is None else _tapped(mode, out, bias, input, "sum", [dims])


def _broadcast(
    mode: ObservingMode, kind: str, func: Callable[..., Tensor], a: Any, b: Any, **named: Any
) -> Tensor:
    weight, data = (a, b) if mode.slots_of(a) is not None else (b, a)
    if named or mode.slots_of(data) is not None or not isinstance(data, Tensor):
        raise UnsupportedOperationError(
            f"A parameter cannot be observed in this form of `{func.__name__}` while it is "
            "compiled. Observe the model uncompiled, or compile other parts of it."
        )
    out = func(data, weight.detach())
    return _tapped(mode, out, weight, data, kind, [0])
