"""What weight decay does to masked weights in the first epochs, by the way it is applied.

``python -m consilience.lab.wiping`` prints, for several ways of decay (or for those named), the
mean magnitude of the weights as training goes on, and the share of gradient components that all
environments agree on. docs/synthetic.md says what it shows.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from consilience.data import EnvironmentBatchSampler
from consilience.lab.settings import PRESETS, Settings
from consilience.lab.synthetic import make_data, make_method

WAYS: dict[str, dict[str, Any]] = {
    "none": {"l2": 0.0},
    "L2 1e-4 inside Adam": {"l2": 1e-4},
    "L2 1e-2 inside Adam": {"l2": 1e-2},
    "L2 1e-6 inside Adam": {"l2": 1e-6},
    "L1 1e-5 inside Adam": {"l1": 1e-5, "l2": 0.0},
    "L2 1e-4 before the mask": {"l2": 1e-4, "decay": "before-mask"},
    "decoupled 1e-4": {"l2": 1e-4, "decay": "decoupled"},
    "decoupled 1e-1": {"l2": 1e-1, "decay": "decoupled"},
    "decoupled 5": {"l2": 5.0, "decay": "decoupled"},
    "none, initial weights/50": {"l2": 0.0, "shrink": 0.02},
    "L2 1e-4 in SGD": {"l2": 1e-4, "optimizer": "sgd"},
    "L2 1e-4 in SGD, not rescaled": {"l2": 1e-4, "optimizer": "sgd", "rescale": "none"},
    "L2 1e-4 inside Adam, eps 1e-3": {"l2": 1e-4, "eps": 1e-3},
    "L2 1e-4 inside Adam, beta2 0.9": {"l2": 1e-4, "beta2": 0.9},
    "none, masked wiped by hand": {"l2": 0.0, "wipe": True},
}
"""Ways of decay, as changes to the preset, and probes of the explanation: `shrink` multiplies the
initial weights, `eps` and `beta2` are Adam's, `wipe` moves masked weights towards 0 itself."""
PROBES = ("shrink", "eps", "beta2", "wipe")
COLUMNS = ("mechanism", "shortcut", "deeper", "kept %", "loss")


def follow(
    settings: Settings,
    seed: int,
    epochs: tuple[int, ...],
    *,
    shrink: float = 1.0,
    eps: float | None = None,
    beta2: float | None = None,
    wipe: bool = False,
) -> dict[int, tuple[float, ...]]:
    """Train by AND-mask, and return after some epochs what :data:`COLUMNS` name.

    The first three are mean magnitudes of weights: first layer from the mechanism, first layer
    from the shortcuts, all deeper layers.

    Args:
        settings: The settings, resolved here.
        seed: Where data and initial weights come from.
        epochs: When to look; 0 is before training.
        shrink: What initial weights are multiplied by.
        eps: Adam's epsilon, in place of its default.
        beta2: How much of Adam's second moment stays from step to step, in place of its default.
        wipe: After each step, move every parameter whose gradient is masked towards 0 by the
            learning rate, or by a tenth of what is left if that is less: what L2 inside Adam
            does to a weight that never agreed, with neither L2 nor Adam in it.
    """
    settings = settings.resolve()
    rows = make_data(settings, seed).train()
    method = make_method("and-mask", settings, seed)
    sampler = EnvironmentBatchSampler(
        rows.env, settings.environments_per_batch, settings.batch_size, seed=seed
    )
    first, *deeper = [m.weight for m in method.model.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for weight in (first, *deeper):
            weight.mul_(shrink)
    for group in method.optimizer.param_groups:
        if eps is not None:
            group["eps"] = eps
        if beta2 is not None:
            group["betas"] = (group["betas"][0], beta2)
    found: dict[int, tuple[float, ...]] = {}
    for epoch in range(max(epochs) + 1):
        steps = []
        for batch in sampler if epoch else ():
            steps.append(method.step(*rows[torch.tensor(batch)]))
            if wipe:
                _wipe(method.model, settings.learning_rate)
        if epoch in epochs:
            many = max(len(steps), 1)
            found[epoch] = (
                float(first[:, :2].detach().abs().mean()),
                float(first[:, 2:].detach().abs().mean()),
                float(torch.cat([w.detach().flatten() for w in deeper]).abs().mean()),
                100 * sum(step.kept for step in steps) / many,
                sum(step.loss for step in steps) / many,
            )
    return found


@torch.no_grad()
def _wipe(model: nn.Module, step: float) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.copy_(torch.where(p.grad == 0, p - p.sign() * (p.abs() / 10).clamp(max=step), p))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    asked = sys.argv[1:] or list(WAYS)
    epochs = (0, 1, 2, 4, 8, 16, 24)
    sys.stdout.write(f"{'':31}{'epoch':>6}" + "".join(f"{c:>11}" for c in COLUMNS) + "\n")
    for name in asked:
        changes = WAYS[name]
        probes = {key: changes[key] for key in PROBES if key in changes}
        given = {key: value for key, value in changes.items() if key not in probes}
        settings = replace(PRESETS["paper"], **given)
        for epoch, numbers in follow(settings, 0, epochs, **probes).items():
            cells = "".join(f"{number:11.4f}" for number in numbers)
            sys.stdout.write(f"{name:31}{epoch:6}{cells}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
