"""The oracle is judged by third ways: by hand, by vmap(grad), and by its three selves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from consilience import Agreement
from consilience.rules import Statistic, Tally
from oracle import (
    Oracle,
    Record,
    compare,
    environments,
    groups_of,
    label_spellings,
    row_weights,
    shares_alone,
    shares_of_a_joint_graph,
    shares_of_uses,
    wavy,
)

LABELS = torch.tensor([2, 0, 2, -1, 1, 0, 2])


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return wavy(model(x))


def batch(rows: int = 7) -> tuple[Tensor]:
    return (torch.randn(rows, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


def test_shares_by_hand():
    def build() -> nn.Module:
        layer = nn.Linear(2, 1, bias=False).double()
        nn.init.constant_(layer.weight, 1.0)
        return layer

    x = torch.tensor([[1.0, -1.0], [2.0, 0.0], [3.0, 4.0], [-1.0, -6.0]], dtype=torch.float64)
    found = shares_alone(build, lambda m, x: m(x)[:, 0], (x,), [7, 5, -1, 7], reduction="sum")
    # Environment 7 has rows 0 and 3, environment 5 has row 1, and row 2 does not vote.
    assert found.shares["weight"].tolist() == [[[0.0, -7.0]], [[2.0, 0.0]]]
    assert found.gradient["weight"].tolist() == [[5.0, -3.0]]
    assert found.votes("weight").tolist() == [[1.0, -1.0]]
    assert found.turnout("weight").tolist() == [[1.0, 1.0]]
    assert found.squares("weight").tolist() == [[4.0, 49.0]]
    floor = np.log(1e-10)
    expected = [[floor + np.log(2 + 1e-10), np.log(7 + 1e-10) + floor]]
    torch.testing.assert_close(found.logs("weight").tolist(), expected)
    assert found.voters == 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "uneven", "environment_mean"])
@pytest.mark.parametrize("oracle", [shares_alone, shares_of_a_joint_graph, shares_of_uses])
def test_oracle_is_vmap_of_grad(oracle, reduction):
    found = oracle(network, losses, batch(), LABELS, reduction=reduction)
    model = network()
    weights = row_weights(reduction, LABELS, 7)

    def row_loss(parameters: dict[str, Tensor], x: Tensor, weight: Tensor) -> Tensor:
        return wavy(functional_call(model, parameters, (x[None],)))[0] * weight

    parameters = {n: p.detach() for n, p in model.named_parameters()}
    rows = vmap(grad(row_loss), (None, 0, 0))(parameters, *batch(), weights)
    for name, each in rows.items():
        stacked = torch.stack([each[label == LABELS].sum(0) for label in (2, 0, 1)])
        torch.testing.assert_close(found.shares[name], stacked, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found.gradient[name], each.sum(0), rtol=1e-12, atol=1e-13)


def test_uses_split_a_batch_norm_by_hand():
    def build() -> nn.Module:
        return nn.BatchNorm1d(4).double()

    (x,) = batch()
    found = shares_of_uses(build, losses, (x,), LABELS)
    centred = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    output = centred.clone().requires_grad_()
    (slope,) = torch.autograd.grad(wavy(output).mean(), output)
    for number, label in enumerate((2, 0, 1)):
        of = label == LABELS
        torch.testing.assert_close(found.shares["weight"][number], (slope * centred)[of].sum(0))
        torch.testing.assert_close(found.shares["bias"][number], slope[of].sum(0))


def test_uses_differ_from_both_other_oracles_where_rows_are_coupled():
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()

    env = torch.tensor([0, 1, 0, 1, 1, 0])
    ways = (shares_alone, shares_of_a_joint_graph, shares_of_uses)
    alone, joint, uses = (way(build, losses, batch(6), env) for way in ways)
    name = "0.weight"
    torch.testing.assert_close(joint.gradient[name], uses.gradient[name], rtol=1e-12, atol=1e-13)
    for one, other in ((alone, joint), (joint, uses), (alone, uses)):
        assert not torch.allclose(one.shares[name], other.shares[name], rtol=1e-3)


@given(env=environments())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_shares_sum_to_the_gradient(env):
    rows = len(env)
    found = shares_alone(network, losses, batch(rows), env)
    model = network()
    losses(model, *batch(rows)).mean().backward()
    groups, unknown = groups_of(env, rows)
    assert found.voters == len(groups) == len(set(env.tolist()) - {-1})
    for name, p in model.named_parameters():
        torch.testing.assert_close(found.gradient[name], p.grad, rtol=1e-10, atol=1e-13)
        if not len(unknown):
            torch.testing.assert_close(found.shares[name].sum(0), p.grad, rtol=1e-10, atol=1e-13)


def test_groups_of_every_spelling():
    env = torch.tensor([9, -3, 9, 4, -3, 9])
    expected, _ = groups_of(env, 6)
    for labels in label_spellings(env).values():
        groups, unknown = groups_of(labels, 6)
        assert [g.tolist() for g in groups] == [g.tolist() for g in expected]
        assert unknown.tolist() == []
    groups, unknown = groups_of([-1, 4, -1], 3)
    assert [g.tolist() for g in groups] == [[1]]
    assert unknown.tolist() == [0, 2]
    assert [g.tolist() for g in groups_of(None, 3)[0]] == [[0], [1], [2]]


@given(env=environments(least=3, most=5, unknown=True))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_strategy_draws_what_it_says(env):
    assert 3 <= len(set(env.tolist()) - {-1}) <= 5
    assert env.dtype == torch.int64


def test_environment_mean_weights_rows_by_their_environment():
    weights = row_weights("environment_mean", LABELS, 7)
    torch.testing.assert_close(weights.tolist(), [1 / 9, 1 / 6, 1 / 9, 0.0, 1 / 3, 1 / 6, 1 / 9])


# --- a comparison that cannot fail proves nothing --------------------------------------------


def truthful(oracle: Oracle) -> dict[str, Tally]:
    return {
        name: Tally(
            gradient=oracle.gradient[name].clone(),
            voters=oracle.voters,
            votes=oracle.votes(name),
            turnout=oracle.turnout(name),
            logs=oracle.logs(name),
            squares=oracle.squares(name),
        )
        for name in oracle.shares
    }


@pytest.fixture
def oracle() -> Oracle:
    return shares_alone(network, losses, batch(), LABELS)


def test_comparison_accepts_the_truth(oracle):
    assert compare(truthful(oracle), oracle) == []


@pytest.mark.parametrize("field", ["gradient", "votes", "turnout", "logs", "squares"])
def test_comparison_sees_one_wrong_component(oracle, field):
    tallies = truthful(oracle)
    wrong = getattr(tallies["0.weight"], field).clone()
    wrong[1, 2] += 1.0 if field in ("votes", "turnout") else 1e-8
    tallies["0.weight"] = dataclasses.replace(tallies["0.weight"], **{field: wrong})
    (problem,) = compare(tallies, oracle)
    assert problem.startswith(f"0.weight: {field}")


def test_comparison_sees_wrong_voters_and_missing_and_surplus_parameters(oracle):
    tallies = truthful(oracle)
    tallies["3.bias"] = dataclasses.replace(tallies["3.bias"], voters=4)
    assert compare(tallies, oracle) == ["3.bias: 4 voters, not 3"]
    tallies = truthful(oracle)
    tallies["spare"] = tallies.pop("3.bias")
    (problem,) = compare(tallies, oracle)
    assert "spare" in problem
    assert "3.bias" in problem


def test_comparison_forgives_votes_within_the_band_alone(oracle):
    name, at = "0.bias", (0, 3)
    shares = {**oracle.shares, name: oracle.shares[name].clone()}
    for value, forgiven in ((1e-13, True), (0.0, False), (1e-11, False)):
        shares[name][at] = value * oracle.scale
        near = dataclasses.replace(oracle, shares=shares)
        tallies = truthful(near)
        votes = tallies[name].votes.clone()
        votes[3] -= 1.0
        tallies[name] = dataclasses.replace(tallies[name], votes=votes)
        assert (compare(tallies, near) == []) is forgiven
        assert compare(tallies, near, strict_zeros=False) == [] or value > 1e-12


# --- the record, and the library's own exact way ---------------------------------------------


def test_record_asks_for_everything_and_finds_each_parameter():
    model, record = network(), Record()
    assert record.statistics == frozenset(Statistic)
    agreement = Agreement(model, record)
    groups, _ = groups_of(LABELS, 7)
    values = losses(model, *batch())
    agreement.backward(torch.stack([values[group].mean() for group in groups]))
    agreement.apply()
    found = record.of(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert found[name].gradient.shape == p.shape


@pytest.mark.parametrize("form", ["vector", "iterable", "generator of fresh graphs"])
def test_library_backward_is_the_oracle(form):
    """The gradient is the mean over environments of the gradient of each one's mean."""
    known = torch.tensor([2, 0, 2, 0, 1, 0, 2])
    expected = shares_alone(network, losses, batch(), known, reduction="environment_mean")
    model, record = network(), Record()
    agreement = Agreement(model, record)
    groups, _ = groups_of(known, 7)
    (x,) = batch()
    if form == "vector":
        values = losses(model, x)
        agreement.backward(torch.stack([values[group].mean() for group in groups]))
    elif form == "iterable":
        agreement.backward([losses(model, x[group]).mean() for group in groups])
    else:
        agreement.backward(losses(model, x[group]).mean() for group in groups)
    agreement.apply()
    found = record.of(model)
    if form == "generator of fresh graphs":
        # How many environments will come is not known when the first is folded, so the floor
        # of the logarithm is applied before the division by their number, and not after.
        for name, tally in found.items():
            floored = torch.log(expected.shares[name].abs() + 1e-10 / 3).sum(0)
            torch.testing.assert_close(tally.logs, floored, rtol=1e-11, atol=1e-11)
            found[name] = dataclasses.replace(tally, logs=expected.logs(name))
    assert compare(found, expected) == []


def test_library_backward_on_a_joint_graph():
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
        ).double()

    known = torch.tensor([2, 0, 2, 0, 1, 0, 2])
    expected = shares_of_a_joint_graph(build, losses, batch(), known, reduction="environment_mean")
    model, record = build(), Record()
    agreement = Agreement(model, record)
    values = losses(model, *batch())
    groups, _ = groups_of(known, 7)
    agreement.backward(torch.stack([values[group].mean() for group in groups]))
    agreement.apply()
    # A bias below a batch norm has a gradient of zero but for rounding.
    assert compare(record.of(model), expected, strict_zeros=False) == []


def test_wavy_depends_on_every_component():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    wavy(x).sum().backward()
    assert len(x.grad[0].unique()) == 12
    assert F.softmax(x, -1).flatten(1).shape == (2, 12)
