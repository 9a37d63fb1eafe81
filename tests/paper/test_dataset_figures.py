"""The pictures of the synthetic dataset: what they show is what the data is."""

import numpy as np
import pytest

from consilience.data import SyntheticMemorization
from consilience.paper import dataset, spirals
from consilience.paper._classes import spiral_oracle


@pytest.mark.parametrize("revolutions", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.4255])
def test_the_oracle_of_the_spirals_classifies_them(revolutions, scale):
    data = SyntheticMemorization(
        environments=1,
        rows_per_environment=2000,
        shortcut_dimensions=0,
        revolutions=revolutions,
        spiral_scale=scale,
    )
    rows, pixels = data.train(), 801
    extent = 1.1 / scale
    regions = spiral_oracle(extent, revolutions, scale, pixels)
    x, y = ((rows.x.numpy() / extent + 1) / 2 * (pixels - 1)).round().astype(int).T
    assert (regions[y, x] == rows.y.numpy()).all()
    assert 0.4 < regions.mean() < 0.6


@pytest.mark.parametrize("module", [spirals, dataset])
def test_the_figure_is_drawn_the_same_every_time(module, tmp_path):
    first = module.draw(tmp_path / "a", quick=True)
    second = module.draw(tmp_path / "b", quick=True)
    name = module.__name__.rpartition(".")[2]
    assert [path.name for path in first] == [f"{name}.svg", f"{name}.png"]
    assert [a.read_bytes() for a in first] == [b.read_bytes() for b in second]
    other = module.draw(tmp_path / "c", quick=True, seed=1)
    assert other[0].read_bytes() != first[0].read_bytes()


def test_half_planes_part_the_blobs(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(dataset, "shade", lambda axes, classes, extent: drawn.append(classes))
    dataset.draw(tmp_path, quick=True)
    halves = [classes for classes in drawn if classes.shape == (200, 200)]
    left_right, below_above, diagonal = halves
    assert np.array_equal(left_right, np.tile(np.arange(200) >= 100, (200, 1)))
    assert np.array_equal(below_above, left_right.T)
    assert np.array_equal(diagonal, diagonal.T)
    assert diagonal[0, 0] == 0
    assert diagonal[-1, -1] == 1
