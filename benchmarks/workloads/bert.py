"""A small BERT (its vocabulary is the usual one) that classifies sequences of 64 tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.workloads._encoder import Block
from benchmarks.workloads._workload import Workload, cross_entropy

VOCABULARY, TOKENS = 30522, 64


class Bert(nn.Module):
    def __init__(self, layers: int = 4, width: int = 256, heads: int = 4):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(TOKENS, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, heads, first=False) for _ in range(layers)))
        self.pool, self.classify = nn.Linear(width, width), nn.Linear(width, 2)
        self.register_buffer("places", torch.arange(TOKENS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.positions(self.places))
        return self.classify(torch.tanh(self.pool(self.blocks(x)[:, 0])))


def draw(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (rows, TOKENS)), torch.randint(2, (rows,))


WORKLOADS = {
    "bert": Workload(
        "BERT, 4 layers, 256 wide, 64 tokens, 8 x 4",
        Bert,
        draw,
        cross_entropy,
        8,
        4,
        1.25,
        small=(4, 2),
    )
}
