"""Means of Hessians, and the proposition that links them to the score."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.consistency import (
    arithmetic_mean,
    determinant_bound,
    geometric_mean,
    log_determinant_ratio,
    quadratic_inconsistency,
)
from consistency.quadratics import definite

seeds = st.integers(0, 2**31)
sizes = st.integers(1, 6)
conditions = st.floats(0, 4)  # powers of ten


def logarithm(matrix):
    values, vectors = torch.linalg.eig(matrix)
    return (vectors @ torch.diag(values.log()) @ torch.linalg.inv(vectors)).real


@settings(max_examples=60, deadline=None)
@given(seeds, sizes, st.integers(2, 5), conditions)
def test_the_geometric_mean_solves_its_equation(seed, size, count, condition):
    hessians = definite(seed, count, size, 10**condition)
    mean = geometric_mean(hessians)
    torch.testing.assert_close(mean, mean.T)
    residual = sum(logarithm(torch.linalg.solve(hessian, mean)) for hessian in hessians)
    assert float(residual.norm()) < 1e-9 * 10**condition


@settings(max_examples=30, deadline=None)
@given(seeds, sizes, conditions)
def test_the_closed_form_of_two_is_the_iteration_of_more(seed, size, condition):
    pair = definite(seed, 2, size, 10**condition)
    twice = torch.cat([pair, pair])  # each matrix twice has the same mean
    torch.testing.assert_close(geometric_mean(twice), geometric_mean(pair), rtol=1e-7, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seeds, sizes, st.integers(2, 5))
def test_congruence_and_inversion_pass_through_the_geometric_mean(seed, size, count):
    hessians = definite(seed, count, size, 30.0)
    mean = geometric_mean(hessians)
    change = definite(seed + 1, 1, size, 5.0)[0].tril()
    moved = change @ hessians @ change.T
    torch.testing.assert_close(geometric_mean((moved + moved.mT) / 2), change @ mean @ change.T)
    inverse = torch.linalg.inv(hessians)
    torch.testing.assert_close(geometric_mean((inverse + inverse.mT) / 2), torch.linalg.inv(mean))


@settings(max_examples=30, deadline=None)
@given(seeds, sizes, st.integers(1, 5))
def test_diagonals_are_a_shortcut_of_matrices(seed, size, count):
    diagonals = 10 ** torch.empty(count, size, dtype=torch.float64).uniform_(
        -2, 2, generator=torch.Generator().manual_seed(seed)
    )
    whole = torch.diag_embed(diagonals)
    torch.testing.assert_close(geometric_mean(whole), geometric_mean(diagonals).diag())
    torch.testing.assert_close(arithmetic_mean(whole), arithmetic_mean(diagonals).diag())
    assert log_determinant_ratio(whole) == pytest.approx(
        log_determinant_ratio(diagonals), abs=1e-10
    )


@settings(max_examples=30, deadline=None)
@given(seeds, sizes, st.integers(2, 5), conditions)
def test_the_determinant_ratio_is_that_of_the_means(seed, size, count, condition):
    hessians = definite(seed, count, size, 10**condition)
    expected = torch.logdet(arithmetic_mean(hessians)) - torch.logdet(geometric_mean(hessians))
    assert log_determinant_ratio(hessians) == pytest.approx(float(expected), abs=1e-7)


def test_determinants_do_not_overflow():
    pair = torch.tensor([[1.0], [4.0]], dtype=torch.float64).expand(2, 5000) * 1e200
    assert log_determinant_ratio(pair) == pytest.approx(5000 * math.log(1.25))
    assert determinant_bound(pair, 1.0) == math.inf


@settings(max_examples=200, deadline=None)
@given(seeds, sizes, conditions)
def test_the_corrected_bound_holds_for_all_pairs(seed, size, condition):
    """Also for Hessians that share no eigenvectors: determinants do not care for the basis."""
    pair = definite(seed, 2, size, 10**condition)
    score = float(quadratic_inconsistency(pair, 0.3))
    sharp, corrected = (determinant_bound(pair, 0.3, form=form) for form in ("sharp", "corrected"))
    assert score <= sharp * (1 + 1e-7)
    assert sharp <= corrected * (1 + 1e-7)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-4, 1e4), st.floats(1e-3, 10))
def test_the_sharp_bound_is_the_score_in_one_dimension(ratio, epsilon):
    pair = torch.tensor([[1.0], [ratio]], dtype=torch.float64)
    score = quadratic_inconsistency(pair, epsilon)
    assert float(score) == pytest.approx(epsilon * max(ratio, 1 / ratio))
    # Where the ratio is near 1 the square root of R^2 - 1 loses half of the digits.
    assert determinant_bound(pair, epsilon, form="sharp") == pytest.approx(float(score), rel=1e-6)
    # The corrected one bounds max(r, 1 / r) by r + 1 / r, and the score is never below half.
    assert determinant_bound(pair, epsilon) == pytest.approx(epsilon * (ratio + 1 / ratio))


def test_the_printed_proposition_is_false():
    """One parameter, curvatures 1 and 4: the score is 4 epsilon, the printed bound 3.125."""
    pair = torch.tensor([[1.0], [4.0]], dtype=torch.float64)
    assert float(quadratic_inconsistency(pair, 1.0)) == 4.0
    assert determinant_bound(pair, 1.0, form="printed") == pytest.approx(3.125)
    assert determinant_bound(pair, 1.0, form="corrected") == pytest.approx(4.25)


@pytest.mark.parametrize(("ratio", "holds"), [(2.414, True), (2.415, False)])
def test_in_one_dimension_the_printed_proposition_fails_beyond_one_plus_root_two(ratio, holds):
    pair = torch.tensor([[1.0], [ratio]], dtype=torch.float64)
    printed = determinant_bound(pair, 1.0, form="printed")
    assert (float(quadratic_inconsistency(pair, 1.0)) <= printed) is holds


def test_the_largest_pair_bounds_more_than_two():
    hessians = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 9.0]], dtype=torch.float64)
    assert determinant_bound(hessians, 0.1) == max(
        determinant_bound(hessians[[a, b]], 0.1) for a, b in [(0, 1), (0, 2), (1, 2)]
    )
    assert determinant_bound(hessians[:1], 0.1) == 0.1


def test_the_captions_factors_are_determinant_ratios_and_not_areas():
    """The paper's captions say that the ellipse of the arithmetic mean is 5 and 25 times larger."""
    for small, determinants, areas in [(0.05, 5.5, 2.35), (0.01, 25.5, 5.05)]:
        pair = torch.tensor([[small, 1.0], [1.0, small]], dtype=torch.float64)
        ratio = math.exp(log_determinant_ratio(pair))
        assert round(ratio, 1) == determinants
        assert round(math.sqrt(ratio), 2) == areas  # the area of x' H^-1 x <= 1 is pi sqrt(det H)


def test_identical_hessians_agree():
    hessian = definite(0, 1, 4, 100.0)
    same = hessian.expand(3, 4, 4)
    torch.testing.assert_close(geometric_mean(same), hessian[0])
    assert log_determinant_ratio(same) == pytest.approx(0, abs=1e-9)


def test_flat_directions():
    one_flat = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    assert geometric_mean(one_flat).tolist() == [0.0, 1.0]
    assert log_determinant_ratio(one_flat) == math.inf
    assert log_determinant_ratio(torch.diag_embed(one_flat)) == math.inf
    assert determinant_bound(one_flat, 0.1, form="sharp") == math.inf
    both_flat = torch.tensor([[0.0, 1.0], [0.0, 4.0]])
    for hessians in (both_flat, torch.diag_embed(both_flat)):
        assert log_determinant_ratio(hessians) == pytest.approx(math.log(1.25), abs=1e-6)


@pytest.mark.parametrize(
    ("hessians", "message"),
    [
        (torch.ones(3), r"stacked as \[environments, n, n\].*\[3\]"),
        (torch.ones(2, 3, 4), r"stacked as.*\[2, 3, 4\]"),
        (torch.ones(0, 3), r"stacked as.*\[0, 3\]"),
        (torch.tensor([[1.0], [math.nan]]), "finite"),
        (torch.tensor([[1.0], [-0.1]]), r"semidefinite.*-0.1 in environment 1"),
        (torch.eye(2).repeat(2, 1, 1) - 1.5, r"semidefinite.*-2 in environment 0"),
        (torch.tensor([[[1.0, 0.5], [0.4, 1.0]]]), r"symmetric.*0.1"),
    ],
)
@pytest.mark.parametrize("function", [arithmetic_mean, geometric_mean, log_determinant_ratio])
def test_bad_hessians(function, hessians, message):
    with pytest.raises(ValueError, match=message):
        function(hessians)


@pytest.mark.parametrize("function", [arithmetic_mean, geometric_mean, log_determinant_ratio])
def test_hessians_in_a_list_and_in_half_precision(function):
    with pytest.raises(TypeError, match=r"should be a tensor.*torch.stack.*`list`"):
        function([torch.eye(2), torch.eye(2)])
    function(torch.eye(2, dtype=torch.float16).repeat(2, 1, 1))


def test_a_singular_matrix_has_no_geometric_mean():
    with pytest.raises(ValueError, match=r"positive definite.*environment 1.*damping"):
        geometric_mean(torch.stack([torch.eye(2), torch.ones(2, 2)]))


def test_an_iteration_that_does_not_settle_says_so():
    with pytest.raises(RuntimeError, match="did not settle in 1 iterations"):
        geometric_mean(definite(0, 3, 4, 1e4), max_iterations=1)


def test_an_unknown_form_of_the_bound():
    with pytest.raises(ValueError, match=r"`form` should be.*'best'"):
        determinant_bound(torch.ones(2, 1), 0.1, form="best")
    with pytest.raises(ValueError, match=r"`epsilon` should be positive.*0"):
        determinant_bound(torch.ones(2, 1), 0)
