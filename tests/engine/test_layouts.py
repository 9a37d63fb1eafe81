"""Rows are followed through any chain of reshapes and moves: exactly, or not at all.

A chain moves the feature vectors of [rows, length, features] around without mixing them, so what
each vector contributes to a gradient is known, wherever it ends up. Lengths and numbers of rows
are small and often equal, so that shapes tell nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from consilience import Agreement
from engine.modules import Net, normal
from oracle import Record, compare, shares_alone, wavy

WIDTH = 3


def factorizations(number: int) -> list[tuple[int, ...]]:
    pairs = [(a, number // a) for a in range(1, number + 1) if number % a == 0]
    triples = [
        (a, b, number // a // b) for a, rest in pairs for b in range(1, rest + 1) if rest % b == 0
    ]
    return [(number,), *pairs, *triples]


@st.composite
def moves(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Draw one move of feature vectors, as a function of a tensor [*shape, features]."""
    dims = len(shape)
    dim = draw(st.integers(0, dims - 1))
    kinds = [
        "reshape",
        "permute",
        "flip",
        "roll",
        "index",
        "cut",
        "unbind",
        "none",
        "written",
        "einsum",
    ]
    kind = draw(st.sampled_from(kinds))
    if kind == "reshape":
        new = draw(st.sampled_from(factorizations(int(np.prod(shape)))))
        return f"reshape{new}", lambda x: x.reshape(*new, x.shape[-1])
    if kind in ("permute", "einsum"):
        order = draw(st.permutations(range(dims)))
        if kind == "permute":
            return f"permute{order}", lambda x: x.permute(*order, dims)
        letters = "abcd"[:dims]
        equation = f"{letters}z->{''.join(letters[i] for i in order)}z"
        return f"einsum {equation}", lambda x: torch.einsum(equation, x)
    if kind == "flip":
        return f"flip {dim}", lambda x: x.flip(dim)
    if kind == "roll":
        return f"roll {dim}", lambda x: x.roll(1, dim)
    if kind == "index":
        order = torch.tensor(draw(st.permutations(range(shape[dim]))))
        way = draw(st.sampled_from(["index_select", "[]", "gather"]))
        if way == "index_select":
            return f"index_select {dim} {order.tolist()}", lambda x: x.index_select(dim, order)
        if way == "[]":
            at = (slice(None),) * dim
            return f"[] {dim} {order.tolist()}", lambda x: x[(*at, order)]

        def gathered(x: Tensor) -> Tensor:
            shape = [1] * x.dim()
            shape[dim] = -1
            return x.gather(dim, order.view(shape).expand_as(x))

        return f"gather {dim} {order.tolist()}", gathered
    if kind == "cut":
        at = draw(st.integers(0, shape[dim]))
        return f"cut {dim} at {at}", lambda x: torch.cat(
            [x.narrow(dim, at, x.shape[dim] - at), x.narrow(dim, 0, at)], dim
        )
    if kind == "unbind":
        to = draw(st.integers(0, dims - 1))
        return f"unbind {dim}, stack {to}", lambda x: torch.stack(x.unbind(dim), to)
    if kind == "written":

        def written(x: Tensor) -> Tensor:
            x = x.movedim(dim, 0)
            out = torch.zeros(x.shape, dtype=x.dtype)
            for i in range(len(x)):
                out[i] = x[i]
            return out

        return f"written {dim}", written
    at = draw(st.integers(0, dims))
    return f"[None] at {at}", lambda x: x.unsqueeze(at)


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    texts, functions = [], []
    for _ in range(draw(st.integers(1, 3))):
        text, function = draw(moves(shape))
        texts.append(text)
        functions.append(function)
        shape = tuple(function(torch.zeros(*shape, 1)).shape[:-1])
        if len(shape) > 4:
            break
    return texts, functions


OPERATIONS: dict[str, Any] = {
    "linear": lambda m, x: m.l(x),
    "matmul": lambda m, x: x @ m.w + m.b,
    "layer norm": lambda m, x: m.n(x),
    "scale": lambda m, x: m.b * x,
    "functional": lambda m, x: F.linear(x, m.w, m.b) * m.b[0],
    "per vector": lambda m, x: torch.einsum("...i,io->...o", x, m.w).sin(),
}


@given(
    sizes=st.tuples(st.integers(2, 4), st.integers(1, 4)),
    operation=st.sampled_from(list(OPERATIONS)),
    each_row=st.booleans(),
    inner=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_chains_of_moves(
    sizes: tuple[int, int], operation: str, each_row: bool, inner: bool, data: st.DataObject
) -> None:
    rows, length = sizes
    texts, functions = data.draw(chains(sizes))
    back = torch.arange(rows * length).view(rows, length, 1)
    for function in functions:
        back = function(back)
    back = back.flatten().argsort()

    def moved(m: Any, x: Tensor) -> Tensor:
        if inner:
            x = m.first(x).tanh()
        for function in functions:
            x = function(x)
        y = OPERATIONS[operation](m, x)
        return y.reshape(-1, WIDTH)[back].view(rows, length, WIDTH)

    def still(m: Any, x: Tensor) -> Tensor:
        if inner:
            x = m.first(x).tanh()
        return OPERATIONS[operation](m, x)

    def build(forward: Any) -> nn.Module:
        torch.manual_seed(0)
        return Net(
            forward,
            l=nn.Linear(WIDTH, WIDTH),
            w=normal(WIDTH, WIDTH),
            b=normal(WIDTH),
            n=nn.LayerNorm(WIDTH),
            first=nn.Linear(WIDTH, WIDTH),
        ).double()

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    env = None if each_row else [0, 1, 1, 0][:rows]
    losses = lambda model, x: wavy(model(x))  # noqa: E731
    model, record = build(moved), Record()
    agreement = Agreement(model, record)
    try:
        with agreement.observe(env):
            loss = losses(model, x).mean()
        loss.backward()
        agreement.apply()
    except RuntimeError as error:
        event("refused")
        assert "rows" in str(error), str(error)  # noqa: PT017
        return
    event("exact")
    expected = shares_alone(lambda: build(still), losses, (x,), env)
    assert compare(record.of(model), expected) == [], texts
