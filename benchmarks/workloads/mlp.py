"""The paper's multilayer perceptron, and a wide one."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.workloads._workload import Workload, cross_entropy
from consilience.models import MLP


def perceptron(
    inputs: int, width: int, outputs: int, environments: int, each: int, target: float | None
) -> Workload:
    """Return a perceptron of three hidden layers on noise."""

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, inputs), torch.randint(outputs, (rows,))

    return Workload(
        f"MLP {inputs}-{width}-{width}-{width}-{outputs}, {environments} x {each}",
        lambda: MLP(inputs, outputs, hidden_units=width),
        draw,
        cross_entropy,
        environments,
        each,
        target,
        sequential=True,
        small=(6, 1) if each == 1 else (4, 2),
    )


WORKLOADS = {
    "mlp-32x128": perceptron(34, 256, 2, 32, 128, 1.10),
    "mlp-16x256": perceptron(34, 256, 2, 16, 256, 1.05),
    "mlp-128x1": perceptron(34, 256, 2, 128, 1, 1.25),
    "wide-8x64": perceptron(1024, 1024, 16, 8, 64, 1.20),
    "wide-512x1": perceptron(1024, 1024, 16, 512, 1, 1.25),
}
