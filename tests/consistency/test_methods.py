"""Three ways to the same score: closed forms, grid and search on losses where all are possible."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.consistency import check_witness, inconsistency, quadratic_inconsistency
from consistency.quadratics import definite, losses_of

EPSILON = 0.1
seeds = st.integers(0, 2**31)


def zeros(size):
    return torch.zeros(size, dtype=torch.float64)


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(1, 4), st.sampled_from(["minimum", "point"]))
def test_the_closed_form_is_the_best_of_many_points_on_the_border(seed, size, count, against):
    """On the border of an ellipsoid, theta = H^(-1/2) u sqrt(2 epsilon)."""
    hessians = definite(seed, count, size, 50.0)
    values = torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()
    score = quadratic_inconsistency(hessians, EPSILON, values=values, against=against)
    for e in range(count):
        directions = torch.randn(2000, size, dtype=torch.float64)
        scale = (directions @ hessians[e] * directions).sum(1, keepdim=True)
        # Inside as well: with "point" the largest difference may be at theta* itself.
        radii = torch.rand(2000, 1, dtype=torch.float64).sqrt()
        points = torch.cat([directions / scale.sqrt(), radii * directions / scale.sqrt()])
        points *= math.sqrt(2 * EPSILON)
        losses = [
            v + (points @ h * points).sum(1) / 2 for h, v in zip(hessians, values, strict=True)
        ]
        for other in range(count):
            base = losses[e] if against == "point" else values[e]
            found = float((losses[other] - base).abs().max())
            assert found <= float(score.matrix[e, other]) * (1 + 1e-9)
            if size <= 2:
                assert found >= 0.95 * float(score.matrix[e, other]) - 1e-12


@settings(max_examples=50, deadline=None)
@given(seeds, st.integers(1, 6), st.sampled_from(["minimum", "point"]))
def test_diagonals_are_matrices(seed, size, against):
    generator = torch.Generator().manual_seed(seed)
    diagonals = torch.rand(3, size, generator=generator, dtype=torch.float64) * 10 + 0.01
    short = quadratic_inconsistency(diagonals, EPSILON, against=against)
    whole = quadratic_inconsistency(torch.diag_embed(diagonals), EPSILON, against=against)
    torch.testing.assert_close(short.matrix, whole.matrix)
    ratios = diagonals[None] / diagonals[:, None]
    if against == "minimum":
        assert float(short) == pytest.approx(EPSILON * float(ratios.max()))


@pytest.mark.parametrize("against", ["minimum", "point"])
@pytest.mark.parametrize("condition", [3.0, 100.0, 1e4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_grid_search_and_closed_form_agree(size, condition, against):
    hessians = definite(size, 2, size, condition)
    values = [0.3, 0.35 if against == "minimum" else 0.3]
    losses = losses_of(hessians, values)
    exact = quadratic_inconsistency(hessians, EPSILON, values=values, against=against)
    automatic = inconsistency(losses, zeros(size), epsilon=EPSILON, against=against)
    torch.testing.assert_close(automatic.matrix, exact.matrix)

    searched = inconsistency(
        losses, zeros(size), epsilon=EPSILON, against=against, method="search", starts=3
    )
    torch.testing.assert_close(searched.matrix, exact.matrix, rtol=1e-5, atol=1e-6)
    assert (searched.matrix <= exact.matrix * (1 + 1e-9)).all()
    assert check_witness(losses, zeros(size), searched).holds

    points = {1: 2001, 2: 301, 3: 61}[size]
    gridded = inconsistency(
        losses, zeros(size), epsilon=EPSILON, against=against, method="grid", points=points
    )
    assert float(gridded) <= float(exact) <= float(gridded) + gridded.error
    # Nodes of a grid lie inside, so the grid errs to one side; a cell is about 1/points wide.
    assert gridded.error < 8 / points * float(exact) or (size, condition) == (3, 1e4)
    assert check_witness(losses, zeros(size), gridded, checks=2).value == pytest.approx(
        float(gridded)
    )


@pytest.mark.parametrize("size", [10, 40])
def test_search_finds_the_closed_form_in_many_dimensions(size):
    hessians = definite(size, 2, size, 100.0)
    exact = quadratic_inconsistency(hessians, EPSILON)
    found = inconsistency(
        losses_of(hessians), zeros(size), epsilon=EPSILON, method="search", starts=3
    )
    assert float(found) <= float(exact) * (1 + 1e-9)
    assert float(found) == pytest.approx(float(exact), rel=1e-3)


def test_identical_losses_give_epsilon():
    hessian = definite(0, 1, 2, 10.0)[0]
    losses = losses_of([hessian, hessian])
    for method in ("quadratic", "grid", "search"):
        score = inconsistency(losses, zeros(2), epsilon=EPSILON, method=method)
        assert EPSILON * 0.999 < float(score) <= EPSILON * (1 + 1e-9)
        printed = inconsistency(losses, zeros(2), epsilon=EPSILON, method=method, against="point")
        assert float(printed) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("whole", [False, True])
def test_a_flat_direction_of_one_environment_makes_it_infinite(whole):
    diagonals = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    score = quadratic_inconsistency(torch.diag_embed(diagonals) if whole else diagonals, 0.1)
    assert score == math.inf
    assert score.pair == (0, 1)
    assert score.matrix.tolist() == [
        [pytest.approx(0.1), math.inf],
        [pytest.approx(0.1), pytest.approx(0.1)],
    ]
    # The witness leads along what environment 0 does not feel.
    assert score.witness.path[-1][1] == 0
    assert score.witness.path[-1][0] != 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_direction_that_is_flat_for_all_counts_for_nothing(whole):
    diagonals = torch.tensor([[0.0, 1.0], [0.0, 4.0]])
    score = quadratic_inconsistency(torch.diag_embed(diagonals) if whole else diagonals, 0.1)
    assert float(score) == pytest.approx(0.4)
    nothing = quadratic_inconsistency(torch.zeros(2, 2, 2) if whole else torch.zeros(2, 2), 0.1)
    assert float(nothing) == 0.0


def test_damping_makes_flat_directions_finite():
    diagonals = torch.tensor([[0.0, 1.0], [2.0, 1.0]], dtype=torch.float64)
    for hessians in (diagonals, torch.diag_embed(diagonals)):
        score = quadratic_inconsistency(hessians, 0.1, damping=0.01)
        assert float(score) == pytest.approx(0.1 * 2.01 / 0.01)


def test_losses_of_different_height():
    """At theta* itself the losses differ already; the printed variant sees the same."""
    hessians = torch.ones(2, 1, dtype=torch.float64)
    score = quadratic_inconsistency(hessians, 0.1, values=[1.0, 0.0])
    assert score.matrix.tolist() == [[pytest.approx(0.1), 1.0], [pytest.approx(1.1), 0.1]]
    losses = losses_of(torch.ones(2, 1, 1, dtype=torch.float64), [1.0, 0.0])
    for method in ("grid", "search"):
        found = inconsistency(losses, zeros(1), epsilon=0.1, method=method)
        torch.testing.assert_close(found.matrix, score.matrix, rtol=1e-3, atol=1e-3)


def two_wells(point):
    """Two round wells: at 0 and, behind a ridge of height 1, at (3, 0)."""
    return torch.minimum(point.square().sum(), (point[0] - 3).square() + point[1].square())


def test_only_the_connected_part_counts():
    """Environment 1 suffers in the other well, which environment 0 holds for as good."""

    def other(point):
        return point.square().sum()

    for method, options in [("grid", {"width": 5.0}), ("search", {})]:
        score = inconsistency([two_wells, other], zeros(2), epsilon=0.25, method=method, **options)
        assert float(score.matrix[0, 1]) == pytest.approx(0.25, rel=0.05)
    # Once epsilon reaches the ridge's height, the wells are one region, and the far end of the
    # other one is at a distance of 3 + 1.6.
    score = inconsistency([two_wells, other], zeros(2), epsilon=2.56, method="grid", width=5.0)
    assert float(score.matrix[0, 1]) == pytest.approx(4.6**2, rel=0.02)


def test_search_follows_a_bent_valley():
    """A valley along a circle: straight lines leave it at once, the path does not."""

    def circle(point):
        return 100 * ((point[0] + 1).square() + point[1].square() - 1).square()

    def round_well(point):
        return point.square().sum()

    losses = [circle, round_well]
    score = inconsistency(losses, zeros(2), epsilon=0.01, method="search", pairs=[(0, 1)])
    # The far side of the ring: (r + 1)^2 at the outer radius.
    exact = (1 + math.sqrt(1 + math.sqrt(0.01 / 100))) ** 2
    assert float(score) <= exact * (1 + 1e-9)
    assert float(score) == pytest.approx(exact, rel=1e-3)
    check = check_witness(losses, zeros(2), score)
    assert check.holds
    assert check.value == pytest.approx(exact, rel=1e-3)
    assert len(score.witness.path) > 5
    gridded = inconsistency(
        losses, zeros(2), epsilon=0.01, method="grid", points=1201, pairs=[(0, 1)]
    )
    assert float(gridded) <= exact <= float(gridded) + gridded.error


def test_a_witness_of_another_loss_does_not_hold():
    losses = losses_of(definite(0, 2, 2, 10.0))
    score = inconsistency(losses, zeros(2), epsilon=0.1, method="search", starts=2)
    assert check_witness(losses, zeros(2), score).holds
    steeper = [lambda point, loss=loss: 1.1 * loss(point) for loss in losses]
    check = check_witness(steeper, zeros(2), score)
    assert not check.holds
    assert check.excess == pytest.approx(1.1, rel=1e-3)
    flatter = [losses[score.pair[0]], losses[score.pair[0]]]
    assert not check_witness(flatter, zeros(2), score).holds  # stays inside, falls short


def test_a_witness_is_checked_more_closely_than_steps_are():
    """A ridge around the start, thinner than the steps beyond it with one check each."""

    def ridge(point):
        distance = point.norm() + 0 * point.sum()
        return 0.001 * point.square().sum() + torch.exp(-(((distance - 0.5) / 0.05) ** 2))

    losses = [ridge, lambda point: point.square().sum()]
    score = inconsistency(
        losses,
        zeros(2),
        epsilon=0.1,
        method="search",
        checks=1,
        starts=4,
        radius=5.0,
        tolerance=math.inf,
        pairs=[(0, 1)],
    )
    assert check_witness(losses, zeros(2), score).holds
    assert float(score) < 0.5**2


def test_a_witness_through_what_is_no_number_does_not_hold():
    losses = losses_of(definite(0, 2, 2, 10.0))
    score = inconsistency(losses, zeros(2), epsilon=0.1, method="search", starts=1)
    end = score.witness.path[-1]

    def holed(point):
        inside = losses[score.pair[0]](point)
        middle = 0.1 < (point @ end) / (end @ end) < 0.9
        return inside * math.nan if middle else inside

    with_hole = list(losses)
    with_hole[score.pair[0]] = holed
    check = check_witness(with_hole, zeros(2), score)
    assert not check.holds
    assert check.excess == math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_damping_below_the_rounding_still_makes_flat_directions_finite(dtype):
    """A damping of 1e-5 of the curvature is less than the rounding of 50 parameters in float32."""
    generator = torch.Generator().manual_seed(0)
    rotation, _ = torch.linalg.qr(torch.randn(50, 50, generator=generator, dtype=torch.float64))
    steep = torch.logspace(0, -9, 50, dtype=torch.float64)
    whole = torch.stack([(rotation * c) @ rotation.T for c in (steep, steep.flip(0))]).to(dtype)
    whole = (whole + whole.mT) / 2
    exact = (1 + 1e-5) / (1e-9 + 1e-5)
    score = quadratic_inconsistency(whole, 1.0, damping=1e-5)
    assert float(score) == pytest.approx(exact, rel=1e-6 if dtype is torch.float64 else 0.05)
    model = {"w": torch.zeros(50, dtype=dtype)}
    losses = [lambda p, h=h: p["w"] @ h @ p["w"] / 2 for h in whole]
    found = inconsistency(losses, model, epsilon=1.0, damping=1e-5)
    torch.testing.assert_close(found.matrix, score.matrix, rtol=0.01, atol=0.0)


def test_a_grid_that_cannot_hold_the_region_says_so():
    losses = [lambda p: p[0].square(), lambda p: p.square().sum()]
    score = inconsistency(losses, zeros(2), epsilon=0.1, method="grid", points=101)
    assert score.error == math.inf
    assert "at least this" in score.meaning
    assert "environment 0 goes on beyond the edge of the grid" in score.meaning
    assert float(score) > 1e6
    boxed = inconsistency(losses, zeros(2), epsilon=0.1, method="grid", points=101, width=[1, 2])
    assert boxed.error == math.inf
    assert float(boxed) == pytest.approx(4.1, rel=0.05)


def test_a_region_thinner_than_the_cells_is_not_called_exact():
    hessians = definite(3, 2, 3, 1.0)
    rotation = torch.linalg.qr(torch.arange(9.0).reshape(3, 3).double() + torch.eye(3)).Q
    hessians[0] = rotation @ torch.diag(torch.tensor([1.0, 1e3, 1e6]).double()) @ rotation.T
    losses = losses_of((hessians + hessians.mT) / 2)
    score = inconsistency(losses, zeros(3), epsilon=0.1, method="grid", points=51)
    assert score.error == math.inf
    assert "environment 0 is thinner than a cell" in score.meaning


def test_a_box_is_fitted_wherever_the_minimum_is_and_however_small():
    for scale in (1e-5, 1.0, 1e4):
        center = torch.tensor([30.0, -2.0], dtype=torch.float64)

        def loss(point, weight, scale=scale, center=center):
            gap = (point - center) / scale
            return gap[0].square() * weight + (5 * gap[1] + gap[0]).square()

        losses = [lambda p: loss(p, 1.0), lambda p: loss(p, 3.0)]
        score = inconsistency(losses, center, epsilon=0.01, method="grid", points=201)
        assert float(score) == pytest.approx(0.03, rel=0.03)
        assert float(score) <= 0.03 <= float(score) + score.error


def test_the_search_stays_within_its_radius():
    losses = [lambda p: p[0].square(), lambda p: p.square().sum()]
    score = inconsistency(losses, zeros(2), epsilon=0.1, method="search", radius=2.0)
    assert score.witness.distance <= 2.0
    # On the circle x^2 + y^2 = 4 every point is worth 4.
    assert float(score) == pytest.approx(4.0, rel=1e-4)
    assert "within a distance of 2" in score.meaning


def test_pairs_that_were_not_asked_for_are_not_there():
    losses = losses_of(definite(0, 3, 2, 10.0))
    for method in ("quadratic", "grid", "search"):
        score = inconsistency(losses, zeros(2), epsilon=0.1, method=method, pairs=[(2, 0), (0, 1)])
        assert (~score.matrix.isnan()).nonzero().tolist() == [[0, 1], [2, 0]]
        assert score.pair in {(2, 0), (0, 1)}
        assert float(score) == score.matrix[score.pair]


def test_the_same_seed_gives_the_same_number():
    losses = losses_of(definite(0, 2, 5, 10.0))
    first, second = (
        inconsistency(losses, zeros(5), epsilon=0.1, method="search", starts=2, steps=5, seed=7)
        for _ in range(2)
    )
    assert torch.equal(first.matrix, second.matrix)
    assert torch.equal(first.witness.path, second.witness.path)
