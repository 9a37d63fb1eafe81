import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from consilience.data import SyntheticMemorization


def slow_train(data: SyntheticMemorization):
    """The definition, one number at a time."""
    rows = []
    for e in range(data.environments):
        draw = np.random.default_rng(np.random.SeedSequence(data.seed, spawn_key=(0, e)))
        signature = [
            data.shortcut_scale * draw.standard_normal() for _ in range(data.shortcut_dimensions)
        ]
        draw = np.random.default_rng(np.random.SeedSequence(data.seed, spawn_key=(1, e)))
        n = data.rows_per_environment
        labels = [int(draw.integers(0, 2)) for _ in range(n)]
        radii = [draw.uniform(data.inner_radius, 1.0) for _ in range(n)]
        jitters = [draw.uniform(-data.jitter, data.jitter) for _ in range(n)]
        points = []
        for y, r, j in zip(labels, radii, jitters, strict=True):
            angle = 2 * math.pi * data.revolutions * r + (math.pi if y else 0.0)
            points.append([(r + j) * math.cos(angle), (r + j) * math.sin(angle)])
        scales = [data.spiral_scale] * 2
        if data.spiral_scale is None:
            means = [sum(p[i] for p in points) / n for i in range(2)]
            scales = [math.sqrt(sum((p[i] - means[i]) ** 2 for p in points) / n) for i in range(2)]
        for y, p in zip(labels, points, strict=True):
            x = [p[0] / scales[0], p[1] / scales[1]] + [s if y else -s for s in signature]
            rows.append((x, y, e))
    return rows


@pytest.mark.parametrize("spiral_scale", [0.4255, None])
@pytest.mark.parametrize(
    ("environments", "dimensions", "rows"), [(3, 4, 25), (1, 0, 7), (5, 1, 40)]
)
def test_equals_literal_generator(environments, dimensions, rows, spiral_scale):
    data = SyntheticMemorization(
        environments=environments,
        shortcut_dimensions=dimensions,
        rows_per_environment=rows,
        revolutions=3,
        shortcut_scale=0.3,
        spiral_scale=spiral_scale,
        seed=11,
    )
    found = data.train()
    for i, (x, y, e) in enumerate(slow_train(data)):
        torch.testing.assert_close(found.x[i], torch.tensor(x), rtol=1e-6, atol=1e-6)
        assert (int(found.y[i]), int(found.env[i])) == (y, e)


def test_environments_do_not_depend_on_their_number_nor_overlap_between_seeds():
    few = SyntheticMemorization(environments=2, rows_per_environment=50, seed=3).train()
    many = SyntheticMemorization(environments=4, rows_per_environment=50, seed=3).train()
    assert torch.equal(few.x, many.x[:100])
    other = SyntheticMemorization(environments=4, rows_per_environment=50, seed=4).train()
    together = torch.cat([many.x, other.x])
    assert len(together.unique(dim=0)) == 400


def test_mechanism_is_shared_and_shortcut_is_not():
    data = SyntheticMemorization(rows_per_environment=200)
    train, test = data.train(), data.test(rows=4000)
    sign = (2 * train.y - 1)[:, None]
    for e in range(32):
        signature = (train.x[:, 2:] * sign)[train.env == e]
        assert torch.equal(signature, signature[:1].expand_as(signature))
    # One signature each, of the deviation asked for; test shortcuts say nothing of the label.
    assert abs(data.signatures().std() - 1) < 0.1
    assert abs(float(test.x[:, 2:].std()) - 1) < 0.01
    correlation = np.corrcoef(test.x[:, 2:].T.numpy(), test.y.numpy())[-1, :-1]
    assert abs(correlation).max() < 5 / math.sqrt(4000)
    # The label is a function of radius and angle, on train and on test alike.
    for rows in (train, test):
        point = rows.x[:, :2] * 0.4255
        radius, angle = point.norm(dim=1), torch.atan2(point[:, 1], point[:, 0])
        turn = (angle - 2 * math.pi * 2 * radius) / math.pi  # 0 for label 0, 1 for label 1, mod 2
        distance = (turn - rows.y + 1) % 2 - 1
        assert distance.abs().max() < 2 * 2 * 0.02 + 1e-4
    many = SyntheticMemorization(environments=1, rows_per_environment=400_000).train()
    assert abs(float(many.x[:, :2].std()) - 1) < 0.003


def test_shortcuts_of_the_paper_are_separable_by_a_line_and_the_mechanism_is_not():
    data = SyntheticMemorization(rows_per_environment=64)
    rows = data.train()
    target = (2.0 * rows.y - 1).double()
    for columns, separable in ((slice(2, None), True), (slice(0, 2), False)):
        x = rows.x[:, columns].double()
        weights = torch.linalg.lstsq(x, target).solution
        right = ((x @ weights) * target > 0).double().mean()
        assert (right == 1) == separable


@pytest.mark.parametrize("across", [False, True])
def test_interventions_move_only_their_columns(across):
    data = SyntheticMemorization(environments=3, rows_per_environment=100, seed=5)
    rows = data.train()
    sign = (2 * rows.y - 1).float()
    for permute, moved, kept in (
        (data.permute_mechanism, slice(0, 2), slice(2, None)),
        (data.permute_shortcuts, slice(2, None), slice(0, 2)),
    ):
        found = permute(rows, across_environments=across)
        assert torch.equal(found.x[:, kept], rows.x[:, kept])
        assert torch.equal(found.y, rows.y)
        assert not torch.equal(found.x[:, moved], rows.x[:, moved])
        groups = [slice(None)] if across else [rows.env == e for e in range(3)]
        for group in groups:
            before, after = rows.x[group][:, moved], found.x[group][:, moved]
            assert torch.equal(
                before.unique(dim=0, return_counts=True)[1],
                after.unique(dim=0, return_counts=True)[1],
            )
            assert torch.equal(before.unique(dim=0), after.unique(dim=0))
    # What was moved says nothing of the label any more.
    shortcut = data.permute_shortcuts(rows).x[:, 2:]
    for e in range(3):
        agrees = (shortcut[rows.env == e] @ torch.tensor(data.signatures()[e]).float()) * sign[
            rows.env == e
        ]
        assert 0.25 < float((agrees > 0).float().mean()) < 0.75


def test_presets_and_wrong_names():
    data = SyntheticMemorization.preset("authors-code", seed=2, environments=4)
    assert (data.environments, data.shortcut_dimensions, data.revolutions, data.seed) == (
        4,
        16,
        3,
        2,
    )
    assert SyntheticMemorization.preset("paper") == SyntheticMemorization()
    with pytest.raises(ValueError, match="Did you mean `authors-code`"):
        SyntheticMemorization.preset("author-code")


@pytest.mark.parametrize(
    "change",
    [
        {"environments": 0},
        {"rows_per_environment": 0},
        {"shortcut_dimensions": -1},
        {"seed": -1},
        {"shortcut_scale": -1.0},
        {"spiral_scale": 0.0},
        {"inner_radius": 1.0},
        {"revolutions": math.nan},
        {"shortcut_scale": math.inf},
        {"spiral_scale": math.nan},
    ],
)
def test_wrong_values_are_named(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"`{name} = {value}`"):
        SyntheticMemorization(**change)


@pytest.mark.parametrize("changes", [{"rows_per_environment": 1}, {"revolutions": 0.0}])
def test_a_sample_without_a_deviation_is_refused(changes):
    data = SyntheticMemorization(environments=2, spiral_scale=None, **changes)
    with pytest.raises(ValueError, match="`spiral_scale = None`"):
        data.train()


def test_rows_are_a_dataset():
    rows = SyntheticMemorization(environments=2, rows_per_environment=6).train()
    batches = list(DataLoader(rows, batch_size=4))
    assert torch.equal(torch.cat([x for x, _, _ in batches]), rows.x)
    assert torch.equal(torch.cat([e for _, _, e in batches]), rows.env)
