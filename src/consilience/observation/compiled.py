"""Observing a model that `torch.compile` traces.

While a graph is traced nothing can be kept on the side, so votes ride through autograd. For every
parameter there are *slots*: leaves of its shape that hold no memory. An operation that consumes a
parameter is followed by an opaque operator, which changes nothing in the forward pass, and in the
backward pass returns the ordinary gradient for the parameter and the statistics over environments
as the gradients of its slots.

The opaque operators run as they are, whatever compiles the rest, so they can count how often a
parameter is used: where it is more than once, shares wait for each other as they do elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count as counter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from consilience.observation.environments import Partition
from consilience.observation.errors import (
    CoupledRowsError,
    ObservationError,
    UnknownRowsError,
    UnsupportedOperationError,
)
from consilience.observation.ledger import Count, Ledger
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


@dataclass(eq=False)
class Uses:
    """The uses of one parameter in one observation, and their shares that wait for the others."""

    parameter: int
    count: int = 0
    waiting: dict[int, list[Shares]] = field(default_factory=dict)
    kept: bool = False  # whether a graph was retained, so that more may come through any use
    tallied: bool = False

    def tally(self, count: Count, statistics: frozenset[Statistic]) -> None:
        """Sum an environment's shares over all uses, before taking signs."""
        shares = [share for found in self.waiting.values() for share in found]
        environments = shares[0].partition.count
        for e in range(environments):
            block = shares[0].block(e, e + 1).clone()
            for share in shares[1:]:
                block += share.block(e, e + 1)
            count.add_shares(block, statistics)
        count.voters += environments
        self.waiting, self.tallied = {}, True


class Slots:
    """The slots of some parameters, and what came back through them."""

    def __init__(self, parameters: Sequence[Tensor], statistics: frozenset[Statistic]):
        self.statistics = statistics
        self.names = [statistic.value for statistic in statistics]
        self.slots = [
            [_slot(p, (1,)), *(_slot(p, p.shape) for _ in statistics)] for p in parameters
        ]
        self._back: dict[int, list[Tensor]] = {}
        self._current: dict[int, Uses] = {}
        self._uses: dict[int, Uses] = {}
        self._enlist()

    def _enlist(self) -> None:
        self.owner = str(next(_NUMBERS))
        _OWNERS[self.owner] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be known under a name of its own, as a copy."""
        self.__dict__.update(state)
        self._enlist()

    def open(self) -> None:
        """Begin an observation."""
        self._take_back()
        self._current = {}

    def abandon(self) -> None:
        """Forget the observation that is open, and what came back in it."""
        dropped = {id(uses) for uses in self._current.values()}
        self._uses = {n: uses for n, uses in self._uses.items() if id(uses) not in dropped}
        self._current = {}
        self._emptied()

    def _emptied(self) -> dict[int, list[Tensor]]:
        """Empty the slots; return what was in those of each parameter."""
        found = {}
        for i, slots in enumerate(self.slots):
            if slots[0].grad is not None:  # all of a parameter's get theirs together
                found[i] = [slot.grad for slot in slots if slot.grad is not None]
                for slot in slots:
                    slot.grad = None
        return found

    def _take_back(self) -> None:
        """Move what came back out of the slots, where a later observation cannot touch it."""
        for i, found in self._emptied().items():
            if i in self._back:
                for amount, more in zip(self._back[i], found, strict=True):
                    amount.add_(more)
            else:
                self._back[i] = found

    def enter(self, parameter: int) -> int:
        """Count a use; return its number."""
        uses = self._current.setdefault(parameter, Uses(parameter))
        if uses.tallied:
            raise ObservationError(
                "A parameter of a compiled model was consumed after a backward pass through an "
                "earlier use of it, in the same observation. Signs do not add over uses: run all "
                "forward passes first, or open an observation of its own for each backward pass "
                "(with environments of its own)."
            )
        uses.count += 1
        number = next(_NUMBERS)
        self._uses[number] = uses
        return number

    def arrive(self, number: int, shares: Shares) -> Uses:
        """Take the shares of a use; return it, and those that belong to it."""
        uses = self._uses.get(number)
        if uses is None:
            raise ObservationError(
                "A backward pass came through a compiled model whose votes were applied or cleared "
                "already. Observe a forward pass for each `agreement.apply()`."
            )
        uses.waiting.setdefault(number, []).append(shares)
        return uses

    def collect(self, into: Ledger, names: Sequence[str]) -> bool:
        """Move what came back into a ledger; return whether there was anything."""
        self._take_back()
        came = False
        for i in range(len(self.slots)):
            waiting = {id(u): u for u in self._uses.values() if u.parameter == i and u.waiting}
            if i not in self._back and not waiting:
                continue
            came = True
            if i in into:
                raise UnsupportedOperationError(
                    f"Parameter `{names[i]}` was consumed by a compiled part of the model and by "
                    "one that is not. Signs do not add over uses: observe the model uncompiled, or "
                    "compile all of it."
                )
            count = into[i]
            if i in self._back:
                voters, *amounts = self._back[i]
                count.voters += int(voters)
                for name, amount in zip(self.names, amounts, strict=True):
                    count.add(Statistic(name), amount)
            for uses in waiting.values():
                uses.tally(count, self.statistics)
        self.clear()
        return came

    def clear(self) -> None:
        """Forget what came back."""
        self._emptied()
        self._current, self._uses, self._back = {}, {}, {}


_NUMBERS = counter(1)
_OWNERS: WeakValueDictionary[str, Slots] = WeakValueDictionary()
"""By a name that can stand in a graph."""


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
    owner: str,
    parameter: int,
) -> tuple[Tensor, Tensor]:
    """Hand on the output of an operation that consumed a parameter; return the use's number."""
    del data, weight, slots, codes, kind, settings, statistics
    if owner not in _OWNERS:
        raise _gone()
    return out.clone(), torch.tensor(_OWNERS[owner].enter(parameter))


def _gone() -> ObservationError:
    return ObservationError(
        "The agreement that observed a compiled model is gone. Keep it for as long as graphs of "
        "its observations live."
    )


@tap.register_fake
def _(out: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty((), dtype=torch.long)


@torch.library.custom_op("consilience::shares", mutates_args=())
def shares(
    gradient: Tensor,
    data: Tensor,
    weight: Tensor,
    codes: Tensor,
    number: Tensor,
    kind: str,
    settings: list[int],
    statistics: str,
    owner: str,
) -> list[Tensor]:
    """Return the gradient of a parameter, its voters, and its statistics.

    Zero voters and statistics, where another use of the parameter is still to come.
    """
    at = gradient if kind == "sum" else data
    partition = _partition(at, codes, int(codes.max()) + 1, kind)
    found = _shares(gradient, data, weight, partition, kind, settings)
    wanted = frozenset(Statistic(name) for name in statistics.split(",") if name)
    slots = _OWNERS.get(owner)
    if slots is None:
        raise _gone()
    uses = slots.arrive(int(number), found)
    uses.kept |= torch._C._autograd._get_current_graph_task_keep_graph()
    count = Count()
    if uses.kept or len(uses.waiting) < uses.count:
        total = found.total()
    elif len(uses.waiting) == 1:
        total = found.tally(wanted, count.add)
        count.voters = partition.count
        uses.waiting, uses.tallied = {}, True
    else:
        total = found.total()
        uses.tally(count, wanted)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    zero = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    amounts = [
        count.statistics.get(Statistic(name), zero).to(dtype, copy=True)
        for name in statistics.split(",")
        if name
    ]
    voters = torch.tensor([float(count.voters)], dtype=dtype, device=weight.device)
    return [total.to(weight.dtype, copy=True).reshape(weight.shape), voters, *amounts]


@shares.register_fake
def _(
    gradient: Tensor,
    data: Tensor,
    weight: Tensor,
    codes: Tensor,
    number: Tensor,
    kind: str,
    settings: list[int],
    statistics: str,
    owner: str,
) -> list[Tensor]:
    del gradient, data, codes, number, kind, settings, owner
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    count = len(statistics.split(",")) if statistics else 0
    wide = [torch.empty(weight.shape, dtype=dtype, device=weight.device) for _ in range(count)]
    voters = torch.empty(1, dtype=dtype, device=weight.device)
    return [torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), voters, *wide]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, data, weight, slots, codes, kind, settings, statistics, owner, _ = inputs
    ctx.save_for_backward(data, weight, codes, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.rest = (kind, settings, statistics, owner)
    ctx.count = len(slots)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    data, weight, codes, number = ctx.saved_tensors
    total, *counted = shares(gradient.contiguous(), data, weight, codes, number, *ctx.rest)
    return gradient, None, total, counted, None, None, None, None, None, None


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
    if not torch.is_grad_enabled():
        return func(*args, **kwargs)
    if mode.batch_dim:
        raise UnsupportedOperationError(
            "A model whose inputs hold the batch second cannot be observed while it is compiled: "
            "observe it uncompiled, or let it take its batch first."
        )
    if func in (F.batch_norm, torch.batch_norm) and mode.batchnorm != "joint":
        _check_batch_norm(*args, **kwargs)
    if mode.codes is None:
        _count_rows(mode, args)
    tracked = [a for a in (*args, *kwargs.values()) if mode.slots_of(a) is not None]
    if not tracked:
        out = func(*args, **kwargs)
        _refuse_moves(mode, func, args, kwargs, out)
        return out
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


def _count_rows(mode: ObservingMode, args: tuple[Any, ...]) -> None:
    """Without labels, every row of the first tensor of data is an environment."""
    for a in args:
        if isinstance(a, Tensor) and a.dim() and mode.slots_of(a) is None:
            if any(a is constant for constant in mode.constants):
                continue
            mode.codes = torch.arange(a.shape[0])
            return


def _check_batch_norm(
    input: Tensor,  # noqa: A002
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> None:
    del input, running_var, weight, bias
    if training or running_mean is None:
        raise CoupledRowsError(
            "Batch normalization in training mode couples rows: a row has no gradient of its own. "
            "Observe the model uncompiled, where there are three ways out; or use "
            "`agreement.backward(environment_losses)`, which is exact for the model as it is."
        )


SWAPS = frozenset(
    "transpose swapaxes swapdims permute movedim moveaxis t T mT H mH adjoint".split()
)
ALONG = frozenset(
    "flip roll sort argsort topk gather take_along_dim index_select cat concat concatenate stack "
    "chunk split tensor_split unbind repeat_interleave".split()
)
ALWAYS = frozenset("flipud rot90 tile".split())


def _refuse_moves(
    mode: ObservingMode, func: Callable[..., Any], args: Any, kwargs: Any, out: Any
) -> None:
    """Raise where rows leave their place: while a graph is traced, they cannot be followed."""
    if mode.codes is None or not args or getattr(func, "__name__", "") == "":
        return
    name = func.__name__
    if name == "einsum":
        moved, first = _mixes(args), args[1]
    else:
        first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
        moved = False
    if not isinstance(first, Tensor) or first.dim() == 0 or any(first is c for c in mode.constants):
        return
    if first.shape[0] == 0 or first.shape[0] % mode.codes.shape[0]:
        return
    numbers = _numbers(args[1:]) + _numbers(list(kwargs.values()))
    numbers = [number % first.dim() for number in numbers]
    if name in SWAPS and first.dim() > 1:
        if name == "permute":
            moved = numbers[0] != 0
        elif name in ("mT", "mH", "adjoint"):
            moved = first.dim() == 2
        else:
            moved = not numbers or 0 in numbers
    elif name in ALONG:
        along = _numbers([kwargs[k] for k in ("dim", "dims", "axis") if k in kwargs])
        if not along and name in ("sort", "argsort", "topk"):
            along = _numbers(args[2:3] if name == "topk" else args[1:2]) or [-1]
        elif not along and name in ("roll", "repeat_interleave", "split", "chunk", "tensor_split"):
            along = _numbers(args[2:3]) or [0]
        elif not along:
            along = _numbers(args[1:2]) or [0]
        moved = any(dim % first.dim() == 0 for dim in along)
    elif name in ALWAYS:
        moved = True
    elif name == "repeat":
        moved = len(numbers) > first.dim() or _numbers(args[1:])[0] != 1
    elif name == "__getitem__":
        part = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        moved = isinstance(part, (Tensor, list)) or (
            isinstance(part, slice) and out.shape[0] != first.shape[0]
        )
    if moved:
        raise UnknownRowsError(
            f"`{name}` moves the rows of a tensor of shape {list(first.shape)} in a model that is "
            "compiled, where they cannot be followed. Observe the model uncompiled, or compile "
            "parts of it."
        )


def _numbers(values: Sequence[Any]) -> list[int]:
    """Return the integers among arguments, and in tuples of them."""
    items: list[Any] = []
    for value in values:
        items += value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]


def _mixes(args: Sequence[Any]) -> bool:
    """Whether the result of an einsum does not begin with what all its operands begin with."""
    left, _, right = args[0].replace(" ", "").partition("->")
    return any(term[:1] != right[:1] for term in left.split(","))


def _tapped(
    mode: ObservingMode, out: Tensor, weight: Any, data: Tensor, kind: str, settings: list[int]
) -> Tensor:
    slots = mode.slots_of(weight)
    if slots is None or not weight.requires_grad:
        return out
    found: Tensor = tap(
        out,
        data.detach(),
        weight,
        slots,
        mode.codes,
        kind,
        settings,
        mode.statistic_names,
        mode.owner,
        mode.index_of(weight),
    )[0]
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
