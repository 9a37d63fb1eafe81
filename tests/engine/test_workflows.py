"""How people train: accumulation, mixed precision, checkpointing, compilation, several losses."""

from __future__ import annotations

import copy
import io
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from consilience import Agreement, AndMask, GeometricMean, Mean, Rule, SandMask, Tally
from engine.modules import Net, TiedLanguageModel, normal
from oracle import (
    Oracle,
    Record,
    check,
    compare,
    shares_alone,
    shares_of_a_joint_graph,
    wavy,
)

ENV = [0, 1, 0, 1, 2]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double()


def rows(number: int = 5, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 3, generator=generator, dtype=torch.float64)


X = rows()


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return wavy(model(x))


def together(*oracles: Oracle) -> Oracle:
    """Environments of several observations: each of them votes for itself."""
    names = {name for oracle in oracles for name in oracle.shares}
    found = {n: [o for o in oracles if n in o.shares] for n in names}
    shares = {n: torch.cat([o.shares[n] for o in some]) for n, some in found.items()}
    gradient = {n: torch.stack([o.gradient[n] for o in some]).sum(0) for n, some in found.items()}
    return Oracle(shares, gradient, sum((o.loss for o in oracles), torch.zeros(())))


def problems(tallies: dict[str, Tally], oracle: Oracle) -> list[str]:
    """Compare parameter by parameter, since voters may differ between them."""
    assert tallies.keys() == oracle.shares.keys()
    return [
        problem
        for name in tallies
        for problem in compare(
            {name: tallies[name]},
            Oracle({name: oracle.shares[name]}, {name: oracle.gradient[name]}, oracle.loss),
        )
    ]


# --- accumulation -----------------------------------------------------------------------------


def test_accumulation() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    parts = [(rows(5, 1), ENV), (rows(3, 2), [7, 8, 7]), (rows(4, 3), None)]
    for x, env in parts:
        with agreement.observe(env):
            loss = losses(model, x).mean()
        loss.backward()
    agreement.apply()
    expected = together(*(shares_alone(network, losses, (x,), env) for x, env in parts))
    assert problems(record.of(model), expected) == []
    assert expected.voters == 3 + 2 + 4


def test_accumulation_of_forwards_before_backwards() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    parts = [(rows(5, 1), ENV), (rows(3, 2), [7, 8, 7])]
    waiting = []
    for x, env in parts:
        with agreement.observe(env):
            waiting.append(losses(model, x).mean())
    for loss in reversed(waiting):
        loss.backward()
    agreement.apply()
    expected = together(*(shares_alone(network, losses, (x,), env) for x, env in parts))
    assert problems(record.of(model), expected) == []


def test_accumulation_into_one_backward() -> None:
    """Two observations whose losses are summed before a single backward."""
    model, record = network(), Record()
    agreement = Agreement(model, record)
    parts = [(rows(5, 1), ENV), (rows(3, 2), [7, 8, 7])]
    total = torch.zeros((), dtype=torch.float64)
    for x, env in parts:
        with agreement.observe(env):
            total = total + losses(model, x).mean()
    total.backward()
    agreement.apply()
    expected = together(*(shares_alone(network, losses, (x,), env) for x, env in parts))
    assert problems(record.of(model), expected) == []


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(self.shared(x).tanh())


def test_a_parameter_is_judged_by_the_environments_that_reached_it() -> None:
    model, record = Branches(), Record()
    agreement = Agreement(model, record)
    parts = [(rows(5, 1), ENV, "a"), (rows(4, 2), [0, 1, 2, 3], "b"), (rows(2, 3), None, "a")]
    oracles = []
    for x, env, branch in parts:
        branch_losses = lambda model, x, branch=branch: wavy(model(x, branch))  # noqa: E731
        with agreement.observe(env):
            loss = branch_losses(model, x).mean()
        loss.backward()
        oracles.append(shares_alone(Branches, branch_losses, (x,), env))
    agreement.apply()
    tallies = record.of(model)
    assert problems(tallies, together(*oracles)) == []
    voters = {name: tally.voters for name, tally in tallies.items()}
    assert voters["shared.weight"] == 3 + 4 + 2
    assert voters["a.weight"] == 3 + 2
    assert voters["b.weight"] == 4


def test_observe_and_backward_meet_in_one_tally() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    x = rows(3, 2)
    agreement.backward(losses(model, x))
    agreement.apply()
    expected = together(
        shares_alone(network, losses, (X,), ENV), shares_alone(network, losses, (x,), None)
    )
    assert problems(record.of(model), expected) == []


def test_steps_do_not_remember_each_other() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    for seed in range(3):
        x = rows(5, seed)
        model.zero_grad()
        with agreement.observe(ENV):
            loss = losses(model, x).mean()
        loss.backward()
        agreement.apply()
        expected = shares_alone(network, losses, (x,), ENV)
        assert compare(record.of(model), expected) == []


def test_training_moves_as_masked_gradients_say() -> None:
    """Ten steps of SGD, beside ten steps of SGD on gradients masked by the oracle."""
    model, twin = network(), network()
    agreement = Agreement(model, AndMask(0.6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for seed in range(10):
        x = rows(5, seed)
        optimizer.zero_grad()
        with agreement.observe(ENV):
            loss = losses(model, x).mean()
        loss.backward()
        agreement.apply()
        optimizer.step()
        found = shares_alone(lambda: copy.deepcopy(twin), losses, (x,), ENV)
        for name, p in twin.named_parameters():
            keep = found.votes(name).abs() >= 2  # 0.6 of 3 voters is 1.8
            p.grad = torch.where(keep, found.gradient[name], 0.0)
        slow.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10, msg=name)


# --- several losses, several backwards --------------------------------------------------------


def two_heads() -> nn.Module:
    torch.manual_seed(0)
    members = {"l": nn.Linear(3, 4), "a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}
    return Net(lambda m, x: (m.a(m.l(x).tanh()), m.b(m.l(x).sin())), **members).double()


def two_losses(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y, z = model(x)
    return wavy(y), z.square().sum(1)


def test_two_losses_one_backward() -> None:
    model, record = two_heads(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        first, second = two_losses(model, X)
        loss = first.mean() + 0.3 * second.mean()
    loss.backward()
    agreement.apply()
    joined = lambda model, x: (lambda a, b: a + 0.3 * b)(*two_losses(model, x))  # noqa: E731, PLC3002
    assert compare(record.of(model), shares_alone(two_heads, joined, (X,), ENV)) == []


def test_two_losses_two_backwards() -> None:
    """An environment's gradient is that of the sum, however many backwards bring it."""
    model, record = two_heads(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        first, second = two_losses(model, X)
        first, second = first.mean(), -2.0 * second.mean()
    first.backward(retain_graph=True)
    second.backward()
    joined = lambda model, x: (lambda a, b: a - 2.0 * b)(*two_losses(model, x))  # noqa: E731, PLC3002
    expected = shares_alone(two_heads, joined, (X,), ENV)
    try:
        agreement.apply()
    except RuntimeError as error:
        assert "backward" in str(error)  # noqa: PT017 - refusing is as good as counting right
    else:
        assert compare(record.of(model), expected) == []


def test_retain_graph() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward(retain_graph=True)
    agreement.apply()
    assert compare(record.of(model), shares_alone(network, losses, (X,), ENV)) == []


def test_retain_graph_and_a_second_step_on_the_same_graph() -> None:
    """What was applied is not counted again: right, or refused, but not doubled."""
    model, record = network(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    expected = shares_alone(network, losses, (X,), ENV)
    for first in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=True)
        try:
            agreement.apply()
        except RuntimeError:
            assert not first
        else:
            assert compare(record.of(model), expected) == []


def test_backward_inside_the_observation() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        losses(model, X).mean().backward()
    agreement.apply()
    assert compare(record.of(model), shares_alone(network, losses, (X,), ENV)) == []


def test_two_forwards_in_one_observation_with_backwards_of_their_own() -> None:
    """Both passes see the same rows, so an environment's share is the sum over both."""
    model, record = network(), Record()
    agreement = Agreement(model, record)
    other = rows(seed=2)
    with agreement.observe(ENV):
        first = losses(model, X).mean()
        second = -1.5 * losses(model, other).mean()
    first.backward()
    second.backward()
    joined = lambda model, x, y: losses(model, x) - 1.5 * losses(model, y)  # noqa: E731
    expected = shares_alone(network, joined, (X, other), ENV)
    try:
        agreement.apply()
    except RuntimeError as error:
        assert "backward" in str(error)  # noqa: PT017
    else:
        assert compare(record.of(model), expected) == []


def test_a_penalty_on_the_parameters() -> None:
    """No row owns it: it enters the gradient without a vote, or is refused by name."""
    model, record = network(), Record()
    agreement = Agreement(model, record)
    penalty = lambda model: 0.1 * sum(p.square().sum() for p in model.parameters())  # noqa: E731
    try:
        with agreement.observe(ENV):
            loss = losses(model, X).mean() + penalty(model)
        loss.backward()
        agreement.apply()
    except RuntimeError as error:
        assert "weight" in str(error) or "bias" in str(error)  # noqa: PT017
        return
    expected = shares_alone(network, losses, (X,), ENV)
    for name, p in network().named_parameters():
        expected.gradient[name] += 0.2 * p.detach()
    assert compare(record.of(model), expected) == []


def test_a_penalty_outside_the_observation() -> None:
    """The part of the gradient that nobody voted on is refused, not masked in silence."""
    model = network()
    agreement = Agreement(model, Record())
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss = loss + 0.1 * model[0].weight.square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        agreement.apply()


# --- randomness -------------------------------------------------------------------------------


def test_dropout_in_train() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(3, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 2), nn.Dropout(0.2)
        ).double()

    def same_noise(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return losses(model, x)

    expected = shares_of_a_joint_graph(build, same_noise, (X,), ENV)
    model, record = build(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        loss = same_noise(model, X).mean()
    loss.backward()
    agreement.apply()
    assert compare(record.of(model), expected) == []


def test_observing_does_not_draw_random_numbers() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    torch.manual_seed(3)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()
    after = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(()))


# --- precision --------------------------------------------------------------------------------


def nearly(
    record: Record, model: nn.Module, expected: Oracle, band: float, least: int = 12
) -> None:
    """Votes are right wherever all shares lie clear of zero; the gradient is near."""
    tallies = record.of(model)
    assert tallies.keys() == expected.shares.keys()
    clear = 0
    for name, tally in tallies.items():
        shares = expected.shares[name]
        # Rounding is relative to a parameter's own largest share.
        certain = (shares.abs() > band * shares.abs().max()).all(0)
        clear += int(certain.sum())
        assert tally.voters == expected.voters
        assert torch.equal(tally.votes[certain].double(), expected.votes(name)[certain]), name
        grad = expected.gradient[name]
        torch.testing.assert_close(
            tally.gradient.double(), grad, rtol=band, atol=band * float(shares.abs().max())
        )
    assert clear > least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_of_low_precision(dtype: torch.dtype) -> None:
    def rounded() -> nn.Module:
        return network().to(dtype).double()

    x = X.to(dtype)
    expected = shares_alone(rounded, losses, (x.double(),), ENV)
    model, record = network().to(dtype), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        loss = losses(model, x).mean()
    loss.backward()
    assert model[0].weight.grad.dtype is dtype
    agreement.apply()
    assert model[0].weight.grad.dtype is dtype
    nearly(record, model, expected, 1e-4 if dtype is torch.float32 else 0.08)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    expected = shares_alone(network, losses, (X,), ENV)
    model, record = network().float(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV), torch.autocast("cpu", dtype):
        loss = losses(model, X.float()).mean()
    loss.backward()
    assert model[0].weight.grad.dtype is torch.float32
    agreement.apply()
    nearly(record, model, expected, 0.08)


def test_autocast_around_the_observation() -> None:
    expected = shares_alone(network, losses, (X,), ENV)
    model, record = network().float(), Record()
    agreement = Agreement(model, record)
    with torch.autocast("cpu", torch.bfloat16), agreement.observe(ENV):
        loss = losses(model, X.float()).mean()
    loss.backward()
    agreement.apply()
    nearly(record, model, expected, 0.08)


def test_autocast_gives_the_ordinary_gradient() -> None:
    """The gradient under autocast is what it is without an agreement, up to a bf16 step."""
    grads = []
    for observe in (True, False):
        model = network().float()
        agreement = Agreement(model, Mean())
        scope = agreement.observe(ENV) if observe else nullcontext()
        with scope, torch.autocast("cpu", torch.bfloat16):
            loss = losses(model, X.float()).mean()
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-7)


RUN_AGAIN: dict[str, Any] = {
    "recurrence": lambda: Net(
        lambda m, x: m.r(m.l(x)[:, None])[0], l=nn.Linear(3, 4), r=nn.GRU(4, 3, batch_first=True)
    ),
    "attention of a learned query": lambda: Net(
        lambda m, x: F.scaled_dot_product_attention(
            m.q.expand(len(x), -1, -1), m.l(x)[:, None], m.l(x)[:, None]
        ),
        q=normal(1, 2, 4),
        l=nn.Linear(3, 4),
    ),
    "distances": lambda: Net(
        lambda m, x: torch.cdist(m.l(x), m.w), w=normal(3, 4), l=nn.Linear(3, 4)
    ),
    "power": lambda: Net(lambda m, x: (m.l(x).abs() + 0.5) ** m.p, p=normal(4), l=nn.Linear(3, 4)),
    "low rank": lambda: Net(
        lambda m, x: F.linear(x, m.w + m.b @ m.a), w=normal(4, 3), b=normal(4, 2), a=normal(2, 3)
    ),
}


@pytest.mark.parametrize("name", RUN_AGAIN)
def test_autocast_of_what_is_run_again_in_the_backward(name: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return RUN_AGAIN[name]()

    expected = shares_alone(lambda: build().double(), losses, (X,), ENV)
    model, record = build().float(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV), torch.autocast("cpu", torch.bfloat16):
        loss = losses(model, X.float()).mean()
    loss.backward()
    agreement.apply()
    nearly(record, model, expected, 0.2, least=2)


def test_hundreds_of_votes_in_half_precision() -> None:
    """bfloat16 cannot count past 256; votes can."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    record = Record()
    agreement = Agreement(layer, record)
    x = torch.ones(700, 2, dtype=torch.bfloat16)
    with agreement.observe(None):
        loss = layer(x).sum()
    loss.backward()
    agreement.apply()
    (tally,) = record.of(layer).values()
    assert tally.votes.tolist() == [[700.0, 700.0]]
    assert tally.turnout.tolist() == [[700.0, 700.0]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", [AndMask(1.0), AndMask(0.0), Mean()], ids=repr)
def test_non_finite_gradients_stay_visible(value: float, rule: Any) -> None:
    model = network()
    agreement = Agreement(model, rule)
    x = X.clone()
    x[3, 1] = value
    with agreement.observe(ENV):
        loss = losses(model, x).mean()
    loss.backward()
    bad = [~p.grad.isfinite() for p in model.parameters()]
    assert any(bool(b.any()) for b in bad)
    agreement.apply()
    for p, was_bad in zip(model.parameters(), bad, strict=True):
        assert not bool(p.grad[was_bad].isfinite().any())


@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler(overflow: bool) -> None:
    model, twin = network().float(), network().float()
    agreement = Agreement(model, AndMask(0.6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = X.float()
    if overflow:
        x[0, 0] = math.inf
    with agreement.observe(ENV):
        loss = losses(model, x).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    agreement.apply()
    scaler.step(optimizer)
    scaler.update()
    if overflow:
        assert scaler.get_scale() == 512.0
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
        return
    plain = Agreement(twin, AndMask(0.6))
    with plain.observe(ENV):
        loss = losses(twin, x).mean()
    loss.backward()
    plain.apply()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_grad_scaler_applied_before_unscaling() -> None:
    """The other order sees the non-finite gradient as well, and skips the step."""
    model, untouched = network().float(), network().float()
    agreement = Agreement(model, AndMask(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = X.float()
    x[0, 0] = math.inf
    with agreement.observe(ENV):
        loss = losses(model, x).mean()
    scaler.scale(loss).backward()
    agreement.apply()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for p, q in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("rule", [AndMask(1.0), GeometricMean(1.0), SandMask(0.5)], ids=repr)
def test_grad_scaler_and_rules_that_count_magnitudes(rule: Rule) -> None:
    """Applied first, every rule gives what it gives without a scaler; applied last, some refuse."""
    found = []
    for scale in (1.0, 1024.0):
        model = network().float()
        agreement = Agreement(model, rule)
        with agreement.observe(ENV):
            loss = losses(model, X.float()).mean()
        (loss * scale).backward()
        agreement.apply()
        found.append([p.grad / scale for p in model.parameters()])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)
    model = network().float()
    agreement = Agreement(model, rule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with agreement.observe(ENV):
        loss = losses(model, X.float()).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if isinstance(rule, AndMask):
        agreement.apply()
        return
    with pytest.raises(RuntimeError, match=r"was multiplied by 0\.000977 since its backward pass"):
        agreement.apply()


# --- checkpointing and compilation ------------------------------------------------------------


class Checkpointed(nn.Module):
    """Recomputes its blocks; `contexts` is given to torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.second = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)
        self.contexts: Any = None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second, self.first):
            if self.contexts is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
        return self.head(x)


def test_checkpointing() -> None:
    expected = shares_alone(Checkpointed, losses, (X,), ENV)
    model, record = Checkpointed(), Record()
    agreement = Agreement(model, record)
    model.contexts = agreement.checkpoint_contexts
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()
    assert compare(record.of(model), expected) == []


def test_checkpointing_of_two_observations_before_their_backwards() -> None:
    """Recomputation belongs to the observation that it repeats, not to the latest."""
    model, record = Checkpointed(), Record()
    agreement = Agreement(model, record)
    model.contexts = agreement.checkpoint_contexts
    waiting = []
    parts = [(rows(5, 1), ENV), (rows(4, 2), [3, 4, 4, 3])]
    for x, env in parts:
        with agreement.observe(env):
            waiting.append(losses(model, x).mean())
    for loss in waiting:
        loss.backward()
    agreement.apply()
    expected = together(*(shares_alone(Checkpointed, losses, (x,), env) for x, env in parts))
    assert problems(record.of(model), expected) == []


def test_checkpointing_without_the_contexts_is_not_silent() -> None:
    model, record = Checkpointed(), Record()
    agreement = Agreement(model, record)
    model.contexts = lambda: (nullcontext(), nullcontext())
    with pytest.raises(RuntimeError):  # noqa: PT012
        with agreement.observe(ENV):
            loss = losses(model, X).mean()
        loss.backward()
        agreement.apply()


def test_checkpoint_contexts_outside_an_observation_do_no_harm() -> None:
    model = Checkpointed()
    agreement = Agreement(model, Record())
    losses(model, X).mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.contexts = agreement.checkpoint_contexts
    losses(model, X).mean().backward()
    for p, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, grad)


def compiled_models() -> dict[str, Any]:
    def convolutions() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)]
        return nn.Sequential(nn.Unflatten(1, (1, 3)), *layers).double()

    def tied() -> nn.Module:
        torch.manual_seed(0)
        return TiedLanguageModel().double()

    def scaled() -> nn.Module:
        torch.manual_seed(0)
        return Net(
            lambda m, x: m.a(x + m.p) * m.t + m.a(x).relu(),
            a=nn.Linear(3, 2),
            p=torch.randn(3),
            t=torch.randn(()),
        ).double()

    return {"network": network, "convolutions": convolutions, "tied": tied, "scaled": scaled}


def compiled_step(build: Any, backend: str, x: Tensor, env: Any) -> list[str]:
    torch.compiler.reset()
    model, record = build(), Record()
    agreement = Agreement(model, record)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = shares_alone(build, losses, (x,), env)
    found = []
    for _ in range(2):
        model.zero_grad()
        with agreement.observe(env):
            loss = losses(compiled, x).mean()
        loss.backward()
        agreement.apply()
        found += compare(record.of(model), expected)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", compiled_models())
def test_compiled(name: str, backend: str) -> None:
    x = torch.randint(6, (5, 3)) if name == "tied" else X
    assert compiled_step(compiled_models()[name], backend, x, ENV) == []


@pytest.mark.filterwarnings("ignore")
def test_compiled_with_rows_as_environments() -> None:
    assert compiled_step(network, "eager", X, None) == []


NOT_TRACED = {
    "derived": lambda m, x: m.a(x) * m.p.exp(),
    "transposed": lambda m, x: m.a(x.repeat_interleave(5, 1).reshape(5, 5, 3).transpose(0, 1)),
    "flipped": lambda m, x: m.a(x.flip(0)),
    "rolled": lambda m, x: m.a(torch.roll(x, 1, 0)),
    "picked": lambda m, x: m.a(x[m.order]),
    "joined": lambda m, x: m.a(torch.cat([x, -x])),
    "repeated": lambda m, x: m.a(x.repeat(2, 1)),
    "mixed": lambda m, x: m.b(torch.einsum("ij,kj->ki", x, m.square)),
    "normalized": lambda m, x: m.a(F.batch_norm(x, None, None, training=True)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOT_TRACED)
def test_what_cannot_be_followed_while_compiled_is_not_silent(name: str) -> None:
    torch.compiler.reset()
    net = Net(NOT_TRACED[name], a=nn.Linear(3, 3), b=nn.Linear(5, 2), p=torch.randn(3))
    net.register_buffer("order", torch.tensor([1, 0, 2, 4, 3]))
    net.register_buffer("square", torch.randn(5, 3))
    compiled = torch.compile(net.double(), backend="eager", fullgraph=True)
    agreement = Agreement(net, AndMask(0.5))
    with pytest.raises(Exception, match=r"cannot be|couples rows"), agreement.observe(ENV):
        compiled(X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_by_inductor() -> None:
    assert compiled_step(network, "inductor", X, ENV) == []


@pytest.mark.filterwarnings("ignore")
def test_compiled_before_the_observation() -> None:
    """A graph that was compiled without an observation is not reused within one in silence."""
    torch.compiler.reset()
    model, record = network(), Record()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    losses(compiled, X).mean().backward()
    model.zero_grad()
    agreement = Agreement(model, record)
    try:
        with agreement.observe(ENV):
            loss = losses(compiled, X).mean()
        loss.backward()
        agreement.apply()
    except RuntimeError:
        return
    assert compare(record.of(model), shares_alone(network, losses, (X,), ENV)) == []


@pytest.mark.filterwarnings("ignore")
def test_traced_model_is_not_silent() -> None:
    model, record = network(), Record()
    traced = torch.jit.trace(model, X)
    agreement = Agreement(model, record)
    try:
        with agreement.observe(ENV):
            loss = losses(traced, X).mean()
        loss.backward()
        agreement.apply()
    except RuntimeError:
        return
    assert compare(record.of(model), shares_alone(network, losses, (X,), ENV)) == []


# --- the model stays the user's ----------------------------------------------------------------


def test_a_list_of_parameters() -> None:
    model, record = network(), Record()
    agreement = Agreement([model[3].weight, model[3].bias], record)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    plain = model[0].weight.grad.clone()
    agreement.apply()
    assert torch.equal(model[0].weight.grad, plain)
    expected = shares_alone(network, losses, (X,), ENV)
    for p in (*model[0].parameters(), *model[1].parameters()):
        p.grad = None
    some = {n: s for n, s in expected.shares.items() if n.startswith("3.")}
    assert problems(record.of(model), Oracle(some, expected.gradient, expected.loss)) == []


def test_a_generator_of_parameters() -> None:
    model = network()
    agreement = Agreement(model.parameters(), AndMask(0.5))
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()


def test_several_parameter_groups() -> None:
    model, record = network(), Record()
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}], lr=0.01
    )
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()
    assert compare(record.of(model), shares_alone(network, losses, (X,), ENV)) == []
    optimizer.step()


def test_model_is_left_as_it_was() -> None:
    model = network()
    names, modules = list(model.state_dict()), [type(m) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    agreement = Agreement(model, AndMask(0.5))
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()
    assert list(model.state_dict()) == names
    assert [type(m) for m in model.modules()] == modules
    assert [sorted(vars(m)) for m in model.modules()] == attributes
    copy.deepcopy(model)
    torch.save(model.state_dict(), io.BytesIO())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks


def test_a_second_model_of_the_same_weights() -> None:
    """An agreement tracks tensors, not names: a copy of the model is another model."""
    model, twin = network(), network()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(RuntimeError):  # noqa: PT012
        with agreement.observe(ENV):
            loss = losses(twin, X).mean()
        loss.backward()
        agreement.apply()


def test_hooks_of_parameters_see_the_ordinary_gradient() -> None:
    model = network()
    losses(model, X).mean().backward()
    plain = model[0].weight.grad.clone()
    model.zero_grad()
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    agreement = Agreement(model, AndMask(0.5))
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()
    torch.testing.assert_close(seen[0], plain)


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_anomaly_mode() -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        check(network, lambda number, g: (rows(number),), ENV)


# --- the report, and verify -------------------------------------------------------------------


def test_report() -> None:
    model = network()
    rule = AndMask(0.6)
    agreement = Agreement(model, rule)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    report = agreement.apply()
    found = shares_alone(network, losses, (X,), ENV)
    kept, agreed, size = 0.0, 0.0, 0
    for name in found.shares:
        votes = found.votes(name).abs()
        part = report.parameters[name]
        assert float(part.kept) == pytest.approx(float((votes >= 2).double().mean()), abs=1e-6)
        assert float(part.agreement) == pytest.approx(float(votes.mean() / 3), abs=1e-6)
        assert float(part.voters) == 3
        assert float(part.null_keep_rate) == pytest.approx(0.25, abs=1e-6)
        kept += float((votes >= 2).sum())
        agreed += float(votes.sum() / 3)
        size += votes.numel()
    assert float(report.kept) == pytest.approx(kept / size, abs=1e-6)
    assert float(report.agreement) == pytest.approx(agreed / size, abs=1e-6)
    assert float(report.voters) == 3
    assert float(report.null_keep_rate) == pytest.approx(0.25, abs=1e-6)


def test_verify_accepts_what_is_right() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    agreement.verify(lambda batch: losses(model, batch).mean(), X, ENV)
    assert all(p.grad is None for p in model.parameters())


def test_verify_leaves_gradients_and_tallies_as_they_were() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.verify(lambda batch: losses(model, batch).mean(), rows(3, 5), [0, 0, 1])
    agreement.apply()
    assert compare(record.of(model), shares_alone(network, losses, (X,), ENV)) == []


def test_verify_names_what_differs() -> None:
    """Rows that are shuffled inside the model, and shapes that do not show it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        # NumPy hides from everybody that the rows are in another order now.
        return m.l(torch.from_numpy(x.numpy()[::-1].copy())).flip(0)

    torch.manual_seed(0)
    model = Net(forward, l=nn.Linear(3, 2)).double()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(RuntimeError, match=r"l\.weight"):
        agreement.verify(lambda batch: losses(model, batch).mean(), X, ENV)


# --- where batches come from ------------------------------------------------------------------


@pytest.mark.parametrize("made", ["noise", "from a list", "from NumPy", "stacked", "moved"])
def test_data_made_inside_the_observation(made: str) -> None:
    """Counted as data, or refused by an error that says where to make it."""
    model, record = network(), Record()
    agreement = Agreement(model, record)
    makers: dict[str, Any] = {
        "noise": lambda: torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).double(),
        "from a list": lambda: torch.tensor(X.tolist(), dtype=torch.float64),
        "from NumPy": lambda: torch.from_numpy(X.numpy().copy()),
        "stacked": lambda: torch.stack([torch.from_numpy(x) for x in X.numpy()]),
        "moved": lambda: X.to(torch.float32).to(torch.float64, copy=True),
    }
    x = makers[made]()
    try:
        with agreement.observe(ENV):
            loss = losses(model, makers[made]()).mean()
        loss.backward()
        agreement.apply()
    except RuntimeError as error:
        assert "made inside" in str(error) and made != "moved"  # noqa: PT017, PT018
    else:
        assert compare(record.of(model), shares_alone(network, losses, (x,), ENV)) == []


def test_a_view_of_a_parameter_that_is_older_than_the_observation() -> None:
    """Nobody sees how it was made; so its use may not pass in silence."""
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    old = model[0].weight.t()
    with pytest.raises(RuntimeError, match=r"0\.weight"):  # noqa: PT012
        with agreement.observe(ENV):
            loss = (wavy(X @ old) + losses(model, X)).mean()
        loss.backward()
        agreement.apply()


def test_a_layer_put_in_after_the_agreement_was_made() -> None:
    """Agreement(model) is about the model: a parameter it does not know is not let through."""
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    model[3] = nn.Linear(4, 2).double()
    with pytest.raises(RuntimeError, match=r"3\.weight"):  # noqa: PT012
        with agreement.observe(ENV):
            loss = losses(model, X).mean()
        loss.backward()
        agreement.apply()


def test_unfrozen_after_the_agreement_was_made() -> None:
    model, record = network(), Record()
    model[0].requires_grad_(False)
    agreement = Agreement(model, record)
    model[0].requires_grad_(True)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    loss.backward()
    agreement.apply()
    assert compare(record.of(model), shares_alone(network, losses, (X,), ENV)) == []


def test_complex_parameters_have_no_sign() -> None:
    model = Net(lambda m, x: (x * m.w).abs(), w=torch.randn(3, dtype=torch.complex128))
    with pytest.raises((RuntimeError, TypeError, ValueError), match="complex"):  # noqa: PT012
        agreement = Agreement(model, AndMask(0.5))
        with agreement.observe(ENV):
            loss = losses(model, X).mean()
        loss.backward()
        agreement.apply()


def test_lazy_parameters_have_no_shape() -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"[Ll]azy|uninit"):
        Agreement(nn.Sequential(nn.LazyLinear(3)), AndMask(0.5))


def test_backward_into_some_parameters_only() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    with agreement.observe(ENV):
        loss = losses(model, X).mean()
    try:
        loss.backward(inputs=[model[3].weight])
        agreement.apply()
    except RuntimeError:
        return
    expected = shares_alone(network, losses, (X,), ENV)
    one = Oracle(
        {"3.weight": expected.shares["3.weight"]},
        {"3.weight": expected.gradient["3.weight"]},
        expected.loss,
    )
    assert problems(record.of(model), one) == []


def test_gradients_that_are_zero_from_the_start() -> None:
    """`zero_grad(set_to_none=False)` leaves zeros, and zeros are no foreign gradient."""
    model, record = network(), Record()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    agreement = Agreement(model, record)
    for seed in range(3):
        x = rows(5, seed)
        model.zero_grad(set_to_none=False)
        with agreement.observe(ENV):
            loss = losses(model, x).mean()
        loss.backward()
        agreement.apply()
        assert compare(record.of(model), shares_alone(network, losses, (x,), ENV)) == []
