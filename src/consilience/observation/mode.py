"""Sees every torch function of a forward pass, and observes those that consume parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from consilience.observation.calls import OPERATORS, Call, fill, recording
from consilience.observation.compiled import Slots, trace
from consilience.observation.environments import Partition
from consilience.observation.errors import (
    CoupledRowsError,
    UnknownRowsError,
    UnsupportedOperationError,
)
from consilience.observation.following import (
    BROADCASTS,
    FOLLOWED,
    MARK,
    REPEATS,
    RESHAPES,
    SAME,
    SHARED,
    SPECIAL,
    VIEWS,
    VIEWS_IN_PLACE,
    WRITERS,
    Following,
    name_of,
    tensors_in,
)
from consilience.observation.layout import PLAIN, Layout, Scattered
from consilience.observation.mixing import mixes
from consilience.observation.operators.normalization import per_environment
from consilience.observation.sources import Call as SourceCall
from consilience.observation.sources import Source
from consilience.observation.uses import Observation

CONSUMERS = frozenset(
    "linear embedding embedding_bag conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d matmul mm bmm addmm lstm gru rnn_tanh rnn_relu lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell".split()
)
"""Functions whose other argument is data, or a constant that was made known as a buffer."""
BATCH_NORMS = frozenset({"batch_norm"})


class Seen(NamedTuple):
    """The tensors among the arguments of a function, by what is known of them."""

    weights: list[tuple[Tensor, Source]]  # came from parameters alone
    data: bool  # some hold rows
    ranks: bool  # with different numbers of dimensions
    shared: bool  # some are the same for all rows
    assumed: bool  # or so it seems, from their shape


class ObservingMode(Following, TorchFunctionMode):
    """Sees every torch function of a forward pass, and observes those that consume parameters."""

    def __init__(
        self,
        observation: Observation,
        constants: Iterable[Tensor],
        *,
        batchnorm: str | None,
        batch_dim: int,
        allow_single: bool,
        slots: Slots,
    ):
        TorchFunctionMode.__init__(self)
        Following.__init__(self, observation, constants, batch_dim)
        slots.open()
        self.slots = slots.slots
        self.owner = slots.owner
        self.parameters = observation.parameters
        self.statistic_names = ",".join(slots.names)
        self.codes = observation.environments.given_codes
        self.batchnorm = batchnorm
        self.allow_single = allow_single
        self._open: list[FunctionType] = []  # Python functions of torch's that are running

    # While a graph is traced

    def slots_of(self, tensor: Any) -> list[Tensor] | None:
        """Return the slots of a parameter; None if it is not tracked."""
        for parameter, slots in zip(self.parameters, self.slots, strict=True):
            if parameter is tensor:
                return slots
        return None

    def index_of(self, parameter: Tensor) -> int:
        """Return which of the tracked parameters this is."""
        return next(i for i, found in enumerate(self.parameters) if found is parameter)

    # What is known of a tensor

    def require_layout(self, tensor: Tensor, call: Call) -> Layout:
        """Return where a tensor's rows are, or raise."""
        layout = self.layout(tensor)
        shape = list(tensor.shape)
        where = f"{self._consumed(call.name, call.weights)} together with"
        if isinstance(layout, Scattered) and self.rows == 1 and tensor.dim():
            return PLAIN  # all there is belongs to the one row
        if isinstance(layout, Scattered):
            raise UnknownRowsError(
                f"{where} a tensor of shape {shape} whose rows cannot be told apart: "
                f"{layout.reason}. Keep rows apart until the loss; or use "
                "`agreement.backward(environment_losses)`, which is exact for any graph."
            )
        if layout is None:
            raise UnknownRowsError(
                f"{where} a tensor of shape {shape}, and the batch has {self.rows} rows: its first "
                "dimension should be the batch, or a multiple of it with each row's slices one "
                "behind the other. If the batch is another dimension of the model's inputs, say "
                "`Agreement(..., batch_dim=1)`; or use `agreement.backward(environment_losses)`."
            )
        if (
            self._kind(tensor) is None
            and not tensor.requires_grad
            and tensor.shape[layout.dim] != self.rows
        ):
            raise self._wrong_length(tensor.shape[layout.dim], where, shape)
        if (
            layout.plain
            and tensor.dim() > 2
            and shape[0] > self.rows
            and shape[1] == self.rows
            and self._kind(tensor) is None
            and self.batch_dim == 0
            and call.name in ("linear", "matmul", "embedding", "layer_norm")
        ):
            raise UnknownRowsError(
                f"{where} a tensor of shape {shape}, and the batch has {self.rows} rows: they may "
                "be its first dimension or its second. If the model's inputs hold the batch "
                "second, say `Agreement(..., batch_dim=1)`; if first, draw another number of rows."
            )
        return layout

    def _wrong_length(self, size: int, where: str, shape: list[int]) -> UnknownRowsError:
        return UnknownRowsError(
            f"{where} a tensor of shape {shape}: the batch seems to have {size} rows, and `env` "
            f"has {self.rows} labels. Give every row of the model's inputs a label. If this tensor "
            "is no data but a constant, register it as a buffer; if the batch is another dimension "
            "of the inputs, say `Agreement(..., batch_dim=1)`."
        )

    def partition(self, size: int, layout: Layout) -> Partition:
        """Return which slices of a dimension belong to which environment."""
        environments = self.observation.environments
        if layout.index is None:
            return environments.partition(size // self.rows)
        return environments.partition_of(layout.index)

    # Seeing functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Observe a function if it consumes a tracked tensor together with rows; else follow it."""
        del types
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return trace(self, func, args, kwargs)
        if func is torch.ops.consilience.tap.default:  # in a graph that was traced before
            return func(*args, **kwargs)
        out = self._dispatch(func, args, kwargs)
        self._see(out)
        return out

    def _dispatch(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Observe, remember, or run a function and follow rows through it."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._moved = True  # `vmap` hides a dimension, and may put it elsewhere in the end
        seen = self._seen((*args, *kwargs.values()) if kwargs else args)
        weights, data = seen.weights, seen.data
        name = name_of(func)
        if name in BATCH_NORMS and data and torch.is_grad_enabled():
            found = self._batch_norm(func, args, kwargs, weights)
            if found is not None:
                return found
        if weights and torch.is_grad_enabled():
            if torch._C._functorch.peek_interpreter_stack() is not None:
                why = "a transformation of `torch.func` (`vmap`, `grad`) hides its rows"
                raise self.unsupported(name, args, kwargs, weights, why)
            tracked_first = bool(args) and any(args[0] is tensor for tensor, _ in weights)
            if name in LIKE and tracked_first:
                return self._derive(func, name, args, kwargs, weights[:1])
            if data and (name in QUESTIONS or name in LIKE):
                weights = []
            if data and name == "__getitem__" and tracked_first and _picks_one(args[1]):
                return self._derive(func, name, args, kwargs, weights)  # an expert, by number
        if weights and torch.is_grad_enabled():
            if data:
                return self._observe(func, name, args, kwargs, weights)
            return self._derive(func, name, args, kwargs, weights)
        if weights and _writes(name) and args[0] is weights[0][0] and not weights[0][1].root:
            return self._derive(func, name, args, kwargs, weights)  # by values alone
        if data and isinstance(func, FunctionType) and self._opens(func, name):
            return self._run_open(func, args, kwargs)
        return self._run(func, name, args, kwargs, seen)

    def _seen(self, values: Iterable[Any]) -> Seen:
        """Look at the tensors among arguments."""
        weights: list[tuple[Tensor, Source]] = []
        data = ranks = shared = assumed = False
        rank = 0
        for tensor in tensors_in(values):
            if tensor.is_nested and torch.is_grad_enabled():
                raise UnknownRowsError(
                    "A nested tensor was met, whose rows are not followed: pad the rows to one "
                    "length instead; or use `agreement.backward(environment_losses)`, which is "
                    "exact for any graph."
                )
            kind = self._kind(tensor)
            if isinstance(kind, Source):
                self._check_unwritten(tensor, kind)
                if all(tensor is not found for found, _ in weights):
                    weights.append((tensor, kind))
            elif kind is SHARED:
                shared = True
            elif kind is None and (
                (not self.observation.environments.settled and not self._settle(tensor))
                or self.layout(tensor) is None
            ):
                shared = True
                assumed = assumed or tensor.dim() > 0
            else:
                data, ranks, rank = True, ranks or (data and tensor.dim() != rank), tensor.dim()
        return Seen(weights, data, ranks, shared, assumed)

    def _run(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: Seen,
    ) -> Any:
        """Call a function that consumes no tracked tensor, and follow rows through it."""
        viewed = self._viewed_in_place(name, args, kwargs) if name in VIEWS_IN_PLACE else None
        out = func(*args, **kwargs)
        if viewed is not None:
            self._mark(out, viewed)
        elif not seen.data:
            if not seen.assumed:
                for tensor in tensors_in((out,)):
                    if self._kind(tensor) is None:
                        self._mark(tensor, SHARED)
        elif self.observation.environments.settled:
            if seen.shared and out is not None and args and out is args[0] and name not in WRITERS:
                self._now_data(args[0])
            ranks = seen.ranks and name in BROADCASTS
            if self._moved or ranks or name in FOLLOWED or mixes(name) or name in SPECIAL:
                self._follow(func, name, args, kwargs, out)
            if isinstance(out, Tensor) and not out.requires_grad and out.dim():
                if name[:4] == "new_" and out.shape[0] != self.rows:
                    self._mark(out, SHARED)
                self._remember_fold(out, args)
        return out

    def _opens(self, func: FunctionType, name: str) -> bool:
        """Whether rows are followed through the functions that a Python function is made of."""
        if name in FOLLOWED or not any(name in func.__globals__ for name in _CHECKS):
            return False
        if func in self._open:
            return False
        return self._moved or name == "multi_head_attention_forward"

    def _run_open(self, func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a Python function such that the functions it is made of are seen."""
        self._open.append(func)
        try:
            with self:
                return _opened(func)(*args, **kwargs)
        finally:
            self._open.pop()

    def _settle(self, tensor: Tensor) -> bool:
        """Learn the number of rows from the first tensor of data that the model is given."""
        if tensor.dim() == 0 or not torch.is_grad_enabled():
            return False
        dim = self.batch_dim if tensor.dim() > self.batch_dim else 0
        self.observation.environments.settle(tensor.shape[dim], allow_single=self.allow_single)
        return True

    # Consuming parameters

    def _check_unwritten(self, tensor: Tensor, source: Source) -> None:
        """Raise where a tensor is no longer what was computed from a parameter."""
        if not source.root and tensor._version != getattr(tensor, MARK).version:
            raise UnsupportedOperationError(
                f"{self._named([(tensor, source)])} was changed in place through a view of it, "
                "which is not followed. Change it as a whole, or compute another tensor; or use "
                "`agreement.backward(environment_losses)`, which is exact for any graph."
            )

    def _derive(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: list[tuple[Tensor, Source]],
    ) -> Any:
        """Remember how a tensor came from parameters alone."""
        if name in CONSUMERS:
            for tensor in tensors_in((*args, *kwargs.values())):
                if tensor.dim() and self._kind(tensor) is None and not tensor.requires_grad:
                    where = f"{self._consumed(name, weights)} together with"
                    raise self._wrong_length(tensor.shape[0], where, list(tensor.shape))
        target = args[0] if args and _writes(name) and isinstance(args[0], Tensor) else None
        given = args
        if target is not None and all(target is not tensor for tensor, _ in weights):
            given = (target.detach().clone(), *args[1:])  # as it was before
        versions = [tensor._version for tensor, _ in weights]
        out = func(*args, **kwargs)
        if target is None and weights[0][0]._version != versions[0] and name != "requires_grad_":
            target = weights[0][0]  # as `relu(x, inplace=True)` writes
        found = [out] if isinstance(out, Tensor) else out
        if target is not None:
            found = [target]
        if not isinstance(found, (list, tuple)):
            return out
        sources = {id(tensor): source for tensor, source in weights}
        first, source = weights[0]
        args = given
        call = SourceCall(
            _as_now(func if target is None else _rewritten(func), first.device.type),
            fill(args, lambda t: sources.get(id(t), t)),
            {k: fill(v, lambda t: sources.get(id(t), t)) for k, v in kwargs.items()},
        )
        roots = tuple(sorted({root for _, s in weights for root in s.roots}))
        for i, tensor in enumerate(found):
            if not isinstance(tensor, Tensor):
                continue
            if target is not None and tensor.requires_grad:
                self._mark(tensor, Source(roots, call, view=False))
                continue
            if id(tensor) in sources:
                continue
            if not tensor.requires_grad:
                self._mark(tensor, SHARED)
                continue
            output = None if isinstance(out, Tensor) else i
            alone = len(weights) == 1 and args and args[0] is first
            if alone and name in SAME and tensor.shape == first.shape:
                made = Source(roots, call, output, view=source.view, same=source)
            elif alone and name in REPEATS and _repeats_ones(first, tensor):
                made = Source(roots, call, output, view=False, base=source)
                self._mark(tensor, made, first)
                continue
            else:
                view = (
                    alone
                    and source.view
                    and (name in VIEWS or name in RESHAPES)
                    and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                    and tensor._is_view()
                )
                made = Source(roots, call, output, view=bool(view))
            self._mark(tensor, made)
        return out

    def _observe(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: list[tuple[Tensor, Source]],
    ) -> Any:
        """Observe a function that consumes tracked tensors together with rows."""
        self._check_alone(name, weights)
        operator = OPERATORS.get(name)
        if name == "broadcast_tensors":
            shape = torch.broadcast_shapes(*(t.shape for t in args))  # type: ignore[no-untyped-call]
            with self:
                return [tensor.expand(shape) for tensor in args]
        twin = operator is not None and _is_builtin_twin(func)
        if isinstance(func, FunctionType) and not twin:
            if func in self._open:
                raise self.unsupported(name, args, kwargs, weights, "no operator observes it")
            return self._run_open(func, args, kwargs)
        if operator is None:
            raise self.unsupported(name, args, kwargs, weights, "no operator observes it")
        call = Call(self, func, name, args, kwargs, weights)
        if any(tensor.is_complex() for tensor, _ in weights) and name not in COMPLEX:
            raise call.unsupported("it is complex")
        try:
            plan = operator(call, *args, **kwargs)
        except TypeError as error:
            raise self.unsupported(name, args, kwargs, weights, str(error)) from error
        detached = {id(tensor): tensor.detach() for tensor, _ in weights}
        out = func(
            *fill(args, lambda t: detached.get(id(t), t)),
            **{k: fill(v, lambda t: detached.get(id(t), t)) for k, v in kwargs.items()},
        )
        return self._tapped(name, out, args, call, plan)

    def _tapped(self, name: str, out: Any, args: tuple[Any, ...], call: Call, plan: Any) -> Any:
        target = args[0] if out is None else out
        call.forget()
        outputs = [target] if isinstance(target, Tensor) else list(target)
        floating = [i for i, t in enumerate(outputs) if t.is_floating_point() or t.is_complex()]
        if not floating:
            return out
        tapped = self.observation.tap(
            name,
            tuple(outputs[i] for i in floating),
            call.weights,
            plan.saved,
            plan.shares_of,
        )
        for i, tensor in zip(floating, tapped, strict=True):
            outputs[i] = tensor
        layouts = plan.layout if isinstance(plan.layout, list) else [plan.layout]
        for tensor, layout in zip(tapped, layouts, strict=False):
            if isinstance(layout, Scattered) or not layout.plain or self._moved:
                self._mark(tensor, layout)
        if out is None:
            self._now_data(target)
            return None
        return outputs[0] if isinstance(target, Tensor) else type(out)(outputs)

    def _batch_norm(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: list[tuple[Tensor, Source]],
    ) -> Any:
        """Treat train-mode batch normalization; None if this one does not couple rows."""
        given: dict[str, Any]
        if isinstance(func, FunctionType):
            given = dict(zip(BATCH_NORM_ARGUMENTS, args, strict=False)) | kwargs
            mean, variance = given.get("running_mean"), given.get("running_var")
            weight, bias = given.get("weight"), given.get("bias")
            training = given.get("training", False)
            momentum, eps = given.get("momentum", 0.1), given.get("eps", 1e-5)
        else:
            _, weight, bias, mean, variance, training, momentum, eps = args[:8]
            given = {"input": args[0]}
        if not training and mean is not None:
            return None
        if self.batchnorm is None:
            raise CoupledRowsError(
                "Batch normalization in training mode couples rows: a row has no gradient of its "
                'own. Choose one of three ways out: `Agreement(..., batchnorm="joint")` counts '
                'rows\' shares of the joint gradient; `Agreement(..., batchnorm="per_environment")`'
                " normalizes each environment by its own statistics; "
                "`agreement.backward(environment_losses)` is exact for the model as it is."
            )
        if self.batchnorm == "joint":
            return None
        if self.layout(given["input"]) is None:
            return None
        call = Call(self, func, "batch_norm", args, kwargs, weights)
        out, layout = per_environment(call, given["input"], mean, variance, momentum, eps)
        if not layout.plain:
            self._mark(out, layout)
        shape = (1, -1, *[1] * (out.dim() - 2))
        with self:
            if weight is not None:
                out = out * weight.reshape(shape)
            if bias is not None:
                out = out + bias.reshape(shape)
        return out

    # Errors

    def _check_alone(self, name: str, weights: Sequence[tuple[Tensor, Source]]) -> None:
        """Check that no other process is to add to these gradients."""
        parallel = DistributedDataParallel._active_ddp_module
        if parallel is None or not parallel.require_backward_grad_sync:
            return
        if torch.distributed.get_world_size(parallel.process_group) > 1:
            raise UnsupportedOperationError(
                f"{self._consumed(name, weights)} in a `DistributedDataParallel`, "
                "which averages gradients over processes: the environments of the other processes "
                "have no vote here, and the processes would drift apart. Run the forward and the "
                "backward pass under `model.no_sync()`, and average `p.grad` over processes after "
                "`agreement.apply()`; each process then agrees on its own environments."
            )

    def _consumed(self, name: str, weights: Sequence[tuple[Tensor, Source]]) -> str:
        named = self._named(weights)
        return f"`{name}` consumes {named[0].lower()}{named[1:]}"

    def _named(self, weights: Sequence[tuple[Tensor, Source]]) -> str:
        roots = sorted({root for _, source in weights for root in source.roots})
        names = ", ".join(f"`{self.observation.names[root]}`" for root in roots)
        derived = any(not source.root for _, source in weights)
        what = "Parameter" if len(roots) == 1 else "Parameters"
        return f"What was computed from {what.lower()} {names}" if derived else f"{what} {names}"

    def unsupported(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: Sequence[tuple[Tensor, Source]],
        why: str,
    ) -> UnsupportedOperationError:
        """Return the error for an operation that has no exact way."""
        shapes = ", ".join(str(list(t.shape)) for t in tensors_in((*args, *kwargs.values())))
        return UnsupportedOperationError(
            f"{self._named(weights)} cannot be observed in `{name}` of tensors of shape {shapes}, "
            f"in a batch of {self.rows} rows: {why}. Rewrite it with supported operations, leave "
            "the parameter out (`Agreement(some_parameters, rule)`), or use "
            "`agreement.backward(environment_losses)`, which is exact for any graph."
        )


BATCH_NORM_ARGUMENTS = "input running_mean running_var weight bias training momentum eps".split()
QUESTIONS = frozenset(
    "equal allclose isclose eq ne lt le gt ge is_same_size result_type can_cast "
    "promote_types logical_and logical_or logical_xor isin bucketize searchsorted "
    "floor_divide".split()
)
"""Functions that give no gradient to a parameter."""
COMPLEX = frozenset("add sub mul matmul einsum mm bmm".split())
WRITES = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__ __imatmul__".split()
)
LIKE = frozenset("to type_as expand_as view_as reshape_as".split())
"""Functions that take no more than a shape or a type from their second argument."""


def _picks_one(index: Any) -> bool:
    """Whether an index picks the same for all rows: all its tensors are single numbers."""
    return all(tensor.dim() == 0 for tensor in tensors_in([index]))


def _writes(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    return name in WRITES or (name[-1:] == "_" and name[-2:] != "__" and name != "requires_grad_")


def _rewritten(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does to a copy of its first argument what another does in place."""
    recorded = torch.is_grad_enabled()

    def run(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = target.clone()
        with torch.set_grad_enabled(recorded):
            func(target, *args, **kwargs)
        return target

    return run


def _as_now(func: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return a function that does later what another does now, under autocast."""
    if not torch.is_autocast_enabled(device):
        return func
    again = recording(device)

    def run(*args: Any, **kwargs: Any) -> Any:
        with again():
            return func(*args, **kwargs)

    return run


def _repeats_ones(before: Tensor, after: Tensor) -> bool:
    lead = after.dim() - before.dim()
    return all(size in (1, after.shape[lead + dim]) for dim, size in enumerate(before.shape))


def _is_builtin_twin(func: Callable[..., Any]) -> bool:
    """Whether a Python function has the arguments of the builtin that the operator is of."""
    return func.__name__ in ("einsum", "__rmatmul__")


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@cache
def _opened(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Python function of torch's that does not ask the mode about itself.

    Such a function first asks whether a mode is active, and hands itself over if so; asked again
    under the mode it would recurse for ever. With that question answered by no, its body runs,
    and the mode sees the functions that it is made of.
    """
    assert isinstance(func, FunctionType)  # noqa: S101 - checked by the caller
    names = {name: _never for name in _CHECKS if name in func.__globals__}
    copy = FunctionType(
        func.__code__,
        {**func.__globals__, **names},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*_: Any) -> bool:
    return False
