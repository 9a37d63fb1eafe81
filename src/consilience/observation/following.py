"""Where the rows of each tensor are, from the first input to the loss.

Every tensor that a function returns may carry a mark: that it is the same for all rows, that it
came from parameters alone, where its rows are, or why they cannot be told. A tensor without a mark
has its rows in dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from consilience.observation.layout import (
    PLAIN,
    Layout,
    Scattered,
    after_adding,
    after_cat,
    after_index,
    after_moving,
    after_repeat,
    after_reshape,
    after_view,
    after_writing,
)
from consilience.observation.mixing import mixed, mixes
from consilience.observation.operators.pointwise import FUNCTIONS
from consilience.observation.operators.products import matmul_terms
from consilience.observation.sources import Source
from consilience.observation.uses import Observation

MARK = "_consilience_mark"
SEEN = "_consilience_seen"
"""On a tensor that came out of a function which was seen: in which observation."""


class Mark(NamedTuple):
    """What is known of a tensor in one observation, kept on the tensor itself."""

    observation: Observation
    kind: Any  # SHARED, a Source, a Layout or Scattered
    base: Tensor | None = None
    version: int = 0  # how often the tensor had been written into

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay behind where the tensor is copied or saved; `torch.load` takes sets."""
        return set, ()


class _Shared:
    def __repr__(self) -> str:
        return "SHARED"


SHARED = _Shared()
"""The mark of a tensor that is the same for all rows: a buffer, a range, a constant."""

VIEWS = frozenset(
    "t transpose permute swapaxes swapdims movedim moveaxis T mT H mH adjoint squeeze unsqueeze "
    "select narrow chunk split tensor_split unbind __getitem__ diagonal __iter__ "
    "split_with_sizes hsplit vsplit dsplit unsafe_chunk unsafe_split linalg_diagonal".split()
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
    "nanmean std_mean var_mean aminmax count_nonzero linalg_vector_norm linalg_norm nanmedian "
    "kthvalue mode".split()
)
MOVES = frozenset(
    "flip roll flipud fliplr rot90 fft_fftshift fft_ifftshift take masked_select tensor_unfold "
    "as_strided narrow_copy diagonal_copy permute_copy transpose_copy t_copy view_copy "
    "unsqueeze_copy squeeze_copy select_copy expand_copy unfold_copy detach_copy alias_copy "
    "slice_copy as_strided_copy swapaxes_copy".split()
)
"""Functions that put components elsewhere, and can be told to do so to the numbers of rows."""
VIEWS_IN_PLACE = frozenset("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_".split())
WRITERS = frozenset(
    "index_add index_copy index_reduce index_fill scatter scatter_add scatter_reduce index_put "
    "masked_scatter".split()
)
WRITERS |= {name + "_" for name in WRITERS} | {"__setitem__"}
ALONG_THIRD = frozenset("topk norm kthvalue linalg_norm linalg_vector_norm take_along_dim".split())
SHUFFLES = frozenset("sort argsort topk gather take_along_dim".split())
PICKS = frozenset("__getitem__ index_select gather take_along_dim".split())
PRODUCTS = frozenset(
    "matmul mm mv bmm dot vdot __matmul__ __rmatmul__ inner cdist linear addmm addmv "
    "baddbmm".split()
)
ADDED = frozenset("addmm addmv baddbmm".split())
BROADCASTS = frozenset(
    [
        *FUNCTIONS,
        *(name + "_" for name in FUNCTIONS),
        "scaled_dot_product_attention",
        "cosine_similarity",
    ]
)
"""Functions whose arguments are aligned at their last dimension."""
SPECIAL = WRITERS | PRODUCTS
FOLLOWED = (
    MOVES
    | VIEWS
    | RESHAPES
    | REPEATS
    | JOINS
    | REDUCTIONS
    | SHUFFLES
    | {"index_select", "repeat_interleave", "einsum"}
)
NORMALIZATIONS = frozenset("group_norm instance_norm batch_norm".split())
UNFOLLOWED = frozenset("tensordot pairwise_distance cosine_similarity trapz trapezoid".split())
"""Not functions of components, though their output may happen to have an input's shape."""
LEADING = frozenset("embedding one_hot linalg_vander".split())
"""Functions that add dimensions behind those of their first argument."""

WRITER_ARGUMENTS = {
    **{f"index_{what}": ("input", "dim", "index", "source") for what in ("add", "copy", "reduce")},
    "index_fill": ("input", "dim", "index", "value"),
    **{f"scatter{what}": ("input", "dim", "index", "src") for what in ("", "_add", "_reduce")},
    "index_put": ("input", "indices", "values"),
    "masked_scatter": ("input", "mask", "source"),
}


def name_of(func: Callable[..., Any]) -> str:
    """Return a function's name; of an attribute's getter, the attribute's."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)  # type: ignore[attr-defined]
    # Windows of a tensor, not `torch.nn.functional.unfold`, which makes patches of images.
    return "tensor_unfold" if func is Tensor.unfold else name


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in lists of arguments."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            yield from tensors_in(value)


_NUMBERS = count()


class Following:
    """Where the rows of each tensor are, in one observation."""

    def __init__(self, observation: Observation, constants: Iterable[Tensor], batch_dim: int):
        self.observation = observation
        self.batch_dim = batch_dim
        self._sources: dict[int, Source] = {
            id(parameter): Source((i,)) for i, parameter in enumerate(observation.parameters)
        }
        self.constants = list(constants)
        self._constants = {id(tensor) for tensor in self.constants}
        self._moved = batch_dim != 0  # whether any tensor has its rows elsewhere
        self._number = next(_NUMBERS)
        with torch.enable_grad():  # functions that are recorded from now on count further
            self._begin = torch.ones((), requires_grad=True).clone().grad_fn._sequence_nr()  # type: ignore[union-attr]

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return self.observation.environments.rows

    def _kind(self, tensor: Tensor) -> Any:
        source = self._sources.get(id(tensor))
        if source is not None:
            return source if tensor.requires_grad else SHARED
        mark = getattr(tensor, MARK, None)
        if isinstance(mark, Mark) and mark.observation is self.observation:
            if mark.kind is SHARED and tensor.requires_grad and tensor._version != mark.version:
                return Scattered("it was written into through a view")
            return mark.kind
        if id(tensor) in self._constants:
            return SHARED
        if type(tensor) is not Tensor and isinstance(tensor, Parameter):
            if tensor.requires_grad:
                self.observation.met_strangers = True
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
        if tensor.dim() == 0 or tensor.is_nested:
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
        if self._moved and self._unseen(tensor):
            return Scattered(
                "it came out of something that is not followed (a scripted function, `vmap`)"
            )
        return found

    def _unseen(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed in this observation by something that was not seen."""
        node = tensor.grad_fn
        if node is None or getattr(tensor, SEEN, None) == self._number:
            return False
        return node._sequence_nr() >= self._begin

    def _see(self, out: Any) -> None:
        """Remember that tensors came out of a function that was seen."""
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in((out,)):
            if not (tensor.requires_grad and tensor.is_leaf):
                setattr(tensor, SEEN, self._number)

    def marked_layout(self, tensor: Tensor) -> Layout | None:
        """Return where a tensor's rows are, if that is known and not merely assumed."""
        kind = self._kind(tensor)
        return kind if isinstance(kind, Layout) else None

    def _viewed_in_place(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Layout | Scattered | None:
        """Tell where rows are going to be once a tensor is turned in place."""
        layout = self.layout(args[0])
        if not isinstance(layout, Layout):
            return layout
        turn = getattr(torch, name[:-1])
        found: Layout | Scattered = after_view(
            lambda probe, *rest: turn(probe, *rest, **kwargs), args, layout, self.rows
        )
        return found

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

    def _written(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Layout | Scattered | None:
        """Follow rows that are written into a tensor; None where no rows are written."""
        named = dict(zip(WRITER_ARGUMENTS.get(name.rstrip("_"), ()), args, strict=False)) | kwargs
        if name == "__setitem__":
            named = {"input": args[0], "index": args[1], "source": args[2]}
        target = named["input"]
        source = next((named[key] for key in ("source", "src", "values") if key in named), None)
        constant = self._is_constant(target)
        found = None if constant else self.layout(target)
        written = self.layout(source) if isinstance(source, Tensor) and source.dim() else None
        if isinstance(found, Scattered) or isinstance(written, Scattered):
            return found if isinstance(found, Scattered) else written
        if written is None or not isinstance(source, Tensor):
            return found
        places = [found] if found is not None else self._places(target, written)
        for place in places:
            if self._goes_home(name, target, place, source, written, named):
                return place
        return Scattered(f"`{name}` put rows in the places of other rows")

    def _places(self, target: Tensor, written: Layout) -> list[Layout]:
        """Return where rows may come to be in a constant into which rows are written."""
        dims = [dim for dim in range(target.dim()) if target.shape[dim] % self.rows == 0]
        found = [Layout(dim) for dim in dims if target.shape[dim]]
        if written.index is not None:
            size = len(written.index)
            found += [Layout(dim, written.index) for dim in dims if target.shape[dim] == size]
        return found

    def _goes_home(
        self,
        name: str,
        target: Tensor,
        place: Layout,
        source: Tensor,
        written: Layout,
        named: dict[str, Any],
    ) -> bool:
        """Whether rows are written to slices of the same rows."""
        rows = self.rows
        try:
            if name.startswith("masked_scatter"):
                mask = named["mask"].expand_as(target)
                picked = after_index(target, mask, place, rows)
                own = written.rows_in(source.shape, rows).expand(source.shape).reshape(-1)
                return isinstance(picked, Layout) and torch.equal(
                    picked.rows_of(int(mask.sum()), rows), own[: int(mask.sum())]
                )
            index = named["index"] if "index" in named else named["indices"]
            if name == "__setitem__" or name.startswith("index_put"):
                return after_writing(target, place, source, written, index, rows)
            return after_adding(target, place, named["dim"], index, source, written, rows)
        except (RuntimeError, IndexError):  # shapes that do not fit this place
            return False

    def _now_data(self, target: Any) -> None:
        """A constant into which data were written is data."""
        if not isinstance(target, Tensor) or id(target) in self._constants:
            return
        if self._is_constant(target):
            delattr(target, MARK)

    def _is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor was a constant, before it may have been written into."""
        mark = getattr(tensor, MARK, None)
        return (
            isinstance(mark, Mark) and mark.observation is self.observation and mark.kind is SHARED
        )

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
        if not outputs and name != "__setitem__":
            return
        inputs = list(tensors_in((*args, *kwargs.values())))
        if func is torch.autograd.grad:
            named = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
            for tensor, like in zip(outputs, tensors_in([named["inputs"]]), strict=False):
                if (found := self.layout(like)) is not None:
                    self._mark(tensor, found)
            return
        if name in WRITERS:
            target = outputs[0] if name != "__setitem__" else args[0]
            if (kind := self._written(name, args, kwargs)) is not None:
                self._now_data(target)
                self._mark_place(target, kind)
            return
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
        if name in BROADCASTS:
            known = [(t, found) for t, found in known if self._certain(t)] or known[:1]
        if not known:
            return
        first = known[0][0]
        layout = known[0][1]
        moved: Any
        if name == "einsum":
            moved = self._after_einsum(args[0], args[1:])
        elif name in FOLLOWED and (first is inputs[0] or name in JOINS):
            moved = self._followed(func, name, args, kwargs, first, layout, known, out)
        elif name in PRODUCTS:
            moved = self._multiplied(name, args, kwargs)
        elif self._mixes(name, args, kwargs, known):
            moved = Scattered(f"`{name}` joined different rows")
        elif all(found.plain for _, found in known) and (
            name not in BROADCASTS or len({t.dim() for t, _ in known}) == 1
        ):
            return
        else:
            moved = [self._assumed(name, known, inputs, tensor) for tensor in outputs]
        moved = moved if isinstance(moved, list) else [moved] * len(outputs)
        for tensor, kind in zip(outputs, moved, strict=True):
            if kind is not None:
                self._mark_place(tensor, kind)

    def _mark_place(self, tensor: Any, kind: Layout | Scattered) -> None:
        """Mark where a tensor's rows are, unless that is what is assumed of every tensor."""
        if self._moved or isinstance(kind, Scattered) or not kind.plain:
            self._mark(tensor, kind)

    def _strange_length(self, inputs: Sequence[Tensor]) -> int | None:
        """Return how long a tensor is that was given to the model and is no batch."""
        for tensor in inputs:
            if self._kind(tensor) is None and not tensor.requires_grad:
                found = self._unmarked_layout(tensor)
                if found is not None and tensor.shape[found.dim] != self.rows:
                    return tensor.shape[found.dim]
        return None

    def _certain(self, tensor: Tensor) -> bool:
        """Whether a tensor holds rows, and not just happens to be as long as some of them."""
        return (
            tensor.requires_grad
            or isinstance(self._kind(tensor), Layout)
            or tensor.shape[0] == self.rows
        )

    def _mixes(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Sequence[tuple[Tensor, Layout]],
    ) -> bool:
        """Whether a function mixes components along the dimension that holds the rows."""
        return mixes(name) and any(
            layout.dim in mixed(name, tensor, args, kwargs) and self._certain(tensor)
            for tensor, layout in known
        )

    def _multiplied(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Layout | Scattered | None:
        """Follow rows through a product of matrices."""
        operands = [*args, *kwargs.values()]
        if name in ADDED:
            operands = operands[1:]
        a, b = operands[:2]
        if name == "__rmatmul__":
            a, b = b, a
        left, right, result = matmul_terms(a, b)
        if name in ("linear", "inner"):
            left, right = f"{left[:-1]}x", "yx"[2 - b.dim() :]
            result = left[:-1] + right[:-1]
        elif name == "cdist":
            right = right[:-2] + "yx"
        places: dict[int, Layout] = {}
        terms = [(left, a), (right, b)]
        if name in ADDED:
            added = args[0] if args else kwargs["input"]
            terms.append((result[max(0, len(result) - added.dim()) :], added))
        for term, operand in terms:
            layout = self.layout(operand)
            if isinstance(layout, Layout) and self._certain(operand):
                if operand.shape[layout.dim] == 1 and self.rows > 1:
                    continue
                at = result.find(term[layout.dim])
                if at in places and not places[at].same_as(Layout(at, layout.index)):
                    return Scattered(f"`{name}` joined different rows")
                places[at] = Layout(at, layout.index)
        if not places:
            return None
        if len(places) != 1 or -1 in places:
            return Scattered(f"`{name}` joined different rows")
        return next(iter(places.values()))

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
        place = 2 if name in ALONG_THIRD else 1
        dims = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis")))
        if dims is None and len(args) > place:
            dims = args[place]
        if name in ("sort", "argsort", "topk", "kthvalue", "mode") and dims is None:
            dims = -1
        if dims is None or isinstance(dims, (Tensor, bool, torch.dtype)):
            first = next(tensors_in((out,)), None)
            if first is None or isinstance(dims, Tensor):
                return layout
            if first.dim() == 0 and layout.plain:
                return None  # as of any other number
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
        self,
        name: str,
        known: Sequence[tuple[Tensor, Layout]],
        inputs: Sequence[Tensor],
        out: Tensor,
    ) -> Layout | Scattered:
        """Return where rows are behind a function of components, or of trailing dimensions."""
        places: dict[int, Layout] = {}
        wide = any(tensor.dim() == out.dim() for tensor in inputs)  # it broadcasts
        for tensor, layout in known:
            if name in NORMALIZATIONS and layout.dim != 0:
                return Scattered(f"its rows were not first in `{name}`")
            if name in UNFOLLOWED:
                return Scattered(f"`{name}` mixed its dimensions")
            added = out.dim() - tensor.dim()
            at = layout.dim + (0 if name in LEADING else added)
            if (added < 0 and name not in BROADCASTS) or (
                added > 0 and name not in LEADING and not wide
            ):
                return Scattered(f"`{name}` changed its shape")
            if at < 0 or out.shape[at] != tensor.shape[layout.dim]:
                return Scattered(f"`{name}` changed its shape")
            if at in places and not places[at].same_as(Layout(at, layout.index)):
                return Scattered(f"`{name}` joined different rows")
            places[at] = Layout(at, layout.index)
        if len(places) != 1:
            return Scattered(f"`{name}` joined rows in different dimensions")
        return next(iter(places.values()))
