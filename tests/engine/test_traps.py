"""What went wrong silently elsewhere, and the traps that the design names: a test for each.

Each was seen in a peer that computes gradients per example: the sum came out right, or the
shapes did, and a number was wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience import Agreement, AndMask
from engine.modules import Net, TiedLanguageModel, features, normal, tokens
from oracle import Record, check, compare, shares_alone, wavy

LABELS = [1, 0, 1, -1, 2, 2, 0, 1]


# --- Opacus -----------------------------------------------------------------------------------


def test_circular_padding() -> None:
    build = lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="circular")  # noqa: E731
    check(build, features(3, 5, 6), LABELS)
    check(build, features(3, 5, 6), None, rows=6)


def test_padding_idx() -> None:
    found = check(lambda: nn.Embedding(4, 3, padding_idx=0), tokens(6, 4), LABELS)
    assert not found.tallies["weight"].turnout[0].any()
    assert found.tallies["weight"].turnout[1:].any()


def test_repeated_indices_in_an_embedding_bag() -> None:
    def batch(rows: int, g: torch.Generator) -> tuple[Tensor]:
        return (torch.tensor([[0, 0, 0, 1], [1, 1, 0, 0], [2, 2, 2, 2]]).repeat(rows, 1)[:rows],)

    for mode in ("sum", "mean", "max"):
        build = lambda mode=mode: nn.EmbeddingBag(3, 2, mode=mode)  # noqa: E731
        check(build, batch, LABELS)
        check(build, batch, None, rows=6)


def test_module_call_and_functional_call_on_one_weight() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.l(x) - 3.0 * F.linear(x.sin(), m.l.weight)

    check(lambda: Net(forward, l=nn.Linear(4, 3)), features(4), LABELS)


# --- BackPACK ---------------------------------------------------------------------------------


def test_tied_weights() -> None:
    check(TiedLanguageModel, tokens(5, 6), LABELS)
    check(TiedLanguageModel, tokens(5, 6), None, rows=5)


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_padding_same(kernel: int) -> None:
    """With an even kernel it is not the same on both sides."""
    build = lambda: nn.Conv1d(3, 2, kernel, padding="same", dilation=2)  # noqa: E731
    check(build, features(3, 9), LABELS)
    check(build, features(3, 9), None, rows=5)


# --- the design's own -------------------------------------------------------------------------


def test_composites_do_not_recurse_for_ever() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y, _ = m.a(x, x, x)
        y = F.leaky_relu(F.rrelu(F.selu(y), training=False))
        return F.gumbel_softmax(y, dim=-1, tau=1e9) * 0 + F.hardswish(y)

    def build() -> nn.Module:
        return Net(forward, a=nn.MultiheadAttention(4, 2, batch_first=True))

    check(build, features(3, 4), LABELS, strict_zeros=False)


def test_signs_do_not_add_over_uses() -> None:
    """Two uses that pull apart, one harder: two votes if signs are added, one in truth."""
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    record = Record()
    agreement = Agreement(layer, record)
    x = torch.ones(4, 1, dtype=torch.float64)
    with agreement.observe([0, 1, 0, 1]):
        loss = (3 * layer(x) - layer(x)).sum()
    loss.backward()
    agreement.apply()
    (tally,) = record.of(layer).values()
    assert tally.votes.tolist() == [[2.0]]
    assert tally.squares.tolist() == [[32.0]]


def test_environments_that_cancel_within_themselves_abstain() -> None:
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    record = Record()
    agreement = Agreement(layer, record)
    x = torch.tensor([[1.0], [-1.0], [2.0], [1.0]], dtype=torch.float64)
    with agreement.observe([0, 0, 1, 1]):
        loss = layer(x).sum()
    loss.backward()
    agreement.apply()
    (tally,) = record.of(layer).values()
    assert tally.votes.tolist() == [[1.0]]
    assert tally.turnout.tolist() == [[1.0]]
    assert tally.voters == 2


def test_derived_parameters_vote_after_the_pull_back() -> None:
    """d/dw of exp(w) * 1 and of -exp(w) * w's other use: signs of the result do not decide."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net(lambda m, x: x @ (m.w * m.w.sum()), w=normal(4, 3)).double()

    check(build, features(4), LABELS)


def test_underflow_in_half_precision_is_no_vote() -> None:
    layer = nn.Linear(1, 2, bias=False).half()
    record = Record()
    agreement = Agreement(layer, record)
    x = torch.ones(2, 1, dtype=torch.float16)
    scale = torch.tensor([1.0, 1e-7], dtype=torch.float16)
    with agreement.observe(None):
        loss = (layer(x) * scale * 1e-1).sum()
    loss.backward()
    assert layer.weight.grad[1].item() == 0.0
    agreement.apply()
    (tally,) = record.of(layer).values()
    assert tally.votes.tolist() == [[2.0], [0.0]]


def test_unanimity_in_every_number_of_environments() -> None:
    """A mean of signs falls short of 1 for some numbers; whole votes do not."""
    for rows in range(2, 130):
        layer = nn.Linear(1, 1, bias=False)
        agreement = Agreement(layer, AndMask(1.0))
        x = torch.ones(rows, 1)
        with agreement.observe(None):
            loss = layer(x).mean()
        loss.backward()
        grad = layer.weight.grad.clone()
        agreement.apply()
        assert torch.equal(layer.weight.grad, grad), rows


def test_masking_an_infinite_gradient_makes_no_nan() -> None:
    layer = nn.Linear(2, 1, bias=False)
    agreement = Agreement(layer, AndMask(1.0))
    x = torch.tensor([[torch.inf, 1.0], [1.0, 1.0]])
    with agreement.observe(None):
        loss = layer(x * 1.0).mean()
    loss.backward()
    grad = layer.weight.grad.clone()
    agreement.apply()
    assert torch.equal(layer.weight.grad, grad)


# --- rows that are not where one thinks: exact or refused, on every length near the batch ------


@pytest.mark.parametrize("length", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("rows", [3, 4, 6])
@pytest.mark.parametrize("kind", ["time first", "time-major fold", "positions", "two views"])
def test_lengths_that_are_multiples_of_the_batch(kind: str, rows: int, length: int) -> None:
    forwards: dict[str, Any] = {
        "time first": lambda m, x: m.l(x.transpose(0, 1)).transpose(0, 1),
        "time-major fold": lambda m, x: (
            m.l(x.transpose(0, 1).flatten(0, 1)).view(x.shape[1], len(x), -1).transpose(0, 1)
        ),
        "positions": lambda m, x: m.l(x) * m.p(torch.arange(x.shape[1])),
        "two views": lambda m, x: m.l(torch.cat([x, x.sin()])).view(2, *x.shape).transpose(0, 1),
    }

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net(forwards[kind], l=nn.Linear(4, 4), p=nn.Embedding(length, 4)).double()

    (x,) = features(length, 4)(rows, torch.Generator().manual_seed(1))
    losses = lambda model, x: wavy(model(x))  # noqa: E731
    model, record = build(), Record()
    agreement = Agreement(model, record)
    try:
        with agreement.observe(None):
            loss = losses(model, x).mean()
        loss.backward()
        agreement.apply()
    except (RuntimeError, ValueError) as error:
        assert "row" in str(error)  # noqa: PT017
        assert "buffer" in str(error)  # noqa: PT017
    else:
        assert compare(record.of(model), shares_alone(build, losses, (x,), None)) == []


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8])
def test_rows_are_not_counted_from_the_first_tensor_seen(length: int) -> None:
    """With env=None, a constant that is used before the data does not say how many rows."""
    frequencies = torch.linspace(1, 2, length, dtype=torch.float64)  # neither buffer nor input

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.l(x * frequencies.exp().sum()).sin()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net(forward, l=nn.Linear(4, 3)).double()

    (x,) = features(4)(4, torch.Generator().manual_seed(1))
    losses = lambda model, x: wavy(model(x))  # noqa: E731
    model, record = build(), Record()
    agreement = Agreement(model, record)
    try:
        with agreement.observe(None):
            loss = losses(model, x).mean()
        loss.backward()
        agreement.apply()
    except (RuntimeError, ValueError) as error:
        assert "row" in str(error)  # noqa: PT017
        assert "buffer" in str(error)  # noqa: PT017
    else:
        assert compare(record.of(model), shares_alone(build, losses, (x,), None)) == []
