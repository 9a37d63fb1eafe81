"""The multilayer perceptron of the synthetic experiments."""

from __future__ import annotations

import torch
from torch import nn


class MLP(nn.Sequential):
    """Linear layers with LeakyReLU between them; batch norm and dropout where asked for.

    Each hidden layer is linear, batch norm, LeakyReLU (slope 0.01), dropout, in that order.
    Weights are drawn from He's normal distribution, as in the authors' released code (the paper's
    text does not say).

    Args:
        inputs: Number of features.
        outputs: Number of outputs; 1 for a single logit.
        hidden_units: Width of each hidden layer.
        hidden_layers: How many hidden layers; 0 is a linear model.
        dropout: Share of hidden units dropped in training.
        batch_norm: Whether to normalise each hidden layer over the batch.
        initial_bias: What biases start at; 0.01 in the authors' released code.
        generator: Where the initial weights come from.

    Example:
        >>> model = MLP(34, hidden_units=256, hidden_layers=3, generator=torch.manual_seed(0))
        >>> model(torch.zeros(5, 34)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        inputs: int,
        outputs: int = 2,
        *,
        hidden_units: int = 256,
        hidden_layers: int = 3,
        dropout: float = 0.0,
        batch_norm: bool = False,
        initial_bias: float = 0.01,
        generator: torch.Generator | None = None,
    ) -> None:
        layers: list[nn.Module] = []
        width = inputs
        for _ in range(hidden_layers):
            layers.append(nn.Linear(width, hidden_units))
            if batch_norm:
                layers.append(nn.BatchNorm1d(hidden_units))
            layers.append(nn.LeakyReLU())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            width = hidden_units
        layers.append(nn.Linear(width, outputs))
        super().__init__(*layers)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, generator=generator)
                nn.init.constant_(layer.bias, initial_bias)
