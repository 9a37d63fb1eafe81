import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.optim import (
    PUBLISHED_SETTINGS,
    share_of_voters,
    temporal_null_keep_rate,
)


def tail_within(beta, threshold, signs=22):
    """Bounds of the rate: all signs of the last steps, and all that those before may add."""
    sums = np.zeros(1)
    for k in range(signs):
        weight = (1 - beta) * beta**k
        sums = np.concatenate([sums - weight, sums + weight])
    rest = beta**signs
    return tuple((np.abs(sums) >= threshold + add).mean() for add in (rest, -rest))


def test_voters_of_equal_weight_are_as_many():
    assert share_of_voters(0.0) == 1
    assert share_of_voters(0.9) == pytest.approx(19)
    for beta in (0.3, 0.79, 0.95):
        weights = (1 - beta) * beta ** np.arange(2000)
        assert share_of_voters(beta) == pytest.approx(weights.sum() ** 2 / (weights**2).sum())


def test_published_settings_keep_15_to_36_percent_of_noise():
    rates = [temporal_null_keep_rate(s["betas"][2], s["threshold"]) for s in PUBLISHED_SETTINGS]
    assert [round(rate, 3) for rate in rates] == [0.314, 0.150, 0.172, 0.273, 0.361]


@pytest.mark.parametrize(("beta", "threshold"), [(0.79, 0.36), (0.4, 0.5), (0.97, 0.2)])
def test_monte_carlo(beta, threshold):
    random = np.random.default_rng(0)
    weights = 100_000
    average = np.zeros(weights)
    for _ in range(int(np.ceil(np.log(1e-6) / np.log(beta)))):
        average = beta * average + (1 - beta) * random.choice([-1.0, 1.0], weights)
    rate = temporal_null_keep_rate(beta, threshold)
    error = np.sqrt(rate * (1 - rate) / weights)
    assert abs((np.abs(average) >= threshold).mean() - rate) < 4 * error


@pytest.mark.parametrize(("beta", "threshold"), [(15 / 17, 0.8), (0.97, 0.6), (63 / 65, 0.8)])
def test_rare_events(beta, threshold):
    """Down to 1e-13, by signs that are drawn where the threshold is met, and weighed back."""
    random, draws = np.random.default_rng(0), 20_000
    weights = (1 - beta) * beta ** np.arange(int(np.ceil(np.log(1e-9) / np.log(beta))))
    low, high = 0.0, 1e4
    for _ in range(100):
        tilt = (low + high) / 2
        low, high = (tilt, high) if weights @ np.tanh(tilt * weights) < threshold else (low, tilt)
    sums = np.zeros(draws)
    for weight in weights:
        sums += (
            np.where(random.random(draws) < 1 / (1 + np.exp(-2 * tilt * weight)), 1, -1) * weight
        )
    odds = np.exp(np.log(np.cosh(tilt * weights)).sum() - tilt * sums)
    found = 2 * np.where(sums >= threshold, odds, 0)
    error = found.std() / draws**0.5
    assert abs(found.mean() - temporal_null_keep_rate(beta, threshold)) < 4 * error
    assert error < 0.02 * found.mean()


@pytest.mark.parametrize("beta", [0.1, 1 / 3, 0.45, 0.5, 0.501, 0.55, 2 / (1 + 5**0.5), 0.65])
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.47, 0.8, 0.97])
def test_rates_lie_between_bounds_from_all_signs(beta, threshold):
    """Also where the law is singular: below 1/2, and at the inverse of the golden ratio."""
    low, high = tail_within(beta, threshold)
    assert low - 1e-5 <= temporal_null_keep_rate(beta, threshold) <= high + 1e-5


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.25, 0.5, 0.99, 1.0])
def test_one_half_is_uniform(threshold):
    assert temporal_null_keep_rate(0.5, threshold) == pytest.approx(1 - threshold, abs=1e-15)


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.5, 0.9])
def test_roots_of_one_half_are_sums_of_uniforms(threshold):
    """Every k-th sign makes a uniform variable when beta^k = 1/2."""
    for k in (2, 4):
        beta = 0.5 ** (1 / k)
        widths = [(1 - beta) / (1 - beta**k) * beta**i for i in range(k)]
        # The distribution of a sum of uniforms on [-w, w], by inclusion and exclusion.
        below = 0.0
        for signs in itertools.product([1, -1], repeat=k):
            reach = threshold + np.dot(signs, widths)
            below += np.prod(signs) * max(reach, 0) ** k
        below /= float(np.prod(range(1, k + 1))) * np.prod([2 * w for w in widths])
        expected = 2 * (1 - below)
        assert temporal_null_keep_rate(beta, threshold) == pytest.approx(expected, abs=1e-7)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.8, 0.995), st.floats(-0.9, 0.9))
def test_one_more_sign_leaves_the_law_as_it_is(beta, x):
    def upper(x):
        if abs(x) >= 1:
            return float(x < 0)
        half = temporal_null_keep_rate(beta, abs(x)) / 2
        return half if x > 0 else 1 - half

    older = upper((x - 1 + beta) / beta), upper((x + 1 - beta) / beta)
    assert upper(x) == pytest.approx(sum(older) / 2, abs=1e-8)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.6, 0.9, 0.999])
def test_rates_fall_from_one_as_thresholds_rise(beta):
    rates = [temporal_null_keep_rate(beta, threshold) for threshold in np.linspace(0, 1, 21)]
    assert rates[0] == 1
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(rates))
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[-1] == pytest.approx(1 if beta == 0 else 0, abs=1e-7)


def test_a_long_average_is_normal():
    # P(|N(0, 1)| >= 2), with the deviation sqrt((1 - beta) / (1 + beta)).
    for beta in (0.999, 0.99999):
        rate = temporal_null_keep_rate(beta, 2 * ((1 - beta) / (1 + beta)) ** 0.5)
        assert rate == pytest.approx(0.0455003, rel=1e-3)


@pytest.mark.parametrize("rate", [share_of_voters, lambda b: temporal_null_keep_rate(b, 0.5)])
@pytest.mark.parametrize("beta", [-0.1, 1.0, float("nan")])
def test_rates_outside_their_range(rate, beta):
    with pytest.raises(ValueError, match=r"`beta` should lie in \[0, 1\)"):
        rate(beta)


def test_thresholds_outside_their_range():
    with pytest.raises(ValueError, match=r"`threshold = 1\.1`"):
        temporal_null_keep_rate(0.9, 1.1)
    with pytest.raises(TypeError, match=r"`beta = '0\.9'`"):
        temporal_null_keep_rate("0.9", 0.5)
