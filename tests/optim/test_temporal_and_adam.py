import copy
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from consilience.optim import PUBLISHED_SETTINGS, TemporalAndAdam
from consilience.optim._pieces import ROOM

KEYS = ("exp_avg", "exp_avg_sq", "sign_avg")


ULPS = 8 * 2.0**-53
"""What a step may round, as a share of the terms that it adds up."""


def transcription(state, g, t, lr, betas, tau, eps, decay_rate, *, correct, decay, maximize):
    """Algorithm 1, line by line, for one component, in Python's floats.

    Returns weight and averages after the step; how far rounding may be off in each; and whether
    rounding decides what is masked.
    """
    theta, m, v, a = state
    b1, b2, b3 = betas
    c1, c2, c3 = (1 - b**t if correct else 1 for b in betas)
    around_g = abs(g)
    if maximize:
        g = -g
    if decay == "before":
        around_g += abs(decay_rate * theta)
        g = g + decay_rate * theta
    around_m = b1 * abs(m) + (1 - b1) * around_g
    around_v = b2 * v + (1 - b2) * around_g**2
    around_a = b3 * abs(a) + (1 - b3)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * (g * g)
    a = b3 * a + (1 - b3) * ((g > 0) - (g < 0))
    b = 1 if abs(a / c3) >= tau else 0
    tie = abs(abs(a / c3) - tau) < 1e-9 or 0 < abs(g) < ULPS * around_g
    root = math.sqrt(v / c2 + eps)
    # To first order, with |g| and |m| at most what is around them.
    around_theta = abs(theta) + lr * around_m / c1 * b / root * (1 + around_v / c2 / root**2)
    theta = theta - lr * (m / c1 * b) / root
    if decay == "after":
        theta = theta - lr * decay_rate * theta
    return (theta, m, v, a), (around_theta, around_m, around_v, around_a), tie


rates = st.sampled_from([0.0, 0.21, 0.5, 0.9]) | st.floats(0, 0.99)


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.tuples(rates, rates, rates),
    st.sampled_from([0.0, 0.1, 0.36, 0.5, 0.8]) | st.floats(0, 0.95),
    st.booleans(),
    st.sampled_from(["after", "before"]),
    st.booleans(),
    st.sampled_from([None, False]),
)
def test_every_element_is_that_of_the_algorithm(
    data, betas, threshold, correct, decay, maximize, foreach
):
    """Each step, from wherever the steps before it have led."""
    shapes = data.draw(st.lists(st.sampled_from([(), (1,), (3,), (2, 3), (0,)]), min_size=1))
    sizes = [math.prod(shape) for shape in shapes]
    seed, steps = data.draw(st.integers(0, 2**31)), data.draw(st.integers(1, 12))
    lr, eps, weight_decay = 0.05, data.draw(st.sampled_from([1e-8, 1e-3])), 0.3
    random = np.random.default_rng(seed)
    parameters = [nn.Parameter(torch.tensor(random.standard_normal(shape))) for shape in shapes]
    numbers = (lr, betas, threshold, eps, weight_decay)
    optimizer = TemporalAndAdam(
        parameters, *numbers, bias_correction=correct, decay=decay, maximize=maximize,
        foreach=foreach,
    )  # fmt: skip

    def flat(tensors):
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).tolist()

    def now(key):
        zeros = [{key: torch.zeros_like(parameter)} for parameter in parameters]
        return flat((optimizer.state[p] or z)[key] for p, z in zip(parameters, zeros, strict=True))

    for t in range(1, steps + 1):
        # Zeros, repeated signs and wide scales, of which random normal numbers have too few.
        gradient = random.choice([-1.0, 0.0, 1.0], sum(sizes), p=[0.15, 0.15, 0.7])
        gradient *= 10.0 ** random.integers(-6, 3, sum(sizes))
        for parameter, part in zip(
            parameters, np.split(gradient, np.cumsum(sizes)[:-1]), strict=True
        ):
            parameter.grad = torch.tensor(part).view(parameter.shape)
        given_gradients = [parameter.grad.clone() for parameter in parameters]
        before = list(zip(flat(parameters), *map(now, KEYS), strict=True))
        optimizer.step()
        assert all(map(torch.equal, given_gradients, (p.grad for p in parameters)))
        after = zip(flat(parameters), *map(now, KEYS), strict=True)
        for found, state, g in zip(after, before, gradient.tolist(), strict=True):
            expected, around, tie = transcription(
                state, g, t, *numbers, correct=correct, decay=decay, maximize=maximize
            )
            for i, name in enumerate(("weight", *KEYS)):
                if not tie or name in KEYS[:2]:
                    assert abs(found[i] - expected[i]) <= ULPS * around[i], name
    for key, parameter in itertools.product(KEYS, parameters):
        assert optimizer.state[parameter][key].shape == parameter.shape


def steps_with(optimizer, parameters, number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = (gradient + 0.5).to(parameter.dtype)
        optimizer.step()


def two_parameters(dtype=torch.float32):
    return [nn.Parameter(torch.ones(3, 2, dtype=dtype)), nn.Parameter(torch.ones(4, dtype=dtype))]


def test_threshold_zero_and_bias_correction_are_adam():
    ours, theirs = two_parameters(torch.float64), two_parameters(torch.float64)
    mask = TemporalAndAdam(ours, 0.01, threshold=0.0, eps=1e-30, bias_correction=True)
    adam = torch.optim.Adam(theirs, 0.01, eps=1e-15)
    steps_with(mask, ours, 7)
    steps_with(adam, theirs, 7)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_decay_before_is_that_of_adam():
    ours, theirs = two_parameters(torch.float64), two_parameters(torch.float64)
    settings = {"eps": 1e-30, "weight_decay": 0.1, "bias_correction": True}
    mask = TemporalAndAdam(ours, 0.01, threshold=0.0, decay="before", **settings)
    adam = torch.optim.Adam(theirs, 0.01, eps=1e-15, weight_decay=0.1)
    steps_with(mask, ours, 7)
    steps_with(adam, theirs, 7)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("correct", [False, True])
def test_buckets_change_nothing(monkeypatch, correct):
    shapes = [(3, 5), (7,), (40,), (2, 2, 2), (), (9,)]
    results = []
    for room, foreach in ((2**18, None), (16, None), (7, None), (1, True), (2**18, False)):
        monkeypatch.setitem(ROOM, "cpu", room)
        parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = TemporalAndAdam(parameters, 0.1, bias_correction=correct, foreach=foreach)
        steps_with(optimizer, parameters, 5)
        results.append(parameters)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=0)  # vectors and rests round differently


def test_work_is_cut_into_buckets(monkeypatch):
    monkeypatch.setitem(ROOM, "cpu", 10)
    parameters = [nn.Parameter(torch.ones(size)) for size in (4, 5, 2, 33, 1)]
    parameters.append(nn.Parameter(torch.ones(1, dtype=torch.float64)))
    parameters.append(nn.Parameter(torch.ones(7, 3).t()))

    def sizes(**options):
        optimizer = TemporalAndAdam(parameters, **options)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return [[piece.numel() for piece in bucket.params] for bucket in optimizer._prepare()]

    # What is not contiguous is not cut.
    assert sizes() == [[4, 5], [2], [10], [10], [10], [3, 1], [1], [21]]
    assert sizes(foreach=False) == [[4], [5], [2], [33], [1], [1], [21]]


def test_nothing_moves_until_enough_votes_are_in():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = TemporalAndAdam([weight], betas=(0.9, 0.999, 0.9), threshold=0.5)
    moved = []
    for _ in range(10):
        weight.grad = torch.ones(1)
        before = weight.detach().clone()
        optimizer.step()
        moved.append(bool(weight != before))
    assert moved == [1 - 0.9 ** (t + 1) >= 0.5 for t in range(10)]
    assert moved.index(True) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9, 0.99, 0.999])
def test_unanimity_is_not_lost_to_rounding(dtype, beta):
    """At threshold 1 what always agreed is kept, and one dissenting sign is noticed."""
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    optimizer = TemporalAndAdam(
        [weight], betas=(0.9, 0.999, beta), threshold=1.0, bias_correction=True
    )
    for t in range(400):
        weight.grad = torch.tensor([1.0, -1.0 if t == 398 else 1.0], dtype=dtype)
        before = weight.detach().clone()
        optimizer.step()
        assert weight[0] != before[0]
    assert (weight[1] == before[1]) == (beta > 0)


def test_a_threshold_that_is_met_exactly_is_met():
    """1 - 0.9 lies below 0.1 in floating point."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = TemporalAndAdam([weight], betas=(0.9, 0.999, 0.9), threshold=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight != 0


def test_zero_votes_for_nobody():
    weight = nn.Parameter(torch.ones(2))
    optimizer = TemporalAndAdam([weight], betas=(0.9, 0.999, 0.5), threshold=0.7)
    for gradient in (1.0, 1.0, 0.0):
        before = weight.detach().clone()
        weight.grad = torch.tensor([gradient, 1.0])
        optimizer.step()
    assert (weight != before).tolist() == [False, True]
    assert optimizer.state[weight]["sign_avg"].tolist() == [0.375, 0.875]


def test_groups_have_their_own_settings():
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = TemporalAndAdam(
        [{"params": [first], "threshold": 0.0}, {"params": [second], "lr": 0.0}], lr=0.1
    )
    optimizer.add_param_group({"params": [third], "betas": (0.0, 0.0, 0.0), "weight_decay": 0.5})
    for parameter in (first, second, third):
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert (first != 1).all()
    assert (second == 1).all()
    assert torch.allclose(third, torch.tensor((1 - 0.1) * (1 - 0.1 * 0.5)))


def test_parameters_without_a_gradient_are_left_alone():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = TemporalAndAdam([used, unused], weight_decay=0.1, threshold=0.1)
    used.grad = torch.ones(2)
    optimizer.step()
    assert (used != 1).all()
    assert (unused == 1).all()
    assert unused not in optimizer.state


def test_bias_is_corrected_by_each_parameters_own_steps():
    late, alone = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    early = nn.Parameter(torch.ones(2))
    together = TemporalAndAdam([early, late], bias_correction=True)
    separate = TemporalAndAdam([alone], bias_correction=True)
    steps_with(together, [early], 3)
    steps_with(together, [late], 2, seed=1)
    steps_with(separate, [alone], 2, seed=1)
    assert torch.equal(late, alone)


def test_closure():
    weight = nn.Parameter(torch.ones(2))
    optimizer = TemporalAndAdam([weight], threshold=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2.0
    assert (weight < 1).all()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ],
)
def test_schedulers(schedule):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = TemporalAndAdam([weight], lr=0.1, threshold=0.0)
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(5):
        steps_with(optimizer, [weight], 1)
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) == 5
    assert len(optimizer.param_groups[0]["betas"]) == 3


def test_lr_as_a_tensor():
    one, two = two_parameters(), two_parameters()
    steps_with(TemporalAndAdam(one, lr=torch.tensor(0.25)), one, 4)
    steps_with(TemporalAndAdam(two, lr=0.25), two, 4)
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("through", ["memory", "disk"])
def test_continuing_from_a_state_dict_changes_nothing(dtype, through):
    weights, others = two_parameters(dtype), two_parameters(dtype)
    optimizer = TemporalAndAdam(weights, 0.01, threshold=0.2, bias_correction=True)
    steps_with(optimizer, weights, 3)
    with torch.no_grad():
        for other, weight in zip(others, weights, strict=True):
            other.copy_(weight)
    state = optimizer.state_dict()
    if through == "disk":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    resumed = TemporalAndAdam(others, 1.0)
    resumed.load_state_dict(state)
    steps_with(optimizer, weights, 3, seed=5)
    steps_with(resumed, others, 3, seed=5)
    assert all(map(torch.equal, weights, others))
    for weight, other in zip(weights, others, strict=True):
        for key, value in optimizer.state[weight].items():
            assert torch.equal(value, resumed.state[other][key])
            assert value.dtype == torch.float32


def test_a_state_without_newer_settings_gets_the_defaults():
    weights = two_parameters()
    optimizer = TemporalAndAdam(weights, 0.01)
    steps_with(optimizer, weights, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for key in ("bias_correction", "decay", "maximize", "foreach"):
        del state["param_groups"][0][key]
    resumed = TemporalAndAdam(weights, 0.5)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["decay"] == "after"
    assert resumed.param_groups[0]["lr"] == 0.01
    steps_with(resumed, weights, 1)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],  # noqa: S301
)
def test_copies_step_alike(copied):
    weights = two_parameters()
    optimizer = TemporalAndAdam(weights, 0.01, threshold=0.3)
    steps_with(optimizer, weights, 3)
    other = copied(optimizer)
    theirs = other.param_groups[0]["params"]
    steps_with(optimizer, weights, 3, seed=2)
    steps_with(other, theirs, 3, seed=2)
    assert all(map(torch.equal, weights, theirs))
    assert weights[0] is not theirs[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_single(dtype):
    half, single = [nn.Parameter(torch.ones(64, dtype=d)) for d in (dtype, torch.float32)]
    generator = torch.Generator().manual_seed(0)
    coarse = TemporalAndAdam([half], 0.01, betas=(0.9, 0.999, 0.97), threshold=0.2)
    fine = TemporalAndAdam([single], 0.01, betas=(0.9, 0.999, 0.97), threshold=0.2)
    for _ in range(40):
        half.grad = (torch.randn(64, generator=generator) + 0.4).to(dtype)
        single.grad = half.grad.float()
        coarse.step()
        fine.step()
        with torch.no_grad():
            single.copy_(half.float())
    for key in KEYS:
        assert torch.equal(coarse.state[half][key], fine.state[single][key])
    assert (half != 1).any()


def test_memory_formats_and_gradients_that_are_views():
    plain = nn.Parameter(torch.ones(2, 3, 4, 4))
    last = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    expanded = nn.Parameter(torch.ones(2, 3, 4, 4))
    optimizers = [TemporalAndAdam([p], 0.1, threshold=0.1) for p in (plain, last, expanded)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradient = torch.randn(2, 1, 4, 4, generator=generator)
        plain.grad = gradient.expand_as(plain).contiguous()
        last.grad = plain.grad.to(memory_format=torch.channels_last)
        expanded.grad = gradient.expand_as(plain)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, last)
    assert torch.equal(plain, expanded)
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_grad_scaler_skips_what_is_not_finite():
    weight = nn.Parameter(torch.ones(2))
    optimizer = TemporalAndAdam([weight], lr=0.1, threshold=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        before = weight.detach().clone()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert bool((weight != before).all()) == moves
        assert weight.isfinite().all()
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full((2,), 0.1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_lose_nothing(value):
    weights = two_parameters()
    optimizer = TemporalAndAdam([("first", weights[0]), ("second", weights[1])], threshold=0.0)
    steps_with(optimizer, weights, 2)
    state = copy.deepcopy(optimizer.state_dict())
    before = [weight.detach().clone() for weight in weights]
    weights[1].grad[2] = value
    with pytest.raises(RuntimeError, match="1 of 4 components of `second` infinite or NaN"):
        optimizer.step()
    assert all(map(torch.equal, before, weights))
    for saved, now in zip(
        state["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(saved[key], now[key]) for key in saved)


def test_sums_that_overflow_are_not_mistaken_for_gradients_that_do():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = TemporalAndAdam([weight], betas=(0.9, 0.0, 0.0), eps=1.0, threshold=0.0)
    weight.grad = torch.tensor([3e38, 3e38, 1.0])
    optimizer.step()
    assert weight[2] != 0


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = TemporalAndAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients.*parameter 0 of group 0"):
        optimizer.step()


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="should be real"):
        TemporalAndAdam([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    optimizer = TemporalAndAdam(two_parameters())
    with pytest.raises(TypeError, match="should be real"):
        optimizer.add_param_group({"params": [torch.ones(2, dtype=torch.complex64)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "`lr = -1.0`"),
        ({"lr": math.nan}, ValueError, "`lr = nan`"),
        ({"lr": "0.1"}, TypeError, "`lr` should be a number. Found `lr = '0.1'`"),
        ({"weight_decay": None}, TypeError, "`weight_decay = None`"),
        ({"betas": (0.9, 0.9, 0.99999)}, ValueError, r"at most 0\.999976.*`betas\[2\] = 0.99999`"),
        ({"eps": 1e-50}, ValueError, "`eps` should be at least 1.2e-38.*`eps = 1e-50`"),
        ({"lr": torch.ones(2)}, ValueError, "`lr` should be one number"),
        ({"betas": (0.9, 0.999)}, ValueError, "`betas` should be three numbers"),
        ({"betas": (0.9, 1.0, 0.9)}, ValueError, r"`betas\[1\] = 1.0`"),
        ({"betas": (-0.1, 0.9, 0.9)}, ValueError, r"`betas\[0\] = -0.1`"),
        ({"betas": (0.9, 0.9, math.nan)}, ValueError, r"`betas\[2\] = nan`"),
        ({"betas": (0.9, 0.9, "0.9")}, TypeError, r"`betas\[2\] = '0.9'`"),
        ({"threshold": 1.5}, ValueError, "`threshold = 1.5`"),
        ({"threshold": -0.1}, ValueError, "`threshold = -0.1`"),
        ({"threshold": math.nan}, ValueError, "`threshold = nan`"),
        ({"threshold": 1.0}, ValueError, "bias_correction = True"),
        ({"eps": 0.0}, ValueError, "`eps = 0.0`"),
        ({"weight_decay": -1.0}, ValueError, "`weight_decay = -1.0`"),
        ({"decay": "during"}, ValueError, "`decay = 'during'`"),
    ],
)
def test_settings_outside_their_ranges(setting, error, words):
    with pytest.raises(error, match=words):
        TemporalAndAdam(two_parameters(), **setting)
    optimizer = TemporalAndAdam(two_parameters())
    with pytest.raises(error, match=words):
        optimizer.add_param_group({"params": two_parameters(), **setting})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("threshold", 1.5), ("betas", (0.9, 0.9, 1.0)), ("lr", -1)]
)
def test_groups_that_were_changed_to_what_no_setting_may_be(key, value):
    weights = two_parameters()
    optimizer = TemporalAndAdam(weights)
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=key):
        steps_with(optimizer, weights, 1)
    assert all((weight == 1).all() for weight in weights)
    assert not optimizer.state


def test_double_precision_allows_more():
    weights = two_parameters(torch.float64)
    optimizer = TemporalAndAdam(weights, betas=(0.9, 0.9, 0.99999), threshold=0, eps=1e-50)
    steps_with(optimizer, weights, 2)
    assert all(weight.isfinite().all() for weight in weights)


def test_states_of_other_optimizers():
    weights = two_parameters()
    adam, optimizer = torch.optim.Adam(weights), TemporalAndAdam(weights)
    with pytest.raises(ValueError, match="`betas` should be three numbers"):
        optimizer.load_state_dict(adam.state_dict())
    steps_with(adam, weights, 1)
    with pytest.raises(ValueError, match=r"no votes.*Found `step`, `exp_avg`, `exp_avg_sq`\."):
        optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999, 0.79)


def test_parameters_that_change_their_type():
    """Averages stay what they were; weights go on in the new type."""
    model = nn.Linear(3, 2)
    optimizer = TemporalAndAdam(model.parameters(), 0.1, threshold=0.0)
    steps_with(optimizer, [model.weight], 1)  # the bias has averages of another type
    for move in (model.double, model.float, model.bfloat16, model.float):
        move()
        before = model.weight.detach().clone()
        steps_with(optimizer, list(model.parameters()), 2)
        assert (model.weight != before).all()
        assert optimizer.state[model.weight]["sign_avg"].dtype == torch.float32


def test_published_settings_are_the_papers():
    assert [s["threshold"] for s in PUBLISHED_SETTINGS] == [0.36, 0.40, 0.41, 0.47, 0.47]
    for settings_ in PUBLISHED_SETTINGS:
        weights = two_parameters()
        steps_with(TemporalAndAdam(weights, **settings_), weights, 3)
        assert all((weight != 1).all() for weight in weights)


@pytest.mark.parametrize(("correct", "decay"), [(False, "before"), (True, "after")])
def test_a_compiled_step_is_the_same_step(correct, decay):
    torch._dynamo.reset()
    settings_ = {"weight_decay": 0.1, "bias_correction": correct, "decay": decay}
    plain, compiled = two_parameters(torch.float64), two_parameters(torch.float64)
    ours = TemporalAndAdam(plain, 0.01, threshold=0.2, **settings_)
    theirs = TemporalAndAdam(compiled, 0.01, threshold=0.2, **settings_)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(theirs.step, backend=counter)
    generator = torch.Generator().manual_seed(0)
    for t in range(12):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = 0.01 / (1 + t)
        for a, b in zip(plain, compiled, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, dtype=a.dtype)
            b.grad = a.grad.clone()
        ours.step()
        step()
    for a, b in zip(plain, compiled, strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-15)
    # Neither a new learning rate nor a new correction compiles anything again.
    assert 1 <= counter.frame_count <= 2
    assert counter.op_count > 10
