"""Random quadratic losses that tests share."""

from functools import partial

import torch


def definite(seed, count, size, condition):
    """Random positive definite matrices with eigenvalues between 1 and a condition number."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(normal)
    shares = torch.rand(count, size, generator=generator, dtype=torch.float64)
    matrices = (rotation * (condition**shares).unsqueeze(-2)) @ rotation.mT
    return (matrices + matrices.mT) / 2


def losses_of(hessians, values=None):
    """Quadratic losses with a common minimum at zero."""
    values = [0.0] * len(hessians) if values is None else values

    def loss(hessian, value, point):
        return value + point @ hessian @ point / 2

    return [partial(loss, h, v) for h, v in zip(hessians, values, strict=True)]
