import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import binom

from consilience.rules import (
    AndMask,
    MajoritySign,
    SoftMask,
    Tally,
    XorMask,
    null_keep_rate,
    quorum,
)
from consilience.rules._threshold import _EXACT_UP_TO

UP_TO = 200


def exact_rate(voters, threshold):
    """The chance that coin flips pass, in fractions."""
    kept = sum(
        math.comb(voters, positive)
        for positive in range(voters + 1)
        if abs(2 * positive - voters) >= threshold * voters
    )
    return Fraction(kept, 2**voters)


def test_threshold_means_its_fraction_for_every_number_of_voters():
    for voters in range(1, UP_TO + 1):
        for votes in range(voters + 1):
            assert quorum(voters, votes / voters) == votes


def test_decimal_threshold_means_its_fraction():
    for voters in range(1, UP_TO + 1):
        for percent in range(101):
            asked = math.ceil(Fraction(percent, 100) * voters)
            assert quorum(voters, percent / 100) == asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_compare_whole_numbers(dtype):
    for voters in range(1, UP_TO + 1):
        votes = torch.arange(-voters, voters + 1, dtype=dtype)
        tally = Tally(torch.ones_like(votes), voters, votes)
        for asked in {0, 1, voters // 3, voters // 2, (4 * voters) // 5, voters - 1, voters}:
            expected = votes.abs() >= asked
            kept = AndMask(asked / voters)(tally)
            assert torch.equal(kept != 0, expected), (voters, asked)
            assert torch.equal(XorMask(asked / voters)(tally) != 0, ~expected), (voters, asked)
            assert torch.equal(AndMask(asked / voters).keep(tally), kept)


@pytest.mark.parametrize(
    ("voters", "threshold", "rate"),
    [
        (3, 1, 1 / 4),
        (3, 0.34, 1 / 4),
        (3, 0.33, 1.0),
        (5, 1, 1 / 16),
        (16, 1, 2**-15),
        (80, 0.2, 0.0929),
        (80, 0.4, 0.00045),
        (1, 1, 1.0),
        (0, 1, 1.0),
    ],
)
def test_known_chances(voters, threshold, rate):
    assert null_keep_rate(voters, threshold) == pytest.approx(rate, rel=6e-3)


def test_chances_are_exact():
    for voters in range(1, 61):
        for threshold in (0, 0.01, 0.2, 0.25, 0.5, 0.6, 0.8, 0.99, 1):
            exact = exact_rate(voters, Fraction(threshold).limit_denominator(100))
            assert null_keep_rate(voters, threshold) == float(exact), (voters, threshold)


@pytest.mark.parametrize("threshold", [0.001, 0.05])
@pytest.mark.parametrize("voters", [_EXACT_UP_TO + 1, _EXACT_UP_TO + 2])
def test_chances_of_many_voters(voters, threshold):
    exact = exact_rate(voters, Fraction(threshold).limit_denominator(1000))
    assert null_keep_rate(voters, threshold) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("voters", [1, 2, 7, 40, 41, _EXACT_UP_TO + 1])
@pytest.mark.parametrize("threshold", [0, 0.05, 0.5, 0.8, 1])
def test_mean_of_a_soft_mask_over_coin_flips(voters, threshold):
    votes = np.abs(2 * np.arange(voters + 1) - voters)
    chance = binom.pmf(np.arange(voters + 1), voters, 0.5)
    mask = np.where(votes >= quorum(voters, threshold), 1.0, votes / voters)
    found = SoftMask(threshold).null_keep_rate(voters)
    assert found == pytest.approx(mask @ chance, rel=1e-8)


@pytest.mark.parametrize("rule", [AndMask(0.8), SoftMask(0.8), XorMask(0.01), MajoritySign()])
def test_chances_of_a_million_voters_take_no_time(rule):
    started = time.process_time()
    assert 0 <= rule.null_keep_rate(10**6) <= 1
    assert time.process_time() - started < 1


@pytest.mark.parametrize("voters", [1, 2, 3, 10, 33, 80, 1000, 100_000])
def test_chances_are_those_of_scipy(voters):
    for threshold in (0.0, 0.07, 0.1, 0.2, 1 / 3, 0.6, 2 / 3, 0.7, 0.99, 1.0):
        least = quorum(voters, threshold)
        expected = min(1.0, 2 * binom.sf((voters + least + 1) // 2 - 1, voters, 0.5))
        expected = expected if least else 1.0
        found = null_keep_rate(voters, threshold)
        assert found == pytest.approx(expected, rel=1e-8, abs=1e-300)


def test_chances_end_at_zero_and_one():
    assert null_keep_rate(10**6, 1.0) == 0.0
    assert null_keep_rate(10**6, 0.0) == 1.0
    assert null_keep_rate(10**6 + 1, 1e-9) == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("voters", [-1, 2.0, "3", None])
def test_voters_are_counted(voters):
    for function in (null_keep_rate, quorum):
        with pytest.raises(ValueError, match=r"`voters` should be an integer.*Found `voters = "):
            function(voters, 0.5)


@pytest.mark.parametrize("threshold", [1.5, -0.1, float("nan"), float("inf")])
def test_threshold_is_checked(threshold):
    for function in (null_keep_rate, quorum):
        with pytest.raises(ValueError, match=r"`threshold` should lie in \[0, 1\]. Found"):
            function(3, threshold)
