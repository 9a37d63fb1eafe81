"""Every reason for which an operation is refused: a call that is, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from consilience import Agreement, AndMask
from consilience.observation.errors import UnsupportedOperationError
from engine.modules import Net
from test_troubleshooting import covers, messages

Forward = Callable[[Any, Tensor], Any]
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
ENV = [0, 1, 2, 0, 1, 2]
ONE = torch.ones(6, dtype=torch.long)
INDEX, OFFSETS = torch.arange(6) % 5, torch.arange(6)


def sequences(x: Tensor) -> Tensor:
    """A step each of three tokens."""
    return x[:, None].expand(6, 3, 4)


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "v": torch.randn(4),
        "number": torch.randn(()),
        "one": torch.randn(1, 4),
        "w": torch.randn(6, 4),
        "six": torch.randn(6),
        "cube": torch.randn(4, 4, 4),
        "table": torch.randn(4, 3),
        "keys": torch.randn(6, 3, 4),
        "kernel": torch.randn(2, 4, 1),
        "bag": nn.EmbeddingBag(5, 3),
        "linear": nn.Linear(4, 4),
        "lstm": nn.LSTM(4, 3, batch_first=True),
        "deep": nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True),
        "second": nn.LSTM(4, 3),
        "cell": nn.GRUCell(4, 3),
        "across": nn.LayerNorm(6),
        "group": nn.GroupNorm(1, 6),
        "rows": nn.Linear(6, 2),
    }


def with_out(m: Any, x: Tensor) -> Tensor:
    return torch.add(x, m.v, out=torch.empty(6, 4))


def rows_written(m: Any, x: Tensor) -> Tensor:
    copy = m.table.t().clone()
    copy[0] = x[0]
    return copy


def parameter_written(m: Any, x: Tensor) -> Tensor:
    copy = x.clone()
    copy[torch.tensor([[0, 1], [2, 3]])] = m.v
    return copy


def bags(m: Any, x: Tensor, **options: Any) -> Tensor:
    return F.embedding_bag(INDEX, m.bag.weight, OFFSETS, mode="sum", **options)


def packed(m: Any, x: Tensor) -> Tensor:
    sequence = pack_padded_sequence(sequences(x), torch.full((6,), 3), batch_first=True)
    return m.lstm(sequence)[0].data


BATCH_SECOND = (
    "it takes its batch from dimension 1, and the rows are in dimension 0 (if the model's inputs "
    "hold the batch second, say `Agreement(..., batch_dim=1)`)"
)
REFUSED: list[tuple[str, Forward]] = [
    ("no operator observes it", lambda m, x: torch.dist(x, m.w)),
    ("it is complex", lambda m, x: torch.complex(x, x) / torch.complex(m.v, m.v)),
    # products
    ("it sums over the dimension that holds the rows", lambda m, x: m.rows(x.t())),
    ("it sums over the dimension that holds the rows", lambda m, x: m.w.t() @ x),
    (
        "its operands hold rows in different dimensions",
        lambda m, x: torch.einsum("ai,bi,i->ab", x, x, m.v),
    ),
    (
        "its operands hold different rows",
        lambda m, x: torch.einsum("bi,bi,i->b", x, x.flip(0), m.v),
    ),
    ("an operand's index stands twice", lambda m, x: torch.einsum("bi,iij->bj", x, m.cube)),
    ("with out", lambda m, x: torch.matmul(x, m.table, out=torch.empty(6, 3))),
    ("in place", lambda m, x: x[:, :3].clone().addmm_(x, m.table)),
    ("of a single number: multiply by it", lambda m, x: torch.inner(m.number, x)),
    ("along another dimension than the last", lambda m, x: torch.linalg.vecdot(x, m.w, dim=0)),
    # broadcasting and joining
    ("its operands hold different rows", lambda m, x: torch.addcmul(m.v, x, x.flip(0))),
    (
        "its operands hold rows in different dimensions",
        lambda m, x: torch.addcmul(m.six, x[:, None, :1], x[None, :, :1]),
    ),
    ("it would change a parameter in place by data", lambda m, x: m.w.exp().add_(x)),
    ("with `out`", with_out),
    ("with a rounding mode", lambda m, x: torch.div(x, m.v, rounding_mode="floor")),
    ("its input comes from a parameter", lambda m, x: F.prelu(m.w, x[0, :1])),
    ("it appends a parameter to the dimension", lambda m, x: torch.cat([m.one, x])),
    ("it appends a parameter to the dimension", lambda m, x: torch.hstack([m.six[:0], x[:, 0]])),
    ("a parameter stands in it twice", lambda m, x: torch.cat([m.w, m.w, x], dim=1)),
    ("a parameter stands in it twice", lambda m, x: torch.stack([m.w, m.w, x], dim=1)),
    ("it writes rows into a parameter", rows_written),
    (
        "the rows that it writes a parameter into cannot be told",
        parameter_written,
    ),
    # run again
    (
        BATCH_SECOND,
        lambda m, x: m.second(sequences(x))[0],
    ),
    ("its input is a packed sequence", packed),
    ("dropout between its layers does not repeat", lambda m, x: m.deep(sequences(x))[0]),
    (
        "its input comes from a parameter",
        lambda m, x: m.lstm(m.keys, (x[None, :, :3], x[None, :, :3]))[0],
    ),
    ("its input comes from a parameter", lambda m, x: m.cell(m.w, x[:, :3])),
    (
        "its dropout does not repeat",
        lambda m, x: F.scaled_dot_product_attention(sequences(x), m.keys, m.keys, dropout_p=0.5),
    ),
    (
        "its operands do not hold the same rows in dimension 0",
        lambda m, x: torch.cdist(x.t(), m.rows.weight),
    ),
    ("rows do not pick each from its own slice", lambda m, x: m.w.gather(0, (x > 0).long())),
    ("in this form", lambda m, x: torch.take_along_dim(m.w, (x > 0).long())),
    # convolutions, normalizations, look-ups
    ("or its weight from data", lambda m, x: F.conv1d(m.keys.transpose(1, 2), x.reshape(6, 4, 1))),
    ("its input has no dimension for rows", lambda m, x: F.conv1d(x.t(), m.kernel)),
    (
        "its input does not hold its rows in dimension 0",
        lambda m, x: F.conv1d(x.t()[:, None].expand(4, 4, 6), m.kernel),
    ),
    ("it normalizes over the dimension that holds the rows", lambda m, x: m.across(x.t())),
    ("its input does not hold its rows in dimension 0", lambda m, x: m.group(x.t())),
    ("`scale_grad_by_freq=True`", lambda m, x: F.embedding(ONE, m.w, scale_grad_by_freq=True)),
    ("votes on a sparse gradient", lambda m, x: F.embedding(ONE, m.w, sparse=True)),
    ("a parameter picks from rows", lambda m, x: x[m.six]),
    ("rows pick from a parameter by a mask", lambda m, x: m.w[x > 0]),
    ("rows pick from a parameter by a mixed index", lambda m, x: m.cube[(x[:, 0] > 0).long(), 0]),
    (
        "rows pick from a parameter by indices that differ in shape or rows",
        lambda m, x: m.w[(x > 0).long(), (x[:, :1] > 0).long()],
    ),
    (
        "rows pick from a parameter by indices that differ in shape or rows",
        lambda m, x: m.w[(x[:, 0] > 0).long(), (x[:, 0] > 0).long().flip(0)],
    ),
    ("`scale_grad_by_freq=True`", lambda m, x: bags(m, x, scale_grad_by_freq=True)),
    ("votes on a sparse gradient", lambda m, x: bags(m, x, sparse=True)),
    ("its `per_sample_weights` are a parameter", lambda m, x: bags(m, x, per_sample_weights=m.six)),
    ("it makes 4 bags of 6 rows", lambda m, x: F.embedding_bag(INDEX, m.bag.weight, OFFSETS[:4])),
]


@pytest.mark.parametrize(
    ("reason", "forward"), REFUSED, ids=[f"{i} {reason}" for i, (reason, _) in enumerate(REFUSED)]
)
def test_refused(reason: str, forward: Forward) -> None:
    model = Net(forward, **parts())
    agreement = Agreement(model, AndMask(1.0))
    with pytest.raises(UnsupportedOperationError) as error, agreement.observe(ENV):
        model(X)
    assert reason in str(error.value)


def test_every_reason_is_among_them() -> None:
    given = [reason for reason, _ in REFUSED]
    found = messages(["observation/mode.py", "observation/operators/*.py"])
    reasons = [text for text in found if len(text) < 150 and "Rewrite it" not in text]
    missing = [
        text
        for text in reasons
        if not any(covers(text, reason) or reason in text for reason in given)
    ]
    assert not missing
