"""Sees every torch function of a forward pass, and observes those that consume parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from consilience.observation.calls import OPERATORS, Call, fill
from consilience.observation.compiled import Slots, trace
from consilience.observation.environments import Partition
from consilience.observation.errors import (
    CoupledRowsError,
    UnknownRowsError,
    UnsupportedOperationError,
)
from consilience.observation.layout import (
    PLAIN,
    Layout,
    Scattered,
    after_cat,
    after_index,
    after_moving,
    after_repeat,
    after_reshape,
    after_view,
)
from consilience.observation.operators.normalization import per_environment
from consilience.observation.sources import Call as SourceCall
from consilience.observation.sources import Source
from consilience.observation.uses import Observation

MARK = "_consilience_mark"


class Mark(NamedTuple):
    """What is known of a tensor in one observation, kept on the tensor itself."""

    observation: Observation
    kind: Any  # SHARED, a Source, a Layout or Scattered
    base: Tensor | None = None
    version: int = 0  # how often the tensor had been written into


class _Shared:
    def __repr__(self) -> str:
        return "SHARED"


SHARED = _Shared()
"""The mark of a tensor that is the same for all rows: a buffer, a range, a constant."""

VIEWS = frozenset(
    "t transpose permute swapaxes swapdims movedim moveaxis T mT H mH adjoint squeeze unsqueeze "
    "select narrow chunk split tensor_split unbind __getitem__ diagonal __iter__ "
    "split_with_sizes hsplit vsplit dsplit unsafe_chunk unsafe_split".split()
)
RESHAPES = frozenset("view reshape flatten unflatten view_as reshape_as ravel".split())
SAME = frozenset(
    "to float double half bfloat16 type type_as contiguous clone alias requires_grad_ cpu cuda "
    "pin_memory".split()
)
REPEATS = frozenset("expand expand_as broadcast_to repeat tile".split())
JOINS = frozenset("cat concat concatenate stack".split())
REDUCTIONS = frozenset(
    "sum mean amax amin max min prod std var logsumexp norm median any all argmax argmin nansum "
    "nanmean std_mean var_mean aminmax count_nonzero vector_norm".split()
)
MOVES = frozenset("flip roll flipud fliplr rot90".split())
SHUFFLES = frozenset("sort argsort topk gather take_along_dim".split())
PICKS = frozenset("__getitem__ index_select gather take_along_dim".split())
PRODUCTS = frozenset("matmul bmm __matmul__ baddbmm scaled_dot_product_attention".split())
CONSUMERS = frozenset(
    "linear embedding embedding_bag conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d matmul mm bmm addmm lstm gru rnn_tanh rnn_relu lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell".split()
)
"""Functions whose other argument is data, or a constant that was made known as a buffer."""
FOLLOWED = (
    MOVES
    | VIEWS
    | RESHAPES
    | REPEATS
    | JOINS
    | REDUCTIONS
    | SHUFFLES
    | {
        "index_select",
        "repeat_interleave",
        "einsum",
    }
)
NORMALIZATIONS = frozenset("group_norm instance_norm batch_norm".split())
UNFOLLOWED = frozenset("mm einsum tensordot cdist outer kron".split())
"""Not functions of components, though their output may happen to have an input's shape."""

BATCH_NORMS = frozenset({"batch_norm"})


def name_of(func: Callable[..., Any]) -> str:
    """Return a function's name; of an attribute's getter, the attribute's."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)  # type: ignore[attr-defined]
    return name


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in lists of arguments."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            yield from tensors_in(value)


class ObservingMode(TorchFunctionMode):
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
        super().__init__()
        slots.open()
        self.slots = slots.slots
        self.owner = slots.owner
        self.parameters = observation.parameters
        self.statistic_names = ",".join(slots.names)
        self.codes = observation.environments.given_codes
        self.observation = observation
        self.batchnorm = batchnorm
        self.batch_dim = batch_dim
        self.allow_single = allow_single
        self._sources: dict[int, Source] = {
            id(parameter): Source((i,)) for i, parameter in enumerate(observation.parameters)
        }
        self.constants = list(constants)
        self._constants = {id(tensor) for tensor in self.constants}
        self._moved = batch_dim != 0  # whether any tensor has its rows elsewhere

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

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return self.observation.environments.rows

    def _kind(self, tensor: Tensor) -> Any:
        source = self._sources.get(id(tensor))
        if source is not None:
            return source if tensor.requires_grad else SHARED
        mark: Mark | None = getattr(tensor, MARK, None)
        if mark is not None and mark.observation is self.observation:
            if mark.kind is SHARED and tensor.requires_grad and tensor._version != mark.version:
                return Scattered("it was written into through a view")
            return mark.kind
        if id(tensor) in self._constants or isinstance(tensor, Parameter):
            return SHARED
        return None

    def _mark(self, tensor: Any, kind: Any, base: Tensor | None = None) -> None:
        if not isinstance(tensor, Tensor) or id(tensor) in self._sources:
            return
        if isinstance(kind, (Layout, Scattered)):
            self._moved = True
        version = 0 if tensor.is_inference() else tensor._version
        setattr(tensor, MARK, Mark(self.observation, kind, base, version))

    def base_of(self, tensor: Tensor) -> Tensor:
        """Return what was repeated to make a tensor."""
        base: Tensor | None = getattr(tensor, MARK).base
        assert base is not None  # noqa: S101 - asked for repeated ones only
        return base

    def _unmarked_layout(self, tensor: Tensor) -> Layout | None:
        """Return where rows are in a tensor that nothing is said of; None if there are none."""
        if tensor.dim() == 0:
            return None
        dim = 0
        if self.batch_dim and tensor.grad_fn is None and tensor.dim() > self.batch_dim:
            dim = self.batch_dim
        size = tensor.shape[dim]
        if size == 0 or size % self.rows:
            return None
        return Layout(dim) if dim else PLAIN

    def layout(self, tensor: Tensor) -> Layout | Scattered | None:
        """Return where a tensor's rows are; None if it has none."""
        kind = self._kind(tensor)
        if isinstance(kind, (Layout, Scattered)):
            return kind
        if kind is not None:
            return None
        found = self._unmarked_layout(tensor)
        if found is None and tensor.requires_grad:
            return Scattered("its rows were summed up, or it never had any")
        return found

    def marked_layout(self, tensor: Tensor) -> Layout | None:
        """Return where a tensor's rows are, if that is known and not merely assumed."""
        kind = self._kind(tensor)
        return kind if isinstance(kind, Layout) else None

    def require_layout(self, tensor: Tensor, call: Call) -> Layout:
        """Return where a tensor's rows are, or raise."""
        layout = self.layout(tensor)
        shape = list(tensor.shape)
        where = f"{self._named(call.weights)} is consumed by `{call.name}` together with"
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
        weights: list[tuple[Tensor, Source]] = []
        data = shared = assumed = False
        for tensor in tensors_in((*args, *kwargs.values()) if kwargs else args):
            kind = self._kind(tensor)
            if isinstance(kind, Source):
                self._check_unwritten(tensor, kind)
                if all(tensor is not found for found, _ in weights):
                    weights.append((tensor, kind))
            elif kind is SHARED:
                shared = True
            elif kind is not None:
                data = True
            elif (
                not self.observation.environments.settled and not self._settle(tensor)
            ) or self.layout(tensor) is None:
                shared = True
                assumed = assumed or tensor.dim() > 0
            else:
                data = True
        name = name_of(func)
        if name in BATCH_NORMS and data and torch.is_grad_enabled():
            found = self._batch_norm(func, args, kwargs, weights)
            if found is not None:
                return found
        if weights and torch.is_grad_enabled():
            tracked_first = bool(args) and any(args[0] is tensor for tensor, _ in weights)
            if name in LIKE and tracked_first:
                return self._derive(func, name, args, kwargs, weights[:1])
            if data and (name in QUESTIONS or name in LIKE):
                weights = []
        if weights and torch.is_grad_enabled():
            if data:
                return self._observe(func, name, args, kwargs, weights)
            return self._derive(func, name, args, kwargs, weights)
        if weights and _writes(name) and args[0] is weights[0][0] and not weights[0][1].root:
            return self._derive(func, name, args, kwargs, weights)  # by values alone
        out = func(*args, **kwargs)
        if not data:
            if not assumed and (name[:2] != "__" or name == "__getitem__"):
                for tensor in tensors_in((out,)):
                    if self._kind(tensor) is None:
                        self._mark(tensor, SHARED)
        elif self.observation.environments.settled:
            if shared and out is not None and args and out is args[0]:
                self._now_data(args[0])
            if self._moved or name in FOLLOWED:
                self._follow(func, name, args, kwargs, out)
            if isinstance(out, Tensor) and not out.requires_grad and out.dim():
                self._remember_fold(out, args)
        if name == "__setitem__" and data:
            self._written(*args)
        return out

    def _settle(self, tensor: Tensor) -> bool:
        """Learn the number of rows from the first tensor of data that the model is given."""
        if tensor.dim() == 0 or not torch.is_grad_enabled():
            return False
        dim = self.batch_dim if tensor.dim() > self.batch_dim else 0
        self.observation.environments.settle(tensor.shape[dim], allow_single=self.allow_single)
        return True

    def _remember_fold(self, tensor: Tensor, args: Sequence[Any]) -> None:
        """Tell what rows were folded into here from an input whose length is wrong."""
        if tensor.shape[0] != self.rows and self._kind(tensor) is None:
            for given in tensors_in(args):
                if self._kind(given) is None and not given.requires_grad:
                    found = self._unmarked_layout(given)
                    if found is not None and given.shape[found.dim] != self.rows:
                        return
            layout = self._unmarked_layout(tensor)
            if layout is PLAIN:
                setattr(tensor, MARK, Mark(self.observation, PLAIN))

    def _written(self, target: Tensor, index: Any, value: Any) -> None:
        """Follow rows that are written into a tensor."""
        layout = self.layout(value) if isinstance(value, Tensor) else None
        shared = self._kind(target) is SHARED
        self._now_data(target)
        if not shared or not isinstance(layout, Layout) or id(target) in self._constants:
            return
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, (Tensor, list)) for part in parts):
            return  # picked by an index: rows are where they are assumed, or not told apart
        view = target[index]
        at = layout.dim + view.dim() - value.dim()
        for dim in range(target.dim()):
            if target.shape[dim] % self.rows == 0:
                found = after_view(
                    torch.Tensor.__getitem__, (target, index), Layout(dim), self.rows
                )
                if found == Layout(at):
                    self._mark(target, Layout(dim, layout.index))
                    return
        self._mark(target, Scattered("rows were written into parts of it"))

    def _now_data(self, target: Any) -> None:
        """A constant into which data were written is data."""
        if not isinstance(target, Tensor) or id(target) in self._constants:
            return
        if self._kind(target) is SHARED:
            delattr(target, MARK)

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
                    where = f"{self._named(weights)} is consumed by `{name}` together with"
                    raise self._wrong_length(tensor.shape[0], where, list(tensor.shape))
        target = args[0] if args and _writes(name) and isinstance(args[0], Tensor) else None
        given = args
        if target is not None and all(target is not tensor for tensor, _ in weights):
            given = (target.detach().clone(), *args[1:])  # as it was before
        out = func(*args, **kwargs)
        found = [out] if isinstance(out, Tensor) else out
        if target is not None:
            found = [target]
        if not isinstance(found, (list, tuple)):
            return out
        sources = {id(tensor): source for tensor, source in weights}
        first, source = weights[0]
        args = given
        call = SourceCall(
            func if target is None else _rewritten(func),
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
        operator = OPERATORS.get(name)
        composite = isinstance(func, FunctionType)
        if composite and not (operator is not None and _is_builtin_twin(func)):
            with self:
                return _opened(func)(*args, **kwargs)
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
            if not layout.plain or self._moved:
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

    # Following rows

    def _follow(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """Mark outputs whose rows are not where they are assumed."""
        outputs = list(tensors_in((out,)))
        if not outputs:
            return
        inputs = list(tensors_in((*args, *kwargs.values())))
        if name in PICKS:
            inputs = inputs[:1]  # where an index came from does not matter
        if name in FOLLOWED and (length := self._strange_length(inputs)) is not None:
            # A dataset that the batch is picked from, pairs that are cut apart, time that comes
            # first: what comes out as long as the batch is taken for it, as any other tensor is.
            for tensor in outputs:
                if not tensor.dim() or tensor.shape[0] != self.rows:
                    why = f"it was made of one of length {length}, and `env` has {self.rows} labels"
                    self._mark(tensor, Scattered(why))
            return
        layouts = [(t, found) for t in inputs if (found := self.layout(t)) is not None]
        scattered = [found for _, found in layouts if isinstance(found, Scattered)]
        if scattered:
            for tensor in outputs:
                self._mark(tensor, scattered[0])
            return
        known = [(t, found) for t, found in layouts if isinstance(found, Layout)]
        if not known:
            return
        first = known[0][0]
        layout = known[0][1]
        moved: Any
        if name == "einsum":
            moved = self._after_einsum(args[0], args[1:])
        elif name in FOLLOWED and (first is inputs[0] or name in JOINS):
            moved = self._followed(func, name, args, kwargs, first, layout, known, out)
        elif all(found.plain for _, found in known):
            return
        else:
            moved = [self._assumed(name, known, tensor) for tensor in outputs]
        moved = moved if isinstance(moved, list) else [moved] * len(outputs)
        for tensor, kind in zip(outputs, moved, strict=True):
            if self._moved or (isinstance(kind, Scattered) or not kind.plain):
                self._mark(tensor, kind)

    def _strange_length(self, inputs: Sequence[Tensor]) -> int | None:
        """Return how long a tensor is that was given to the model and is no batch."""
        for tensor in inputs:
            if self._kind(tensor) is None and not tensor.requires_grad:
                found = self._unmarked_layout(tensor)
                if found is not None and tensor.shape[found.dim] != self.rows:
                    return tensor.shape[found.dim]
        return None

    def _after_einsum(self, equation: Any, operands: Sequence[Any]) -> Layout | Scattered:
        if not isinstance(equation, str):  # the notation with lists of integers
            return Scattered("`einsum` mixed its dimensions")
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = operands[0]
        left, arrow, out = equation.replace(" ", "").partition("->")
        if "." in left or not arrow:
            return Scattered("`einsum` mixed its dimensions")
        places: dict[int, Layout] = {}
        for term, operand in zip(left.split(","), operands, strict=True):
            layout = self.layout(operand)
            if isinstance(layout, Layout):
                at = out.find(term[layout.dim])
                places[at] = Layout(at, layout.index)
        if len(places) != 1 or -1 in places:
            return Scattered("`einsum` mixed its dimensions")
        return next(iter(places.values()))

    def _followed(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        x: Tensor,
        layout: Layout,
        known: Sequence[tuple[Tensor, Layout]],
        out: Any,
    ) -> Any:
        rows = self.rows
        if name in JOINS:
            return self._joined(name, args, kwargs, known, out)
        if name in RESHAPES:
            return after_reshape(x.shape, out.shape, layout, rows)
        if name in REPEATS:
            return after_repeat(x.shape, out.shape, layout, rows)
        if name in MOVES:
            return after_moving(func, args, kwargs, layout, rows)
        if name in REDUCTIONS or name in SHUFFLES:
            return self._along(name, args, kwargs, x, layout, out)
        if name == "repeat_interleave":
            dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
            times = kwargs.get("repeats", args[1] if len(args) > 1 else None)
            if dim is None or not isinstance(times, int):
                return Scattered("it was flattened by `repeat_interleave`")
            if dim % x.dim() != layout.dim or layout.index is None:
                return layout
            return Layout(layout.dim, layout.index.repeat_interleave(times))
        if name == "index_select":
            named = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
            if named["dim"] % x.dim() != layout.dim:
                return layout
            index = layout.rows_of(x.shape[layout.dim], rows)[named["index"].cpu()]
            return Layout(layout.dim, index)
        if name == "__getitem__":
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, (Tensor, list)) for part in parts):
                return after_index(x, args[1], layout, rows)
            if layout.plain and parts[0] in (slice(None), Ellipsis) and parts[0] is not Ellipsis:
                return layout
        if kwargs:
            return after_view(lambda probe, *rest: func(probe, *rest, **kwargs), args, layout, rows)
        return after_view(func, args, layout, rows)

    def _joined(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Sequence[tuple[Tensor, Layout]],
        out: Tensor,
    ) -> Any:
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        layouts = [layout for _, layout in known]
        if name == "stack":
            if not all(layouts[0].same_as(layout) for layout in layouts):
                return Scattered("tensors with different rows were stacked")
            at = layouts[0].dim
            return Layout(at + (dim % out.dim() <= at), layouts[0].index)
        joined = args[0] if args else kwargs["tensors"]
        if dim % out.dim() == layouts[0].dim and len(known) < len(joined):
            return Scattered("data without rows were appended to them")
        return after_cat([tensor for tensor, _ in known], layouts, dim, self.rows)

    def _along(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        x: Tensor,
        layout: Layout,
        out: Any,
    ) -> Any:
        """Follow a function along some dimensions: a sum, or a reordering."""
        place = 2 if name in ("topk", "norm") else 1
        dims = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis")))
        if dims is None and len(args) > place:
            dims = args[place]
        if name in ("sort", "argsort", "topk") and dims is None:
            dims = -1
        if dims is None or isinstance(dims, (Tensor, bool, torch.dtype)):
            first = next(tensors_in((out,)), None)
            if first is None or first.dim() == 0 or isinstance(dims, Tensor):
                return layout
            return Scattered(f"its rows were reduced by `{name}`")
        dims = [dims] if isinstance(dims, int) else list(dims)
        dims = [dim % x.dim() for dim in dims]
        if layout.dim in dims:
            if name in SHUFFLES:
                return Scattered(f"its rows were reordered by `{name}`")
            return Scattered(f"its rows were reduced by `{name}`")
        if name in SHUFFLES:
            return layout
        first = next(tensors_in((out,)))
        if first.dim() == x.dim():
            return layout
        return Layout(layout.dim - sum(dim < layout.dim for dim in dims), layout.index)

    def _assumed(
        self, name: str, known: Sequence[tuple[Tensor, Layout]], out: Tensor
    ) -> Layout | Scattered:
        """Return where rows are behind a function of components, or of trailing dimensions."""
        places: dict[int, Layout] = {}
        for tensor, layout in known:
            if name in NORMALIZATIONS and layout.dim != 0:
                return Scattered(f"its rows were not first in `{name}`")
            if name in PRODUCTS:
                if tensor.dim() < 3 or layout.dim >= tensor.dim() - 2:
                    return Scattered(f"`{name}` mixed its dimensions")
            elif name in UNFOLLOWED:
                return Scattered(f"`{name}` mixed its dimensions")
            at = layout.dim + out.dim() - tensor.dim()
            if at < 0 or out.shape[at] != tensor.shape[layout.dim]:
                return Scattered(f"`{name}` changed its shape")
            if at in places and not places[at].same_as(Layout(at, layout.index)):
                return Scattered(f"`{name}` joined different rows")
            places[at] = Layout(at, layout.index)
        if len(places) != 1:
            return Scattered(f"`{name}` joined rows in different dimensions")
        return next(iter(places.values()))

    # Errors

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
    "promote_types".split()
)
"""Functions that give no gradient to a parameter."""
COMPLEX = frozenset("add sub mul matmul einsum mm bmm".split())
WRITES = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__ __imatmul__".split()
)
LIKE = frozenset("to type_as expand_as view_as reshape_as".split())
"""Functions that take no more than a shape or a type from their second argument."""


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
