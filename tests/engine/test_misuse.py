# An error may come at the observation, at the backward or at apply: which of them is not tested.
# ruff: noqa: PT012, SIM117
"""Bad input gets a clear error and loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from consilience import Agreement, AndMask, Mean
from engine.modules import Net, normal
from oracle import Record, compare, shares_alone, wavy

clear_error = (ValueError, TypeError, RuntimeError)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def rows(number: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 3, generator=generator, dtype=torch.float64)


# Batches are made before they are observed: what is made inside is not taken for data.
FIVE, FOUR, THREE = rows(5), rows(4, seed=9), rows(3)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return wavy(model(x))


def observed(agreement: Agreement, model: nn.Module, x: Tensor, env: Any) -> None:
    with agreement.observe(env):
        loss = losses(model, x).mean()
    loss.backward()


# --- env --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 6, 10])
def test_env_of_the_wrong_length(length: int) -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(clear_error, match=rf"\b{length}\b.*\b5\b|\b5\b.*\b{length}\b"):
        observed(agreement, model, FIVE, list(range(length)))
        agreement.apply()


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0]), id="float tensor"),
        pytest.param(np.array([0.0, 1.0, 2.0, 0.0, 1.0]), id="float array"),
        pytest.param([0.5, 1.0, 2.0, 0.0, 1.0], id="float list"),
        pytest.param(torch.zeros(5, dtype=torch.complex64), id="complex"),
        pytest.param(torch.tensor([[0, 1, 0, 1, 0]]), id="two dimensions"),
        pytest.param(torch.tensor([[0], [1], [0], [1], [0]]), id="a column"),
        pytest.param(torch.tensor(3), id="no dimension"),
        pytest.param(np.zeros((5, 2), dtype=int), id="array of two dimensions"),
        pytest.param(3, id="a number"),
        pytest.param("abcde", id="a string"),
        pytest.param(["a", 1, "b", 2, "c"], id="mixed list"),
        pytest.param([[0, 1], [1, 0]], id="nested list"),
        pytest.param({0, 1, 2, 3, 4}, id="a set"),
        pytest.param({"env": [0, 1]}, id="a dictionary"),
        pytest.param(torch.tensor([0, -2, 1, -1, -1])[:0], id="empty tensor"),
        pytest.param([], id="empty list"),
    ],
)
def test_env_of_a_wrong_kind(env: Any) -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(clear_error, match="env"):
        observed(agreement, model, FIVE, env)
    observed(agreement, model, FIVE, [0, 1, 0, 1, 0])  # and nothing is lost
    agreement.apply()


@pytest.mark.parametrize("env", [None, []], ids=["None", "list"])
def test_an_empty_batch(env: Any) -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(clear_error, match=r"empty|no row|0 rows|Found"):
        observed(agreement, model, rows(0), env)
        agreement.apply()


@pytest.mark.parametrize(
    ("env", "number"),
    [([3, 3, 3], 3), (["x", "x"], 2), (None, 1), ([-1, 2, 2], 3), ([-1, -1], 2)],
    ids=["one label", "one string", "one row", "one and unknown", "unknown alone"],
)
def test_a_single_environment(env: Any, number: int) -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(clear_error, match="environment"):
        observed(agreement, model, rows(number), env)
        agreement.apply()


def test_a_single_environment_when_allowed() -> None:
    model = network()
    agreement = Agreement(model, AndMask(1.0), allow_single=True)
    observed(agreement, model, THREE, [3, 3, 3])
    expected = [p.grad.clone() for p in model.parameters()]
    agreement.apply()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, grad)  # an environment always agrees with itself


# --- the wrong order of calls -----------------------------------------------------------------


def test_apply_with_nothing_observed() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(clear_error, match="observe"):
        agreement.apply()
    losses(model, FIVE).mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(clear_error, match="observe"):
        agreement.apply()
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)


def test_apply_before_backward() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with agreement.observe([0, 1, 0, 1, 0]):
        losses(model, FIVE).mean()
    with pytest.raises(clear_error, match="backward"):
        agreement.apply()


def test_apply_twice() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    observed(agreement, model, FIVE, [0, 1, 0, 1, 0])
    agreement.apply()
    with pytest.raises(clear_error, match="observe"):
        agreement.apply()


def test_nested_observations() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(clear_error, match=r"nest|inside|already|active"):
        with agreement.observe([0, 1, 0, 1, 0]), agreement.observe([0, 1, 0, 1, 0]):
            pass
    observed(agreement, model, FIVE, [0, 1, 0, 1, 0])
    agreement.apply()


def test_two_agreements_on_the_same_model_at_once() -> None:
    """Whatever happens, no vote is counted twice or lost without a word."""
    model, first, second = network(), Record(), Record()
    one, two = Agreement(model, first), Agreement(model, second)
    expected = shares_alone(network, losses, (FIVE,), [0, 1, 0, 1, 2])
    try:
        with one.observe([0, 1, 0, 1, 2]), two.observe([0, 1, 0, 1, 2]):
            loss = losses(model, FIVE).mean()
    except clear_error:
        return
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    one.apply()
    assert compare(first.of(model), expected) == []
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    two.apply()
    assert compare(second.of(model), expected) == []


def test_environment_losses_without_gradients() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with torch.no_grad():
        values = losses(model, FIVE)
    with pytest.raises(ValueError, match="environment_losses"):
        agreement.backward(values)
    with pytest.raises(ValueError, match="environment_losses"):
        agreement.backward(iter(list(values)))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda v: v.mean(), id="no dimension"),
        pytest.param(lambda v: v[None], id="two dimensions"),
        pytest.param(lambda v: v[:0], id="empty"),
        pytest.param(lambda v: [], id="empty list"),
        pytest.param(lambda v: [v, v], id="vectors in a list"),
        pytest.param(lambda v: [1.0, 2.0], id="numbers in a list"),
    ],
)
def test_environment_losses_of_a_wrong_kind(wrong: Callable[[Tensor], Any]) -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises((ValueError, TypeError), match="environment_losses"):
        agreement.backward(wrong(losses(model, FIVE)))
    observed(agreement, model, FIVE, [0, 1, 0, 1, 0])
    agreement.apply()


def test_a_single_environment_loss() -> None:
    model = network()
    with pytest.raises(clear_error, match="environment"):
        agreement = Agreement(model, AndMask(0.5))
        agreement.backward(losses(model, rows(1)))
        agreement.apply()


def test_failing_backward_leaves_no_votes() -> None:
    """The second loss cannot be differentiated; the first has left nothing behind."""
    model, record = network(), Record()
    agreement = Agreement(model, record)
    values = losses(model, FIVE)
    with pytest.raises(clear_error):
        agreement.backward([values[0], values[1].detach()])
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(clear_error, match="observe"):
        agreement.apply()
    expected = shares_alone(network, losses, (FIVE,), None)
    model.zero_grad()
    agreement.backward(losses(model, FIVE))
    agreement.apply()
    assert compare(record.of(model), expected) == []


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param(nn.ReLU, id="a module without parameters"),
        pytest.param(list, id="no parameters"),
        pytest.param(lambda: [torch.zeros(3)], id="a tensor that needs no gradient"),
        pytest.param(lambda: network().requires_grad_(False), id="all frozen"),
        pytest.param(lambda: [1.0], id="a number"),
    ],
)
def test_wrong_parameters(parameters: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Agreement(parameters(), AndMask(0.5))


def test_wrong_rule() -> None:
    with pytest.raises(TypeError, match="rule"):
        Agreement(network(), 0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rule"):
        Agreement(network(), AndMask)  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan"), float("inf")])
def test_threshold_out_of_range(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        AndMask(threshold)


# --- exceptions, and passes that are not followed by a backward -------------------------------


def recorded(steps: Callable[[Agreement, nn.Module], None]) -> list[str]:
    """Run some steps that should amount to one observed batch; return what differs from that."""
    model, record = network(), Record()
    agreement = Agreement(model, record)
    steps(agreement, model)
    agreement.apply()
    expected = shares_alone(network, losses, (FIVE,), [0, 1, 0, 1, 2])
    return compare(record.of(model), expected)


def good(agreement: Agreement, model: nn.Module) -> None:
    observed(agreement, model, FIVE, [0, 1, 0, 1, 2])


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("where", ["at once", "after the forward", "in the model", "wrong shape"])
def test_an_exception_inside_an_observation(where: str, before: bool) -> None:
    def fail(agreement: Agreement, model: nn.Module) -> None:
        def hook(*_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises((KeyboardInterrupt, RuntimeError)), agreement.observe([0, 0, 1]):
            if where == "at once":
                raise KeyboardInterrupt
            if where == "after the forward":
                losses(model, THREE).mean()
                raise KeyboardInterrupt
            if where == "in the model":
                handle = model[1].register_forward_hook(hook)
                try:
                    model(THREE)
                finally:
                    handle.remove()
            model(THREE[:, :2])

    def steps(agreement: Agreement, model: nn.Module) -> None:
        if before:
            fail(agreement, model)
        good(agreement, model)
        if not before:
            fail(agreement, model)

    assert recorded(steps) == []


def test_loss_of_an_observation_that_failed_may_still_be_differentiated() -> None:
    """Its gradient is unvoted then, and apply() says so instead of mixing it in."""
    model = network()
    agreement = Agreement(model, Record())
    loss = torch.zeros(())
    with pytest.raises(KeyboardInterrupt), agreement.observe([0, 0, 1]):
        loss = losses(model, THREE).mean()
        raise KeyboardInterrupt
    loss.backward()
    with pytest.raises(RuntimeError):
        agreement.apply()


def test_validation_without_gradients_inside_observe() -> None:
    def steps(agreement: Agreement, model: nn.Module) -> None:
        with agreement.observe([0, 1, 0, 1, 2]):
            loss = losses(model, FIVE).mean()
            with torch.no_grad():
                losses(model, FOUR).mean()
                losses(model, FIVE.flip(1)).mean()
        loss.backward()

    assert recorded(steps) == []


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_validation_in_an_observation_of_its_own(guard: Any) -> None:
    def steps(agreement: Agreement, model: nn.Module) -> None:
        for before in (True, False):
            with agreement.observe([0, 1, 2, 3]), guard():
                losses(model, FOUR).mean()
            if before:
                good(agreement, model)

    assert recorded(steps) == []


def test_observed_passes_without_a_backward() -> None:
    def steps(agreement: Agreement, model: nn.Module) -> None:
        with agreement.observe([0, 1, 2, 3]):
            losses(model, FOUR).mean()
        good(agreement, model)
        with agreement.observe([0, 1, 2, 3]):
            unused = losses(model, FOUR).mean()
        assert unused.requires_grad

    assert recorded(steps) == []


def test_clear() -> None:
    def steps(agreement: Agreement, model: nn.Module) -> None:
        observed(agreement, model, FOUR, None)
        agreement.clear()
        model.zero_grad()
        good(agreement, model)

    assert recorded(steps) == []


# --- what bypasses the engine -----------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """A linear layer that no torch function shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


def test_custom_function_on_a_parameter() -> None:
    model = Net(lambda m, x: Scaled.apply(x, m.w), w=normal(2, 3))
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(RuntimeError, match="w"):
        observed(agreement, model, FIVE, None)
        agreement.apply()


def test_custom_function_beside_an_ordinary_use_of_the_parameter() -> None:
    """The votes of one use must not decide over the gradient of two."""
    model = Net(lambda m, x: Scaled.apply(x, m.w) + F.linear(x.sin(), m.w), w=normal(2, 3))
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(RuntimeError, match="w"):
        observed(agreement, model, FIVE, None)
        agreement.apply()


def test_a_path_that_is_not_seen_and_is_taken_later() -> None:
    model = Net(
        lambda m, x: F.linear(x.sin(), m.w) + (Scaled.apply(x, m.w) if m.late else 0),
        w=normal(2, 3),
    )
    agreement = Agreement(model, AndMask(0.5))
    model.late = False
    for _ in range(6):
        model.zero_grad()
        observed(agreement, model, FIVE, None)
        agreement.apply()
    model.late = True
    with pytest.raises(RuntimeError, match="A part of the gradient of `w`"):
        for _ in range(4):
            model.zero_grad()
            observed(agreement, model, FIVE, None)
            agreement.apply()


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad, -2 * grad @ w, -2 * grad.t() @ x


def test_custom_function_that_turns_the_gradient_round() -> None:
    """What is left over may point the same way, and be larger."""
    model = Net(lambda m, x: Turned.apply(F.linear(x, m.w), x, m.w), w=normal(2, 3))
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(RuntimeError, match="w"):
        observed(agreement, model, FIVE, None)
        agreement.apply()


def test_custom_function_on_a_derived_parameter() -> None:
    model = Net(lambda m, x: Scaled.apply(x, m.w.exp()) + F.linear(x, m.w), w=normal(2, 3))
    agreement = Agreement(model, AndMask(0.5))
    with pytest.raises(RuntimeError, match="w"):
        observed(agreement, model, FIVE, None)
        agreement.apply()


def test_custom_function_on_activations_alone_is_fine() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 3 * ctx.saved_tensors[0] ** 2 * grad

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}
        return Net(lambda m, x: m.b(Cube.apply(m.a(x))), **layers).double()

    model, record = build(), Record()
    agreement = Agreement(model, record)
    observed(agreement, model, FIVE, [0, 1, 0, 1, 2])
    agreement.apply()
    expected = shares_alone(build, losses, (FIVE,), [0, 1, 0, 1, 2])
    assert compare(record.of(model), expected) == []


def test_reentrant_checkpointing() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    x = FIVE.clone().requires_grad_()
    with pytest.raises(RuntimeError):
        with agreement.observe(None):
            loss = wavy(checkpoint(model, x, use_reentrant=True)).mean()
        loss.backward()
        agreement.apply()


def test_unobserved_backward_beside_an_observed_one() -> None:
    """A gradient that nobody voted on is part of p.grad: not silently masked."""
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    losses(model, FOUR).mean().backward()
    observed(agreement, model, FIVE, None)
    with pytest.raises(RuntimeError):
        agreement.apply()


def test_unobserved_parameter_beside_observed_ones() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    x = FIVE
    with agreement.observe(None):
        hidden = model[1](model[0](x))
    loss = wavy(model[2](hidden)).mean()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"2\.weight|2\.bias"):
        agreement.apply()


def test_gradients_set_by_hand() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    observed(agreement, model, FIVE, None)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        agreement.apply()


def test_zeroing_gradients_between_backward_and_apply() -> None:
    """Votes without a gradient are dropped or refused; they make up nothing."""
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    observed(agreement, model, FIVE, None)
    model.zero_grad()
    try:
        agreement.apply()
    except RuntimeError:
        return
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("to_none", [True, False], ids=["None", "zeros"])
def test_votes_of_a_batch_whose_gradients_were_zeroed(to_none: bool) -> None:
    """A skipped step (a NaN, an early `continue`) does not vote on the next one's gradient."""
    model, record = network(), Record()
    agreement = Agreement(model, record)
    observed(agreement, model, FOUR, None)
    model.zero_grad(set_to_none=to_none)
    observed(agreement, model, FIVE, [0, 1, 0, 1, 2])
    try:
        agreement.apply()
    except RuntimeError:
        return
    expected = shares_alone(network, losses, (FIVE,), [0, 1, 0, 1, 2])
    assert compare(record.of(model), expected) == []


def test_nothing_is_changed_by_an_apply_that_raises() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.5))
    x = FIVE
    with agreement.observe(None):
        hidden = model[1](model[0](x))
    wavy(model[2](hidden)).mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError):
        agreement.apply()
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)


def test_frozen_after_the_agreement_was_made() -> None:
    model, record = network(), Record()
    agreement = Agreement(model, record)
    model[0].requires_grad_(False)
    observed(agreement, model, FIVE, [0, 1, 0, 1, 2])
    agreement.apply()

    def frozen() -> nn.Module:
        model = network()
        model[0].requires_grad_(False)
        return model

    expected = shares_alone(frozen, losses, (FIVE,), [0, 1, 0, 1, 2])
    assert compare(record.of(model), expected) == []


def test_parameters_of_another_model_are_left_alone() -> None:
    model, other = network(), nn.Linear(3, 2).double()
    agreement = Agreement(model, Record())
    with agreement.observe(None):
        loss = (losses(model, FIVE) + wavy(other(FIVE))).mean()
    loss.backward()
    grad = other.weight.grad.clone()
    agreement.apply()
    assert torch.equal(other.weight.grad, grad)


def test_repr_reads_as_the_call() -> None:
    text = repr(Agreement(network(), Mean()))
    assert text.startswith("Agreement(")
    assert "Mean()" in text
