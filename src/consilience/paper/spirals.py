"""The spirals: the mechanism that all environments of the synthetic dataset share."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from consilience.data import SyntheticMemorization
from consilience.lab.figures import save, style
from consilience.paper._classes import bare, scatter, shade, spiral_oracle


def draw(folder: Path, *, quick: bool = False, seed: int = 0) -> list[Path]:
    """Draw the spirals of both presets, with the boundary that an oracle would draw.

    Args:
        folder: Where to write `spirals.svg` and `spirals.png`.
        quick: Fewer points.
        seed: Where the points come from.

    Returns:
        The files written.
    """
    rows = 300 if quick else 1280
    presets = {"paper": "preset paper", "authors-code": "preset authors-code"}
    with style():
        figure = Figure(figsize=(6.6, 3.6))
        for axes, (preset, name) in zip(figure.subplots(1, 2), presets.items(), strict=True):
            data = SyntheticMemorization.preset(
                preset,
                environments=1,
                rows_per_environment=rows,
                shortcut_dimensions=0,
                spiral_scale=1.0,
                seed=seed,
            )
            train = data.train()
            shade(axes, spiral_oracle(1.1, data.revolutions, 1.0), 1.1)
            scatter(axes, train.x.numpy(), train.y.numpy())
            bare(axes, 1.1)
            axes.set_title(f"{name}: {data.revolutions:g} revolutions")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, markerscale=1.6)
        return save(figure, folder, "spirals")
