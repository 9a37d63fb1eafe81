"""Four environments, four strong features that are private, and a weak one that is shared.

    python examples/linear_regression.py --folder demo

Each environment is one row. Row ``e`` has the value 3 on feature ``e``, which no other row has,
and 0.3 on the last feature, which all rows have; every target is 1. There are two ways to a
loss of zero: the *patchwork*, in which every environment is explained by its own feature, and
the shared feature alone. Both fit the training data. Only the shared feature says anything about
an environment that was never seen.

The mean gradient takes the patchwork, as its features are ten times stronger. The AND-mask and
the geometric mean take the shared feature: a private feature moves the loss of one environment
only, so there is nothing that the environments agree on. And what they learn from two of the
environments is what they learn from the other two.

The example is the one of the notebook that accompanies "Learning explanations that are hard to
vary" (ICLR 2021), with its settings.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import webbrowser
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from consilience import Agreement, AndMask, GeometricMean, Mean, Rule
from consilience.lab.figures import DASHES, INK, PALETTE, save, style

ENVIRONMENTS = 4
STEPS = 1000
LEARNING_RATE, ITS_DECAY, WEIGHT_DECAY = 0.3, 0.9995, 0.01
RULES: dict[str, Rule] = {
    "Mean": Mean(),
    "AndMask": AndMask(threshold=1.0),
    "GeometricMean": GeometricMean(threshold=1.0),
}

X = 3 * torch.cat([torch.eye(ENVIRONMENTS), torch.full((ENVIRONMENTS, 1), 0.1)], dim=1)
Y = torch.ones(ENVIRONMENTS)
UNSEEN = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3])


def train(rule: Rule, rows: slice = slice(None), steps: int = STEPS, *, seed: int = 0) -> Tensor:
    """Train on some of the environments; return the weights before every step and at the end."""
    x, y = X[rows], Y[rows]
    torch.manual_seed(seed)
    model = nn.Linear(x.shape[1], 1, bias=False)
    nn.init.normal_(model.weight, std=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, ITS_DECAY)
    agreement = Agreement(model, rule)

    path = [model.weight.detach().squeeze(0).clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        with agreement.observe():  # every row is its own environment
            loss = (0.5 * (model(x).squeeze(1) - y) ** 2).mean()
        loss.backward()
        agreement.apply()
        optimizer.step()
        schedule.step()
        path.append(model.weight.detach().squeeze(0).clone())
    return torch.stack(path)


def loss_in(x: Tensor, weights: Tensor) -> Tensor:
    """The loss of weights, or of the weights of every step, on rows of which all targets are 1."""
    return (0.5 * (weights @ x.T - 1) ** 2).mean(-1)


def draw(paths: dict[str, Tensor], folder: Path) -> list[Path]:
    """Draw what each feature contributes to the prediction, and the loss, step by step."""
    shared = {"color": PALETTE[0], "ls": DASHES[0], "lw": 2.6}
    private = {"color": PALETTE[1], "ls": DASHES[0], "lw": 1.3}
    with style():
        figure = Figure(figsize=(9, 4.6))
        rows = figure.subplots(2, len(paths), sharex=True, sharey="row")
        for (name, path), above, below in zip(paths.items(), *rows, strict=True):
            steps = torch.arange(1, len(path) + 1)
            contributions = path * X.amax(0)
            above.plot(steps, contributions[:, :-1], **private)
            above.plot(steps, contributions[:, -1], **shared)
            above.set_title(name, fontfamily="monospace", fontsize=11)
            below.plot(steps, loss_in(X, path), color=INK, ls=DASHES[0])
            below.plot(steps, loss_in(UNSEEN[None], path), color=PALETTE[2], ls=DASHES[1])
            below.set(xscale="log", xlim=(1, len(path)), ylim=(0, 0.55), xlabel="step")
        rows[0, 0].set_ylabel("contribution of a feature\nto the prediction")
        rows[1, 0].set_ylabel("loss")
        # Labels stand beside their lines, in the colour of the lines.
        named = {"fontsize": 9, "fontweight": "bold"}
        rows[0, 0].text(6, 0.86, "four private features", color="#8A6A10", **named)
        rows[0, 0].text(6, 0.08, "the shared feature", color=PALETTE[0], **named)
        rows[1, 0].text(6, 0.42, "a new environment", color=PALETTE[2], **named)
        rows[1, 0].text(6, 0.03, "four seen in training", color=INK, **named)
        return save(figure, folder, "linear_regression")


def show(picture: Path) -> None:
    """Open a picture where there is a screen to open it on."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    if sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in screens):
        webbrowser.open(picture.resolve().as_uri())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where the picture goes")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of gradient descent")
    parser.add_argument("--show", action="store_true", help="open the picture on the screen")
    options = parser.parse_args()

    started = time.perf_counter()
    paths = {name: train(rule, steps=options.steps) for name, rule in RULES.items()}
    halves = {
        name: [train(rule, half, options.steps)[-1] for half in (slice(0, 2), slice(2, 4))]
        for name, rule in RULES.items()
    }
    took = time.perf_counter() - started

    print("                        weights                    loss in environments    two halves")
    print("rule            private (x 4)    shared           seen         not seen       differ by")
    for name, path in paths.items():
        weights = path[-1]
        apart = (halves[name][0] - halves[name][1]).abs().max()
        print(
            f"{name:14s}{weights[:-1].min():7.3f} to{weights[:-1].max():6.3f}{weights[-1]:10.3f}"
            f"{loss_in(X, weights):15.5f}{loss_in(UNSEEN[None], weights):17.5f}{apart:16.3f}"
        )
    print(f"\n{3 * len(RULES)} runs of {options.steps} steps in {took:.1f} s.")
    pictures = draw(paths, options.folder)
    for picture in pictures:
        print(f"Picture: {picture}")
    if options.show:
        show(pictures[0])


if __name__ == "__main__":
    main()
