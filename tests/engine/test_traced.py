"""What observes a model while it is traced, run as ordinary functions.

Here every operation is taken for one that is being traced, and runs at once. That shows in which
line something goes wrong, which a compiled graph hides; test_workflows.py compiles.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience import Agreement, AndMask, GeometricMean
from consilience.observation.errors import ObservationError
from engine.modules import Net
from oracle import Record, compare, shares_alone, wavy

ENV = [0, 1, 0, 1, 2]
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.tensor([[0, 1], [2, 0], [5, 5], [3, 1], [0, 4]])
IMAGES = X.reshape(5, 2, 3, 1).repeat(1, 1, 2, 4)


@contextmanager
def traced(agreement: Agreement, env: Any) -> Iterator[None]:
    with agreement.observe(env), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return wavy(model(x))


def make(forward: Callable[..., Tensor], **parts: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net(forward, **{name: part() for name, part in parts.items()}).double()

    return build


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (make(lambda m, x: m.a(x), a=lambda: nn.Linear(6, 2)), X),
    "no bias": (make(lambda m, x: m.a(x), a=lambda: nn.Linear(6, 2, bias=False)), X),
    "twice": (make(lambda m, x: m.a(m.a(x).sin()), a=lambda: nn.Linear(6, 6)), X),
    "tokens": (make(lambda m, x: m.a(x.unflatten(1, (2, -1))), a=lambda: nn.Linear(3, 2)), X),
    "layer norm": (make(lambda m, x: m.n(x), n=lambda: nn.LayerNorm(6)), X),
    "no shift": (make(lambda m, x: m.n(x), n=lambda: nn.LayerNorm(6, bias=False)), X),
    "embedding": (make(lambda m, x: m.e(x), e=lambda: nn.Embedding(6, 3)), TOKENS),
    "padding": (make(lambda m, x: m.e(x), e=lambda: nn.Embedding(6, 3, padding_idx=-1)), TOKENS),
    "convolution": (
        make(lambda m, x: m.c(x), c=lambda: nn.Conv2d(2, 4, (2, 3), (1, 2), (1, 0), groups=2)),
        IMAGES,
    ),
    "unbiased convolution": (
        make(lambda m, x: m.c(x.flatten(2)), c=lambda: nn.Conv1d(2, 2, 3, bias=False)),
        IMAGES,
    ),
    "bare parameters": (
        make(
            lambda m, x: (m.t * x + m.p).sin() * m.p,
            t=lambda: torch.randn(()),
            p=lambda: torch.randn(6),
        ),
        X,
    ),
    "frozen bias": (
        make(lambda m, x: m.a(x), a=lambda: frozen(nn.Linear(6, 2))),
        X,
    ),
    "evaluated batch norm": (
        make(
            lambda m, x: m.a(m.n(x)),
            a=lambda: nn.Linear(6, 2),
            n=lambda: nn.BatchNorm1d(6, affine=False).eval(),
        ),
        X,
    ),
}


def frozen(layer: nn.Linear) -> nn.Linear:
    layer.bias.requires_grad_(False)
    return layer


@pytest.mark.parametrize("env", [ENV, [0, -1, 0, 1, 1], None], ids=["known", "unknown", "rows"])
@pytest.mark.parametrize("name", MODELS)
def test_traced(name: str, env: Any) -> None:
    build, x = MODELS[name]
    model, record = build(), Record()
    agreement = Agreement(model, record)
    expected = shares_alone(build, losses, (x,), env)
    for _ in range(2):
        model.zero_grad()
        with traced(agreement, env):
            loss = losses(model, x).mean()
        loss.backward()
        agreement.apply()
        assert compare(record.of(model), expected) == []


def test_traced_without_gradients_counts_nothing() -> None:
    model = MODELS["linear"][0]()
    agreement = Agreement(model, AndMask(0.5))
    with traced(agreement, ENV):
        with torch.no_grad():
            model(X)
        loss = losses(model, X).mean()
    loss.backward()
    assert agreement.apply().voters == 3


def test_a_graph_that_is_kept_votes_on_the_sum() -> None:
    """Two backward passes through one graph: their shares add up before the sign is taken."""
    build, _ = MODELS["twice"]
    model, record = build(), Record()
    agreement = Agreement(model, record)
    with traced(agreement, ENV):
        loss = losses(model, X).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    agreement.apply()
    expected = shares_alone(build, lambda m, x: 2 * losses(m, x), (X,), ENV)
    assert compare(record.of(model), expected) == []


def test_uses_that_no_backward_pass_reaches() -> None:
    """A parameter is used twice, and the loss depends on one of them."""
    build, _ = MODELS["linear"]
    model, record = build(), Record()
    agreement = Agreement(model, record)
    with traced(agreement, ENV):
        model(X + 1)
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()
    assert compare(record.of(model), shares_alone(build, losses, (X,), ENV)) == []


def test_single_precision_and_other_statistics() -> None:
    model = MODELS["linear"][0]().float()
    plain = MODELS["linear"][0]().float()
    agreement, eager = Agreement(model, GeometricMean(0.5)), Agreement(plain, GeometricMean(0.5))
    with traced(agreement, ENV):
        losses(model, X.float()).mean().backward()
    with eager.observe(ENV):
        losses(plain, X.float()).mean().backward()
    agreement.apply(), eager.apply()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# --- what is refused ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "sub": (lambda m, x: x - m.p, "cannot be observed in `sub`"),
    "alpha": (lambda m, x: torch.add(x, m.p, alpha=2), "in this form of `add`"),
    "number": (lambda m, x: m.p * 2.0 * x, "in this form of `mul`"),
    "two parameters": (lambda m, x: (m.p + m.p) * x, "in this form of `add`"),
    "max_norm": (lambda m, x: F.embedding(TOKENS, m.w, max_norm=1.0), "with further options"),
    "padding": (lambda m, x: F.conv1d(x[:, None], m.k, padding="same"), "as numbers"),
    "batch norm": (lambda m, x: F.batch_norm(x, None, None, training=True), "couples rows"),
    "chunk": (lambda m, x: m.a(torch.cat(x.chunk(5))), "`chunk` moves the rows"),
    "split": (lambda m, x: m.a(x.split(1)[0]), "`split` moves the rows"),
    "cat": (lambda m, x: m.a(torch.cat([x, x])), "`cat` moves the rows"),
    "stack": (lambda m, x: m.a(torch.stack((x, x), dim=0)), "`stack` moves the rows"),
    "sort": (lambda m, x: m.a(x.sort(0).values), "`sort` moves the rows"),
    "topk": (lambda m, x: m.a(x.topk(2, dim=0).values), "`topk` moves the rows"),
    "flip": (lambda m, x: m.a(x.flip(0)), "`flip` moves the rows"),
    "roll": (lambda m, x: m.a(x.roll(1)), "`roll` moves the rows"),
    "flipud": (lambda m, x: m.a(torch.flipud(x)), "`flipud` moves the rows"),
    "repeat": (lambda m, x: m.a(x.repeat(2, 1)), "`repeat` moves the rows"),
    "more dimensions": (lambda m, x: m.a(x.repeat(1, 1, 1)), "`repeat` moves the rows"),
    "transpose": (lambda m, x: m.b(x.t()), "`t` moves the rows"),
    "permute": (lambda m, x: m.b(x.permute(1, 0)), "`permute` moves the rows"),
    "mT": (lambda m, x: m.b(torch.adjoint(x)), "`adjoint` moves the rows"),
    "index": (lambda m, x: m.a(x[torch.tensor([0, 0, 1, 2, 3])]), "`__getitem__` moves the rows"),
    "slice": (lambda m, x: m.a(x[1:]), "`__getitem__` moves the rows"),
    "einsum": (lambda m, x: m.b(torch.einsum("ij->ji", x)), "`einsum` moves the rows"),
}
ALLOWED: dict[str, Callable[..., Any]] = {
    "permute": lambda m, x: m.a(x[:, None].permute(0, 2, 1)[..., 0]),
    "transpose": lambda m, x: m.a(x[:, None].transpose(1, 2)[..., 0]),
    "sort": lambda m, x: m.a(x.sort().values),
    "topk": lambda m, x: m.a(x.topk(6).values),
    "cat": lambda m, x: m.a(torch.cat([x[:, :3], x[:, 3:]], dim=1)),
    "repeat": lambda m, x: m.a(x.repeat(1, 2)[:, :6]),
    "einsum": lambda m, x: m.a(torch.einsum("ij,ij->ij", x, x)),
    "mT": lambda m, x: m.a(torch.adjoint(x[:, None])[..., 0]),
    "constants": lambda m, x: m.a(x + m.c.flip(0)),
    "other lengths": lambda m, x: m.a(x * torch.ones(6).flip(0)),
    "split": lambda m, x: m.a(torch.cat(x.split(2, 1), 1)),
}


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "a": nn.Linear(6, 2),
        "b": nn.Linear(5, 2),
        "p": torch.randn(6),
        "w": torch.randn(6, 3),
        "k": torch.randn(2, 1, 3),
    }


def net(forward: Callable[..., Any]) -> nn.Module:
    model = Net(forward, **parts()).double()
    model.register_buffer("c", torch.arange(6.0, dtype=torch.float64))
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_while_tracing(name: str) -> None:
    forward, message = REFUSED[name]
    model = net(forward)
    with (
        pytest.raises(ObservationError, match=message),
        traced(Agreement(model, AndMask(1.0)), ENV),
    ):
        model(X)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_leaves_rows_in_their_place_while_tracing(name: str) -> None:
    model, record = net(ALLOWED[name]), Record()
    agreement = Agreement(model, record)
    with traced(agreement, ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()
    expected = shares_alone(lambda: net(ALLOWED[name]), losses, (X,), ENV)
    assert compare(record.of(model), expected) == []


def test_rows_that_are_not_first_are_refused_when_they_arrive() -> None:
    model = net(lambda m, x: m.a(x))
    agreement = Agreement(model, AndMask(1.0))
    with traced(agreement, ENV):
        loss = model(torch.randn(7, 6, dtype=torch.float64)).sum()
    with pytest.raises(ObservationError, match="rows should be its first dimension"):
        loss.backward()


def test_batch_second_is_refused() -> None:
    model = net(lambda m, x: m.a(x))
    agreement = Agreement(model, AndMask(1.0), batch_dim=1)
    with pytest.raises(ObservationError, match="hold the batch second"), traced(agreement, ENV):
        model(X)


def test_a_part_that_is_compiled_and_one_that_is_not() -> None:
    model = net(lambda m, x: m.a(x))
    agreement = Agreement(model, AndMask(1.0))
    with traced(agreement, ENV):
        loss = model(X).square().sum()
    loss.backward()
    with agreement.observe(ENV):
        loss = model(X).square().sum()
    loss.backward()
    with pytest.raises(ObservationError, match="by a compiled part of the model and by one"):
        agreement.apply()


def test_a_use_after_a_backward_pass() -> None:
    model = net(lambda m, x: m.a(x))
    agreement = Agreement(model, AndMask(1.0))
    with (  # noqa: PT012
        pytest.raises(ObservationError, match="after a backward pass through an earlier use"),
        traced(agreement, ENV),
    ):
        model(X).square().sum().backward()
        model(X)


def test_a_graph_whose_votes_were_applied() -> None:
    model = net(lambda m, x: m.a(x))
    agreement = Agreement(model, AndMask(1.0))
    with traced(agreement, ENV):
        loss = model(X).square().sum()
    loss.backward(retain_graph=True)
    agreement.apply()
    with pytest.raises(ObservationError, match="were applied or cleared already"):
        loss.backward()


def test_an_agreement_that_is_gone() -> None:
    model = net(lambda m, x: m.a(x))
    agreement = Agreement(model, AndMask(1.0))
    with traced(agreement, ENV):
        loss = model(X).square().sum()
    del agreement
    gc.collect()
    with pytest.raises(ObservationError, match="is gone"):
        loss.backward()
