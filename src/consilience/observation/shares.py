"""The environments' shares in the gradient of one tensor, from one operation.

Each class holds what one operation's backward knows (inputs, and gradients of outputs), arranged
so that an environment's slices lie together, and gives from it the ordinary gradient, any
environment's share, or straight away the statistics over environments. Shares of many
environments are made in blocks that stay small, however many environments there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from consilience.observation.environments import Partition
from consilience.observation.ledger import BLOCK_BYTES, accumulator_dtype
from consilience.rules import Statistic

Sink = Callable[[Statistic, Tensor], None]
"""Takes an amount of a statistic, in the shape of the tensor, and adds it to an accumulator."""


class Shares(ABC):
    """The environments' shares in the gradient of one tensor, from one operation."""

    partition: Partition
    shape: torch.Size

    @abstractmethod
    def block(self, start: int, stop: int) -> Tensor:
        """Return the shares of some environments, as ``[stop - start, *shape]``."""

    @abstractmethod
    def rest(self) -> Tensor | None:
        """Return the share of rows of unknown environment; None where there are none."""

    def blocks(self) -> Iterator[Tensor]:
        """Yield all shares, a block of environments at a time."""
        count = self.partition.count
        size = max(1, self.shape.numel()) * 8
        step = max(1, min(count, BLOCK_BYTES // size))
        for start in range(0, count, step):
            yield self.block(start, min(count, start + step))

    def total(self) -> Tensor:
        """Return the ordinary gradient: the sum of all shares."""
        total = self.rest()
        for block in self.blocks():
            amount = block.sum(0)
            total = amount if total is None else total.add_(amount)
        assert total is not None  # noqa: S101 - there is an environment
        return total

    def tally(self, statistics: frozenset[Statistic], sink: Sink) -> Tensor:
        """Fold the statistics into a sink, and return the ordinary gradient."""
        if statistics == {Statistic.VOTES} and self.shape.numel() > TILE:
            return self._tally_in_tiles(sink)
        total = self.rest()
        for block in self.blocks():
            amount = block.sum(0)
            total = amount if total is None else total.add_(amount)
            exact = block.to(accumulator_dtype(block.dtype))
            for statistic in statistics:
                sink(statistic, statistic.of(exact))
        assert total is not None  # noqa: S101 - there is an environment
        return total

    def _tally_in_tiles(self, sink: Sink) -> Tensor:
        """Count votes and sum the gradient of a large tensor, a few environments at a time.

        Their shares are read once; the tile of the sums that they are added to stays in cache.
        """
        total, votes = self.rest(), None
        if total is not None:
            total = total.reshape(-1).to(accumulator_dtype(total.dtype))
        waiting: list[Tensor] = []

        def fold() -> None:
            nonlocal total, votes
            if total is None:
                dtype = accumulator_dtype(waiting[0].dtype)
                total = torch.zeros_like(waiting[0], dtype=dtype)
            if votes is None:
                votes = torch.zeros_like(total)
            scratch = torch.empty(TILE, dtype=waiting[0].dtype, device=total.device)
            for start in range(0, len(total), TILE):
                part, count = total[start : start + TILE], votes[start : start + TILE]
                sign = scratch[: len(part)]
                for share in waiting:
                    tile = share[start : start + TILE]
                    part.add_(tile)
                    count.add_(torch.sign(tile, out=sign))
            waiting.clear()

        # What fits a cache is folded while it is there; what does not shares the way of the sums.
        limit = WAITING_BYTES if self.shape.numel() > CACHED else 0
        for block in self.blocks():
            waiting += block.reshape(len(block), -1)
            if sum(share.nbytes for share in waiting) >= limit:
                fold()
        if waiting:
            fold()
        assert total is not None  # noqa: S101 - there is an environment
        assert votes is not None  # noqa: S101
        sink(Statistic.VOTES, votes.reshape(self.shape))
        return total.reshape(self.shape)


def has_rest(partition: Partition) -> bool:
    """Whether some slices belong to rows of unknown environment."""
    return partition.known < partition.size


def segment_sum(x: Tensor, partition: Partition, start: int, stop: int) -> Tensor:
    """Sum arranged slices within each of some environments, to ``[stop - start, ...]``."""
    bounds = partition.bounds
    part = x[bounds[start] : bounds[stop]]
    if partition.each is not None:
        if partition.each == 1:
            return part
        return part.reshape(stop - start, partition.each, *part.shape[1:]).sum(1)
    sizes = torch.tensor([bounds[e + 1] - bounds[e] for e in range(start, stop)], device=x.device)
    # Told how long the result is, a GPU need not be waited for.
    index = torch.repeat_interleave(
        torch.arange(stop - start, device=x.device), sizes, output_size=len(part)
    )
    return x.new_zeros(stop - start, *x.shape[1:]).index_add_(0, index, part)


class SumShares(Shares):
    """Contributions of every slice, to be summed over slices and over broadcast dimensions.

    Args:
        contributions: Arranged, ``[slices, ...]``; the other dimensions broadcast from the
            tensor's and are summed already where it repeated them (see :func:`reduced`).
        shape: The shape of the tensor.
        partition: Which slices are whose.
    """

    def __init__(self, contributions: Tensor, shape: torch.Size, partition: Partition):
        self.partition = partition
        self.shape = shape
        self._contributions = contributions

    def block(self, start: int, stop: int) -> Tensor:
        summed = segment_sum(self._contributions, self.partition, start, stop)
        return summed.reshape(stop - start, *self.shape)

    def rest(self) -> Tensor | None:
        if not has_rest(self.partition):
            return None
        return self._contributions[self.partition.known :].sum(0).reshape(self.shape)


def reduced(contributions: Tensor, dim: int, shape: torch.Size) -> Tensor | None:
    """Sum contributions over what broadcasting repeated, all but the row dimension.

    Returns ``[slices, *shape]`` flattened behind the slices; None where the tensor itself extends
    along the row dimension.
    """
    full = contributions.dim()
    aligned = (1,) * (full - len(shape)) + tuple(shape)
    if aligned[dim] != 1:
        return None
    over = [d for d in range(full) if d != dim and aligned[d] == 1 and contributions.shape[d] != 1]
    if over:
        contributions = contributions.sum(over, keepdim=True)
    return contributions.movedim(dim, 0).flatten(1) if full > 1 else contributions[:, None]


class SpanShares(Shares):
    """Contributions to a tensor that itself extends along the row dimension.

    An environment's share is the contribution at its own rows, and zero elsewhere.
    """

    def __init__(self, contributions: Tensor, dim: int, partition: Partition):
        self.partition = partition
        self.shape = contributions.shape
        self._contributions = contributions
        self._dim = dim

    def _at(self, start: int, stop: int) -> Tensor:
        part = self.partition
        if part.order is None:
            return torch.arange(start, stop, device=self._contributions.device)
        return part.order_on(self._contributions.device)[start:stop]

    def _only(self, index: Tensor) -> Tensor:
        picked = self._contributions.index_select(self._dim, index)
        return torch.zeros_like(self._contributions).index_copy_(self._dim, index, picked)

    def block(self, start: int, stop: int) -> Tensor:
        bounds = self.partition.bounds
        only = [self._only(self._at(bounds[e], bounds[e + 1])) for e in range(start, stop)]
        return torch.stack(only).reshape(stop - start, *self.shape)

    def rest(self) -> Tensor | None:
        if not has_rest(self.partition):
            return None
        rest = self._only(self._at(self.partition.known, self.partition.size))
        return rest.reshape(self.shape)

    def total(self) -> Tensor:
        return self._contributions.reshape(self.shape)


class ProductShares(Shares):
    r"""A matrix's shares :math:`\sum_{s \in e} d_s a_s^\top`.

    Args:
        outputs: Gradients of outputs, arranged, ``[slices, ..., out]``.
        inputs: Inputs, arranged, ``[slices, ..., in]``.
        partition: Which slices are whose.
        shape: The shape of the matrix, or of the vector where it has a single row.
    """

    def __init__(self, outputs: Tensor, inputs: Tensor, partition: Partition, shape: torch.Size):
        self.partition = partition
        self.shape = shape
        size, middle = partition.size, outputs.shape[1:-1].numel()
        self._outputs = outputs.reshape(size, middle, outputs.shape[-1])
        self._inputs = inputs.reshape(size, middle, inputs.shape[-1])

    def _product(self, start: int, stop: int) -> Tensor:
        outputs = self._outputs[start:stop].flatten(0, 1)
        return (outputs.t() @ self._inputs[start:stop].flatten(0, 1)).reshape(self.shape)

    def block(self, start: int, stop: int) -> Tensor:
        bounds, count = self.partition.bounds, stop - start
        if self.partition.each is None:
            return torch.stack(
                [self._product(bounds[e], bounds[e + 1]) for e in range(start, stop)]
            )
        if count == 1:
            return self._product(bounds[start], bounds[stop])[None]
        outputs = self._outputs[bounds[start] : bounds[stop]]
        inputs = self._inputs[bounds[start] : bounds[stop]]
        each = self.partition.each * outputs.shape[1]
        outputs = outputs.reshape(count, each, outputs.shape[-1])
        found = outputs.transpose(1, 2) @ inputs.reshape(count, each, inputs.shape[-1])
        return found.reshape(count, *self.shape)

    def rest(self) -> Tensor | None:
        if not has_rest(self.partition):
            return None
        return self._product(self.partition.known, self.partition.size)

    def total(self) -> Tensor:
        return self._product(0, self.partition.size)

    def tally(self, statistics: frozenset[Statistic], sink: Sink) -> Tensor:
        dtype = self._outputs.dtype
        single = self.partition.each == 1 and self._outputs.shape[1] == 1
        if single and statistics <= FACTORED and dtype != torch.float16:
            self._tally_factored(statistics, sink)
            return self.total()
        if statistics == {Statistic.VOTES} and dtype in (torch.float32, torch.float64):
            return self._tally_votes(sink)
        return super().tally(statistics, sink)

    def _tally_factored(self, statistics: frozenset[Statistic], sink: Sink) -> None:
        """Count where an environment is a single slice, whose share is one outer product.

        The sign of a product is the product of signs, so the sum of signs over environments is one
        more matrix product, as is the sum of squares. (Not in float16, where a product that
        underflows has to vote 0.)
        """
        known = self.partition.known
        outputs, inputs = self._outputs[:known, 0], self._inputs[:known, 0]
        for statistic in statistics:
            dtype = accumulator_dtype(outputs.dtype)
            if statistic is Statistic.SQUARES:
                found = (outputs.square().t() @ inputs.square()).to(dtype)
            elif statistic is Statistic.TURNOUT:
                found = integer_product(outputs != 0, inputs != 0, dtype)
            else:
                found = integer_product(signs(outputs), signs(inputs), dtype)
            sink(statistic, found.reshape(self.shape))

    def _tally_votes(self, sink: Sink) -> Tensor:
        """Count votes and sum the gradient, an environment at a time, in tiles that fit a cache."""
        bounds, width = self.partition.bounds, self._inputs.shape[-1]
        outputs, inputs = self._outputs.flatten(0, 1), self._inputs.flatten(0, 1)
        middle = self._outputs.shape[1]
        total = outputs.new_empty(outputs.shape[-1], width)
        votes = torch.empty_like(total)
        step = max(1, TILE_BYTES // max(1, width * outputs.element_size()))
        parts = [(bounds[e] * middle, bounds[e + 1] * middle) for e in range(len(bounds) - 1)]
        share = outputs.new_empty(min(step, len(total)), width)
        for start in range(0, len(total), step):
            columns = outputs[:, start : start + step]
            tile_total, tile_votes = total[start : start + step], votes[start : start + step]
            tile_share = share[: len(tile_total)]
            (first, last), *others = parts
            torch.mm(columns[first:last].t(), inputs[first:last], out=tile_total)
            torch.sign(tile_total, out=tile_votes)
            for first, last in others:
                torch.mm(columns[first:last].t(), inputs[first:last], out=tile_share)
                tile_total.add_(tile_share)
                tile_votes.add_(tile_share.sign_())
        if has_rest(self.partition):
            first = self.partition.known * middle
            total.addmm_(outputs[first:].t(), inputs[first:])
        sink(Statistic.VOTES, votes.reshape(self.shape))
        return total.reshape(self.shape)


FACTORED = frozenset({Statistic.VOTES, Statistic.TURNOUT, Statistic.SQUARES})
"""The statistics of an outer product that are products themselves."""
TILE_BYTES = 256 * 2**10
"""How much of a weight is worked on at a time, so that gradient, votes and share stay in cache."""
TILE = 2**15
"""How many components of large shares are folded at a time."""
CACHED = 2**19
"""How many components a share may have that is still in cache when it is folded."""
WAITING_BYTES = 24 * 2**20
"""How much shares may take that wait to be folded together."""


def signs(x: Tensor) -> Tensor:
    """Return the signs as narrow integers; NaN has none."""
    return x.sign().nan_to_num_(0.0).to(torch.int8)


def integer_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left.T @ right`` for factors in {-1, 0, 1}, exactly.

    In integers, or in bfloat16, where that is fast. Products of bfloat16 add up in float32 and come
    out exact up to 256, so that many rows are taken at a time.
    """
    device = left.device.type
    # Of one row or column torch gives garbage: it trusts strides that such a matrix need not have.
    if _fast_integers(device) and min(*left.shape, right.shape[1]) > 1:
        return torch._int_mm(left.to(torch.int8).t(), right.to(torch.int8)).to(dtype)
    if not _fast_bfloat16(device):
        return left.to(dtype).t() @ right.to(dtype)
    left, right = left.bfloat16(), right.bfloat16()
    found = (left[:256].t() @ right[:256]).to(dtype)
    for start in range(256, len(left), 256):
        found.add_(left[start : start + 256].t() @ right[start : start + 256])
    return found


@cache
def _fast_integers(device: str) -> bool:
    return device == "cpu" and bool(torch.cpu._is_vnni_supported())


@cache
def _fast_bfloat16(device: str) -> bool:
    if device == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device == "cuda"


class ContractionShares(Shares):
    """Shares of one operand of an einsum whose letter ``r`` runs over slices.

    Args:
        equation: Such as ``"rbi,rbo->io"``: the other operands and the gradient of the output, to
            the tensor; ``r`` comes first in those that have it and is not in the tensor.
        operands: Arranged.
        partition: Which slices are whose.
        shape: The shape of the tensor, which may have dimensions of size one that the equation
            has not.
    """

    def __init__(
        self, equation: str, operands: Sequence[Tensor], partition: Partition, shape: torch.Size
    ):
        self.partition = partition
        self.shape = shape
        self._left, self._right = equation.split("->")
        self._operands = operands
        self._running = [term.startswith("r") for term in self._left.split(",")]

    def _share(self, start: int, stop: int) -> Tensor:
        operands = [
            operand[start:stop] if running else operand
            for operand, running in zip(self._operands, self._running, strict=True)
        ]
        found = torch.einsum(f"{self._left}->{self._right}", *operands)
        return found.reshape(self.shape)

    def block(self, start: int, stop: int) -> Tensor:
        bounds, each = self.partition.bounds, self.partition.each
        if each is None or stop - start == 1:
            shares = [self._share(bounds[e], bounds[e + 1]) for e in range(start, stop)]
            return torch.stack(shares)
        left = ",".join(
            "E" + term if running else term
            for term, running in zip(self._left.split(","), self._running, strict=True)
        )
        operands = [
            operand[bounds[start] : bounds[stop]].reshape(stop - start, each, *operand.shape[1:])
            if running
            else operand
            for operand, running in zip(self._operands, self._running, strict=True)
        ]
        found = torch.einsum(f"{left}->E{self._right}", *operands)
        return found.reshape(stop - start, *self.shape)

    def rest(self) -> Tensor | None:
        if not has_rest(self.partition):
            return None
        return self._share(self.partition.known, self.partition.size)

    def total(self) -> Tensor:
        return self._share(0, self.partition.size)


class Loop:
    """An operation's own backward, for a range of arranged slices and all its tracked tensors.

    Remembers the last range, since the shares of several tensors come out of it together.
    """

    def __init__(self, run: Callable[[int, int], Sequence[Tensor]]):
        self._run = run
        self._last: tuple[int, int] | None = None
        self._found: Sequence[Tensor] = ()

    def __call__(self, start: int, stop: int) -> Sequence[Tensor]:
        """Return the shares that a range of slices has in each tensor."""
        if self._last != (start, stop):
            self._found = self._run(start, stop)
            self._last = (start, stop)
        return self._found


class LoopShares(Shares):
    """Shares that an operation's own backward gives, for one range of slices after another.

    Args:
        loop: From a range of slices to their shares in each tensor.
        position: Which of the loop's tensors this is.
        partition: Which slices are whose.
        shape: The shape of the tensor.
    """

    def __init__(self, loop: Loop, position: int, partition: Partition, shape: torch.Size):
        self.partition = partition
        self.shape = shape
        self.loop = loop
        self._position = position

    def _share(self, start: int, stop: int) -> Tensor:
        return self.loop(start, stop)[self._position]

    def block(self, start: int, stop: int) -> Tensor:
        bounds = self.partition.bounds
        if stop == start + 1:
            return self._share(bounds[start], bounds[stop])[None]
        return torch.stack([self._share(bounds[e], bounds[e + 1]) for e in range(start, stop)])

    def blocks(self) -> Iterator[Tensor]:
        for e in range(self.partition.count):
            yield self.block(e, e + 1)

    def rest(self) -> Tensor | None:
        if not has_rest(self.partition):
            return None
        return self._share(self.partition.known, self.partition.size)

    def total(self) -> Tensor:
        return self._share(0, self.partition.size)


class ScatterShares(Shares):
    """Shares of a table of which each slice reaches some entries (an embedding).

    Args:
        entries: Which entry of the table, ``[n]``.
        slices: Which arranged slice, ``[n]``, in ascending order.
        values: What is added to the entry, ``[n, width]``.
        partition: Which slices are whose.
        shape: The shape of the table, ``[entries, width]``.
    """

    def __init__(
        self,
        entries: Tensor,
        slices: Tensor,
        values: Tensor,
        partition: Partition,
        shape: torch.Size,
    ):
        self.partition = partition
        self.shape = shape
        self._entries = entries
        self._values = values
        bounds = torch.tensor(partition.bounds[1:], device=slices.device)
        # Environment e holds slices below bounds[e + 1]; the unknown ones come last, as `count`.
        self._env = torch.bucketize(slices, bounds, right=True)

    def block(self, start: int, stop: int) -> Tensor:
        here = (self._env >= start) & (self._env < stop)
        flat = (self._env[here] - start) * self.shape[0] + self._entries[here]
        table = self._values.new_zeros((stop - start) * self.shape[0], *self.shape[1:])
        table.index_add_(0, flat, self._values[here])
        return table.reshape(stop - start, *self.shape)

    def rest(self) -> Tensor | None:
        if not has_rest(self.partition):
            return None
        here = self._env == self.partition.count
        table = self._values.new_zeros(self.shape)
        return table.index_add_(0, self._entries[here], self._values[here])

    def total(self) -> Tensor:
        return self._values.new_zeros(self.shape).index_add_(0, self._entries, self._values)

    def tally(self, statistics: frozenset[Statistic], sink: Sink) -> Tensor:
        # Sum over equal (environment, entry) first: a sign is taken of sums only. What no slice of
        # an environment reaches has a share of zero there.
        known = self._env < self.partition.count
        key = self._env[known] * self.shape[0] + self._entries[known]
        pairs, inverse = torch.unique(key, return_inverse=True)
        values = self._values[known]
        summed = values.new_zeros(len(pairs), *self.shape[1:]).index_add_(0, inverse, values)
        summed = summed.to(accumulator_dtype(summed.dtype))
        entries = pairs % self.shape[0]
        for statistic in statistics:
            zero = statistic.of(summed.new_zeros(1, 1)).item()
            amount = summed.new_full(self.shape, zero * self.partition.count)
            each = statistic.of(summed[None])  # of single shares: the sum is over one
            sink(statistic, amount.index_add_(0, entries, each - zero))
        return self.total()
