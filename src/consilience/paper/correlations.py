"""Gradient correlations: what AND- and XOR-masks keep of the mechanism and of the shortcuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from consilience.data import Rows, SyntheticMemorization
from consilience.lab.figures import PALETTE, save, style
from consilience.models import MLP
from consilience.paper import _numbers
from consilience.rules import AndMask, Rule, XorMask

ENVIRONMENTS = 16
ROWS = 1024
THRESHOLDS = tuple(quorum / ENVIRONMENTS for quorum in range(0, ENVIRONMENTS + 1, 2))
"""All that 16 voters can tell apart: votes are even, so |votes| is 0, 2, ... 16."""
LEAST_COMPONENTS = 10
"""With fewer components left than this, a correlation says nothing and none is given."""

Scales = Literal["text", "preset"]
Initialisation = Literal["torch", "he"]
Mask = Literal["and", "xor"]
Part = Literal["all", "first layer"]

SCALES: dict[Scales, dict[str, Any]] = {
    "text": {"shortcut_scale": 0.1, "spiral_scale": 1.0},
    "preset": {},
}
"""`text`: what the paper's text says, signatures N(0, 0.1) and radii up to 1. `preset`: the scales
of the authors' code, which the preset `paper` has."""
CASES: tuple[tuple[Scales, Initialisation, str], ...] = (
    ("text", "torch", "scales of the text,\nPyTorch's initialisation"),
    ("text", "he", "scales of the text,\nHe's initialisation"),
    ("preset", "torch", "preset paper,\nPyTorch's initialisation"),
    ("preset", "he", "preset paper,\nHe's initialisation"),
)
PARTS: tuple[Part, ...] = ("all", "first layer")
SIGNALS = {
    "mechanism": (PALETTE[0], "-"),
    "shortcuts": (PALETTE[2], "--"),
    "neither": (PALETTE[4], ":"),
}
"""What is left in the data once the rest was permuted. `neither` is the floor: what a gradient has
in common with one of the same inputs in which nothing tells the label."""


@dataclass(frozen=True)
class Correlation:
    """How the masked average gradient correlates with the two signals that it is made of.

    Attributes:
        scales: Scales of the data.
        initialisation: How the network's weights were drawn.
        part: Which components: all, or the weights of the first layer.
        mask: `and` or `xor`.
        threshold: Of the mask.
        seed: Of data and network.
        kept: The share of components that are not zero after the mask.
        mechanism: Correlation with the gradient of data whose shortcuts were permuted, over the
            components that are not zero; None where there are fewer than 10.
        shortcuts: Correlation with the gradient of data whose mechanism was permuted.
        neither: Correlation with the gradient of data of which both were permuted.
    """

    scales: Scales
    initialisation: Initialisation
    part: Part
    mask: Mask
    threshold: float
    seed: int
    kept: float
    mechanism: float | None
    shortcuts: float | None
    neither: float | None


@dataclass(frozen=True)
class Gradients:
    """Gradients of a network at its initialisation, all parameters in one vector.

    Attributes:
        each: Of each environment on the original data ``[environments, parameters]``.
        mechanism: Average over environments, shortcuts permuted ``[parameters]``.
        shortcuts: Average over environments, mechanism permuted ``[parameters]``.
        neither: Average over environments, both permuted ``[parameters]``.
    """

    each: Tensor
    mechanism: Tensor
    shortcuts: Tensor
    neither: Tensor

    def first(self, count: int) -> Gradients:
        """Return the gradients of the first `count` parameters alone."""
        signals = (getattr(self, name)[:count] for name in SIGNALS)
        return Gradients(self.each[:, :count], *signals)

    def masked(self, rule: Rule) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return what a rule leaves of the average gradient, zeros excluded, and the signals."""
        combined = rule.combine(self.each)
        there = combined != 0
        found = {name: getattr(self, name)[there].double().numpy() for name in SIGNALS}
        return combined[there].double().numpy(), found


def draw(
    folder: Path, *, quick: bool = False, seeds: int = 10, across_environments: bool = True
) -> list[Path]:
    """Measure and draw the correlations, print them, and write them beside the figures.

    The paper's setting: 16 environments of 1024 rows, all in one batch; a network of three
    hidden layers of 256 units at initialisation, batch norm off; components that the mask left
    at zero excluded. Neither the scale of shortcuts nor how weights are drawn is beyond doubt
    in the text, and both matter, so every combination is measured.

    Args:
        folder: Where to write `correlations.*` (correlation against threshold, and the numbers
            as JSON and CSV) and `correlations-scatter.*` (components and regression lines, with
            the scales of the text and PyTorch's initialisation).
        quick: Two seeds and a narrower network.
        seeds: How many pairs of data and network.
        across_environments: Whether rows swap mechanisms (or shortcuts) over the whole dataset,
            or within their environment.

    Returns:
        The files written.
    """
    seeds, hidden_units = (2, 32) if quick else (seeds, 256)
    numbers: list[Correlation] = []
    shown: list[Gradients] = []
    for scales, initialisation, _ in CASES:
        for seed in range(seeds):
            gradients, first = measure(
                seed,
                scales,
                initialisation,
                hidden_units=hidden_units,
                across_environments=across_environments,
            )
            for part in PARTS:
                chosen = gradients if part == "all" else gradients.first(first)
                numbers += correlate(chosen, scales, initialisation, part, seed)
            if (scales, initialisation) == CASES[0][:2]:
                shown.append(gradients)
    settings = {
        "environments": ENVIRONMENTS,
        "rows_per_environment": ROWS,
        "hidden_layers": 3,
        "hidden_units": hidden_units,
        "seeds": seeds,
        "across_environments": across_environments,
        "scales": SCALES,
    }
    print(_summary(numbers))
    with style():
        files = save(_thresholds(numbers), folder, "correlations")
        files += save(_scatters(shown), folder, "correlations-scatter")
    return files + _numbers.write(folder, "correlations", settings, [asdict(n) for n in numbers])


def measure(
    seed: int,
    scales: Scales,
    initialisation: Initialisation,
    *,
    hidden_units: int = 256,
    across_environments: bool = True,
) -> tuple[Gradients, int]:
    """Return the gradients of a fresh network on the data and on what interventions leave of it.

    The second value is how many of the components are weights of the first layer; they come
    first.
    """
    data = SyntheticMemorization.preset(
        "paper", environments=ENVIRONMENTS, rows_per_environment=ROWS, seed=seed, **SCALES[scales]
    )
    rows = data.train()
    model = network(data.dimensions, hidden_units, initialisation, seed)
    on_mechanism = data.permute_shortcuts(rows, across_environments=across_environments)
    on_shortcuts = data.permute_mechanism(rows, across_environments=across_environments)
    on_neither = data.permute_mechanism(on_mechanism, across_environments=across_environments)
    gradients = Gradients(
        each=environment_gradients(model, rows),
        mechanism=environment_gradients(model, on_mechanism).mean(0),
        shortcuts=environment_gradients(model, on_shortcuts).mean(0),
        neither=environment_gradients(model, on_neither).mean(0),
    )
    return gradients, next(model.parameters()).numel()


def network(
    dimensions: int, hidden_units: int, initialisation: Initialisation, seed: int
) -> nn.Module:
    """Return a network of three hidden layers whose weights are drawn in one of the usual ways."""
    generator = torch.Generator().manual_seed(seed)
    model = MLP(dimensions, hidden_units=hidden_units, hidden_layers=3, generator=generator)
    if initialisation == "torch":
        for layer in model:
            if isinstance(layer, nn.Linear):
                bound = 1 / math.sqrt(layer.in_features)
                nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return model


def environment_gradients(model: nn.Module, rows: Rows) -> Tensor:
    """Return the gradient of each environment's mean loss ``[environments, parameters]``."""
    parameters = list(model.parameters())
    found = []
    for e in range(int(rows.env.max()) + 1):
        x, y, _ = rows[rows.env == e]
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        found.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(found)


def correlate(
    gradients: Gradients, scales: Scales, initialisation: Initialisation, part: Part, seed: int
) -> list[Correlation]:
    """Return the correlations under both masks at every threshold."""
    found = []
    for mask, threshold in _order():
        rule = AndMask(threshold) if mask == "and" else XorMask(threshold)
        masked, signals = gradients.masked(rule)
        found.append(
            Correlation(
                scales,
                initialisation,
                part,
                mask,
                threshold,
                seed,
                kept=masked.size / gradients.mechanism.numel(),
                **{name: pearson(masked, signal) for name, signal in signals.items()},
            )
        )
    return found


def pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return the correlation of two vectors, or None where they are too short to say."""
    return float(np.corrcoef(x, y)[0, 1]) if x.size >= LEAST_COMPONENTS else None


def _order() -> list[tuple[Mask, float]]:
    """Return masks from left to right: XOR at ever higher thresholds, no mask, then AND.

    XOR at threshold 1 keeps all but unanimous components, which is nearly no mask; at 0, nothing.
    """
    xor: list[tuple[Mask, float]] = [("xor", t) for t in THRESHOLDS if t > 0]
    return [*xor, *(("and", t) for t in THRESHOLDS)]


def _thresholds(numbers: Sequence[Correlation]) -> Figure:
    figure = Figure(figsize=(10.4, 5.6))
    grid = figure.subplots(len(PARTS), len(CASES), sharex=True, sharey=True)
    for row, part in enumerate(PARTS):
        for column, (scales, initialisation, name) in enumerate(CASES):
            axes = grid[row, column]
            here = (scales, initialisation, part)
            chosen = [n for n in numbers if (n.scales, n.initialisation, n.part) == here]
            _against_threshold(axes, chosen)
            if row == 0:
                axes.set_title(name)
            else:
                axes.set_xlabel("XOR $\\leftarrow$  threshold $\\tau$  $\\rightarrow$ AND")
        what = {"all": "all parameters", "first layer": "weights of the first layer"}[part]
        grid[row, 0].set_ylabel(f"{what}\ncorrelation $\\rho$")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        [f"{label} left in the data" for label in labels],
        loc="outside lower center",
        ncols=3,
        handlelength=3,
    )
    return figure


def _against_threshold(axes: Axes, numbers: Sequence[Correlation]) -> None:
    """Draw mean and range over seeds: XOR to the left, no mask in the middle, AND to the right."""
    for signal, (colour, dashes) in SIGNALS.items():
        points = []
        for mask, threshold in _order():
            if (mask, threshold) == ("xor", 1.0):
                continue
            here = [n for n in numbers if (n.mask, n.threshold) == (mask, threshold)]
            found = np.array([v for n in here if (v := getattr(n, signal)) is not None])
            if 2 * found.size >= len(here):  # else most seeds have next to nothing left
                place = threshold if mask == "and" else threshold - 1
                points.append((place, found.mean(), found.min(), found.max()))
        place, mean, low, high = np.array(points).T
        if signal != "neither":  # its band would hide the others
            axes.fill_between(place, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(place, mean, color=colour, linestyle=dashes, marker="o", ms=3, label=signal)
    axes.axvline(0, color="#444444", linewidth=0.8, linestyle="-")
    axes.set(
        xlim=(-0.94, 1.06),
        ylim=(-0.17, 1.06),
        xticks=[-0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1],
        xticklabels=["¼", "½", "¾", "all", "¼", "½", "¾", "1"],
    )


def _scatters(shown: Sequence[Gradients]) -> Figure:
    figure = Figure(figsize=(9.6, 5.2))
    cases: list[tuple[str, Rule]] = [
        ("XOR, $\\tau$ = 1/4", XorMask(0.25)),
        ("no mask", AndMask(0.0)),
        ("AND, $\\tau$ = 1/2", AndMask(0.5)),
        ("AND, $\\tau$ = 1", AndMask(1.0)),
    ]
    grid = figure.subplots(2, len(cases))
    for column, (name, rule) in enumerate(cases):
        for row, signal in enumerate(("mechanism", "shortcuts")):
            _scatter(grid[row, column], shown, rule, signal)
            grid[row, 0].set_ylabel(f"gradient of the\n{signal} alone")
        grid[0, column].set_title(name)
        grid[1, column].set_xlabel("masked average gradient")
    return figure


def _scatter(axes: Axes, shown: Sequence[Gradients], rule: Rule, signal: str) -> None:
    """Scatter components of the first seed; a regression line and a correlation for each seed.

    Axes reach to the 99.5th percentile of the first seed's components, in units of it: a few
    components of the last layer are so large that nothing else would be seen.
    """
    colour, _ = SIGNALS[signal]
    span = np.array([-1.0, 1.0])
    found = []
    for seed, gradients in enumerate(shown):
        masked, signals = gradients.masked(rule)
        rho = pearson(masked, signals[signal])
        if rho is None:
            continue
        unit = np.quantile(np.abs(masked), 0.995)
        slope, intercept = np.polyfit(masked / unit, signals[signal] / unit, 1)
        axes.plot(span, slope * span + intercept, color="black", linestyle="-", linewidth=0.8)
        found.append(rho)
        if seed == 0:
            chosen = np.random.default_rng(0).permutation(masked.size)[:2000]
            points = masked[chosen] / unit, signals[signal][chosen] / unit
            axes.scatter(*points, s=4, color=colour, alpha=0.5, linewidths=0, rasterized=True)
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    spread = f" ± {np.std(found, ddof=1):.2f}" if len(found) > 1 else ""
    text = f"$\\rho$ = {np.mean(found):.2f}{spread}" if found else "next to nothing left"
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    axes.text(0.04, 0.96, text, transform=axes.transAxes, va="top", fontsize=8, bbox=box)


def _summary(numbers: Sequence[Correlation]) -> str:
    """Return mean and deviation over seeds as a table a part, at the quarters of the threshold."""
    tables = []
    for part in PARTS:
        rows = []
        for scales, initialisation, _ in CASES:
            for mask, threshold in _order():
                if 4 * threshold % 1 or (mask, threshold) == ("xor", 1.0):
                    continue
                here = (scales, initialisation, part, mask, threshold)
                members = [
                    n
                    for n in numbers
                    if (n.scales, n.initialisation, n.part, n.mask, n.threshold) == here
                ]
                cells = [f"{scales}, {initialisation}", mask if threshold else "none"]
                cells += [f"{threshold:g}", f"{np.mean([n.kept for n in members]):.3%}"]
                for signal in SIGNALS:
                    values = [v for n in members if (v := getattr(n, signal)) is not None]
                    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
                    cells.append(f"{np.mean(values):.2f}{spread}" if values else "-")
                rows.append(cells)
        head = [part, "mask", "tau", "kept", *SIGNALS]
        tables.append(_numbers.table(head, rows))
    return "\n\n".join(tables)
