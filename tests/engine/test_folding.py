"""Paths that are there for speed give what the plain way gives, bit for bit.

Shares hold small whole numbers here, so that sums are exact in any order.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from consilience.observation import shares as module
from consilience.observation.environments import Partition
from consilience.observation.shares import ProductShares, Shares, integer_product, signs
from consilience.rules import Statistic, _masking

VOTES = frozenset({Statistic.VOTES})


def whole(*shape: int, dtype: torch.dtype = torch.float32, low: int = -2, high: int = 3) -> Tensor:
    return torch.randint(low, high, shape).to(dtype)


class Stacked(Shares):
    """Shares that lie there, a block of some at a time."""

    def __init__(self, stack: Tensor, rest: Tensor | None, step: int):
        self.stack, self._rest, self.step = stack, rest, step
        self.shape = stack.shape[1:]
        self.partition = Partition(len(stack), tuple(range(len(stack) + 1)))

    def block(self, start: int, stop: int) -> Tensor:
        return self.stack[start:stop]

    def blocks(self):
        for start in range(0, len(self.stack), self.step):
            yield self.block(start, min(len(self.stack), start + self.step))

    def rest(self) -> Tensor | None:
        return None if self._rest is None else self._rest.clone()


def tallied(shares: Shares, statistics: frozenset[Statistic]) -> tuple[Tensor, dict]:
    found: dict[Statistic, Tensor] = {}
    total = shares.tally(statistics, found.__setitem__)
    return total, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("step", "bytes_"), [(1, 1), (1, 10**6), (3, 100), (7, 1)])
@pytest.mark.parametrize("has_rest", [False, True])
def test_tiles_of_any_size_sum_to_the_same(dtype, step, bytes_, has_rest, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(module, "TILE", 5)
    monkeypatch.setattr(module, "WAITING_BYTES", bytes_)
    monkeypatch.setattr(module, "CACHED", 0 if bytes_ > 1 else 100)
    stack, rest = whole(7, 3, 4, dtype=dtype), whole(3, 4, dtype=dtype)
    before = stack.clone()
    total, found = tallied(Stacked(stack, rest if has_rest else None, step), VOTES)
    expected = stack.double().sum(0) + (rest.double() if has_rest else 0)
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=0)
    votes = found[Statistic.VOTES]
    torch.testing.assert_close(votes.double(), stack.double().sign().sum(0), rtol=0, atol=0)
    assert votes.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(stack, before, rtol=0, atol=0)  # read only


@pytest.mark.parametrize("bounds", [(0, 4, 8, 12), (0, 0, 5, 5, 11), (0, 3, 6, 9), (0, 1, 2, 3)])
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("middle", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [1, 60, 2**18])
def test_products_count_as_their_shares_do(bounds, extra, middle, dtype, tile, monkeypatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(module, "TILE_BYTES", tile)
    size = bounds[-1] + extra
    outputs, inputs = whole(size, middle, 7, dtype=dtype), whole(size, middle, 5, dtype=dtype)
    shares = ProductShares(outputs, inputs, Partition(size, bounds), torch.Size([7, 5]))
    each = torch.einsum("smo,smi->soi", outputs, inputs)
    stack = torch.stack([each[a:b].sum(0) for a, b in itertools.pairwise(bounds)])
    for statistics in (VOTES, frozenset({Statistic.VOTES, Statistic.TURNOUT, Statistic.SQUARES})):
        total, found = tallied(shares, statistics)
        torch.testing.assert_close(total, each.sum(0), rtol=0, atol=0)
        for statistic in statistics:
            torch.testing.assert_close(found[statistic], statistic.of(stack), rtol=0, atol=0)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (3, 1, 1),
        (3, 1, 5),
        (3, 5, 1),
        (1, 3, 5),
        (2, 2, 2),
        (3, 7, 2),
        (256, 5, 17),
        (257, 16, 64),
        (1000, 3, 9),
    ],
)
def test_products_of_signs_are_exact_on_every_path(integers, bfloat16, shape, monkeypatch) -> None:
    torch.manual_seed(2)
    if (integers and not module._fast_integers("cpu")) or (
        bfloat16 and not module._fast_bfloat16("cpu")
    ):
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(module, "_fast_integers", lambda _: integers)
    monkeypatch.setattr(module, "_fast_bfloat16", lambda _: bfloat16)
    rows, out, inputs = shape
    left, right = torch.ones(rows, out), whole(rows, inputs, low=-1, high=2)
    left[whole(rows, out, low=0, high=4) == 0] = -1.0
    for a, b in ((left, right), (torch.ones(rows, out), torch.ones(rows, inputs))):
        found = integer_product(signs(a), signs(b), torch.float32)
        assert torch.equal(found.double(), a.double().t() @ b.double())
        found = integer_product(a != 0, b != 0, torch.float64)
        assert torch.equal(found, (a != 0).double().t() @ (b != 0).double())


def test_signs_of_what_is_no_number() -> None:
    x = torch.tensor([2.5, -1e-40, 0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    assert signs(x).tolist() == [1, -1, 0, 0, 1, -1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 6, 23])
@pytest.mark.parametrize("least", [0, 1, 3, 9])
def test_masking_in_tiles_is_masking(dtype, size, least, monkeypatch) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(_masking, "TILE", 5)
    gradient = torch.randn(size, 3, dtype=dtype)
    gradient[0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    votes = whole(size, 3, dtype=dtype, low=-4, high=5)
    kept = (votes.abs() >= least) | ~gradient.isfinite()
    expected = torch.where(kept, gradient, torch.zeros_like(gradient))
    before = votes.clone()
    for g, v in ((gradient, votes), (gradient.t(), votes.t())):
        found = _masking.keep_agreed(g, v, least)
        want = expected if g is gradient else expected.t()
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(votes, before)


def test_masking_in_tiles_leaves_autograd_and_vmap_alone(monkeypatch) -> None:
    monkeypatch.setattr(_masking, "TILE", 2)
    gradient, votes = torch.randn(4, 3, requires_grad=True), whole(4, 3, low=-4, high=5)
    kept = _masking.keep_agreed(gradient, votes, 2)
    kept.sum().backward()
    assert torch.equal(gradient.grad, (votes.abs() >= 2).float())
    both = torch.vmap(lambda g, v: _masking.keep_agreed(g, v, 2))(gradient.detach(), votes)
    assert torch.equal(both, kept.detach())
