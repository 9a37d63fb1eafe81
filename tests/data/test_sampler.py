import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from consilience.data import EnvironmentBatchSampler, SyntheticMemorization


def environments(sizes, seed=0):
    """A shuffled column of environments of these sizes, with names that leave gaps."""
    env = np.repeat(3 * np.arange(len(sizes)) + 1, sizes)
    return np.random.default_rng(seed).permutation(env)


sizes_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(sizes_strategy, st.data())
@pytest.mark.parametrize("uneven", ["spread", "repeat", "drop"])
def test_every_batch_keeps_its_promise(uneven, sizes, data):
    k = data.draw(st.integers(1, len(sizes)))
    n = data.draw(st.integers(1, max(sizes) if uneven == "spread" else min(sizes)))
    env = environments(sizes)
    try:
        sampler = EnvironmentBatchSampler(env, k, n, uneven=uneven, seed=1)
    except ValueError as error:
        if uneven != "spread" or "too few to take part" not in str(error):
            raise
        assume(False)
    for _ in range(2):
        batches = list(sampler)
        assert len(batches) == len(sampler)
        for batch in batches:
            assert len(set(batch)) == len(batch)
            share = Counter(env[batch].tolist())
            assert len(share) == k
            if uneven == "spread":
                assert max(share.values()) <= n
            else:
                assert set(share.values()) == {n}
            changes = np.flatnonzero(np.diff(env[batch]))
            assert len(changes) == k - 1  # rows of an environment stand together
        times = Counter(row for batch in batches for row in batch)
        if uneven == "spread":
            assert times == Counter(range(len(env)))
        elif uneven == "repeat":
            assert set(times) == set(range(len(env)))
            assert sum(times.values()) - len(env) == sampler.repeated
        else:
            assert not times or max(times.values()) == 1
            assert len(env) - len(times) == sampler.dropped
    if uneven != "drop":
        assert sampler.dropped == 0
    if uneven != "repeat":
        assert sampler.repeated == 0


@settings(max_examples=100, deadline=None)
@given(sizes_strategy, st.data())
def test_drop_leaves_out_as_little_as_can_be(sizes, data):
    k = data.draw(st.integers(1, len(sizes)))
    n = data.draw(st.integers(1, min(sizes)))
    sampler = EnvironmentBatchSampler(environments(sizes), k, n, uneven="drop")
    visits = [size // n for size in sizes]
    most = max(b for b in range(sum(visits) + 1) if sum(min(v, b) for v in visits) >= k * b)
    assert len(sampler) == most


@pytest.mark.parametrize("uneven", ["spread", "repeat", "drop"])
def test_equal_environments_give_exactly_n_rows_of_k(uneven):
    env = np.repeat(np.arange(6), 20)
    sampler = EnvironmentBatchSampler(env, 3, 5, uneven=uneven)
    batches = list(sampler)
    assert len(batches) == 6 * 20 // 15
    assert all(Counter(np.bincount(env[b], minlength=6))[5] == 3 for b in batches)
    assert sorted(row for b in batches for row in b) == list(range(120))


def test_dropped_environments_take_turns():
    sampler = EnvironmentBatchSampler(np.arange(5), 2, 1, uneven="drop")
    left_out = {frozenset(range(5)) - {r for b in sampler for r in b} for _ in range(40)}
    assert left_out == {frozenset({e}) for e in range(5)}


def test_same_seed_same_order_and_epochs_differ():
    env = environments([12, 12, 12])
    first, second = (EnvironmentBatchSampler(env, 2, 3, seed=9) for _ in range(2))
    a, b = list(first), list(first)
    assert (a, b) == (list(second), list(second))
    assert a != b
    assert a != list(EnvironmentBatchSampler(env, 2, 3, seed=10))


def test_resumes_in_the_middle_of_an_epoch():
    env = environments([12, 9, 30])
    whole = EnvironmentBatchSampler(env, 2, 3, seed=4)
    expected = list(whole) + list(whole)
    interrupted = EnvironmentBatchSampler(env, 2, 3, seed=4)
    list(interrupted)
    passing = iter(interrupted)
    head = [next(passing) for _ in range(2)]
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = EnvironmentBatchSampler(env, 2, 3)
    resumed.load_state_dict(state)
    n = len(whole)
    assert head + list(resumed) == expected[n:]
    assert resumed.epoch == 2
    # What a loader has asked for ahead of time is not consumed.
    resumed.load_state_dict({**state, "position": 0})
    next(passing)
    assert interrupted.state_dict(consumed=1)["position"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_asked_for_ahead_is_not_consumed(workers):
    env = environments([12, 9, 30])
    data = TensorDataset(torch.arange(51))

    def sampler():
        return EnvironmentBatchSampler(env, 2, 3, seed=4)

    def loader(batches):
        return DataLoader(data, batch_sampler=batches, num_workers=workers)

    straight = sampler()
    expected = [[rows.tolist() for (rows,) in loader(straight)] for _ in range(2)]
    here = sampler()
    states = [here.state_dict(consumed=i) for i, _ in enumerate(loader(here), start=1)]
    for used in range(1, len(here) + 1):
        resumed = sampler()
        resumed.load_state_dict(json.loads(json.dumps(states[used - 1])))
        assert [rows.tolist() for (rows,) in loader(resumed)] == expected[0][used:]
        if used in (1, len(here)):
            assert [rows.tolist() for (rows,) in loader(resumed)] == expected[1]
    # Batches are counted from the beginning of the epoch, also in a pass that was resumed.
    resumed = sampler()
    resumed.load_state_dict(states[4])
    passing = iter(loader(resumed))
    next(passing)
    for wrong in (1, 4, len(here) + 1):
        with pytest.raises(ValueError, match=rf"Found `consumed = {wrong}`"):
            resumed.state_dict(consumed=wrong)
    assert resumed.state_dict(consumed=6)["position"] == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_is_broken_off_costs_the_next_one_nothing(workers):
    env = environments([12, 9, 30])
    sampler = EnvironmentBatchSampler(env, 2, 3, seed=4)
    loader = DataLoader(TensorDataset(torch.arange(51)), batch_sampler=sampler, num_workers=workers)
    peeked = next(iter(loader))[0].tolist()
    whole = [rows.tolist() for (rows,) in loader]
    assert sorted(row for rows in whole for row in rows) == list(range(51))
    again = EnvironmentBatchSampler(env, 2, 3, seed=4)
    assert (peeked, whole) == (next(iter(again)), list(again))
    # A pass that took every batch and did not ask for one more is not followed by an empty one.
    taken = [batch for batch, _ in zip(sampler, range(len(sampler)), strict=False)]
    assert len(taken) == len(list(sampler)) == len(sampler)


def test_a_state_of_other_rows_is_refused():
    state = EnvironmentBatchSampler([0, 0, 1, 1], 2, 1).state_dict()
    with pytest.raises(ValueError, match="same rows"):
        EnvironmentBatchSampler([0, 0, 0, 1, 1, 1], 2, 1).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_works_with_a_loader_and_anyones_dataset(workers):
    env = torch.tensor(environments([6, 9, 12]))
    data = TensorDataset(torch.arange(27), env)
    loader = DataLoader(data, batch_sampler=EnvironmentBatchSampler(env, 3, 3), num_workers=workers)
    rows = torch.cat([row for row, _ in loader])
    assert sorted(rows.tolist()) == list(range(27))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1, 1), "zero environments"),
        (([0, 1], 0, 1), "`environments_per_batch = 0`"),
        (([0, 1], 3, 1), "`environments_per_batch = 3`"),
        (([0, 1], 2, 0), "`rows_per_environment = 0`"),
        (([0, 1], 2, 1.5), "whole number. Found `rows_per_environment = 1.5`"),
        (([0, 1], 2.0, 1), "whole number. Found `environments_per_batch = 2.0`"),
        (([0, -1], 1, 1), "not be negative"),
        (([0.5, 1.0], 1, 1), "whole numbers"),
        (([[0, 1]], 1, 1), "shape \\[1, 2\\]"),
        (([0] * 50 + [1], 2, 5), "Environment 1 has 1 rows, too few"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        EnvironmentBatchSampler(*arguments)


def test_a_wrong_seed_is_named():
    with pytest.raises(ValueError, match=r"not negative\. Found `seed = -1`"):
        EnvironmentBatchSampler([0, 1], 2, 1, seed=-1)


def test_environments_may_lie_on_another_device():
    class Elsewhere:
        def cpu(self):
            return torch.tensor([0, 0, 1, 1])

    assert EnvironmentBatchSampler(Elsewhere(), 2, 1).sizes == [2, 2]


def test_strings_are_labels_too():
    names = np.array(["oslo", "rome", "oslo", "rome"])
    for batch in EnvironmentBatchSampler(names, 2, 1):
        assert set(names[batch]) == {"oslo", "rome"}


def test_too_few_rows_for_the_batch():
    for uneven in ("repeat", "drop"):
        with pytest.raises(ValueError, match="at most 2, the size of the smallest"):
            EnvironmentBatchSampler([0, 0, 0, 1, 1], 2, 3, uneven=uneven)
    with pytest.raises(ValueError, match="`uneven = 'pad'`"):
        EnvironmentBatchSampler([0, 1], 2, 1, uneven="pad")


def test_the_paper_makes_ten_steps_an_epoch():
    env = np.repeat(np.arange(32), SyntheticMemorization().rows_per_environment)
    assert len(EnvironmentBatchSampler(env, 32, 128)) == 10
