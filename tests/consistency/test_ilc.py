"""Invariant learning consistency: the mean score over initialisations, and comparisons."""

import math
from statistics import mean, stdev

import pytest
import torch

from consilience.consistency import ilc, inconsistency

# Quartic losses at a point that need not be their minimum: the curvature depends on where one is.
LOSSES = [lambda w: (w**2).sum() + w[0] ** 4, lambda w: (w**2).sum() + w[1] ** 4]
OPTIONS = {"losses": LOSSES, "damping": 0.1, "tolerance": math.inf}


def initial(generator):
    return torch.rand(2, generator=generator, dtype=torch.float64)


def scaled(weights):
    """An algorithm that ends at a place that depends on where it started."""
    return 2 * weights


def fixed(weights):
    return torch.ones_like(weights)


def test_it_is_minus_the_mean_score_with_students_interval():
    found = ilc(scaled, initial, 0.1, 5, seed=3, **OPTIONS)
    scores = [
        inconsistency(
            LOSSES,
            scaled(initial(torch.Generator().manual_seed(seed))),
            epsilon=0.1,
            damping=0.1,
            tolerance=math.inf,
        )
        for seed in range(3, 8)
    ]
    assert [float(score) for score in found.scores] == [float(score) for score in scores]
    assert float(found) == pytest.approx(-mean(scores))
    half = 2.7764451 * stdev(scores) / math.sqrt(5)  # t with 4 degrees of freedom
    assert found.interval == pytest.approx((float(found) - half, float(found) + half))
    assert isinstance(found, float)
    assert str(found) == repr(float(found))
    assert repr(found).startswith("ILC(-")


def test_algorithms_are_compared_run_by_run():
    first = ilc(scaled, initial, 0.1, 6, **OPTIONS)
    second = ilc(fixed, initial, 0.1, 6, **OPTIONS)
    gain = second.minus(first)
    assert gain.paired
    assert gain.mean == pytest.approx(float(second) - float(first))
    gains = [float(a) - float(b) for a, b in zip(first.scores, second.scores, strict=True)]
    half = 2.5705818 * stdev(gains) / math.sqrt(6)
    assert gain.interval == pytest.approx((gain.mean - half, gain.mean + half))
    back = first.minus(second)
    assert back.mean == pytest.approx(-gain.mean)
    assert back.interval == pytest.approx((-gain.interval[1], -gain.interval[0]))


def test_other_seeds_are_compared_as_two_samples():
    first = ilc(scaled, initial, 0.1, 6, **OPTIONS)
    second = ilc(scaled, initial, 0.1, 8, seed=100, **OPTIONS)
    gain = second.minus(first)
    assert not gain.paired
    assert gain.mean == pytest.approx(float(second) - float(first))
    from scipy import stats

    welch = stats.ttest_ind(
        [-float(s) for s in second.scores], [-float(s) for s in first.scores], equal_var=False
    ).confidence_interval(0.95)
    assert gain.interval == pytest.approx((welch.low, welch.high))


def test_the_interval_covers_as_often_as_it_says():
    """Of 200 intervals at 80%, 160 should cover the mean, give or take 4.5 x 5.7."""
    exact = ilc(scaled, initial, 0.1, 400, seed=10**6, **OPTIONS)
    covered = 0
    for block in range(200):
        values = [-float(score) for score in exact.scores[2 * block : 2 * block + 2]]
        half = 3.0776835 * stdev(values) / math.sqrt(2)
        covered += abs(mean(values) - float(exact)) <= half
    assert abs(covered - 160) < 26


def test_an_infinite_score_makes_the_mean_infinite_and_the_interval_nothing():
    losses = [lambda w: w[0] ** 2, lambda w: w.square().sum()]
    found = ilc(torch.zeros_like, initial, 0.1, 2, losses=losses)
    assert float(found) == -math.inf
    assert all(math.isnan(end) for end in found.interval)
    assert all(math.isnan(end) for end in found.minus(found).interval)


def test_bad_input():
    with pytest.raises(ValueError, match=r"`n` should be a whole number, 2 or more.*1"):
        ilc(fixed, initial, 0.1, 1, **OPTIONS)
    with pytest.raises(ValueError, match=r"`confidence` should lie between 0 and 1.*1.5"):
        ilc(fixed, initial, 0.1, 2, confidence=1.5, **OPTIONS)
    with pytest.raises(ValueError, match=r"`epsilon` should be positive"):
        ilc(fixed, initial, -0.1, 2, **OPTIONS)


def test_all_is_checked_before_the_first_training():
    def never(start):
        raise AssertionError

    for wrong in ({"method": "best"}, {"against": "all"}, {"tolerance": -1.0}, {"stats": 1}):
        with pytest.raises((ValueError, TypeError), match=r"should be|takes the options"):
            ilc(never, initial, 0.1, 2, **{**OPTIONS, **wrong})
    with pytest.raises(ValueError, match=r"`epsilon` should be positive"):
        ilc(never, initial, -0.1, 2, **OPTIONS)


def test_progress(capsys):
    ilc(fixed, initial, 0.1, 2, progress=True, **OPTIONS)
    assert "runs 2/2" in capsys.readouterr().err
