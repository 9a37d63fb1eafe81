"""Environments of every number, size, order and spelling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from consilience import environment_mean
from engine.modules import Net, TiedLanguageModel, features, tokens
from oracle import (
    Record,
    check,
    compare,
    environments,
    label_spellings,
    make_agreement,
    row_weights,
    shares_alone,
    wavy,
)

quick = settings(max_examples=25, deadline=None, derandomize=True)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.PReLU(4),
        nn.Conv2d(4, 2, 2, stride=2, groups=2, bias=False),
    )


def unrolled() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.start.expand(len(x), 4)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return h

    return Net(forward, start=torch.randn(4), cell=nn.GRUCell(3, 4))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)


NETWORKS = {
    "perceptron": (perceptron, features(3), True),
    "convolutions": (convolutions, features(2, 4, 4), True),
    "tied": (TiedLanguageModel, tokens(3, 6), True),
    "unrolled": (unrolled, features(3, 3), True),
    "attention": (attention, features(3, 4), False),
}


@pytest.mark.parametrize("name", NETWORKS)
@given(env=environments())
@quick
def test_any_labels(name: str, env: Tensor) -> None:
    build, batch, strict_zeros = NETWORKS[name]
    check(build, batch, env, strict_zeros=strict_zeros)


@pytest.mark.parametrize("name", NETWORKS)
@given(rows=st.integers(1, 40), seed=st.integers(0, 99))
@settings(quick, max_examples=10)
def test_each_row_its_own(name: str, rows: int, seed: int) -> None:
    build, batch, strict_zeros = NETWORKS[name]
    check(build, batch, None, rows=rows, seed=seed, strict_zeros=strict_zeros)


@pytest.mark.parametrize("reduction", ["sum", "uneven", "environment_mean"])
@given(env=environments(least=2, most=6))
@settings(quick, max_examples=10)
def test_loss_that_weighs_rows(reduction: str, env: Tensor) -> None:
    check(perceptron, features(3), env, reduction=reduction)


@pytest.mark.parametrize("spelling", label_spellings(torch.tensor([5, 0, 5, 7, 7, 3])))
def test_spellings(spelling: str) -> None:
    env = label_spellings(torch.tensor([5, 0, 5, 7, 7, 3]))[spelling]
    found = check(perceptron, features(3), env)
    assert {tally.voters for tally in found.tallies.values()} == {4}


@pytest.mark.parametrize("spelling", label_spellings(torch.tensor([5, -1, 5, 7, -1, 3])))
def test_spellings_with_unknown_rows(spelling: str) -> None:
    env = label_spellings(torch.tensor([5, -1, 5, 7, -1, 3]))[spelling]
    found = check(perceptron, features(3), env)
    assert {tally.voters for tally in found.tallies.values()} == {3}


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(torch.tensor([-7, 3, -7, 10**12]), id="negative and huge"),
        pytest.param(np.array([2, 0, 2, 1], dtype=np.uint8), id="uint8"),
        pytest.param(torch.tensor([2, 0, 2, 1], dtype=torch.int16), id="int16"),
        pytest.param([2, 0, 2, 1][::-1], id="reversed list"),
        pytest.param(torch.tensor([2, 9, 0, 9, 2, 9, 1, 9])[::2], id="strided"),
        pytest.param(np.array([255, 0, 255, 1], dtype=np.uint8), id="uint8, 255 is no -1"),
        pytest.param(torch.tensor([2, 0, 2, 1], dtype=torch.uint8), id="uint8 tensor"),
        pytest.param(["a", "b", "a", "c"], id="strings"),
        pytest.param([np.int64(4), np.int64(4), np.int64(0), np.int64(1)], id="NumPy integers"),
    ],
)
def test_odd_labels(env: Any) -> None:
    found = check(perceptron, features(3), env)
    assert {tally.voters for tally in found.tallies.values()} == {3}


@pytest.mark.parametrize(
    "env", [[5, None, 5, 7, None, 3], ["a", None, "a", "b", None, "c"]], ids=["numbers", "strings"]
)
def test_none_among_labels_is_unknown(env: Any) -> None:
    build = _seeded(perceptron)
    (x,) = features(3)(6, torch.Generator().manual_seed(1))
    expected = shares_alone(build, _losses, (x,), [5, -1, 5, 7, -1, 3])
    model, record = build(), Record()
    agreement = make_agreement(model, record, 3)
    with agreement.observe(env):
        loss = _losses(model, x).mean()
    loss.backward()
    agreement.apply()
    assert compare(record.of(model), expected) == []


def test_labels_are_copied() -> None:
    """What happens to the labels between forward and backward does not matter."""
    env = torch.tensor([0, 1, 1, 0])
    build = _seeded(perceptron)
    (x,) = features(3)(4, torch.Generator().manual_seed(1))
    expected = shares_alone(build, _losses, (x,), env.clone())
    model, record = build(), Record()
    agreement = make_agreement(model, record, 2)
    with agreement.observe(env):
        loss = _losses(model, x).mean()
    env.fill_(0)
    loss.backward()
    agreement.apply()
    assert compare(record.of(model), expected) == []


@given(env=environments(least=2, most=8))
@settings(quick, max_examples=15)
def test_environment_mean(env: Tensor) -> None:
    """It is the mean over environments of the mean within each; unknown rows have no part."""
    values = torch.randn(len(env), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = [label for label in dict.fromkeys(env.tolist()) if label != -1]
    expected = torch.stack([values[env == label].mean() for label in known]).mean()
    torch.testing.assert_close(environment_mean(values, env), expected, rtol=1e-12, atol=1e-12)
    weights = row_weights("environment_mean", env, len(env))
    torch.testing.assert_close((values * weights).sum(), expected, rtol=1e-12, atol=1e-12)


def test_gradient_with_environment_mean_is_the_papers() -> None:
    """(1/d) sum over environments of each one's own mean gradient."""
    env = torch.tensor([0, 1, 1, 0, 2])
    build = _seeded(perceptron)
    (x,) = features(3)(5, torch.Generator().manual_seed(1))
    expected = shares_alone(build, _losses, (x,), env, reduction="environment_mean")
    model, record = build(), Record()
    agreement = make_agreement(model, record, 3)
    with agreement.observe(env):
        loss = environment_mean(_losses(model, x), env)
    loss.backward()
    agreement.apply()
    assert compare(record.of(model), expected) == []


def _losses(model: nn.Module, x: Tensor) -> Tensor:
    return wavy(model(x))


def _seeded(build: Any) -> Any:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build().double()

    return seeded
