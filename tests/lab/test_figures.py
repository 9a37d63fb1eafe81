"""The style of figures: apart in grey and for the colour-blind, and written atomically."""

import doctest
import itertools
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

import consilience.lab.figures as figures
from consilience.lab.figures import DASHES, MARKERS, PALETTE, save, style

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
EYES = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
    "grey": [[0.2126, 0.7152, 0.0722]] * 3,
    "full": np.eye(3).tolist(),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, eye):
    """CIELAB coordinates of a colour as an eye sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = TO_XYZ @ np.clip(np.array(EYES[eye]) @ linear, 0, 1) / (0.9505, 1.0, 1.089)

    def f(t):
        return np.cbrt(t) if t > 0.008856 else 7.787 * t + 16 / 116

    return np.array([116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))])


@pytest.mark.parametrize("eye", EYES)
def test_colours_stay_apart_for_every_eye(eye):
    for first, second in itertools.combinations([*PALETTE, "#FFFFFF"], 2):
        assert np.linalg.norm(lab(first, eye) - lab(second, eye)) > 10, (first, second)


def test_every_colour_has_dashes_and_a_marker_of_its_own():
    assert len(set(PALETTE)) == len(set(DASHES)) == len(set(MARKERS)) == len(PALETTE)


def test_style_ends_with_its_context():
    assert not mpl.rcParams["axes.grid"]
    with style():
        assert mpl.rcParams["axes.grid"]
    assert not mpl.rcParams["axes.grid"]


def drawn(value):
    with style():
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([0, value])
    return figure


def test_save_writes_vector_and_pixels_the_same_each_time(tmp_path):
    first = save(drawn(1), tmp_path / "new" / "folder", "line")
    second = save(drawn(1), tmp_path / "again", "line")
    assert [path.name for path in first] == ["line.svg", "line.png"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert first[0].read_bytes().startswith(b"<?xml")
    assert first[1].read_bytes().startswith(b"\x89PNG")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    old = save(drawn(1), tmp_path, "line")
    before = [path.read_bytes() for path in old]

    def half_written(self, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", half_written)
    with pytest.raises(OSError, match="disk full"):
        save(drawn(2), tmp_path, "line")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["line.png", "line.svg"]
    assert [path.read_bytes() for path in old] == before


def test_the_example_runs():
    assert doctest.testmod(figures).failed == 0
