"""Scores of trained networks: does the inconsistency score tell a patchwork from a mechanism?"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call

from consilience.consistency import (
    EnvironmentLoss,
    check_witness,
    environment_losses,
    inconsistency,
)
from consilience.data import Rows
from consilience.lab.errors import LabError
from consilience.lab.figures import INK, PALETTE, save, style
from consilience.lab.report.readings import Reading
from consilience.lab.synthetic import load
from consilience.methods import predictions
from consilience.paper import _numbers
from consilience.paper._families import choose

METHODS = ("ERM, L2", "AND-mask", "geometric mean")
ENVIRONMENTS, ROWS, BATCH = 4, 64, 16
"""The first four environments; 64 rows of each, and 64 others of each as a control. Batches are
small as a row of a Gauss-Newton matrix costs a backward pass through its batch."""
SHARE = 1e-3
"""The damping, as a share of the largest curvature that an environment has on average."""
EPSILON = 0.1
"""Of the search. Losses are about 1e-4, and cannot be negative: every solution that fits is within
epsilon of a minimum, whatever its gradient."""
RADIUS, STEPS = 0.1, 25
"""How far the search may go, as a share of the norm of the parameters that vary, and its steps."""
PARTS = ("all layers", "layers after the first")


@dataclass(frozen=True)
class Score:
    """The score of a trained network, of all its parameters or of those after the first layer.

    Attributes:
        method: How it was trained.
        seed: Of the run.
        part: Which parameters vary.
        test_accuracy: On new environments.
        loss: Mean loss on the environments that are looked at.
        worst_loss: The largest of any of them.
        gradient: The norm of the mean loss's gradient.
        curvature: The largest eigenvalue of a Gauss-Newton matrix, averaged over environments.
        norm: The norm of the parameters.
        score: Between environments: quadratic, Gauss-Newton, in units of epsilon.
        control: The same between two halves of an environment's rows.
        seconds: How long it took.
        found: The search's lower bound: the loss of another environment at the witness.
        found_control: The same between two halves of an environment's rows.
        holds: Whether both witnesses passed the check.
        seen: The accuracy at the witness in the environment that does not feel it.
        felt: The accuracy at the witness in the other one.
    """

    method: str
    seed: int
    part: str
    test_accuracy: float
    loss: float
    worst_loss: float
    gradient: float
    curvature: float
    norm: float
    score: float
    control: float
    seconds: float
    found: float
    found_control: float
    holds: bool
    seen: float
    felt: float


def draw(folder: Path, *, quick: bool = False, runs: Path = Path("runs")) -> list[Path]:
    """Score the networks of finished synthetic runs, draw the scores and write them beside.

    Two methods of the score, over all parameters and over those after the first layer. A control
    has the two halves of one environment's rows as its environments: what is left between them is
    due to the rows, not to environments. Networks that do not fit their training data are at no
    minimum, and are left out and named.

    Args:
        folder: Where to write `consistency.svg`, `.png`, `.json` and `.csv`.
        quick: One network of each method, fewer rows and steps.
        runs: The folder of runs.

    Returns:
        The files written.

    Raises:
        LabError: Where there is no run to show; it names the commands.
    """
    scores: list[Score] = []
    for method, group in choose(runs, METHODS, whole=True).items():
        for reading in group.counted[: 1 if quick else None]:
            assert reading.run is not None  # noqa: S101 - counted runs have been opened
            accuracy = reading.last("train_accuracy")
            if not quick and (accuracy is None or accuracy < 0.99):
                print(f"{method}, seed {reading.run.seed}: left out, no minimum ({accuracy:.1%})")
                continue
            found = measure(reading, method, quick=quick)
            scores += found
            took = sum(score.seconds for score in found)
            print(f"{method}, seed {reading.run.seed}: {took:.0f} s", flush=True)
    if not scores:
        raise LabError(f"There is no network that fits its training data in `{runs}`.")
    print(summary(scores))
    settings = {
        "environments": ENVIRONMENTS,
        "rows": ROWS,
        "damping_share": SHARE,
        "epsilon": EPSILON,
        "radius_share": RADIUS,
        "steps": STEPS,
    }
    with style():
        files = save(_figure(scores), folder, "consistency")
    return files + _numbers.write(folder, "consistency", settings, [asdict(s) for s in scores])


def measure(reading: Reading, method: str, *, quick: bool = False) -> list[Score]:
    """Return the scores of a run's network: one for all parameters, one without the first layer."""
    run = reading.run
    assert run is not None  # noqa: S101
    built, data = load(run)
    model, rows = built.model, ROWS // 8 if quick else ROWS
    sets = halves(data.train(), rows)
    losses = environment_losses(_criterion, [_batches(chosen) for chosen in sets])
    scores = []
    for part in PARTS:
        start = time.monotonic()
        model.requires_grad_(True)
        if part != PARTS[0]:
            next(model.children()).requires_grad_(False)
        parameters = [p for p in model.parameters() if p.requires_grad]
        norm = math.sqrt(sum(float(p.detach().square().sum()) for p in parameters))
        gradient = _gradient(losses[:ENVIRONMENTS], model, parameters)
        curvature = float(np.mean(_curvatures(losses[:ENVIRONMENTS], model, sets[0])))
        own = [(e, e + ENVIRONMENTS) for e in range(ENVIRONMENTS)]
        others = [(a, b) for a in range(ENVIRONMENTS) for b in range(ENVIRONMENTS) if a != b]
        quadratic = inconsistency(
            losses,
            model,
            epsilon=1.0,
            curvature="gauss-newton",
            damping=SHARE * curvature,
            pairs=own + others,
            tolerance=math.inf,
        )
        heights = [float(loss(model).detach()) for loss in losses[:ENVIRONMENTS]]
        scores.append(
            Score(
                method=method,
                seed=run.seed,
                part=part,
                test_accuracy=float(reading.last("test_accuracy") or math.nan),
                loss=float(np.mean(heights)),
                worst_loss=max(heights),
                gradient=gradient,
                curvature=curvature,
                norm=norm,
                score=max(float(quadratic.matrix[pair]) for pair in others),
                control=max(float(quadratic.matrix[pair]) for pair in own),
                **_search(sets, model, norm, 3 if quick else STEPS),
                seconds=time.monotonic() - start,
            )
        )
    return scores


def _search(sets: Sequence[Rows], model: nn.Module, norm: float, steps: int) -> dict[str, Any]:
    """Search between environments and between halves of one, and look at the witness."""
    losses = environment_losses(_criterion, [(rows.x, rows.y) for rows in sets])
    between = [(e, (e + 1) % ENVIRONMENTS) for e in range(ENVIRONMENTS)]
    own = [(e, e + ENVIRONMENTS) for e in range(ENVIRONMENTS)]
    scores = [
        inconsistency(
            losses,
            model,
            epsilon=EPSILON,
            method="search",
            pairs=pairs,
            radius=RADIUS * norm,
            starts=1,
            steps=steps,
            tolerance=math.inf,
        )
        for pairs in (between, own)
    ]
    witness = scores[0].witness
    assert witness is not None  # noqa: S101 - a search has one
    seen, felt = (_accuracy(model, witness.parameters, sets[e]) for e in witness.pair)
    holds = all(check_witness(losses, model, score, checks=16).holds for score in scores)
    return {
        "found": float(scores[0]),
        "found_control": float(scores[1]),
        "holds": holds,
        "seen": seen,
        "felt": felt,
    }


def halves(train: Rows, rows: int) -> list[Rows]:
    """Return rows of each of the first environments, and then as many others of each."""
    return [
        Rows(*train[(train.env == e).nonzero().flatten()[half * rows : (half + 1) * rows]])
        for half in (0, 1)
        for e in range(ENVIRONMENTS)
    ]


def _batches(rows: Rows) -> list[tuple[Tensor, Tensor]]:
    starts = range(0, len(rows), BATCH)
    return [(rows.x[i : i + BATCH], rows.y[i : i + BATCH]) for i in starts]


def _criterion(output: Tensor, y: Tensor) -> Tensor:
    if output.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(output.squeeze(1), y.to(output))
    return F.cross_entropy(output, y)


def _gradient(
    losses: Sequence[EnvironmentLoss], model: nn.Module, parameters: list[nn.Parameter]
) -> float:
    """Return the norm of the mean loss's gradient."""
    mean = torch.stack([loss(model) for loss in losses]).mean()
    found = torch.autograd.grad(mean, parameters)
    return math.sqrt(sum(float(g.square().sum()) for g in found))


def _curvatures(losses: Sequence[EnvironmentLoss], model: nn.Module, rows: Rows) -> list[float]:
    """Return the largest eigenvalue of each loss's Gauss-Newton matrix.

    Asked as a score: for an environment that feels nothing, with a damping of 1, the region is a
    ball, and the score in units of epsilon is that eigenvalue plus 1.
    """
    nothing = environment_losses(lambda output, _: 0 * output.square().sum(), [_batches(rows)])
    score = inconsistency(
        [*nothing, *losses],
        model,
        epsilon=(large := 1e4),  # against which differences of height are nothing
        curvature="gauss-newton",
        damping=1.0,
        pairs=[(0, e) for e in range(1, len(losses) + 1)],
        tolerance=math.inf,
    )
    return [float(value) / large - 1 for value in score.matrix[0, 1:]]


def _accuracy(model: nn.Module, parameters: dict[str, Tensor], rows: Rows) -> float:
    with torch.no_grad():
        output = functional_call(model, parameters, (rows.x,))
    return float((predictions(output) == rows.y).double().mean())


def summary(scores: Sequence[Score]) -> str:
    """Return medians and ranges over seeds: a table for each part, a column for each method."""
    measures = (
        ("loss", "loss"),
        ("gradient", "gradient"),
        ("curvature", "curvature"),
        ("score", "score"),
        ("- control", "control"),
        ("search", "found"),
        ("- control", "found_control"),
        ("- accuracy", "seen"),
        ("- elsewhere", "felt"),
    )
    tables = []
    for part in PARTS:
        groups = [[s for s in scores if (s.method, s.part) == (method, part)] for method in METHODS]
        groups = [group for group in groups if group]
        lines = [["seeds", *(str(len(group)) for group in groups)]]
        lines.append(
            ["test", *(f"{np.mean([s.test_accuracy for s in group]):.1%}" for group in groups)]
        )
        lines += [
            [name, *(_range([getattr(s, key) for s in group]) for group in groups)]
            for name, key in measures
        ]
        lines.append(
            ["- holds", *(f"{sum(s.holds for s in group)} of {len(group)}" for group in groups)]
        )
        head = ["", *(group[0].method for group in groups)]
        tables.append(f"{part}\n{_numbers.table(head, lines)}")
    return "\n\n".join(tables)


def _range(values: Sequence[float]) -> str:
    """Return the median and, of several values, the least and the largest."""

    def short(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.2g}"

    middle = short(float(np.median(values)))
    return f"{middle} ({short(min(values))}-{short(max(values))})" if len(values) > 1 else middle


def _figure(scores: Sequence[Score]) -> Figure:
    figure = Figure(figsize=(9.2, 4.3))
    left, right = figure.subplots(1, 2)
    _strips(left, scores, "score", "control")
    left.set(
        title=f"Quadratic model, damping {SHARE:g} of the curvature", ylabel="score / $\\epsilon$"
    )
    left.axhline(1, color=INK, linestyle=":", linewidth=1)
    _strips(right, scores, "found", "found_control")
    right.set(
        title=f"Search within {RADIUS:.0%} of the norm, $\\epsilon$ = {EPSILON:g}",
        ylabel="loss elsewhere at the witness",
    )
    right.axhline(EPSILON, color=INK, linestyle=":", linewidth=1)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _strips(axes: Axes, scores: Sequence[Score], key: str, control: str) -> None:
    """Draw a dot for each seed: filled between environments, hollow between halves of one."""
    places, names = [], []
    for p, part in enumerate(PARTS):
        for m, method in enumerate(METHODS):
            chosen = [s for s in scores if (s.method, s.part) == (method, part)]
            place = p * (len(METHODS) + 0.8) + m
            places.append(place)
            names.append(method.replace(" ", "\n").replace("-", "-\n"))
            shift = np.linspace(-0.12, 0.12, len(chosen)) if len(chosen) > 1 else np.zeros(1)
            for what, marker, face, aside, label in (
                (key, "o", PALETTE[0], -0.17, "between environments"),
                (control, "D", "white", 0.17, "control: between two halves of one environment"),
            ):
                axes.plot(
                    place + aside + shift[: len(chosen)],
                    [getattr(s, what) for s in chosen],
                    linestyle="none",
                    marker=marker,
                    markersize=5,
                    color=PALETTE[0] if face != "white" else PALETTE[2],
                    markerfacecolor=face,
                    label=label if (p, m) == (0, 0) else None,
                )
        axes.text(
            p * (len(METHODS) + 0.8) + (len(METHODS) - 1) / 2,
            1.0,
            part,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8.5,
            fontweight="bold",
        )
    axes.axvline(len(METHODS) - 0.1, color="#999999", linewidth=0.8, linestyle="-")
    axes.set_yscale("log")
    axes.set_xticks(places, names, fontsize=7.5)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
