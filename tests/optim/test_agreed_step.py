"""`agreement.step` against optimizers of one component each, on gradients of a backward pass per
environment."""

import copy

import pytest
import torch
from tests.optim.test_masked_step import FUSED, ByHand, make
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

from consilience import (
    Agreement,
    AndMask,
    GeometricMean,
    MajoritySign,
    Mean,
    Rule,
    SoftMask,
    XorMask,
)
from consilience.observation.errors import ObservationError
from consilience.optim import TemporalAndMask

NAMED = ("momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad")
WAYS = [(name, {"foreach": foreach}) for name in NAMED for foreach in (False, True)]
WAYS += [(name, {"fused": True}) for name in NAMED if name in FUSED]
RATE = 0.3


class NoKeep(Rule):
    """A mask that does not say what it keeps."""

    def __call__(self, tally):
        return torch.where(tally.votes.abs() >= 3, tally.gradient, 0)


# What each rule makes of gradients [environments, ...], and what it keeps, by their formulas.
def and_mask(g):
    keep = g.sign().mean(0).abs() >= 0.6
    return g.mean(0) * keep, keep


def xor_mask(g):
    keep = g.sign().mean(0).abs() < 0.6
    return g.mean(0) * keep, keep


def soft_mask(g):
    agreement = g.sign().mean(0).abs()
    return torch.where(agreement >= 0.6, 1, agreement) * g.mean(0), agreement > 0


def geometric_mean(g):
    keep = g.sign().mean(0).abs() >= 0.9
    return keep * g.mean(0).sign() * 4 * (g.abs() / 4 + 1e-10).log().mean(0).exp(), keep


def no_keep(g):
    keep = g.sign().sum(0).abs() >= 3
    return g.mean(0) * keep, keep


RULES = {
    "and": (AndMask(0.6), and_mask),
    "xor": (XorMask(0.6), xor_mask),
    "soft": (SoftMask(0.6), soft_mask),
    "geometric": (GeometricMean(0.9), geometric_mean),
    "majority": (
        MajoritySign(),
        lambda g: (g.sign().sum(0).sign(), g.sign().sum(0) != 0),
    ),
    "mean": (Mean(), lambda g: (g.mean(0), torch.ones_like(g[0], dtype=torch.bool))),
    "no-keep": (NoKeep(), no_keep),
}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    return x, y, torch.arange(8) % 4


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def by_environment(model, x, y, env):
    """Return, for each parameter, its gradient in each environment."""
    parameters = list(model.parameters())
    rows = [
        torch.autograd.grad(loss_of(model, x[env == e], y[env == e]), parameters) for e in range(4)
    ]
    return [torch.stack(found) for found in zip(*rows, strict=True)]


def shown(gradients, formula, masked):
    """Return what the optimizer should see of a parameter, and what is kept of it."""
    result, keep = formula(gradients)
    return (torch.where(keep, result, gradients.mean(0)) if masked == "update" else result), keep


def check(rule, formula, name, way, masked, decay):
    model = network()
    optimizer = make(name, way, model.parameters(), RATE)
    agreement = Agreement(model, rule)
    hands = [ByHand(name, way, p.detach().reshape(-1), RATE) for p in model.parameters()]
    dropped = 0
    for seed in range(4):
        x, y, env = batch(seed)
        for hand, gradients in zip(hands, by_environment(model, x, y, env), strict=True):
            seen, keep = shown(gradients, formula, masked)
            dropped += int((~keep).sum())
            hand.step(seen.reshape(-1), keep.reshape(-1), masked, decay)
        optimizer.zero_grad()
        with agreement.observe(env):
            loss = loss_of(model, x, y)
        loss.backward()
        report = agreement.step(optimizer, masked=masked, decay=decay)
        assert report.voters == 4
        for parameter, hand in zip(model.parameters(), hands, strict=True):
            expected = torch.stack([part.detach() for part in hand.weights])
            assert torch.allclose(parameter.reshape(-1), expected, rtol=1e-11, atol=1e-13)
    assert dropped > 0 or isinstance(rule, Mean)


@pytest.mark.parametrize("masked", ["gradient", "update", "frozen"])
@pytest.mark.parametrize("decay", ["before", "after", "none"])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_every_optimizer_steps_as_by_hand(name, way, decay, masked):
    check(*RULES["and"], name, way, masked, decay)


@pytest.mark.parametrize("masked", ["gradient", "update", "frozen"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_steps_as_by_hand(rule, masked):
    check(*RULES[rule], "adamw", {"foreach": True}, masked, "before")


def made(rule=None, **options):
    model = network()
    agreement = Agreement(model, rule or AndMask(0.6))
    optimizer = optim.Adam(model.parameters(), 0.1, weight_decay=0.1, **options)
    return model, agreement, optimizer


def voted(model, agreement, seed=0):
    x, y, env = batch(seed)
    model.zero_grad()
    with agreement.observe(env):
        loss = loss_of(model, x, y)
    loss.backward()


def test_the_default_is_apply_and_step():
    (model, agreement, optimizer), (other, apart, plain) = made(), made()
    for seed in range(3):
        voted(model, agreement, seed)
        agreement.step(optimizer)
        voted(other, apart, seed)
        apart.apply()
        plain.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("masked", ["gradient", "update", "frozen"])
def test_applying_first_changes_nothing(masked):
    (model, agreement, optimizer), (other, apart, plain) = made(), made()
    for seed in range(3):
        voted(model, agreement, seed)
        agreement.step(optimizer, masked=masked)
        voted(other, apart, seed)
        report = apart.apply()
        assert apart.step(plain, masked=masked) is report
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("masked", ["gradient", "update", "frozen"])
def test_two_optimizers_share_the_votes(masked):
    (model, agreement, optimizer), (other, apart, _) = made(), made()
    halves = [
        optim.Adam(layer.parameters(), 0.1, weight_decay=0.1) for layer in (other[0], other[2])
    ]
    for seed in range(3):
        voted(model, agreement, seed)
        agreement.step(optimizer, masked=masked)
        voted(other, apart, seed)
        for half in halves:
            apart.step(half, masked=masked)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("masked", ["gradient", "frozen"])
def test_clipping_between_apply_and_step_bounds_what_is_left(masked):
    model, agreement, _ = made()
    optimizer = optim.SGD(model.parameters(), 1.0)
    voted(model, agreement)
    agreement.apply()
    before = [p.detach().clone() for p in model.parameters()]
    clip_grad_norm_(model.parameters(), 0.01)
    agreement.step(optimizer, masked=masked)
    moved = torch.cat(
        [(p - b).detach().reshape(-1) for p, b in zip(model.parameters(), before, strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_clipping_before_the_step_of_masked_updates_clips_all_that_averages_see():
    model, agreement, _ = made()
    optimizer = optim.SGD(model.parameters(), 1.0, momentum=0.5)
    voted(model, agreement)
    clip_grad_norm_(model.parameters(), 0.01)
    agreement.step(optimizer, masked="update")
    buffers = [optimizer.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()]
    assert torch.cat(buffers).norm().item() == pytest.approx(0.01, rel=1e-3)
    voted(model, agreement)
    agreement.apply()
    clip_grad_norm_(model.parameters(), 0.01)
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(ValueError, match=r"were changed after `agreement\.apply"):
        agreement.step(optimizer, masked="update")
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masked", ["update", "frozen"])
def test_a_grad_scaler_skips_the_step(fused, masked):
    model = nn.Linear(3, 1, bias=False)
    agreement = Agreement(model, AndMask(1.0))
    optimizer = optim.Adam(model.parameters(), 0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = torch.tensor([[1.0, 1, 1], [1, -1, 1]])
    for factor in (1.0, float("inf"), 1.0):
        model.zero_grad()
        before = model.weight.detach().clone()
        with agreement.observe():
            loss = (model(x) * factor).sum()
        scaler.scale(loss).backward()
        agreement.step(optimizer, masked=masked, step=lambda: scaler.step(optimizer))
        scaler.update()
        expected = [factor == 1, False, factor == 1]
        assert (model.weight != before).reshape(-1).tolist() == expected


@pytest.mark.parametrize("masked", ["gradient", "update", "frozen"])
def test_gradients_may_be_unscaled_and_clipped_before_the_step(masked):
    model, agreement, _ = made()
    optimizer = optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for seed in range(2):
        x, y, env = batch(seed)
        optimizer.zero_grad()
        with agreement.observe(env):
            loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        if masked != "update":
            agreement.apply()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.01)
        before = [p.detach().clone() for p in model.parameters()]
        agreement.step(optimizer, masked=masked, step=lambda: scaler.step(optimizer))
        scaler.update()
        moves = [p - b for p, b in zip(model.parameters(), before, strict=True)]
        length = torch.nn.utils.get_total_norm(moves).item()
        assert 0 < length <= 0.01 * (1 + 1e-3)
        assert (length == pytest.approx(0.01, rel=1e-3)) == (masked != "update")


def test_a_second_step_on_the_same_votes():
    model, agreement, optimizer = made()
    voted(model, agreement)
    agreement.step(optimizer, masked="frozen")
    loss_of(model, *batch(1)[:2]).backward()  # not observed
    with pytest.raises(ObservationError, match="These votes were stepped on before"):
        agreement.step(optimizer, masked="frozen")
    voted(model, agreement)
    agreement.step(optimizer, masked="frozen")


def test_bad_requests_use_no_votes_up():
    model, agreement, optimizer = made()
    other = optim.SGD(network().parameters(), 0.1)
    voted(model, agreement)
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="`masked = 'all'`"):
        agreement.step(optimizer, masked="all")
    with pytest.raises(ValueError, match="`decay = 'later'`"):
        agreement.step(optimizer, decay="later")
    with pytest.raises(ValueError, match="It was given other parameters"):
        agreement.step(other)
    with pytest.raises(TypeError, match=r"should be a `torch\.optim\.Optimizer`"):
        agreement.step(model)
    assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))
    assert agreement.step(optimizer).voters == 4


def test_nothing_observed():
    _, agreement, optimizer = made()
    with pytest.raises(ObservationError, match="nothing to apply"):
        agreement.step(optimizer)


@pytest.mark.parametrize("rule", [AndMask(0.6, "count"), GeometricMean(0.6, "norm")])
def test_updates_of_a_rescaled_rule(rule):
    model, agreement, optimizer = made(rule)
    voted(model, agreement)
    with pytest.raises(ValueError, match=r"rescaling.*Found `(AndMask|GeometricMean)\("):
        agreement.step(optimizer, masked="update")
    agreement.step(optimizer, masked="frozen")


@pytest.mark.parametrize("masked", ["update", "frozen"])
def test_gradients_that_are_not_finite_move_nothing(masked):
    model, agreement, optimizer = made()
    voted(model, agreement)
    agreement.step(optimizer, masked=masked)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    voted(model, agreement)
    agreement.apply()
    model[0].weight.grad[0, 0] = float("nan")
    if masked == "update":
        model[0].weight.grad[0, 0] = 0.0
        voted(model, agreement)
        model[0].weight.grad[0, 0] = float("nan")
        agreement.unvoted = "allow"  # or the conservation check would find it first
    with pytest.raises((RuntimeError, ObservationError), match=r"1 of 12 components|did not come"):
        agreement.step(optimizer, masked=masked)
    after = [model.state_dict(), optimizer.state_dict()]
    assert all(
        torch.equal(a, b) for a, b in zip(before[0].values(), after[0].values(), strict=True)
    )
    for a, b in zip(before[1]["state"].values(), after[1]["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_parameters_that_no_environment_voted_on_step_as_ever():
    model = network()
    agreement = Agreement(model[0], AndMask(1.0))
    optimizer = optim.SGD(model.parameters(), 0.1)
    before = copy.deepcopy(model)
    voted(model, agreement)
    agreement.step(optimizer, masked="frozen")
    assert (model[2].weight != before[2].weight).all()
    stayed = model[0].weight == before[0].weight
    assert stayed.any()
    assert not stayed.all()


def test_agreement_over_environments_and_over_time_together():
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    optimizer = TemporalAndMask(optim.SGD(model.parameters(), 0.1, momentum=0.9), 0.5, 0.7)
    for seed in range(4):
        before = copy.deepcopy(model)
        voted(model, agreement, seed)
        agreement.step(optimizer, masked="frozen")
        each = by_environment(before, *batch(seed))
        for p, b, gradients in zip(model.parameters(), before.parameters(), each, strict=True):
            assert torch.equal(p[~and_mask_half(gradients)], b[~and_mask_half(gradients)])


def and_mask_half(gradients):
    return gradients.sign().mean(0).abs() >= 0.5
