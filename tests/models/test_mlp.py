import math

import pytest
import torch
from torch import nn

from consilience.models import MLP


def test_layers_stand_in_the_stated_order():
    model = MLP(5, 3, hidden_units=7, hidden_layers=2, dropout=0.5, batch_norm=True)
    block = [nn.Linear, nn.BatchNorm1d, nn.LeakyReLU, nn.Dropout]
    assert [type(layer) for layer in model] == [*block, *block, nn.Linear]
    assert [type(layer) for layer in MLP(5, hidden_layers=1)] == [
        nn.Linear,
        nn.LeakyReLU,
        nn.Linear,
    ]
    assert model(torch.zeros(4, 5)).shape == (4, 3)


def test_no_hidden_layer_is_linear():
    model = MLP(4, 1, hidden_layers=0, generator=torch.Generator().manual_seed(0))
    a, b = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(a) + model(b) - model(a * 0), model(a + b))


def test_initial_weights_are_he_normal_and_biases_a_hundredth():
    model = MLP(34, hidden_units=256, generator=torch.Generator().manual_seed(0))
    for layer in model:
        if isinstance(layer, nn.Linear):
            expected = math.sqrt(2 / layer.in_features)
            deviation = float(layer.weight.detach().std())
            n = layer.weight.numel()
            assert abs(deviation / expected - 1) < 4 / math.sqrt(2 * n)
            assert (layer.bias == 0.01).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_generator_decides_the_weights(seed):
    torch.manual_seed(99)
    first = MLP(3, generator=torch.Generator().manual_seed(seed)).state_dict()
    second = MLP(3, generator=torch.Generator().manual_seed(seed)).state_dict()
    other = MLP(3, generator=torch.Generator().manual_seed(seed + 1)).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert torch.equal(weight, other[name]) == name.endswith("bias")
