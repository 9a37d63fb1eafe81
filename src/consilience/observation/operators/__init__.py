"""How each family of torch functions that consume a parameter is observed."""

from consilience.observation.operators import (
    convolution,
    embedding,
    normalization,
    pointwise,
    products,
    rerun,
)

__all__ = ["convolution", "embedding", "normalization", "pointwise", "products", "rerun"]
