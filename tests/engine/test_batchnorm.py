"""Train-mode batch norm couples rows: refused by default, exact in three ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from consilience import Agreement, AndMask
from engine.modules import Net, features, inexact_start, normal
from oracle import (
    Record,
    check,
    compare,
    environments,
    groups_of,
    shares_of_a_joint_graph,
    wavy,
)

LABELS = [2, 0, 2, 1, 1, 0, 2, 0, 1]
UNKNOWN = [2, 0, 2, -1, 1, 1, 0, 2, -1]

NETWORKS: dict[str, tuple[Any, Any]] = {
    "alone": (lambda: inexact_start(nn.BatchNorm1d(3)), features(3)),
    "1d with space": (lambda: inexact_start(nn.BatchNorm1d(3)), features(3, 4)),
    "2d": (lambda: inexact_start(nn.BatchNorm2d(3)), features(3, 2, 2)),
    "3d": (lambda: inexact_start(nn.BatchNorm3d(3)), features(3, 2, 2, 1)),
    "between linear layers": (
        lambda: nn.Sequential(nn.Linear(3, 4), inexact_start(nn.BatchNorm1d(4)), nn.Linear(4, 2)),
        features(3),
    ),
    "two of them": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2, bias=False),
            inexact_start(nn.BatchNorm2d(3)),
            nn.ReLU(),
            nn.Conv2d(3, 3, 2),
            nn.BatchNorm2d(3, momentum=None),
            nn.Flatten(),
            nn.Linear(12, 2),
        ),
        features(2, 4, 4),
    ),
    "no affine": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Tanh(), nn.Linear(4, 2)
        ),
        features(3),
    ),
    "no running statistics": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
        ),
        features(3),
    ),
    "no running statistics, eval": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
        ).eval(),
        features(3),
    ),
    "frozen": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 2)
        ),
        features(3),
    ),
    "the same one twice": (
        lambda: Net(
            lambda m, x: m.n(m.l(m.n(m.l(x)).sin())),
            n=inexact_start(nn.BatchNorm1d(3)),
            l=nn.Linear(3, 3),
        ),
        features(3),
    ),
}

every_network = pytest.mark.parametrize("name", NETWORKS)


@every_network
def test_default_is_an_error_that_names_three_ways_out(name: str) -> None:
    build, batch = NETWORKS[name]
    with pytest.raises(RuntimeError) as error:
        check(build, batch, LABELS)
    for way_out in ('batchnorm="joint"', 'batchnorm="per_environment"', "backward"):
        assert way_out in str(error.value)


@every_network
@pytest.mark.parametrize("env", [LABELS, UNKNOWN, None], ids=["known", "unknown", "each row"])
def test_joint(name: str, env: Any) -> None:
    build, batch = NETWORKS[name]
    check(build, batch, env, rows=9, oracle="uses", strict_zeros=False, batchnorm="joint")


@every_network
def test_per_environment(name: str) -> None:
    build, batch = NETWORKS[name]
    check(
        build,
        batch,
        LABELS,
        oracle="alone",
        strict_zeros=False,
        same_forward=False,
        batchnorm="per_environment",
    )


@given(env=environments(least=2, most=8, unknown=True))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_joint_on_any_labels(env: Tensor) -> None:
    build, batch = NETWORKS["between linear layers"]
    check(build, batch, env, oracle="uses", strict_zeros=False, batchnorm="joint")


@given(env=environments(least=2, most=8, unknown=False))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_per_environment_on_any_labels(env: Tensor) -> None:
    # With space, even an environment of one row has statistics.
    build = lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Conv1d(3, 2, 1))  # noqa: E731
    check(
        build,
        features(2, 4),
        env,
        oracle="alone",
        strict_zeros=False,
        same_forward=False,
        batchnorm="per_environment",
    )


class FunctionalNorm(nn.Module):
    """A batch norm without a module to tell it by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(normal(3)), nn.Parameter(normal(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True)


def test_functional() -> None:
    with pytest.raises(RuntimeError, match="per_environment"):
        check(FunctionalNorm, features(3), LABELS)
    check(FunctionalNorm, features(3), LABELS, oracle="uses", batchnorm="joint")
    check(FunctionalNorm, features(3), LABELS, same_forward=False, batchnorm="per_environment")


def test_backward_on_the_joint_graph_is_exact() -> None:
    build, batch = NETWORKS["two of them"]

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build().double()

    (x,) = batch(9, torch.Generator().manual_seed(1))
    losses = lambda model, x: wavy(model(x))  # noqa: E731
    expected = shares_of_a_joint_graph(seeded, losses, (x,), LABELS, reduction="environment_mean")
    model, record = seeded(), Record()
    agreement = Agreement(model, record)
    values = losses(model, x)
    agreement.backward(torch.stack([values[group].mean() for group in groups_of(LABELS, 9)[0]]))
    agreement.apply()
    assert compare(record.of(model), expected, strict_zeros=False) == []


def test_joint_updates_running_statistics_as_ever() -> None:
    build, batch = NETWORKS["between linear layers"]
    torch.manual_seed(0)
    plain = build().double()
    torch.manual_seed(0)
    observed = build().double()
    (x,) = batch(9, torch.Generator().manual_seed(1))
    plain(x)
    with Agreement(observed, AndMask(0.5), batchnorm="joint").observe(LABELS):
        observed(x)
    for (name, expected), (_, found) in zip(
        plain.named_buffers(), observed.named_buffers(), strict=True
    ):
        torch.testing.assert_close(found, expected, msg=name)


def test_per_environment_moves_running_statistics() -> None:
    """Each environment's statistics enter the running ones: they move, and stay finite."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3).double()
    x = 5.0 + torch.randn(9, 3, dtype=torch.float64)
    agreement = Agreement(model, AndMask(0.5), batchnorm="per_environment")
    for _ in range(60):
        with agreement.observe(LABELS):
            model(x)
    means = torch.stack([x[group].mean(0) for group in groups_of(LABELS, 9)[0]])
    assert bool((model.running_mean >= means.min(0).values - 0.05).all())
    assert bool((model.running_mean <= means.max(0).values + 0.05).all())
    assert int(model.num_batches_tracked) > 0


def test_an_environment_of_one_row_has_no_statistics() -> None:
    model = nn.BatchNorm1d(3).double()
    agreement = Agreement(model, AndMask(0.5), batchnorm="per_environment")
    x = torch.randn(3, 3, dtype=torch.float64)
    with (
        pytest.raises((ValueError, RuntimeError), match=r"one|1|single"),
        agreement.observe([0, 0, 1]),
    ):
        model(x)


def test_unknown_way() -> None:
    with pytest.raises(ValueError, match="batchnorm"):
        Agreement(nn.BatchNorm1d(3), AndMask(0.5), batchnorm="per-environment")


def test_eval_mode_needs_no_way() -> None:
    build, batch = NETWORKS["between linear layers"]
    check(lambda: build().eval(), batch, LABELS)
    check(lambda: build().eval(), batch, LABELS, batchnorm="joint")
    check(lambda: build().eval(), batch, LABELS, batchnorm="per_environment")
