"""The paper's network for CIFAR, in training mode: each image is an environment."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.workloads._workload import Workload, cross_entropy
from consilience.models import FastResNet


def draw(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


WORKLOADS = {
    "fast-resnet": Workload(
        "FastResNet, 80 x 1, joint batch norm",
        FastResNet,
        draw,
        cross_entropy,
        80,
        1,
        1.30,
        joint=True,
        small=(6, 1),
    )
}
