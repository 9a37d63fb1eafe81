"""Sums of products with a parameter: linear layers, matrix products, einsum, bilinear forms."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from consilience.observation.calls import Call, Plan, operator
from consilience.observation.layout import Layout
from consilience.observation.operators.sums import sum_shares
from consilience.observation.shares import ContractionShares, ProductShares, Shares, SpanShares

LETTERS = [letter for letter in string.ascii_lowercase if letter not in "rwxy"]


@operator("linear")
def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Plan:  # noqa: A002
    """Observe ``x W^T + b``.

    Not: rows in the dimension that is summed over.
    """
    w, b = call.weight(weight), call.weight(bias)
    if call.weight(input) is not None or call.is_data(weight):
        term = "".join(LETTERS[: input.dim() - 1])
        terms = [term + "x", "yx"[2 - weight.dim() :]]
        out = term + "y"[2 - weight.dim() :]
        return contraction(call, [input, weight], terms, out, [(bias, 1.0)])
    layout = call.layout(input)
    if layout.dim == input.dim() - 1:
        raise call.unsupported("it sums over the dimension that holds the rows")
    partition = call.partition(input, layout)
    count, shape, shift = len(call.weights), weight.shape, None if bias is None else bias.shape

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        (gradient,) = gradients
        found: list[Shares | None] = [None] * count
        if gradient is None:
            return found
        if w is not None:
            outputs = gradient if len(shape) > 1 else gradient[..., None]
            found[w] = ProductShares(
                partition.arrange(outputs, layout.dim),
                partition.arrange(saved[0].to(gradient.dtype), layout.dim),
                partition,
                shape,
            )
        if b is not None and shift is not None:
            found[b] = sum_shares(gradient, layout.dim, shift, partition)
        return found

    return Plan((input,) if w is not None else (), shares_of, layout)


def contraction(
    call: Call,
    operands: Sequence[Tensor],
    terms: Sequence[str],
    out: str,
    added: Sequence[tuple[Any, float]] = (),
    scale: float = 1.0,
) -> Plan:
    """Observe an einsum of operands, to which further terms may be added by broadcasting."""
    terms = [_check_letters(call, term) for term in terms]
    layouts = [
        call.layout(operand) if call.weight(operand) is None and call.is_data(operand) else None
        for operand in operands
    ]
    letters = {
        term[layout.dim]: (layout, operand.shape[layout.dim])
        for term, layout, operand in zip(terms, layouts, operands, strict=True)
        if layout is not None and (operand.shape[layout.dim] > 1 or call.mode.rows == 1)
    }
    if len(letters) != 1:
        raise call.unsupported("its operands hold rows in different dimensions")
    (row, (layout, size)) = next(iter(letters.items()))
    if row not in out:
        raise call.unsupported("it sums over the dimension that holds the rows")
    known = [found for found in layouts if found is not None]
    if not all(
        (found.index is None) == (layout.index is None)
        and (found.index is None or torch.equal(found.index, layout.index))  # type: ignore[arg-type]
        for found in known
    ):
        raise call.unsupported("its operands hold different rows")
    partition = call.mode.partition(size, layout)
    others = [x for x in dict.fromkeys("".join(terms) + out) if x != row]
    names = dict(zip(others, [x for x in string.ascii_lowercase if x != "r"], strict=False))
    names[row] = "r"
    wanted = [call.weight(operand) for operand in operands]
    shapes = [operand.shape for operand in operands]
    result = Layout(out.index(row), layout.index)
    count = len(call.weights)
    addends = [
        (position, tensor.shape, factor)
        for tensor, factor in added
        if (position := call.weight(tensor)) is not None
    ]

    def shares_of(saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Any]:
        (gradient,) = gradients
        found: list[Shares | None] = [None] * count
        if gradient is None:
            return found
        for position, shape, factor in addends:
            found[position] = sum_shares(gradient * factor, result.dim, shape, partition)
        for position, index in enumerate(wanted):
            if index is None:
                continue
            others = [
                (terms[i], conjugate(saved[i]).to(gradient.dtype))
                for i in range(len(terms))
                if i != position
            ]
            others.append((out, gradient * scale if scale != 1.0 else gradient))
            alone = [x for x in terms[position] if all(x not in term for term, _ in others)]
            if alone:  # summed over before anything else: each gets the same
                size = [shapes[position][terms[position].index(x)] for x in alone]
                others.append(("".join(alone), gradient.new_ones(size)))
            found[index] = _operand_shares(
                terms[position], shapes[position], others, row, names, partition
            )
        return found

    return Plan(tuple(operands), shares_of, result)


def conjugate(tensor: Tensor) -> Tensor:
    """Return what a complex factor contributes to a gradient."""
    return tensor.conj() if tensor.is_complex() else tensor


def _check_letters(call: Call, term: str) -> str:
    if len(set(term)) < len(term):
        raise call.unsupported("an operand's index stands twice (a diagonal)")
    return term


def _operand_shares(
    term: str,
    shape: torch.Size,
    others: Sequence[tuple[str, Tensor]],
    row: str,
    names: dict[str, str],
    partition: Any,
) -> Shares:
    """Return the shares of one operand of an einsum: an einsum of the others and the gradient."""
    squeezed: list[tuple[str, Tensor]] = []
    sizes: dict[str, int] = {}
    for other, tensor in others:
        for letter, size in zip(other, tensor.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    for other, tensor in others:
        # An operand of size one is repeated along that letter: it does not have it.
        kept = [d for d, x in enumerate(other) if tensor.shape[d] != 1 or sizes[x] == 1]
        reduced_tensor = tensor
        for d in reversed(range(len(other))):
            if d not in kept:
                reduced_tensor = reduced_tensor.squeeze(d)
        squeezed.append(("".join(other[d] for d in kept), reduced_tensor))
    target = "".join(
        x for x, size in zip(term, shape, strict=True) if size != 1 or sizes.get(x, 1) == 1
    )
    spans = row in target

    def translate(letters: str) -> str:
        return "".join(names[x] for x in letters)

    if spans:
        equation = ",".join(translate(other) for other, _ in squeezed)
        full = torch.einsum(f"{equation}->{translate(target)}", *(t for _, t in squeezed))
        return SpanShares(full.reshape(shape), term.index(row), partition)
    left, arranged = [], []
    for other, tensor in squeezed:
        if row in other:
            arranged.append(partition.arrange(tensor, other.index(row)))
            left.append("r" + translate(other.replace(row, "")))
        else:
            arranged.append(tensor)
            left.append(translate(other))
    equation = f"{','.join(left)}->{translate(target)}"
    return ContractionShares(equation, arranged, partition, shape)


def matmul_terms(a: Tensor, b: Tensor) -> tuple[str, str, str]:
    """Return a product of matrices as an einsum: its operands' terms, and its result's."""
    batch = max(a.dim(), b.dim()) - 2
    letters = LETTERS[: max(0, batch)]
    left = "x" if a.dim() == 1 else "".join(letters[len(letters) - (a.dim() - 2) :]) + "wx"
    right = "x" if b.dim() == 1 else "".join(letters[len(letters) - (b.dim() - 2) :]) + "xy"
    out = "".join(letters) + ("w" if a.dim() > 1 else "") + ("y" if b.dim() > 1 else "")
    return left, right, out


@operator("matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__")
def matmul(call: Call, input: Tensor, other: Tensor, **kwargs: Any) -> Plan:  # noqa: A002
    """Observe a product of matrices, broadcasting over leading dimensions.

    Not: rows in the dimension that is summed over; operands with rows in two dimensions.
    """
    if kwargs:
        raise call.unsupported(f"with {', '.join(kwargs)}")
    if call.name == "__rmatmul__":
        input, other = other, input  # noqa: A001
    left, right, out = matmul_terms(input, other)
    return contraction(call, [input, other], [left, right], out)


@operator("addmm", "addmv", "baddbmm", "addmm_", "baddbmm_")
def addmm(
    call: Call,
    input: Tensor,  # noqa: A002
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Plan:
    """Observe ``beta * input + alpha * (a @ b)``.

    Not: in place.
    """
    if call.name.endswith("_"):
        raise call.unsupported("in place")
    left, right, out = matmul_terms(a, b)
    return contraction(call, [a, b], [left, right], out, [(input, beta)], alpha)


@operator("einsum")
def einsum(call: Call, equation: str, *operands: Any) -> Plan:
    """Observe an einsum; an ellipsis is written out.

    Not: a diagonal (``ii``); a sum over rows.
    """
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    left, _, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [x for x in string.ascii_letters if x not in equation]
    if "..." in equation:
        ranks = [
            operand.dim() - len(term.replace("...", ""))
            for term, operand in zip(terms, operands, strict=True)
            if "..." in term
        ]
        dots = free[: max(ranks)]
        terms = [
            term.replace("...", "".join(dots[len(dots) - (o.dim() - len(term) + 3) :]))
            if "..." in term
            else term
            for term, o in zip(terms, operands, strict=True)
        ]
        out = out.replace("...", "".join(dots))
    if "->" not in equation:
        counts = "".join(terms)
        out = "".join(sorted(x for x in set(counts) if counts.count(x) == 1))
    return contraction(call, operands, terms, out)


@operator("inner")
def inner(call: Call, input: Tensor, other: Tensor) -> Plan:  # noqa: A002
    """Observe a product that sums over both last dimensions."""
    if not input.dim() or not other.dim():
        raise call.unsupported("of a single number: multiply by it")
    left, right = LETTERS[: input.dim() - 1], LETTERS[10 : 9 + other.dim()]
    terms = ["".join(left) + "x", "".join(right) + "x"]
    return contraction(call, [input, other], terms, "".join(left + right))


@operator("outer", "ger")
def outer(call: Call, input: Tensor, vec2: Tensor) -> Plan:  # noqa: A002
    """Observe all products of the components of two vectors."""
    return contraction(call, [input, vec2], ["x", "y"], "xy")


@operator("linalg_vecdot")
def vecdot(call: Call, x: Tensor, y: Tensor, *, dim: int = -1) -> Plan:
    """Observe products of vectors, in the last dimension."""
    if dim % max(x.dim(), y.dim()) != max(x.dim(), y.dim()) - 1:
        raise call.unsupported("along another dimension than the last")
    letters = LETTERS[: max(x.dim(), y.dim()) - 1]
    terms = ["".join(letters[len(letters) - t.dim() + 1 :]) + "x" for t in (x, y)]
    return contraction(call, [x, y], terms, "".join(letters))


@operator("tensordot")
def tensordot(
    call: Call,
    a: Tensor,
    b: Tensor,
    dims_a: Sequence[int],
    dims_b: Sequence[int],
) -> Plan:
    """Observe a product that sums over chosen dimensions."""
    left, right = LETTERS[: a.dim()], LETTERS[10 : 10 + b.dim()]
    summed = [dim % a.dim() for dim in dims_a]
    for dim, other in zip(summed, dims_b, strict=True):
        right[other % b.dim()] = left[dim]
    kept = [x for d, x in enumerate(left) if d not in summed]
    out = kept + [x for x in right if x not in left]
    return contraction(call, [a, b], ["".join(left), "".join(right)], "".join(out))


@operator("linalg_multi_dot", "multi_dot")
def multi_dot(call: Call, tensors: Sequence[Tensor]) -> Plan:
    """Observe a chain of matrix products."""
    terms = [LETTERS[i] + LETTERS[i + 1] for i in range(len(tensors))]
    first, last = tensors[0].dim() == 1, tensors[-1].dim() == 1
    terms[0] = terms[0][int(first) :]
    terms[-1] = terms[-1][: 2 - int(last)]
    out = ("" if first else LETTERS[0]) + ("" if last else LETTERS[len(tensors)])
    return contraction(call, tensors, terms, out)


@operator("bilinear")
def bilinear(
    call: Call,
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Plan:
    """Observe ``x1^T W x2 + b``."""
    lead = "".join(LETTERS[: input1.dim() - 1])
    terms = [lead + "w", lead + "x", "ywx"]
    return contraction(call, [input1, input2, weight], terms, lead + "y", [(bias, 1.0)])
