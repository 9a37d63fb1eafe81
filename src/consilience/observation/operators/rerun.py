"""Operations whose rows are independent: they are run again, an environment at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from consilience.observation.calls import Call, Place, Plan, fill, operator, recording
from consilience.observation.environments import Partition
from consilience.observation.layout import Layout
from consilience.observation.shares import Loop, LoopShares


def rerun(
    call: Call,
    rows: Sequence[tuple[Tensor, int]],
    outputs: Sequence[int],
    layout: Layout,
    partition: Partition,
) -> Plan:
    """Observe any function whose rows are independent of each other.

    Args:
        call: The call.
        rows: The tensors among its arguments that hold rows, and in which dimension.
        outputs: In which dimension each output holds its rows.
        layout: Which rows those dimensions hold.
        partition: Which slices are whose.
    """
    saved: list[Tensor] = []
    places: dict[int, Place] = {}

    def place(tensor: Tensor) -> Place:
        if id(tensor) not in places:
            places[id(tensor)] = Place(len(saved))
            saved.append(tensor.detach())
        return places[id(tensor)]

    template = fill((call.args, call.kwargs), place)
    dims = {places[id(tensor)].index: dim for tensor, dim in rows}
    wanted = [places[id(tensor)].index for tensor in call.arguments]
    shapes = [tensor.shape for tensor in call.arguments]
    func, again = call.func, recording(call.arguments[0].device.type)

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        arranged = [
            partition.arrange(tensor, dims[i]).movedim(0, dims[i])
            if i in dims and i not in wanted
            else tensor
            for i, tensor in enumerate(saved)
        ]
        slopes = [
            None if g is None else partition.arrange(g, dim).movedim(0, dim)
            for g, dim in zip(gradients, outputs, strict=True)
        ]

        def run(start: int, stop: int) -> list[Tensor]:
            leaves = {i: arranged[i].detach().requires_grad_() for i in wanted}
            if start == stop:
                return [torch.zeros_like(leaf) for leaf in leaves.values()]

            def part(place: Place) -> Tensor:
                i = place.index
                whole = leaves.get(i, arranged[i])
                if i not in dims:
                    return whole
                if i in leaves and partition.order is not None:
                    mine = partition.order_on(whole.device)[start:stop]
                    return whole.index_select(dims[i], mine)
                return whole.narrow(dims[i], start, stop - start)

            with again():
                args, kwargs = fill(template, part)
                out = func(*args, **kwargs)
            found = [out] if isinstance(out, Tensor) else list(out)
            used = [
                (one, slope.narrow(dim, start, stop - start))
                for one, slope, dim in zip(found, slopes, outputs, strict=True)
                if slope is not None
            ]
            grads = torch.autograd.grad(
                [one for one, _ in used],
                list(leaves.values()),
                [slope.to(one.dtype) for one, slope in used],
                allow_unused=True,
            )
            return [
                torch.zeros_like(leaf) if grad is None else grad
                for leaf, grad in zip(leaves.values(), grads, strict=True)
            ]

        loop = Loop(run)
        return [LoopShares(loop, i, partition, shape) for i, shape in enumerate(shapes)]

    return Plan(tuple(saved), shares_of, [Layout(dim, layout.index) for dim in outputs])


def _recurrent_layout(call: Call, tensor: Tensor, dim: int) -> Layout:
    """Return the layout of an input whose batch dimension the operation itself fixes."""
    layout = call.layout(tensor)
    if layout.dim != dim:
        raise call.unsupported(
            f"it takes its batch from dimension {dim}, and the rows are in dimension {layout.dim} "
            "(if the model's inputs hold the batch second, say `Agreement(..., batch_dim=1)`)"
        )
    return layout


@operator("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: Call, input: Tensor, hx: Any, *args: Any) -> Plan:  # noqa: A002
    """Observe a recurrent layer, all its steps, layers and directions at once.

    Not: packed sequences (pad instead); dropout between layers.
    """
    if isinstance(hx, Tensor) and not hx.is_floating_point():
        raise call.unsupported("its input is a packed sequence: pad it instead")
    if len(args) != 7:
        raise call.unsupported("in this form")
    _, _, _, dropout, train, _, batch_first = args
    if dropout and train:
        raise call.unsupported("dropout between its layers does not repeat: use `dropout=0`")
    if input.dim() != 3:
        raise call.unsupported("its input has no dimension for rows")
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    if call.weight(input) is not None:
        raise call.unsupported("its input comes from a parameter")
    dim = 0 if batch_first else 1
    layout = _recurrent_layout(call, input, dim)
    partition = call.partition(input, layout)
    rows = [(input, dim), *((state, 1) for state in states)]
    return rerun(call, rows, [dim, *[1] * len(states)], layout, partition)


@operator("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: Call, input: Tensor, hx: Any, *_: Any) -> Plan:  # noqa: A002
    """Observe one step of a recurrent cell."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    if call.weight(input) is not None:
        raise call.unsupported("its input comes from a parameter")
    if input.dim() != 2:
        raise call.unsupported("its input has no dimension for rows")
    layout = _recurrent_layout(call, input, 0)
    partition = call.partition(input, layout)
    rows = [(input, 0), *((state, 0) for state in states)]
    return rerun(call, rows, [0] * len(states), layout, partition)


@operator("scaled_dot_product_attention", "cdist", "cosine_similarity", "pairwise_distance")
def rows_first(call: Call, *args: Any, **kwargs: Any) -> Plan:
    """Observe a function that treats the slices of dimension 0 independently.

    Not: attention with dropout; operands with other rows in dimension 0.
    """
    if call.name == "scaled_dot_product_attention" and (
        kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    ):
        raise call.unsupported("its dropout does not repeat: use `dropout_p=0`")
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    data = [t for t in tensors if call.weight(t) is None and call.is_data(t)]
    full = max(tensor.dim() for tensor in data)
    layout = call.layout(data[0])
    size = data[0].shape[0]
    if layout.dim != 0 or any(not call.layout(t).same_as(layout) or t.dim() < full for t in data):
        raise call.unsupported("its operands do not hold the same rows in dimension 0")
    rows = [
        (tensor, 0)
        for tensor in tensors
        if tensor.dim() == full and tensor.shape[0] == size and _has_rows(call, tensor)
    ]
    partition = call.mode.partition(size, layout)
    # Distances between two sets of points lie where the points do.
    at = int(call.name == "cdist" and full == 2 and tensors[0] is not data[0])
    return rerun(call, rows, [at], Layout(at, layout.index) if at else layout, partition)


def _has_rows(call: Call, tensor: Tensor) -> bool:
    """Whether a tensor is to be cut into rows.

    The functions broadcast their operands, so that one as long as there are rows is cut along with
    them; a matrix of centres is not.
    """
    if call.weight(tensor) is not None or call.name == "scaled_dot_product_attention":
        return call.name != "cdist" or tensor.dim() > 2
    return call.is_data(tensor)


@operator("gather", "take_along_dim")
def gather(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Plan:  # noqa: A002
    """Observe rows that pick from a parameter that was repeated for each of them.

    Not: picking along dimension 0.
    """
    order = ("dim", "index") if call.name == "gather" else ("indices", "dim")
    named = dict(zip(order, args, strict=False)) | kwargs
    index, dim = named.get("index", named.get("indices")), named.get("dim")
    if call.weight(input) is None or not isinstance(index, Tensor) or dim is None:
        raise call.unsupported("in this form")
    layout = call.layout(index)
    size = index.shape[0]
    if layout.dim != 0 or dim % index.dim() == 0 or input.shape[0] not in (1, size):
        raise call.unsupported("rows do not pick each from its own slice of dimension 0")
    rows = [(index, 0)]
    if input.shape[0] == size and (call.name == "gather" or size > 1):
        rows.append((input, 0))
    partition = call.mode.partition(size, layout)
    return rerun(call, rows, [0], layout, partition)
