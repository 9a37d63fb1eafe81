import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.lab import cost, wiping
from consilience.lab.progress import wilson
from consilience.lab.settings import PRESETS

TINY = replace(
    PRESETS["paper"],
    environments=4,
    rows_per_environment=32,
    batch_size=16,
    hidden_units=8,
    epochs=9,
)


def test_cost_takes_turns_and_prints_ratios(monkeypatch, capsys):
    monkeypatch.setattr(cost, "PRESETS", {"tiny": TINY})
    found = cost.measure("tiny", 3)
    assert {name: len(pairs) for name, pairs in found.items()} == {"erm": 3, "and-mask": 3}
    assert all(wall > 0 for pairs in found.values() for wall, _ in pairs)
    monkeypatch.setattr("sys.argv", ["cost", "2"])
    cost.main()
    assert capsys.readouterr().out.count("ratio") == 2


def test_masked_weights_are_wiped_at_a_rate_that_hardly_depends_on_l2():
    """What docs/synthetic.md says of weight decay, on a network where hardly anything agrees."""
    settings = replace(TINY, environments=24)
    before, after = wiping.follow(replace(settings, l2=0.0), 0, (0, 4)).values()
    for i in range(3):
        assert abs(after[i] / before[i] - 1) < 0.05
    strong, weak = (wiping.follow(replace(settings, l2=l2), 0, (4,))[4] for l2 in (1e-3, 1e-6))
    for i in range(3):
        assert strong[i] < 0.85 * before[i]
        assert abs(strong[i] / weak[i] - 1) < 0.05
    (by_hand,) = wiping.follow(replace(settings, l2=0.0), 0, (4,), wipe=True).values()
    (damped,) = wiping.follow(replace(settings, l2=1e-3), 0, (4,), eps=1.0).values()
    for i in range(3):
        assert by_hand[i] < 0.85 * before[i]
        assert abs(damped[i] / before[i] - 1) < 0.05
    for changes in ({"decay": "decoupled"}, {"optimizer": "sgd"}, {"decay": "before-mask"}):
        (gentle,) = wiping.follow(replace(settings, l2=1e-3, **changes), 0, (4,)).values()
        for i in range(3):
            assert abs(gentle[i] / before[i] - 1) < 0.05


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_holds_the_shares_that_a_test_would_not_reject(pair):
    """Its ends are where the share found lies 1.96 standard errors away; or 0 and 1."""
    successes, count = pair
    low, high = wilson(successes, count)
    assert 0 <= low <= successes / count <= high <= 1
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9:
            error = math.sqrt(end * (1 - end) / count)
            assert abs(successes / count - end) / error == pytest.approx(1.959964, rel=1e-6)
