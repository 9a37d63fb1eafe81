"""Where a weight goes whose gradient is masked: under each optimizer, each choice, each decay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.optim import Optimizer

from consilience.lab.figures import PALETTE, save, style
from consilience.optim import masked_step
from consilience.optim._masked_step import Decay, Masked
from consilience.paper import _numbers

AGREED, MASKED, AGREED_AGAIN = 12, 48, 16
"""Steps in which environments agree, disagree, and agree again."""

DECAY_RATE = 0.25

OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.04}),
    "SGD, momentum 0.9": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "SGD, Nesterov": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.04}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.04}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.02, "alpha": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}

DECAYS: dict[Decay, str] = {
    "before": 'decay="before"',
    "after": 'decay="after"',
    "none": 'decay="none"',
}

LINES: dict[Masked, dict[str, Any]] = {
    "gradient": {"color": PALETTE[2], "linestyle": "-", "linewidth": 1.8},
    "update": {"color": PALETTE[1], "linestyle": "--", "linewidth": 2.4},
    "frozen": {"color": PALETTE[0], "linestyle": ":", "linewidth": 2.2},
}


def draw(folder: Path, *, quick: bool = False) -> list[Path]:
    """Follow a weight under each optimizer and each choice, and draw its ways.

    The weight begins at 1 with the gradient of its environments, which agree, at -1; then they
    disagree, so that it is masked and its mean gradient is 1 and -1 in turn; then they agree as
    before.

    Args:
        folder: Where to write `masked-not-frozen.svg`, `.png`, `.json` and `.csv`.
        quick: Nothing to shorten.

    Returns:
        The files written.
    """
    del quick
    rows: list[dict[str, Any]] = []
    with style():
        figure = Figure(figsize=(11.5, 5.4))
        grid = figure.subplots(len(DECAYS), len(OPTIMIZERS), sharex=True, sharey=True)
        for column, name in enumerate(OPTIMIZERS):
            for row, (decay, title) in enumerate(DECAYS.items()):
                for masked, line in LINES.items():
                    path = follow(name, masked, decay)
                    grid[row, column].plot(path, label=f'masked="{masked}"', **line)
                    rows += [
                        {
                            "optimizer": name,
                            "decay": decay,
                            "masked": masked,
                            "step": step,
                            "weight": value,
                        }
                        for step, value in enumerate(path)
                    ]
                _decorate(grid[row, column])
                grid[row, 0].set_ylabel(f"{title}\nweight")
            grid[0, column].set_title(name)
        figure.supxlabel("step (shaded: the weight is masked)", fontsize=9)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, handlelength=3.5)
        files = save(figure, folder, "masked-not-frozen")
    settings = {
        "optimizers": {name: options for name, (_, options) in OPTIMIZERS.items()},
        "weight_decay": DECAY_RATE,
        "steps": [AGREED, MASKED, AGREED_AGAIN],
    }
    return files + _numbers.write(folder, "masked-not-frozen", settings, rows)


def follow(name: str, masked: Masked, decay: Decay) -> list[float]:
    """Return the weight before the first step and after each.

    Args:
        name: One of `OPTIMIZERS`.
        masked: What to hold back while the environments disagree.
        decay: When weight decay happens.
    """
    kind, options = OPTIMIZERS[name]
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = kind([weight], weight_decay=DECAY_RATE, **options)
    path = [weight.item()]
    for step in range(AGREED + MASKED + AGREED_AGAIN):
        keep = not AGREED <= step < AGREED + MASKED
        mean = -1.0 if keep or step % 2 else 1.0
        weight.grad = torch.full_like(weight, 0.0 if masked == "gradient" and not keep else mean)
        masked_step(optimizer, {weight: torch.tensor([keep])}, masked=masked, decay=decay)
        path.append(weight.item())
    return path


def _decorate(axes: Axes) -> None:
    axes.axvspan(AGREED, AGREED + MASKED, color="#eeeeee", zorder=0)
    axes.set_xticks(np.arange(0, AGREED + MASKED + AGREED_AGAIN + 1, 20))
    axes.set_ylim(0, 3.3)
