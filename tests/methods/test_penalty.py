import pytest
import torch

from consilience.methods import ERM, Agreeing, Penalty
from consilience.models import MLP
from consilience.rules import AndMask

ENV = torch.arange(3).repeat_interleave(4)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (12,), generator=generator), ENV


def network():
    return MLP(5, hidden_units=6, generator=torch.Generator().manual_seed(3)).double()


def train(decay, make_optimizer, l1=0.0, l2=0.0, steps=5):
    model = network()
    method = ERM(model, make_optimizer(model.parameters()), Penalty(l1, l2, decay))
    for seed in range(steps):
        method.step(*batch(seed))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def adam(**kwargs):
    return lambda parameters: torch.optim.Adam(parameters, lr=0.01, **kwargs)


@pytest.mark.parametrize("decay", ["after-mask", "before-mask"])
def test_l2_inside_adam_is_the_weight_decay_of_adam(decay):
    expected = train(decay, adam(weight_decay=0.1))
    torch.testing.assert_close(train(decay, adam(), l2=0.1), expected)
    assert not torch.allclose(train(decay, adam()), expected)


def test_decoupled_is_the_weight_decay_of_adamw():
    expected = train("decoupled", lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))
    torch.testing.assert_close(train("decoupled", adam(), l2=0.1), expected)


@pytest.mark.parametrize("decay", ["after-mask", "before-mask"])
def test_l1_is_the_gradient_of_the_sum_of_magnitudes(decay):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(5):
        x, y, _ = batch(seed)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        (loss + 0.01 * sum(p.abs().sum() for p in model.parameters())).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    torch.testing.assert_close(train(decay, sgd, l1=0.01), expected)


def test_decoupled_l1_shrinks_by_the_rate_times_the_coefficient():
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    plain, shrunk = train("decoupled", sgd, steps=1), train("decoupled", sgd, l1=0.01, steps=1)
    before = torch.cat([p.detach().flatten() for p in network().parameters()])
    torch.testing.assert_close(plain - shrunk, 0.1 * 0.01 * before.sign())


@pytest.mark.parametrize(
    ("decay", "shrinks"), [("after-mask", True), ("before-mask", False), ("decoupled", True)]
)
def test_where_a_masked_weight_is_regularised(decay, shrinks):
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    x, y, env = batch(0)
    gradients = [
        torch.autograd.grad(
            torch.nn.functional.cross_entropy(model(x[env == e]), y[env == e]), model.parameters()
        )
        for e in range(3)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Agreeing(model, optimizer, AndMask(1.0), Penalty(l2=0.5, decay=decay)).step(x, y, env)
    found_masked = 0
    for i, p in enumerate(model.parameters()):
        shares = torch.stack([g[i] for g in gradients])
        masked = shares.sign().sum(0).abs() < 3
        found_masked += int(masked.sum())
        factor = 1 - 0.1 * 0.5 if shrinks else 1.0
        torch.testing.assert_close(p.detach()[masked], before[i][masked] * factor)
        kept = before[i] - 0.1 * (shares.mean(0) + 0.5 * before[i])
        torch.testing.assert_close(p.detach()[~masked], kept[~masked])
    assert found_masked > 10
