"""A small vision transformer on images of 64 x 64, in patches of 8 x 8."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.workloads._encoder import Block
from benchmarks.workloads._workload import Workload, cross_entropy

IMAGE, PATCH = 64, 8


class ViT(nn.Module):
    def __init__(self, layers: int = 4, width: int = 256, heads: int = 4, classes: int = 10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (IMAGE // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, first=True) for _ in range(layers)))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.classify(self.norm(self.blocks(x)[:, 0]))


def draw(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, IMAGE, IMAGE), torch.randint(10, (rows,))


WORKLOADS = {
    "vit": Workload(
        "ViT, 4 layers, 256 wide, 64x64 images, 8 x 8",
        ViT,
        draw,
        cross_entropy,
        8,
        8,
        1.25,
        small=(4, 2),
    )
}
