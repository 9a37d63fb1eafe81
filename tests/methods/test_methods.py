import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from consilience.methods import DANN, ERM, IRM, Agreeing, irm_penalty, losses, predictions
from consilience.models import MLP
from consilience.rules import (
    AndMask,
    GeometricMean,
    MajoritySign,
    Mean,
    SandMask,
    SoftMask,
    XorMask,
)


def batch(env, inputs=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(env), inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (len(env),), generator=generator), env


def network(outputs=2, **kwargs):
    return MLP(
        5, outputs, hidden_units=6, generator=torch.Generator().manual_seed(3), **kwargs
    ).double()


def sgd(*models):
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=1.0)


def step_taken(model, run):
    """The direction of one step of SGD at rate 1, which is the gradient that it saw."""
    before = [p.detach().clone() for p in model.parameters()]
    run()
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 99),
)
def test_irm_penalty_is_the_squared_gradient_of_a_scale(env, outputs, seed):
    env = torch.tensor(env)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(env), outputs, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    y = torch.randint(0, max(outputs, 2), (len(env),), generator=generator)
    terms = []
    for e in env.unique():
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        risk = losses(logits[env == e] * scale, y[env == e]).mean()
        (slope,) = torch.autograd.grad(risk, scale, create_graph=True)
        terms.append(slope**2)
    expected = torch.stack(terms).mean()
    found = irm_penalty(logits, y, env)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits)[0], torch.autograd.grad(expected, logits)[0]
    )


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_irm_anneals_and_divides_by_its_weight(steps):
    model = network()
    x, y, env = batch(torch.tensor([0, 0, 0, 1, 1]))
    method = IRM(model, sgd(model), penalty_weight=50.0, annealing_steps=2)
    method.load_state_dict({"steps": steps})
    weight = 50.0 if steps >= 2 else 1.0
    logits = model(x)
    risks = [losses(logits[env == e], y[env == e]).mean() for e in range(2)]
    loss = (sum(risks) / 2 + weight * irm_penalty(logits, y, env)) / weight
    expected = torch.autograd.grad(loss, list(model.parameters()))
    found = step_taken(model, lambda: method.step(x, y, env))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert method.state_dict() == {"steps": steps + 1}


def test_dann_reverses_the_domain_gradient_for_the_embedding_alone():
    embedding, label, domain = (
        nn.Sequential(nn.Linear(5, 4), nn.Tanh()).double(),
        nn.Linear(4, 2).double(),
        nn.Linear(4, 3).double(),
    )
    x, y, env = batch(torch.tensor([0, 1, 2, 2, 1, 0, 0]))
    features = embedding(x)
    label_loss = F.cross_entropy(label(features), y)
    domain_loss = F.cross_entropy(domain(features), env)
    expected = []
    for part, loss in (
        (embedding, label_loss - 0.3 * domain_loss),
        (label, label_loss),
        (domain, domain_loss),
    ):
        expected += torch.autograd.grad(loss, list(part.parameters()), retain_graph=True)
    method = DANN(embedding, label, domain, sgd(embedding, label, domain), domain_weight=0.3)
    whole = nn.ModuleList([embedding, label, domain])
    found = step_taken(whole, lambda: method.step(x, y, env))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(method.model(x), label(embedding(x)))


def test_erm_follows_the_pooled_gradient():
    model = network()
    x, y, env = batch(torch.tensor([0, 0, 0, 1, 2]))
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    loss = F.cross_entropy(model(x), y).item()
    method = ERM(model, sgd(model))
    found = step_taken(model, lambda: method.step(x, y, env))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert loss != F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    "rule",
    [
        AndMask(0.4, True),
        GeometricMean(0.4),
        SandMask(0.4),
        SoftMask(0.4),
        XorMask(0.4),
        MajoritySign(),
        Mean(),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_agreeing_follows_the_rule_of_stacked_gradients(rule, outputs):
    model = network(outputs)
    x, y, env = batch(torch.tensor([0, 0, 0, 1, 2, 2, 7]))
    each = [
        torch.autograd.grad(
            losses(model(x[env == e]), y[env == e]).mean(), list(model.parameters())
        )
        for e in env.unique()
    ]
    expected = [rule.combine(torch.stack(gradients)) for gradients in zip(*each, strict=True)]
    method = Agreeing(model, sgd(model), rule)
    report = []
    found = step_taken(model, lambda: report.append(method.step(x, y, env)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    mean_loss = (
        sum(losses(network(outputs)(x[env == e]), y[env == e]).mean() for e in env.unique()) / 4
    )
    assert report[0].loss == pytest.approx(mean_loss.item())
    assert report[0].null_keep_rate == rule.null_keep_rate(4)
    if isinstance(rule, AndMask):
        nonzero = sum(int((g != 0).sum()) for g in expected)
        assert report[0].kept == pytest.approx(nonzero / sum(g.numel() for g in expected))


def test_agreeing_with_batch_norm():
    x, y, env = batch(torch.arange(3).repeat_interleave(4))
    # Shares of the joint backward pass sum to the ordinary gradient.
    model = network(batch_norm=True)
    expected = torch.autograd.grad(losses(model(x), y).mean(), list(model.parameters()))
    method = Agreeing(model, sgd(model), Mean(), batchnorm="joint")
    for a, b in zip(step_taken(model, lambda: method.step(x, y, env)), expected, strict=True):
        torch.testing.assert_close(a, b)
    # Environments normalised by themselves are networks by themselves.
    model = network(batch_norm=True)
    each = [
        torch.autograd.grad(
            losses(model(x[env == e]), y[env == e]).mean(), list(model.parameters())
        )
        for e in range(3)
    ]
    expected = [AndMask(1.0).combine(torch.stack(shares)) for shares in zip(*each, strict=True)]
    method = Agreeing(model, sgd(model), AndMask(1.0), batchnorm="per_environment")
    for a, b in zip(step_taken(model, lambda: method.step(x, y, env)), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_predictions_of_one_and_two_outputs():
    assert predictions(torch.tensor([[-0.1], [0.1]])).tolist() == [0, 1]
    assert predictions(torch.tensor([[0.2, 0.1], [0.0, 0.1]])).tolist() == [0, 1]
    logit = torch.tensor([[-1.5], [0.3]])
    pair = torch.cat([torch.zeros(2, 1), logit], dim=1)
    y = torch.tensor([1, 0])
    torch.testing.assert_close(losses(logit, y), losses(pair, y))
