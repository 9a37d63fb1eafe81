"""An ordinary training loop, and what two more lines do when the data has a shortcut.

    python examples/own_training_loop.py

Sixteen hospitals measure the same two quantities: patients lie on an inner ring, healthy people
on an outer one, and the rings overlap a little. Every hospital's device also leaves a mark, on a
channel of its own, that gives the label away. In a hospital that was not in the data, marks
appear as well and mean nothing.

The loop trains a small network twice: on the plain gradient, and on what the hospitals agree on.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from consilience import Agreement, AndMask, Mean, Rule, environment_mean

HOSPITALS = 16


def measure(rows: int, seed: int, *, known: bool) -> TensorDataset:
    """Measure people in the known hospitals, or in as many new ones."""
    random = torch.Generator().manual_seed(seed)
    hospital = torch.arange(HOSPITALS).repeat_interleave(rows)
    label = torch.randint(2, hospital.shape, generator=random)
    angle = 2 * torch.pi * torch.rand(hospital.shape, generator=random)
    radius = 1 + label + 0.25 * torch.randn(hospital.shape, generator=random)
    rings = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    meant = label if known else torch.randint(2, label.shape, generator=random)
    marks = F.one_hot(hospital, HOSPITALS) * (4 * meant - 2)[:, None]
    return TensorDataset(torch.cat([rings, marks], dim=1), label, hospital)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y, _ = data.tensors
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


def train(rule: Rule, data: TensorDataset, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(2 + HOSPITALS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    loader = DataLoader(data, batch_size=512, shuffle=True)
    agreement = Agreement(model, rule)

    for epoch in range(epochs):
        for x, y, hospital in loader:
            optimizer.zero_grad()
            with agreement.observe(hospital):
                losses = F.cross_entropy(model(x), y, reduction="none")
                loss = environment_mean(losses, hospital)
            loss.backward()
            report = agreement.apply()
            optimizer.step()
        if (epoch + 1) % 10 == 0 or epoch + 1 == epochs:
            print(
                f"  epoch {epoch + 1:3d}   loss {loss.item():.3f}   kept {report.kept:4.0%}"
                f"   (by chance {report.null_keep_rate:4.0%})"
            )
    return model


def score(rule: Rule, epochs: int, seed: int) -> tuple[float, float]:
    """Return the accuracy in the known hospitals, and in new ones."""
    known = measure(256, seed=0, known=True)
    new = measure(256, seed=1, known=False)
    model = train(rule, known, epochs, seed)
    return accuracy(model, known), accuracy(model, new)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for rule in (Mean(), AndMask(threshold=0.6)):
        print(f"\n{rule}")
        seen, new = score(rule, options.epochs, options.seed)
        print(f"  accuracy in the known hospitals {seen:.1%}, in new ones {new:.1%}")


if __name__ == "__main__":
    main()
