"""The networks of the experiments."""

from consilience.models.mlp import MLP

__all__ = ["MLP"]
