"""The networks of the experiments."""

from consilience.models.fast_resnet import FastResNet
from consilience.models.mlp import MLP

__all__ = ["MLP", "FastResNet"]
