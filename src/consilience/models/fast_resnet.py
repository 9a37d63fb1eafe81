"""The residual network of the CIFAR-10 experiments."""

from __future__ import annotations

from torch import Tensor, nn


class FastResNet(nn.Module):
    r"""A shallow residual network for images of 32 x 32, as in the paper (appendix).

    Convolutions of 3 x 3 without bias, each with batch norm and ReLU; the numbers are channels:

    .. math:: 64 \to 128 \to \text{pool} \to \text{residual} \to 256 \to \text{pool} \to 512
        \to \text{pool} \to \text{residual} \to \text{max over space} \to \text{linear} \cdot
        \tfrac{1}{8}

    It is the ``FastResnet`` of PyTorch-Ignite's CIFAR-10 example, which the paper names, after
    David Page's cifar10-fast.

    Args:
        classes: How many outputs there are.
        width: Channels of the first convolution; the others double it.
        channels: Channels of the images.

    Example:
        >>> import torch
        >>> FastResNet(width=8)(torch.zeros(4, 3, 32, 32)).shape
        torch.Size([4, 10])
    """

    scale = 0.125

    def __init__(self, classes: int = 10, *, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(channels, width),
            _convolution(width, 2 * width),
            nn.MaxPool2d(2),
            _Residual(2 * width),
            _convolution(2 * width, 4 * width),
            nn.MaxPool2d(2),
            _convolution(4 * width, 8 * width),
            nn.MaxPool2d(2),
            _Residual(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(8 * width, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images ``[rows, channels, height, width]``."""
        logits: Tensor = self.classifier(self.features(images)) * self.scale
        return logits


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            _convolution(channels, channels), _convolution(channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.convolutions(x)
        return found + x


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
