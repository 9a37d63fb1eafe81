"""Which rows the slices of an activation belong to, and how functions move them.

A tensor that nothing is said of has its rows in dimension 0, each row's slices one behind the
other. Functions that move data (a transpose, a reshape, an index, a concatenation) are followed
here, so that rows which end up elsewhere are still known to be rows. What cannot be followed is
marked so, and whoever needs its rows raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the rows of an activation are.

    Attributes:
        dim: The dimension whose slices belong to rows.
        index: The row of each slice; None: contiguous, as many slices per row as fit.
    """

    dim: int = 0
    index: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether this is what is assumed of a tensor that nothing is said of."""
        return self.dim == 0 and self.index is None

    def rows_of(self, size: int, rows: int) -> Tensor:
        """Return the row of each slice."""
        if self.index is not None:
            return self.index
        return torch.arange(rows).repeat_interleave(size // rows)

    def rows_in(self, shape: Sequence[int], rows: int) -> Tensor:
        """Return the row of each component of a tensor, of length 1 where it does not depend."""
        wide = [1] * len(shape)
        wide[self.dim] = -1
        return self.rows_of(shape[self.dim], rows).reshape(wide)

    def same_as(self, other: Layout) -> bool:
        """Whether both put rows at the same slices."""
        if self.dim != other.dim or (self.index is None) != (other.index is None):
            return False
        return self.index is None or torch.equal(self.index, other.index)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scattered:
    """The mark of an activation whose rows could not be followed."""

    reason: str


PLAIN = Layout()


def canonical(ids: Tensor, rows: int) -> Layout | None:
    """Read a layout off the rows of all slices ``ids[...]``; None if two dimensions matter."""
    for dim in range(ids.dim()):
        lead = ids
        for other in reversed(range(ids.dim())):
            if other != dim:
                lead = lead.select(other, 0)
        shape = [1] * ids.dim()
        shape[dim] = -1
        if bool((ids == lead.reshape(shape)).all()):
            size = len(lead)
            if size % rows == 0 and torch.equal(
                lead, torch.arange(rows).repeat_interleave(size // rows)
            ):
                return Layout(dim)
            return Layout(dim, lead.contiguous())
    return None


def after_view(func: Callable[..., Any], args: Sequence[Any], layout: Layout, rows: int) -> Any:
    """Follow a function that returns basic views of its first argument.

    The function is called once more on a tensor without memory whose strides tell dimensions
    apart, and the rows are read off the strides of what comes out.
    """
    x: Tensor = args[0]
    strides, stride = [0] * x.dim(), 1
    for dim in reversed(range(x.dim())):
        strides[dim] = stride
        stride *= x.shape[dim] + 2
    probe = torch.empty_strided(x.shape, strides, device="meta")
    found = func(probe, *args[1:])
    unit, span = strides[layout.dim], x.shape[layout.dim]

    def read(out: Tensor) -> Layout | Scattered:
        # A dimension of size one may have any stride: it is asked last.
        dims = sorted(range(out.dim()), key=lambda dim: out.shape[dim] == 1)
        for dim in dims:
            size, step = out.shape[dim], out.stride(dim)
            if step and step % unit == 0 and step // unit <= span and size > 0:
                start = out.storage_offset() // unit % (span + 2)
                if step == unit and start == 0 and size == span:
                    return Layout(dim, layout.index)
                index = layout.rows_of(span, rows)[start :: step // unit][:size]
                return Layout(dim, index)
        return Scattered("one row was selected")

    if isinstance(found, Tensor):
        return read(found)
    return [read(out) for out in found]


def after_reshape(
    before: Sequence[int], after: Sequence[int], layout: Layout, rows: int
) -> Layout | Scattered:
    """Follow a reshape, that merges or splits dimensions."""
    if layout.plain and after and after[0] % rows == 0 and after[0] > 0:
        return PLAIN
    dim = layout.dim
    trailing = math.prod(before[dim + 1 :])
    keep = len(after)
    while keep > 0 and trailing % max(1, math.prod(after[keep - 1 :])) == 0:
        keep -= 1
    inner = math.prod(after[keep:])
    if keep and inner and trailing % inner == 0:
        ids = layout.rows_of(before[dim], rows).expand(*before[:dim], before[dim])
        ids = ids.reshape(-1).repeat_interleave(trailing // inner).reshape(tuple(after[:keep]))
    else:
        ids = layout.rows_in(before, rows).expand(tuple(before)).reshape(after)
    found = canonical(ids, rows) if ids.numel() else None
    return found or Scattered("its rows were folded together by a reshape")


def after_index(x: Tensor, index: Any, layout: Layout, rows: int) -> Layout | Scattered:
    """Follow an index that holds tensors."""
    ids = layout.rows_in(x.shape, rows).expand(x.shape).to(x.device)[index].cpu()
    return canonical(ids, rows) or Scattered("its rows were picked by an index")


def after_cat(
    tensors: Sequence[Tensor], layouts: Sequence[Layout], dim: int, rows: int
) -> Layout | Scattered:
    """Follow a concatenation."""
    dim %= tensors[0].dim()
    first = layouts[0]
    if any(layout.dim != first.dim for layout in layouts):
        return Scattered("tensors with rows in different dimensions were concatenated")
    if dim != first.dim:
        if all(first.same_as(layout) for layout in layouts):
            return first
        return Scattered("tensors with different rows were concatenated")
    index = torch.cat(
        [
            layout.rows_of(tensor.shape[dim], rows)
            for layout, tensor in zip(layouts, tensors, strict=True)
        ]
    )
    return Layout(dim, index)


def after_repeat(
    before: Sequence[int], after: Sequence[int], layout: Layout, rows: int
) -> Layout | Scattered:
    """Follow a function that tiles, or adds dimensions in front (repeat, tile, expand)."""
    dim = layout.dim + len(after) - len(before)
    times = after[dim] // max(1, before[layout.dim])
    if times == 1:
        return Layout(dim, layout.index)
    return Layout(dim, layout.rows_of(before[layout.dim], rows).repeat(times))


def after_moving(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    layout: Layout,
    rows: int,
) -> Any:
    """Follow a function that moves components about (flip, roll): move row numbers alike."""
    x: Tensor = args[0]
    ids = layout.rows_in(x.shape, rows).expand(x.shape).contiguous().to(x.device)
    if func in (torch.as_strided, Tensor.as_strided):  # which goes by the places in memory
        places = ids.new_zeros(x.untyped_storage().nbytes() // x.element_size())
        ids = places.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(ids)
    moved = func(ids, *args[1:], **kwargs)
    found = [
        canonical(one.cpu(), rows) or Scattered("its rows were moved about")
        for one in ([moved] if isinstance(moved, Tensor) else moved)
    ]
    return found[0] if isinstance(moved, Tensor) else found


def after_writing(
    target: Tensor, at: Layout, source: Tensor, layout: Layout, index: Any, rows: int
) -> bool:
    """Whether ``target[index] = source`` writes every row to slices of the same row."""
    ids = at.rows_in(target.shape, rows).expand(target.shape).to(target.device)[index].cpu()
    own = layout.rows_in(source.shape, rows)
    while own.dim() > ids.dim() and own.shape[0] == 1:
        own = own[0]
    return bool((ids == own).all())


def after_adding(
    target: Tensor,
    at: Layout,
    dim: int,
    index: Tensor,
    source: Tensor,
    layout: Layout,
    rows: int,
) -> bool:
    """Whether ``index_add`` or ``scatter_add`` bring every row to slices of the same row."""
    dim %= max(1, target.dim())
    if layout.dim != at.dim:
        return False
    to = at.rows_of(target.shape[at.dim], rows)
    own = layout.rows_of(source.shape[layout.dim], rows)
    if dim != at.dim:
        size = source.shape[layout.dim] if index.dim() < source.dim() else index.shape[at.dim]
        return torch.equal(to[:size], own[:size])
    index = index.cpu()
    if index.dim() == source.dim() and index.dim() > 1:
        shape = [1] * index.dim()
        shape[dim] = -1
        own = own[: index.shape[dim]].reshape(shape)
    else:
        own = own[: index.numel()]
    return bool((to[index] == own).all())
