"""What the agreement does around the engine: states, copies, bad input, other wrappers."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience import (
    Agreement,
    AndMask,
    GeometricMean,
    Mean,
    Rule,
    SandMask,
    Statistic,
    Tally,
    environment_mean,
)
from consilience.observation.environments import factorize
from consilience.observation.errors import (
    CoupledRowsError,
    NotVotedOnError,
    ObservationError,
    UnsupportedOperationError,
)
from consilience.observation.shares import ProductShares
from rules.test_every_rule import RULES

ENV = torch.arange(12) % 4
RULE = AndMask(0.6)


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 4, generator=random, dtype=torch.float64)
    return x, torch.randint(3, (12,), generator=random)


X, Y = data()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor = X, y: Tensor = Y) -> Tensor:
    return environment_mean(F.cross_entropy(model(x), y, reduction="none"), ENV)


def expected(model: nn.Module, rule: Rule = RULE, x: Tensor = X, y: Tensor = Y) -> list[Tensor]:
    """A backward pass for each environment."""
    parameters = list(model.parameters())
    shares = [
        torch.autograd.grad(F.cross_entropy(model(x[e == ENV]), y[e == ENV]), parameters)
        for e in range(4)
    ]
    return [rule.combine(torch.stack(found)) for found in zip(*shares, strict=True)]


def assert_agreed(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> None:
    wanted = expected(network(), x=x, y=y)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)


# --- rules that misbehave ---------------------------------------------------------------------


def test_a_rule_that_raises_halfway_changes_no_gradient() -> None:
    class Third(Rule):
        calls = 0

        def __call__(self, tally: Tally) -> Tensor:
            Third.calls += 1
            if Third.calls == 3:
                raise KeyError("mine")
            return RULE(tally)

    model = network()
    agreement = Agreement(model, Third())
    with agreement.observe(ENV):
        loss = loss_of(model)
    loss.backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(KeyError, match="mine"):
        agreement.apply()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)
    agreement.apply()  # the votes are still there
    assert_agreed(model)


@pytest.mark.parametrize("rubbish", [None, 3.0, torch.zeros(2), torch.zeros(())])
def test_a_rule_that_returns_no_gradient(rubbish: Any) -> None:
    class Rubbish(Rule):
        def __call__(self, tally: Tally) -> Tensor:
            return rubbish

    model = network()
    agreement = Agreement(model, Rubbish())
    with agreement.observe(ENV):
        loss = loss_of(model)
    loss.backward()
    with pytest.raises(TypeError, match=r"tensor of the shape of the gradient.*`0\.weight`"):
        agreement.apply()


class Everything(Rule):
    """Reads every statistic that there is."""

    statistics = frozenset(Statistic)

    def __call__(self, tally: Tally) -> Tensor:
        found = [tally.get(statistic) for statistic in Statistic]
        return tally.gradient + sum(found) / tally.voters


@pytest.mark.parametrize("way", ["observe", "vector", "generator"])
@pytest.mark.parametrize("rule", [*RULES, Everything()], ids=repr)
def test_an_agreement_does_what_the_rule_does_on_stacked_gradients(rule: Rule, way: str) -> None:
    model, x = network(), X.clone()
    x[ENV == 1] = 0.0  # one environment knows nothing of the first weights
    agreement = Agreement(model, rule)
    if way == "observe":
        with agreement.observe(ENV):
            loss = loss_of(model, x)
        loss.backward()
    elif way == "vector":
        agreement.backward(torch.stack(environment_losses(model, x)))
    else:
        agreement.backward(F.cross_entropy(model(x[e == ENV]), Y[e == ENV]) for e in range(4))
    agreement.apply()
    tolerance = 1e-5 if way == "generator" and Statistic.LOGS in rule.statistics else 1e-8
    for parameter, gradient in zip(model.parameters(), expected(network(), rule, x), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=1e-12)


# --- exceptions inside of an observation ------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_a_backward_pass_in_an_observation_that_fails(before: bool, compiled: bool) -> None:
    """Its votes are gone, and what it put into gradients does not show up as foreign."""
    model = network()
    agreement = Agreement(model, RULE)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    if before:
        with agreement.observe(ENV):
            loss = loss_of(run)
        loss.backward()
    kept = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]

    def fail() -> None:
        with agreement.observe(ENV):
            loss_of(run, X, (Y + 1) % 3).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    if not before:
        with agreement.observe(ENV):
            loss = loss_of(run)
        loss.backward()
    assert agreement.apply().voters == 4
    assert_agreed(model)


def test_votes_of_several_compiled_observations_add_up() -> None:
    model = network()
    agreement = Agreement(model, Mean())
    counting = Agreement(model, RULE)
    run = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        with counting.observe(ENV):
            loss = loss_of(run)
        loss.backward()
    assert counting.apply().voters == 12
    del agreement


# --- gradients that are not this step's -------------------------------------------------------


def step(agreement: Agreement, model: nn.Module, seed: int) -> None:
    x, y = data(seed)
    with agreement.observe(ENV):
        loss = loss_of(model, x, y)
    loss.backward()
    agreement.apply()


@pytest.mark.parametrize("way", ["observe", "backward"])
def test_gradients_that_were_not_zeroed(way: str) -> None:
    """Applied once for each micro-batch, a rule would take its own results for votes."""
    model = network()
    agreement = Agreement(model, RULE)
    step(agreement, model, 0)
    left = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(NotVotedOnError, match=r"`0\.weight`.*zero_grad"):  # noqa: PT012
        if way == "observe":
            step(agreement, model, 1)
        else:
            agreement.backward([loss_of(model), 2 * loss_of(model)])
    assert torch.equal(model[2].bias.grad, left[-1])
    model.zero_grad()
    with agreement.observe(ENV):
        loss = loss_of(model)
    loss.backward()
    assert agreement.apply().voters == 4
    assert_agreed(model)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_were_zeroed_after_the_forward_pass(to_none: bool) -> None:
    model = network()
    agreement = Agreement(model, RULE)
    for seed in range(3):
        x, y = data(seed)
        with agreement.observe(ENV):
            loss = loss_of(model, x, y)
        model.zero_grad(set_to_none=to_none)
        loss.backward()
        agreement.apply()
        assert_agreed(model, x, y)


def test_gradients_that_may_pile_up() -> None:
    model = network()
    agreement = Agreement(model, RULE, unvoted="allow")
    step(agreement, model, 0)
    step(agreement, model, 1)


def test_what_apply_leaves_can_be_saved() -> None:
    model = network()
    step(Agreement(model, RULE), model, 0)
    file = io.BytesIO()
    torch.save(model[0].weight.grad, file)
    file.seek(0)
    assert torch.equal(torch.load(file), model[0].weight.grad)
    assert torch.equal(copy.deepcopy(model[0].weight.grad), model[0].weight.grad)


# --- reports ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [RULE, Mean(), SandMask(0.5)], ids=repr)
def test_a_report_reads_as_a_table(rule: Rule) -> None:
    model = network()
    agreement = Agreement(model, rule)
    with agreement.observe(ENV):
        loss = loss_of(model)
    loss.backward()
    report = agreement.apply()
    lines = str(report).splitlines()
    assert len(lines) == 2 + len(list(model.parameters()))
    assert len({len(line) for line in lines}) == 1
    assert "0.weight       32       4" in lines[1]
    assert f"{100 * report.kept:.3g}%" in lines[-1]
    assert str(report.voters)[:1] == "4"


def test_a_report_that_was_not_read_in_time() -> None:
    model = network()
    agreement = Agreement(model, RULE)
    with agreement.observe(ENV):
        loss = loss_of(model)
    loss.backward()
    late = agreement.apply()
    model.zero_grad()
    with agreement.observe(ENV):
        pass
    assert str(late) == repr(late) == "Report(<not read in time>)"
    with pytest.raises(RuntimeError, match="not read before the next observation"):
        _ = late.kept


# --- a model that changes ---------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_put_in_between_two_steps(compiled: bool) -> None:
    """A model compiled under an agreement goes on with the layer that it knows."""
    model = network()
    agreement = Agreement(model, RULE)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with agreement.observe(ENV):
        loss = loss_of(run)
    loss.backward()
    agreement.apply()
    model.zero_grad()
    model[2] = nn.Linear(8, 3).double()
    with pytest.raises(NotVotedOnError, match=r"`2\.weight`, `2\.bias` .* the model"):  # noqa: PT012
        with agreement.observe(ENV):
            loss = loss_of(run)
        loss.backward()
        agreement.apply()


def test_parameters_that_were_all_replaced() -> None:
    model = network()
    agreement = Agreement(model, RULE)
    model.load_state_dict(network().state_dict(), assign=True)
    with pytest.raises(NotVotedOnError, match="came into the model"):
        step(agreement, model, 0)


def test_parameters_of_another_model_do_no_harm() -> None:
    """A discriminator behind a generator, say, whose gradients are not this agreement's."""
    model, other = network(), nn.Linear(3, 3).double()
    agreement = Agreement(model, RULE)
    with agreement.observe(ENV):
        loss = loss_of(lambda x: other(model(x)))
    loss.backward()
    assert agreement.apply().voters == 4


def test_two_models_in_one_pass() -> None:
    model, behind = network(), nn.Linear(3, 3).double()
    first, second = Agreement(model, RULE), Agreement(behind, RULE)
    with first.observe(ENV), second.observe(ENV):
        loss = loss_of(lambda x: behind(model(x)))
    loss.backward()
    first.apply()
    second.apply()
    whole = nn.Sequential(model, behind)
    for parameter, gradient in zip(whole.parameters(), expected(whole), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)


def test_a_threshold_that_changes_between_steps() -> None:
    model = network()
    agreement = Agreement(model, AndMask(0.0))
    for rule in (AndMask(0.0), AndMask(0.6), GeometricMean(0.6), AndMask(1.0)):
        agreement.rule = rule
        model.zero_grad()
        step(agreement, model, 0)
        for parameter, gradient in zip(model.parameters(), expected(network(), rule), strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda m: [*m.named_parameters(), *network().named_parameters()], ValueError),
        (lambda m: [("a", m[0].weight, 1)], TypeError),
        (lambda m: [(0, m[0].weight)], TypeError),
        (lambda m: [m], TypeError),
        (lambda m: [{"params": list(m.parameters())}], TypeError),
        (lambda m: dict(m.named_parameters()), TypeError),
    ],
)
def test_parameters_that_are_unclear(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Parameter `parameters` should"):
        Agreement(wrong(network()), RULE)


# --- copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])  # noqa: S301
def test_a_copy_is_an_agreement_of_its_own(way: Callable[[Any], Any], compiled: bool) -> None:
    model = network()
    agreement = Agreement(model, RULE)
    model_, agreement_ = way((model, agreement))
    del agreement
    run = torch.compile(model_, backend="aot_eager") if compiled else model_
    with agreement_.observe(ENV):
        loss = loss_of(run)
    loss.backward()
    assert agreement_.apply().voters == 4
    assert_agreed(model_)
    assert model[0].weight.grad is None


def test_tensors_of_an_observation_can_be_copied_and_saved() -> None:
    """What is known of a tensor is kept on it, and does not travel with it."""
    model = network()
    agreement = Agreement(model, RULE)
    with agreement.observe(ENV):
        features = model[0](X).t().detach()
        again = copy.deepcopy(features)
        file = io.BytesIO()
        torch.save(features, file)
        assert loss_of(lambda x: model(x) + again.t()[:, :3]).requires_grad
    assert torch.equal(again, features)
    assert len(pickle.dumps(features)) < 5000
    file.seek(0)
    assert torch.equal(torch.load(file), features)


# --- several processes, threads and transformations -------------------------------------------


def test_data_parallel_processes_are_refused(tmp_path: Any, monkeypatch: Any) -> None:
    """Every process would mask the average of all by the votes of its own."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = network()
        parallel = nn.parallel.DistributedDataParallel(model)
        agreement = Agreement(parallel, RULE, unvoted="allow")
        with agreement.observe(ENV):  # a single process is no harm
            loss = loss_of(parallel)
        loss.backward()
        agreement.apply()
        assert_agreed(model)
        model.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
            with (
                pytest.raises(UnsupportedOperationError, match="averages gradients over processes"),
                agreement.observe(ENV),
            ):
                loss_of(parallel)
            with parallel.no_sync():
                with agreement.observe(ENV):
                    loss = loss_of(parallel)
                loss.backward()
        agreement.apply()
        assert_agreed(model)
    finally:
        torch.distributed.destroy_process_group()


def test_a_thread_for_each_model() -> None:
    models = [network() for _ in range(3)]

    def train(model: nn.Module) -> None:
        agreement = Agreement(model, RULE)
        for _ in range(5):
            model.zero_grad()
            with agreement.observe(ENV):
                loss = loss_of(model)
            loss.backward()
            agreement.apply()

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models:
        assert_agreed(model)


def test_a_forward_pass_in_another_thread_is_not_silent() -> None:
    model = network()
    agreement = Agreement(model, RULE)
    found: list[Tensor] = []
    with agreement.observe(ENV):
        thread = threading.Thread(target=lambda: found.append(loss_of(model)))
        thread.start()
        thread.join()
    found[0].backward()
    with pytest.raises(NotVotedOnError):
        agreement.apply()


def test_transformations_of_functions_are_not_silent() -> None:
    model = network()
    agreement = Agreement(model, RULE)
    with pytest.raises(UnsupportedOperationError, match="`vmap`"), agreement.observe(ENV):
        torch.vmap(model)(X)

    def loss_at(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (X,)), Y)

    parameters = dict(model.named_parameters())
    with agreement.observe(ENV):
        gradients = torch.func.grad(loss_at)(parameters)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    with pytest.raises(NotVotedOnError):
        agreement.apply()


def test_an_optimizer_inside_of_backward_is_not_silent() -> None:
    model = network()
    agreement = Agreement(model, RULE)

    def step_at_once(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    with agreement.observe(ENV):
        loss = loss_of(model)
    loss.backward()
    with pytest.raises(ObservationError, match=r"nothing to apply|no gradient"):
        agreement.apply()


# --- devices that nobody waits for ------------------------------------------------------------


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)),
        (12, 4),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()),
        (12, 4, 4, 4),
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (12, 5, 8),
    ),
}


@pytest.mark.parametrize(
    "rule", [RULE, GeometricMean(0.5, rescale="norm"), SandMask(0.5)], ids=repr
)
@pytest.mark.parametrize(
    "env", [None, ENV, [0] * 5 + [1] * 3 + [2] * 4], ids=["rows", "even", "uneven"]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_never_waits_for_the_device(name: str, env: Any, rule: Rule) -> None:
    """A tensor on the meta device has no values: whoever reads one fails.

    Derived parameters (weight norm) are left out: they are computed again, and compared.
    """
    make, shape = MODELS[name]
    with torch.device("meta"):
        model, x = make(), torch.randn(shape)
    agreement = Agreement(model, rule, unvoted="allow")
    for _ in range(2):
        model.zero_grad()
        with agreement.observe(env):
            loss = model(x).square().mean()
        loss.backward()
        report = agreement.apply()
    assert all(parameter.grad.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError):  # it is the reading that waits
        repr(report)


# --- verifying --------------------------------------------------------------------------------


def state(model: nn.Module) -> list[Any]:
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [*buffers, torch.get_rng_state(), torch.tensor([m.training for m in model.modules()])]


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # another tensor, not the same one written into
        return self.layer(x) * self.calls


def in_another_order(x: Tensor) -> Tensor:
    """NumPy hides that the rows are in another order."""
    return torch.from_numpy(x.detach().numpy()[[1, 0, *range(2, len(x))]].copy())


def class_loss(model: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), class_loss),
        (Stateful, class_loss),
        (lambda: nn.Linear(4, 3), lambda model: class_loss(lambda x: model(in_another_order(x)))),
        (
            lambda: nn.Linear(4, 3),
            lambda model: lambda batch: (model(batch[0]) @ model(batch[0]).t()).exp().mean(),
        ),
    ],
    ids=["dropout", "state", "another order", "pairs of rows"],
)
def test_verify_finds(make: Any, loss: Any) -> None:
    torch.manual_seed(0)
    model = make().double()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state(model)
    with pytest.raises(NotVotedOnError, match=r"weight`, consumed by linear: (votes|its gradient)"):
        Agreement(model, RULE).verify(loss(model), (X, Y), ENV)
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    assert all((parameter.grad == 1).all() for parameter in model.parameters())


def test_verify_finds_an_operator_that_counts_wrong(monkeypatch: Any) -> None:
    model = network()
    agreement = Agreement(model, RULE)
    agreement.verify(class_loss(model), (X, Y), ENV)
    right = ProductShares.tally

    def wrong(self: Any, statistics: Any, add: Any) -> Tensor:
        return right(self, statistics, lambda statistic, amount: add(statistic, -amount))

    monkeypatch.setattr(ProductShares, "tally", wrong)
    with pytest.raises(NotVotedOnError, match=r"`0\.weight`, consumed by linear: votes differ on"):
        agreement.verify(class_loss(model), (X, Y), ENV)


def test_verify_with_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    with pytest.raises(CoupledRowsError):
        Agreement(model, RULE).verify(class_loss(model), (X, Y), ENV)
    before = state(model)
    Agreement(model, RULE, batchnorm="per_environment").verify(class_loss(model), (X, Y), ENV)
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        (Pair(X, Y), lambda model, b: F.cross_entropy(model(b.x), b.y)),
        (UserDict(x=X, y=Y), lambda model, b: F.cross_entropy(model(b.data["x"]), b.data["y"])),
        ({"x": [X, "name"], "y": Y}, lambda model, b: F.cross_entropy(model(b["x"][0]), b["y"])),
        (
            (X, np.arange(12.0)),
            lambda model, b: (model(b[0]).square().sum(1) * torch.from_numpy(b[1])).sum(),
        ),
    ],
    ids=["named tuple", "mapping", "nested", "array"],
)
def test_verify_takes_batches_of_any_form(batch: Any, loss: Any) -> None:
    model = network()
    Agreement(model, RULE).verify(lambda given: loss(model, given), batch, ENV)


@pytest.mark.parametrize(
    "wrong", [0.5, Y.double(), torch.zeros(())], ids=["number", "rows", "constant"]
)
def test_verify_needs_a_loss(wrong: Any) -> None:
    with pytest.raises(ValueError, match="`compute_loss` should return a loss"):
        Agreement(network(), RULE).verify(lambda _: wrong, (X, Y), ENV)


# --- losses of environments -------------------------------------------------------------------


def environment_losses(model: nn.Module, x: Tensor = X) -> list[Tensor]:
    found = F.cross_entropy(model(x), Y, reduction="none")
    return [found[e == ENV].mean() for e in range(4)]


@pytest.mark.parametrize(
    "give",
    [
        torch.stack,
        list,
        tuple,
        lambda losses: dict(enumerate(losses)),
        lambda losses: dict(enumerate(losses)).values(),
        lambda losses: [loss.reshape(1) for loss in losses],
    ],
    ids=["vector", "list", "tuple", "dictionary", "values", "of one element"],
)
def test_losses_in_any_form(give: Callable[[list[Tensor]], Any]) -> None:
    model = network()
    agreement = Agreement(model, RULE)
    agreement.backward(give(environment_losses(model)))
    agreement.apply()
    assert_agreed(model)


@pytest.mark.parametrize("wrong", [None, 3.0, 1], ids=repr)
def test_losses_that_are_none(wrong: Any) -> None:
    with pytest.raises(TypeError, match="`environment_losses` should be a vector"):
        Agreement(network(), RULE).backward(wrong)


def test_a_generator_whose_losses_share_a_graph() -> None:
    model = network()
    agreement = Agreement(model, RULE)
    losses = environment_losses(model)
    with pytest.raises(ObservationError, match=r"share a graph.*list or a vector"):
        agreement.backward(loss for loss in losses)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_generator_that_fails_leaves_no_trace() -> None:
    model = network()
    agreement = Agreement(model, RULE)

    def losses() -> Iterator[Tensor]:
        yield loss_of(model)
        raise KeyError("the data is gone")

    with pytest.raises(KeyError):
        agreement.backward(losses())
    assert all(parameter.grad is None for parameter in model.parameters())
    agreement.backward(environment_losses(model))
    assert agreement.apply().voters == 4
    assert_agreed(model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", ["observe", "backward"])
def test_a_loss_that_is_not_finite_stays_in_sight(way: str, bad: float) -> None:
    model = network()
    agreement = Agreement(model, AndMask(1.0))
    if way == "observe":
        with agreement.observe(ENV):
            loss = bad * loss_of(model)
        loss.backward()
    else:
        agreement.backward(bad * loss for loss in [loss_of(model), loss_of(model)])
    agreement.apply()
    assert not model[2].bias.grad.isfinite().any()


# --- labels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "codes"),
    [
        (["b", "a", "-1"], [1, 0, -1]),
        (np.array(["b", -1, "a"]), [1, -1, 0]),  # NumPy made a string of it
        ([b"x", b"-1", b"y"], [0, -1, 1]),
        ([np.str_("a"), "b", None], [0, 1, -1]),
        ([2**64 - 1, 5, -1], [0, 1, -1]),
        (np.array([5, 2**64 - 1], dtype=np.uint64), [1, 0]),
        (np.array([7, 3, 7], dtype=object), [1, 0, 1]),
        ([np.int8(3), torch.tensor(2), 3], [1, 0, 1]),
        (range(3), [0, 1, 2]),
        (np.ma.array([4, 4, 9], mask=[True, False, False]), [-1, 0, 1]),
    ],
    ids=repr,
)
def test_labels(labels: Any, codes: list[int]) -> None:
    found = factorize(labels)
    known = found >= 0
    assert (found < 0).tolist() == [code < 0 for code in codes]
    same = found[known][:, None] == found[known]
    wanted = torch.tensor([code for code in codes if code >= 0])
    assert torch.equal(same, wanted[:, None] == wanted)


@pytest.mark.parametrize(
    "labels",
    [np.array([1, "1"], dtype=object), [-1, "a"], ["a", float("nan")], [1.0], [(1, 2)], [[0], [1]]],
    ids=repr,
)
def test_labels_that_are_unclear(labels: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="Parameter `env` should h"):
        factorize(labels)


@pytest.mark.parametrize(
    ("losses", "error"),
    [
        ([1.0, 2.0], TypeError),
        (torch.tensor([1, 2]), TypeError),
        (torch.zeros(0), ValueError),
        (torch.zeros(2, 0), ValueError),
        (torch.zeros(()), ValueError),
    ],
    ids=repr,
)
def test_losses_without_a_mean(losses: Any, error: type[Exception]) -> None:
    for env in (None, [0, 1]):
        with pytest.raises(error, match="Parameter `losses` should"):
            environment_mean(losses, env)
