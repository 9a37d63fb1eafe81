"""Tables of which rows look up entries: embeddings, bags of them, and plain indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from consilience.observation.calls import Call, Plan, operator
from consilience.observation.layout import PLAIN, Layout
from consilience.observation.operators.rerun import rerun
from consilience.observation.shares import ScatterShares, Shares


def _lookup(call: Call, weight: Tensor, index: Tensor, padding: int = -1) -> Plan:
    layout = call.layout(index)
    partition = call.partition(index, layout)
    shape = weight.shape

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        (gradient,) = gradients
        if gradient is None:
            return [None]
        entries = partition.arrange(saved[0], layout.dim)
        values = partition.arrange(gradient, layout.dim)
        slices = torch.arange(partition.size, device=entries.device)
        slices = slices.repeat_interleave(entries[:1].numel())
        entries = entries.reshape(-1)
        entries = torch.where(entries < 0, entries + shape[0], entries)
        values = values.reshape(len(entries), *shape[1:])
        if padding >= 0:
            here = entries != padding
            entries, slices, values = entries[here], slices[here], values[here]
        return [ScatterShares(entries, slices, values, partition, shape)]

    return Plan((index,), shares_of, layout)


@operator("embedding")
def embedding(
    call: Call,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Plan:
    """Observe a look-up: an environment's share is summed over its repeated indices first."""
    if scale_grad_by_freq:
        raise call.unsupported(
            "`scale_grad_by_freq=True` scales a row's gradient by what other rows hold"
        )
    if sparse:
        raise call.unsupported("votes on a sparse gradient are not kept: use `sparse=False`")
    return _lookup(call, weight, indices, padding_idx)


@operator("__getitem__", "index_select", "take")
def index(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Plan:  # noqa: A002
    """Observe ``w[i]``, ``w[i, j]`` or ``w[:, i]`` where the indices hold entries for each row.

    Not: masks; indices of different shapes, or with a slice in between.
    """
    if call.weight(input) is None:
        raise call.unsupported("a parameter picks from rows")
    if call.name == "index_select":
        named = dict(zip(("dim", "index"), args, strict=False)) | kwargs
        picks, at = [named["index"]], named["dim"] % max(1, input.dim())
    elif call.name == "take":
        picks, at = [args[0] if args else kwargs["index"]], 0
    else:
        parts = args[0] if isinstance(args[0], tuple) else (args[0],)
        picks = [part for part in parts if isinstance(part, Tensor)]
        at = next((d for d, part in enumerate(parts) if isinstance(part, Tensor)), 0)
        others = [part for part in parts if not isinstance(part, Tensor)]
        together = parts[at : at + len(picks)]
        if any(not isinstance(part, slice) for part in others) or any(
            not isinstance(part, Tensor) for part in together
        ):
            raise call.unsupported("rows pick from a parameter by a mixed index")
    if any(pick.dtype not in (torch.int64, torch.int32) for pick in picks):
        raise call.unsupported("rows pick from a parameter by a mask")
    if len(picks) == 1 and at == 0 and call.name != "take":
        return _lookup(call, input, picks[0])
    layout = call.layout(picks[0])
    if layout.dim != 0 or any(
        pick.shape != picks[0].shape or not call.layout(pick).same_as(layout) for pick in picks
    ):
        raise call.unsupported("rows pick from a parameter by indices that differ in shape or rows")
    rows = [(pick, 0) for pick in picks]
    return rerun(call, rows, [at], Layout(at, layout.index), call.partition(picks[0], layout))


@operator("embedding_bag", "_embedding_bag")
def embedding_bag(
    call: Call,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Plan:
    """Observe bags of look-ups, summed, averaged or maximised; a bag belongs to a row.

    Not: ``scale_grad_by_freq``, ``sparse``, ``per_sample_weights`` that are a parameter.
    """
    if scale_grad_by_freq:
        raise call.unsupported(
            "`scale_grad_by_freq=True` scales a row's gradient by what other rows hold"
        )
    if sparse:
        raise call.unsupported("votes on a sparse gradient are not kept: use `sparse=False`")
    if call.weight(per_sample_weights) is not None:
        raise call.unsupported("its `per_sample_weights` are a parameter")
    bags = len(offsets) - int(include_last_offset)
    if bags % call.mode.rows:
        raise call.unsupported(f"it makes {bags} bags of {call.mode.rows} rows")
    layout = call.mode.marked_layout(offsets) or PLAIN
    if include_last_offset and layout.index is not None:
        layout = Layout(0, layout.index[:bags])
    partition = call.mode.partition(bags, layout)
    saved = [indices, offsets]
    if per_sample_weights is not None:
        saved.append(per_sample_weights)
    table = weight.detach()

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        gradient = gradients[0]
        if gradient is None:
            return [None]
        indices, offsets, *weights = saved
        if not include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([len(indices)])])
        lengths = torch.diff(offsets)
        bag = torch.repeat_interleave(torch.arange(bags, device=indices.device), lengths)
        real = torch.ones_like(indices, dtype=torch.bool)
        if padding_idx is not None and padding_idx >= 0:
            real = indices != padding_idx
        entries, bag = indices[real], bag[real]
        if mode == 2:
            return [_maxima(table, entries, bag, gradient, partition)]
        values = gradient[bag]
        if weights:
            values = values * weights[0].reshape(-1)[real][:, None].to(values.dtype)
        if mode == 1:
            sizes = torch.bincount(bag, minlength=bags).clamp(min=1)
            values = values / sizes[bag][:, None]
        return [_sorted(entries, bag, values, partition, table.shape)]

    return Plan(tuple(saved), shares_of, layout)


def _sorted(
    entries: Tensor, bag: Tensor, values: Tensor, partition: Any, shape: torch.Size
) -> Shares:
    """Arrange: bags to their places in the partition."""
    if partition.order is not None:
        place = torch.empty_like(partition.order)
        place[partition.order] = torch.arange(len(place))
        bag = place.to(bag.device)[bag]
    return ScatterShares(entries, bag, values, partition, shape)


def _maxima(
    table: Tensor, entries: Tensor, bag: Tensor, gradient: Tensor, partition: Any
) -> Shares:
    """Send each component's gradient to the first entry that is the maximum of its bag."""
    width = table.shape[1]
    found = table[entries]
    wide = bag[:, None].expand(-1, width)
    top = torch.full_like(gradient, -torch.inf).to(found.dtype)
    top = top.scatter_reduce(0, wide, found, "amax")
    position = torch.arange(len(entries), device=table.device)[:, None].expand(-1, width)
    position = torch.where(found == top[bag], position, len(entries))
    first = torch.full_like(gradient, len(entries), dtype=torch.long)
    first = first.scatter_reduce(0, wide, position, "amin")
    mine = torch.arange(len(entries), device=table.device)[:, None] == first[bag]
    values = torch.where(mine, gradient[bag], torch.zeros_like(gradient[bag]))
    return _sorted(entries, bag, values, partition, table.shape)
