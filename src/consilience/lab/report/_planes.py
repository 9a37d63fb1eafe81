"""What a trained network learned: its decisions on planes, and what it listens to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from consilience.data import Rows, SyntheticMemorization
from consilience.lab.errors import LabError
from consilience.lab.runs import CHECKPOINT, Run
from consilience.lab.synthetic import load
from consilience.methods import predictions

PIXELS = 112
ROWS = 64
"""Rows of each environment on which a network is asked what it listens to."""


@dataclass(frozen=True)
class Plane:
    """What a network says on a plane through its inputs.

    Attributes:
        title: What varies.
        caption: What is held fixed, and what the right answer is.
        chance_of_one: Probability of class 1 ``[pixels, pixels]``, rows from top to bottom.
        extent: The plane reaches from -extent to extent both ways.
        marks: Points to show: x, y and class.
    """

    title: str
    caption: str
    chance_of_one: np.ndarray
    extent: float
    marks: Sequence[tuple[float, float, int]]


@dataclass(frozen=True)
class Learned:
    """What a network learned, from its checkpoint.

    Attributes:
        mechanism: Accuracy on training environments once shortcuts are shuffled among rows:
            what it can tell from the mechanism alone.
        shortcuts: The same once mechanisms are shuffled: what it can tell from shortcuts alone.
    """

    mechanism: float
    shortcuts: float


def learned(run: Run) -> Learned:
    """Ask a network what it listens to, on fresh rows of its training environments."""
    model, data = _load(run)
    few = replace(data, rows_per_environment=ROWS)
    rows = few.train()
    return Learned(
        mechanism=_accuracy(model, few.permute_shortcuts(rows, across_environments=True)),
        shortcuts=_accuracy(model, few.permute_mechanism(rows, across_environments=True)),
    )


def planes(run: Run) -> list[Plane]:
    """Return what a network says on planes of the mechanism and of shortcuts.

    On the first two the mechanism varies, with shortcuts at zero and with the shortcut of
    environment 1 that goes with class 1. On the others the shortcut varies in the plane of two
    environments' signatures, and the mechanism stays that of one row.
    """
    model, data = _load(run)
    test = data.test(240)
    points = [
        (float(x), float(y), int(label))
        for (x, y), label in zip(test.x[:, :2].tolist(), test.y.tolist(), strict=True)
    ]
    extent = 1.08 * float(test.x[:, :2].abs().max())
    signatures = torch.from_numpy(data.signatures()).float()
    spirals = torch.eye(2, data.dimensions)
    held = torch.zeros(data.dimensions)
    found = [
        Plane(
            "mechanism",
            "shortcuts at zero; the right answer follows the spirals",
            _decide(model, spirals, held, extent),
            extent,
            points,
        )
    ]
    if data.shortcut_dimensions == 0:
        return found
    carrying = held.clone()
    carrying[2:] = signatures[0]
    found.append(
        Plane(
            "mechanism, with a shortcut of class 1",
            "the shortcut is environment 1's; the right answer still follows the spirals",
            _decide(model, spirals, carrying, extent),
            extent,
            points,
        )
    )
    if data.shortcut_dimensions == 1 or data.environments == 1:
        return found
    for label, (a, b) in ((0, (0, 1)), (1, (2, 3))):
        if b < data.environments:
            row = _clear_row(test, label)
            title = f"shortcuts of environments {a + 1} and {b + 1}"
            found.append(_shortcut_plane(model, signatures[[a, b]], row, (title, label)))
    return found


def _shortcut_plane(
    model: nn.Module, signatures: Tensor, row: Tensor, about: tuple[str, int]
) -> Plane:
    """Return the plane through two signatures, the mechanism held at that of a row."""
    title, label = about
    basis, corner = torch.linalg.qr(signatures.T)
    axes = torch.zeros(2, len(row))
    axes[:, 2:] = basis.T
    held = torch.cat([row[:2], torch.zeros(len(row) - 2)])
    ends = corner.T.tolist()  # where the two signatures lie in the plane
    extent = 1.35 * float(corner.abs().max()) + 1e-9
    return Plane(
        title,
        f"the mechanism is that of a row of class {label}; the right answer is {label} everywhere",
        _decide(model, axes, held, extent),
        extent,
        [(sign * x, sign * y, int(sign > 0)) for x, y in ends for sign in (1, -1)],
    )


def _clear_row(test: Rows, label: int) -> Tensor:
    """Return the row of a class half way out on its spiral, where no end is near."""
    distance = test.x[:, :2].norm(dim=1)
    away = (distance - distance.median()).abs() + 1e6 * (test.y != label)
    return test.x[int(away.argmin())]


@torch.no_grad()
def _decide(model: nn.Module, axes: Tensor, held: Tensor, extent: float) -> np.ndarray:
    """Return the probability of class 1 on a plane, from the top left to the bottom right."""
    ticks = torch.linspace(-extent, extent, PIXELS)
    y, x = torch.meshgrid(ticks.flip(0), ticks, indexing="ij")
    inputs = held + x.reshape(-1, 1) * axes[0] + y.reshape(-1, 1) * axes[1]
    logits = model(inputs)
    chance = logits[:, 0].sigmoid() if logits.shape[1] == 1 else logits.softmax(1)[:, 1]
    found: np.ndarray = chance.reshape(PIXELS, PIXELS).nan_to_num(0.5).double().numpy()
    return found


@torch.no_grad()
def _accuracy(model: nn.Module, rows: Rows) -> float:
    return float((predictions(model(rows.x)) == rows.y).double().mean())


def _load(run: Run) -> tuple[nn.Module, SyntheticMemorization]:
    try:
        method, data = load(run)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise LabError(
            f"`{run.path / CHECKPOINT}` does not fit its configuration: {error}."
        ) from None
    return method.model, data
