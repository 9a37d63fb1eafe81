"""The figures of the theory: that they are drawn, and that what they show is so."""

import csv
import json
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience import AndMask
from consilience.consistency import inconsistency
from consilience.paper import _surfaces, convergence, linear_regression, patchwork
from consilience.paper.catalogue import THEORY


@pytest.mark.parametrize("entry", [e for e in THEORY if not e.runs], ids=lambda entry: entry.name)
def test_every_figure_is_drawn(entry, tmp_path, capsys):
    module = import_module(entry.module)
    paths = module.draw(tmp_path / "out", quick=True)
    assert {path.name for path in paths[:2]} == {f"{entry.name}.svg", f"{entry.name}.png"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in paths
    )
    assert paths[0].read_bytes().startswith(b"<?xml")
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    tables = {path.suffix: path for path in paths[2:]}
    if tables:
        rows = json.loads(tables[".json"].read_text())["rows"]
        with tables[".csv"].open() as file:
            assert len(list(csv.DictReader(file))) == len(rows)
        assert capsys.readouterr().out.count("\n") >= len(rows)


def test_both_minima_of_the_landscapes_look_alike():
    for minimum in (_surfaces.SHARED, _surfaces.CROSSING):
        at = torch.tensor(minimum, dtype=torch.float64)
        assert float(_surfaces.mean_loss(at)) == pytest.approx(0, abs=1e-30)
        assert float(_surfaces.gradients(at).norm()) == pytest.approx(0, abs=1e-15)
    ends = _surfaces.descend(
        lambda p: _surfaces.gradients(p).mean(0), torch.tensor(_surfaces.STARTS).double()
    )[-1]
    minima = torch.tensor([_surfaces.SHARED, _surfaces.CROSSING]).double()
    nearest = torch.cdist(ends, minima).min(1)
    assert (nearest.values < 1e-3).all()
    assert nearest.indices.unique().tolist() == [0, 1]


@pytest.mark.parametrize("environment", [0, 1])
def test_one_environment_alone_never_finds_the_crossing(environment):
    ends = _surfaces.descend(
        lambda p: _surfaces.gradients(p)[environment], torch.tensor(_surfaces.STARTS).double()
    )[-1]
    crossing = torch.tensor(_surfaces.CROSSING).double()
    assert ((ends - crossing).norm(dim=1) > 0.1).all()
    # It does find the minimum that both share, and otherwise ends in its own valley.
    shared = (ends - torch.tensor(_surfaces.SHARED)).norm(dim=1) < 1e-3
    assert shared.any()
    assert ((ends[~shared, environment] - 0.8).abs() < 1e-3).all()


def test_the_score_tells_the_two_minima_apart():
    scores = [
        inconsistency(
            [_surfaces.loss_a, _surfaces.loss_b],
            torch.tensor(minimum, dtype=torch.float64),
            epsilon=0.05,
            method="search",
            radius=2.0,
            starts=4,
        )
        for minimum in (_surfaces.SHARED, _surfaces.CROSSING)
    ]
    assert float(scores[0]) < 1.1 * 0.05
    assert float(scores[1]) > 15 * 0.05


def test_between_the_minima_nothing_is_agreed_upon():
    found = _surfaces.gradients(torch.tensor([0.5, 0.5], dtype=torch.float64))
    cosine = torch.nn.functional.cosine_similarity(found[0], found[1], dim=0)
    assert abs(float(cosine)) < 0.11  # orthogonal up to a trace
    assert AndMask(1.0).combine(found).tolist() == [0, 0]


def test_the_patchwork_is_what_the_paper_says():
    """A does not feel the sixth weight, B does; and -45 fits where the text's -50 does not."""
    inputs = patchwork.environments(1001)
    losses = {
        name: [float(patchwork.loss(x, torch.tensor(theta).double())) for x in inputs.values()]
        for name, theta in {
            "minimum": patchwork.MINIMUM,
            "varied": patchwork.VARIED,
            "as in the text": (100.0, -50.0, 100.0, -75.0, 1.0, 1.0),
        }.items()
    }
    assert max(losses["minimum"]) < 0.004
    assert losses["varied"][0] == pytest.approx(losses["minimum"][0], abs=1e-10)
    assert losses["varied"][1] > 1
    assert losses["as in the text"][0] > 10 * losses["minimum"][0]
    x = torch.tensor([0.1, 0.45, 0.6, 0.75, 0.9], dtype=torch.float64)
    torch.testing.assert_close(
        patchwork.target(x), torch.tensor([0, 0.5, 1, 1.5, 2], dtype=torch.float64)
    )
    assert all((x < 0.5).all() == (name == "A") for name, x in inputs.items())


def test_the_patchworks_score_is_at_least_its_variation():
    """The paper prints the score as at most the variation's loss. It is a lower bound."""
    inputs = patchwork.environments(201)
    losses = [lambda theta, x=x: patchwork.loss(x, theta) for x in inputs.values()]
    best = torch.tensor(patchwork.MINIMUM, dtype=torch.float64)
    varied = torch.tensor(patchwork.VARIED, dtype=torch.float64)
    score = inconsistency(
        losses, best, epsilon=0.01, method="search", radius=1.5, tolerance=1.0, starts=4
    )
    assert float(score) > float(losses[1](varied)) - float(losses[0](best))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]))
def test_masked_descent_keeps_within_the_proposition(seed, threshold):
    x, y = convergence.problem(seed)
    descent = convergence.descend(x, y, AndMask(threshold), 60)
    assert (descent.lowest() <= descent.bound()).all()
    # What the proof shows of every step, with its stray factor put right.
    fall = descent.losses[:-1] - descent.losses[1:]
    assert (fall >= descent.rate / 2 * descent.norms * (1 - 1e-9) - 1e-15).all()


def test_the_proposition_is_about_the_plain_mask_alone():
    x, y = convergence.problem(0)
    descent = convergence.descend(x, y, AndMask(1.0, rescale="count"), 5)
    assert not (descent.lowest() <= descent.bound()).all()


def test_the_descent_is_autograds():
    x, y = convergence.problem(1)
    descent = convergence.descend(x, y, AndMask(0.0), 2)
    theta = torch.zeros(x.shape[-1], dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ theta, y)
    (slope,) = torch.autograd.grad(loss, theta)
    assert float(descent.losses[0]) == pytest.approx(loss.item())
    assert float(descent.norms[0]) == pytest.approx(float(slope.square().sum()))
    curvature = torch.autograd.functional.hessian(
        lambda t: torch.nn.functional.binary_cross_entropy_with_logits(x @ t, y), theta.detach()
    )
    # At zero, where sigmoids are steepest, the curvature is exactly the bound L.
    assert 1 / descent.rate == pytest.approx(float(torch.linalg.eigvalsh(curvature)[-1]))


def test_averaging_lands_on_the_patchwork_and_agreement_on_the_shared_feature():
    ends = {
        name: linear_regression.train(rule, linear_regression.X, 1000, 0)[-1]
        for name, rule in linear_regression.RULES.items()
    }
    private, shared = ends["mean"][:4], ends["mean"][4]
    assert (3 * private > 0.9).all()
    assert 0.3 * shared < 0.1
    for name in ("AND-mask", "geometric mean"):
        assert (3 * ends[name][:4].abs() < 0.1).all()
        assert 0.3 * ends[name][4] > 0.85


def test_the_score_of_a_linear_model_does_not_depend_on_the_solution():
    """Squared loss is quadratic: its Hessian is the same everywhere, and so is the score.

    The patchwork and the shared solution of the linear regression are equally inconsistent.
    """
    losses = [lambda w, row=row: 0.5 * (row @ w - 1) ** 2 for row in linear_regression.X.double()]
    patch = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1 / 3, 0.0], dtype=torch.float64)
    shared = torch.tensor([0.0, 0.0, 0.0, 0.0, 1 / 0.3], dtype=torch.float64)
    scores = [
        inconsistency(losses, solution, epsilon=0.1, damping=1.0) for solution in (patch, shared)
    ]
    assert float(scores[0]) == pytest.approx(float(scores[1]))
    assert inconsistency(losses, shared, epsilon=0.1) == float("inf")
