import torch
from torch import nn

from consilience.models import FastResNet


def test_shapes_and_sizes_are_those_of_the_named_network():
    model = FastResNet()
    shapes = [tuple(m.weight.shape[:2]) for m in model.modules() if isinstance(m, nn.Conv2d)]
    # prep; layer 1 and its residual; layer 2; layer 3 and its residual: (outputs, inputs)
    assert shapes == [
        (64, 3),
        (128, 64),
        (128, 128),
        (128, 128),
        (256, 128),
        (512, 256),
        (512, 512),
        (512, 512),
    ]
    assert not any(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d))
    convolutions = 9 * sum(a * b for a, b in shapes)
    norms = 2 * sum(a for a, _ in shapes)
    assert sum(p.numel() for p in model.parameters()) == convolutions + norms + 10 * 512


def test_outputs_are_those_of_the_stated_layers():
    torch.manual_seed(0)
    model = FastResNet(5, width=4).double().eval()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    c = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    n = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]

    def layer(i, x):
        return n[i](c[i](x)).relu()

    def pool(x):
        return nn.functional.max_pool2d(x, 2)

    h = pool(layer(1, layer(0, x)))
    h = h + layer(3, layer(2, h))
    h = pool(layer(4, h))
    h = pool(layer(5, h))
    h = h + layer(7, layer(6, h))
    expected = h.amax((2, 3)) @ model.classifier.weight.t() / 8
    torch.testing.assert_close(model(x), expected)
