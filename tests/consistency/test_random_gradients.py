"""What the AND-mask leaves of random gradients."""

import math

import pytest
import torch

from consilience import AndMask
from consilience.consistency import decay_rate, expected_norm, norm_bound, simulate_norm
from consilience.rules import null_keep_rate


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.4, 0.6, 1.0])
@pytest.mark.parametrize("voters", [1, 2, 3, 7, 16, 41])
def test_monte_carlo_lies_within_its_error_of_the_exact_formula(voters, threshold):
    generator = torch.Generator().manual_seed(voters)
    found = simulate_norm(
        voters, threshold, size=3000, deviation=1.5, draws=60, generator=generator
    )
    exact = expected_norm(voters, threshold, size=3000, deviation=1.5)
    if 60 * 3000 * null_keep_rate(voters, threshold) < 1e-3:
        assert found.mean == 0  # too rare to be met
    else:  # thirty comparisons: chance exceeds 4.5 standard errors once in 5000 such sets
        assert abs(found.mean - exact) < 4.5 * found.error


@pytest.mark.parametrize("threshold", [0.2, 0.6, 1.0])
def test_the_formula_speaks_of_the_mask_that_is_used(threshold):
    generator = torch.Generator().manual_seed(3)
    rule = AndMask(threshold)
    draws = [
        rule.combine(torch.randn(8, 3000, generator=generator)).square().sum() for _ in range(100)
    ]
    norms = torch.stack(draws)
    error = norms.std() / 10
    assert abs(norms.mean() - expected_norm(8, threshold, size=3000)) < 4.5 * error


@pytest.mark.parametrize("voters", [1, 2, 5, 80, 1000])
def test_without_a_mask_the_norm_is_one_over_the_voters(voters):
    assert expected_norm(voters, 0.0, size=7, deviation=2.0) == pytest.approx(28 / voters)


def test_full_agreement_in_closed_form():
    """All signs agree: the mean of half-normal variables, squared, times 2^(1 - d)."""
    for voters in (2, 3, 9):
        square = 1 / voters + (1 - 1 / voters) * 2 / math.pi
        assert expected_norm(voters, 1.0) == pytest.approx(square * 2 ** (1 - voters))


@pytest.mark.parametrize("voters", range(1, 60))
def test_the_corrected_bound_holds_and_the_printed_one_does_not(voters):
    for threshold in [0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 1.0]:
        assert expected_norm(voters, threshold) <= norm_bound(voters, threshold)
    assert norm_bound(voters, 1.0, form="printed") == 0.0
    assert expected_norm(voters, 1.0) > 0.0


def test_bounds_are_their_formulas():
    assert norm_bound(10, 0.6, size=2, deviation=3.0) == 18 * 3 * math.comb(10, 8) / 2**9
    assert norm_bound(10, 0.6, form="printed") == 2 * math.comb(10, 8) / 2**9


@pytest.mark.parametrize("threshold", [0.2, 0.6, 0.8, 1.0])
def test_the_norm_decays_at_the_corrected_rate(threshold):
    """The rate is 2 / q; the printed 2 - q would be below 1, a growth."""
    rate = decay_rate(threshold)
    near, far = 200, 400
    fall = (expected_norm(near, threshold) / expected_norm(far, threshold)) ** (1 / (far - near))
    # A factor of sqrt(far / near) still shows at this many voters: 2^(1/400).
    assert fall == pytest.approx(rate, rel=3e-3)
    printed = 2 - 2 / rate
    assert printed < 1 or threshold == 1.0


def test_known_rates():
    assert decay_rate(0.6) == pytest.approx(1.2126, abs=1e-4)
    assert decay_rate(0.0) == pytest.approx(1.0)
    assert decay_rate(1.0) == pytest.approx(2.0)


@pytest.mark.parametrize("function", [expected_norm, norm_bound, simulate_norm])
def test_bad_input(function):
    with pytest.raises(ValueError, match=r"`voters` should be a whole number, 1 or more.*0"):
        function(0, 0.5)
    with pytest.raises(ValueError, match=r"`threshold` should lie in \[0, 1\].*1.5"):
        function(4, 1.5)


def test_the_formula_of_many_voters():
    """Ten thousand voters, against the sum in plain integers at a thousand."""
    voters, threshold = 1000, 0.05
    total = 0.0
    for positive in range(voters + 1):
        votes = 2 * positive - voters
        if abs(votes) >= 50:
            square = (1 - 2 / math.pi) / voters + 2 * votes**2 / (math.pi * voters**2)
            total += math.comb(voters, positive) / 2**voters * square
    assert expected_norm(voters, threshold) == pytest.approx(total, rel=1e-12)
    assert expected_norm(10_000, 0.0) == pytest.approx(1e-4, rel=1e-12)
    assert 0 < expected_norm(10_000, 0.2) < 1e-80


def test_other_bad_input():
    for function in (expected_norm, norm_bound, simulate_norm):
        with pytest.raises(ValueError, match=r"`size` should be 1 or more.*-1"):
            function(4, 0.5, size=-1)
        with pytest.raises(ValueError, match=r"`deviation` should be 0 or more.*nan"):
            function(4, 0.5, deviation=math.nan)
        with pytest.raises(ValueError, match=r"`voters` should be a whole number.*2.5"):
            function(2.5, 0.5)
    with pytest.raises(ValueError, match=r"`draws` should be 2 or more.*1"):
        simulate_norm(4, 0.5, draws=1)
    with pytest.raises(ValueError, match=r"`form` should be.*'exact'"):
        norm_bound(4, 0.5, form="exact")
