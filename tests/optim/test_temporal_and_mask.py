import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from consilience.optim import TemporalAndAdam, TemporalAndMask, masked_step
from consilience.optim._pieces import ROOM

WRAPPED = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: optim.Adam(p, 0.1, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, 0.1, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, 0.1, foreach=True),
}
wrapped = pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
on = pytest.mark.parametrize("on", ["gradient", "update", "frozen"])


def ones(*shapes, dtype=torch.float64):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes or ((3, 2), (4,))]


def gradients(parameters, generator):
    return [
        (torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.5).to(p.dtype)
        for p in parameters
    ]


def steps_with(optimizer, parameters, number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        for parameter, gradient in zip(parameters, gradients(parameters, generator), strict=True):
            parameter.grad = gradient
        optimizer.step()


@wrapped
@on
@pytest.mark.parametrize("correct", [False, True])
def test_against_the_wrapped_optimizer_masked_by_hand(make, on, correct):
    ours, theirs = ones(), ones()
    mask = TemporalAndMask(make(ours), 0.7, 0.4, on, bias_correction=correct)
    plain = make(theirs)
    averages = [torch.zeros_like(p) for p in theirs]
    generator = torch.Generator().manual_seed(1)
    for t in range(1, 9):
        drawn = gradients(ours, generator)
        befores = [p.detach().clone() for p in theirs]
        states = [
            {k: v.clone() for k, v in plain.state[p].items() if v is not None} for p in theirs
        ]
        keeps = []
        for parameter, other, average, gradient in zip(ours, theirs, averages, drawn, strict=True):
            average.mul_(0.7).add_(gradient.sign(), alpha=1 - 0.7)
            keeps.append(average.abs() / (1 - 0.7**t if correct else 1) >= 0.4)
            parameter.grad = gradient.clone()
            other.grad = gradient * keeps[-1] if on == "gradient" else gradient
        mask.step()
        plain.step()
        for parameter, other, keep, before, state in zip(
            ours, theirs, keeps, befores, states, strict=True
        ):
            if on != "gradient":
                with torch.no_grad():
                    other.copy_(torch.where(keep, other, before))
            if on == "frozen":
                for key, value in plain.state[other].items():
                    if key != "step":
                        value.copy_(torch.where(keep, value, state.get(key, torch.zeros(()))))
            assert torch.allclose(parameter, other, rtol=1e-13, atol=0)
    assert any((~keep).any() for keep in keeps)


def test_threshold_zero_is_the_wrapped_optimizer():
    ours, theirs = ones(), ones()
    steps_with(TemporalAndMask(optim.SGD(ours, 0.1), 0.9, 0.0), ours, 4)
    steps_with(optim.SGD(theirs, 0.1), theirs, 4)
    assert all(map(torch.equal, ours, theirs))


def test_of_adam_on_updates_with_decay_after_is_the_algorithm():
    """But for eps, where the two differ, which is made to vanish."""
    ours, theirs = ones(), ones()
    adam = optim.Adam(ours, 0.1, eps=1e-15, weight_decay=0.2)
    mask = TemporalAndMask(adam, 0.8, 0.3, "update", decay="after", bias_correction=True)
    algorithm = TemporalAndAdam(
        theirs, 0.1, (0.9, 0.999, 0.8), 0.3, 1e-30, 0.2, bias_correction=True
    )
    steps_with(mask, ours, 9)
    steps_with(algorithm, theirs, 9)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=0)


@on
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_pieces_change_nothing(monkeypatch, on, dtype):
    results = []
    for room in (2**18, 3, 5):
        monkeypatch.setitem(ROOM, "cpu", room)
        weights = ones((3, 5), (2,), (), dtype=dtype)
        mask = TemporalAndMask(optim.SGD(weights, 0.1, momentum=0.9, foreach=False), 0.7, 0.4, on)
        steps_with(mask, weights, 6)
        results.append([*weights, *(weight.grad for weight in weights)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 0.99), st.floats(0, 0.95), st.booleans(), st.integers(0, 2**31))
def test_what_is_kept_is_what_signs_agree_on(beta, threshold, correct, seed):
    generator = torch.Generator().manual_seed(seed)
    (weight,) = ones((20,))
    mask = TemporalAndMask(optim.SGD([weight], 1.0), beta, threshold, bias_correction=correct)
    average = torch.zeros(20, dtype=torch.float64)
    for t in range(1, 7):
        gradient = torch.randint(-1, 3, (20,), generator=generator).double()
        weight.grad = gradient.clone()
        mask.step()
        average = beta * average + (1 - beta) * gradient.sign()
        distance = average.abs() - threshold * (1 - beta**t if correct else 1)
        sure = distance.abs() > 1e-9
        assert torch.equal(weight.grad[sure], torch.where(distance > 0, gradient, 0)[sure])


@pytest.mark.parametrize(
    ("rescale", "limit", "factor"),
    [("none", None, 1), (True, None, 4), ("count", 3.0, 3), ("norm", None, 2)],
)
def test_rescaling(rescale, limit, factor):
    (weight,) = ones((4,))
    mask = TemporalAndMask(optim.SGD([weight], 1.0), 0.5, 0.7, rescale=rescale, max_rescale=limit)
    for signs in ([1, 1, 1, 1], [1, -1, -1, -1]):
        weight.grad = 2 * torch.tensor(signs, dtype=torch.float64)
        mask.step()
    assert weight.grad.tolist() == [2.0 * factor, 0, 0, 0]
    weight.grad = torch.tensor([-1.0, 1, 1, 1], dtype=torch.float64)
    mask.step()
    assert weight.grad.tolist() == [0, 0, 0, 0]


def test_the_state_is_that_of_the_wrapped_optimizer():
    weights = ones()
    adam = optim.Adam(weights, 0.1)
    mask = TemporalAndMask(adam, 0.9, 0.1)
    assert mask.param_groups is adam.param_groups
    assert mask.state is adam.state
    assert mask.defaults is adam.defaults
    steps_with(mask, weights, 1)
    mask.zero_grad()
    assert all(weight.grad is None for weight in weights)


def test_schedulers():
    for schedule in (
        lambda o: optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    ):
        weights = ones()
        mask = TemporalAndMask(optim.SGD(weights, 0.1, momentum=0.9), 0.9, 0.1)
        scheduler = schedule(mask)
        rates = []
        for _ in range(4):
            steps_with(mask, weights, 1)
            scheduler.step()
            rates.append(mask.optimizer.param_groups[0]["lr"])
        assert len(set(rates)) == 4


def test_closure():
    (weight,) = ones((2,))
    mask = TemporalAndMask(optim.SGD([weight], 0.25), 0.0, 1.0)

    def closure():
        mask.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert mask.step(closure) == 2.0
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused):
    (weight,) = ones((2,), dtype=torch.float32)
    mask = TemporalAndMask(optim.SGD([weight], 0.25, fused=fused), 0.0, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor, expected in ((1.0, 0.75), (float("inf"), 0.75), (1.0, 0.5)):
        mask.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(mask)
        scaler.update()
        assert weight.tolist() == [expected, expected]


@wrapped
@pytest.mark.parametrize("through", ["memory", "disk"])
def test_continuing_from_a_state_dict_changes_nothing(make, through):
    weights, others = ones(), ones()
    mask = TemporalAndMask(make(weights), 0.8, 0.3, bias_correction=True)
    steps_with(mask, weights, 3)
    with torch.no_grad():
        for other, weight in zip(others, weights, strict=True):
            other.copy_(weight)
    state = copy.deepcopy(mask.state_dict())
    if through == "disk":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    resumed = TemporalAndMask(make(others), 0.8, 0.3, bias_correction=True)
    resumed.load_state_dict(state)
    steps_with(mask, weights, 3, seed=4)
    steps_with(resumed, others, 3, seed=4)
    assert all(map(torch.equal, weights, others))


def test_half_precision_votes_in_single():
    (weight,) = ones((3,), dtype=torch.bfloat16)
    mask = TemporalAndMask(optim.SGD([weight], 0.1), 0.99, 0.1)
    steps_with(mask, [weight], 2)
    other = TemporalAndMask(optim.SGD([weight], 0.1), 0.99, 0.1)
    other.load_state_dict(mask.state_dict())
    for found in (mask, other):
        assert found._averages[weight][1].dtype == torch.float32
        assert found._averages[weight][0] == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_copies_step_alike(copied):
    weights = ones()
    mask = TemporalAndMask(optim.Adam(weights, 0.1), 0.8, 0.3, "update")
    steps_with(mask, weights, 3)
    other = copied(mask)
    theirs = other.param_groups[0]["params"]
    steps_with(mask, weights, 3, seed=2)
    steps_with(other, theirs, 3, seed=2)
    assert all(map(torch.equal, weights, theirs))
    assert theirs[0] is not weights[0]


def test_parameters_may_be_added_through_the_mask():
    first, second = ones((2,), (2,))
    mask = TemporalAndMask(optim.SGD([first], 0.1), 0.0, 1.0)
    mask.add_param_group({"params": [second], "lr": 0.2})
    for weight in (first, second):
        weight.grad = torch.ones_like(weight)
    mask.step()
    assert first.tolist() == [0.9, 0.9]
    assert second.tolist() == [0.8, 0.8]


@pytest.mark.parametrize("change", ["added", "replaced"])
def test_a_wrapped_optimizer_that_was_given_other_parameters(change):
    weight, other = ones((2,), (2,))
    mask = TemporalAndMask(optim.SGD([weight], 0.1), 0.5, 0.5)
    if change == "added":
        mask.optimizer.add_param_group({"params": [other]})
    else:
        mask.optimizer.param_groups[0]["params"] = [other]
    other.grad = torch.ones_like(other)
    for use in (mask.step, lambda: mask.load_state_dict(mask.state_dict())):
        with pytest.raises(ValueError, match="was given other parameters"):
            use()
    assert other.tolist() == [1, 1]


def test_parameters_without_a_gradient_are_left_alone():
    used, unused = ones((2,), (2,))
    mask = TemporalAndMask(optim.SGD([used, unused], 0.1, weight_decay=0.5), 0.5, 0.1)
    used.grad = torch.ones_like(used)
    mask.step()
    assert unused.tolist() == [1, 1]
    assert unused not in mask._averages


@on
def test_gradients_that_are_not_finite_lose_nothing(on):
    first, second = weights = ones()
    mask = TemporalAndMask(optim.Adam([("a", first), ("b", second)], 0.1), 0.8, 0.1, on)
    steps_with(mask, weights, 2)
    before = copy.deepcopy([weights, mask.state_dict()])
    second.grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="1 of 4 components of `b` infinite or NaN"):
        mask.step()
    assert all(map(torch.equal, weights, before[0]))
    votes, old = mask.state_dict()["temporal_and_mask"], before[1]["temporal_and_mask"]
    for i in votes:
        assert torch.equal(votes[i]["sign_avg"], old[i]["sign_avg"])
        assert votes[i]["step"] == old[i]["step"]


def test_what_cannot_be_wrapped():
    weights = ones()
    with pytest.raises(ValueError, match="LBFGS cannot"):
        TemporalAndMask(optim.LBFGS(weights), 0.9, 0.5)
    with pytest.raises(ValueError, match="SparseAdam cannot"):
        TemporalAndMask(optim.SparseAdam(weights), 0.9, 0.5)
    with pytest.raises(TypeError, match=r"`torch.optim.Optimizer`. Found list"):
        TemporalAndMask(weights, 0.9, 0.5)
    with pytest.raises(ValueError, match="those of Rprop have none"):
        TemporalAndMask(optim.Rprop(weights), 0.9, 0.5, decay="after")
    with pytest.raises(ValueError, match="Adafactor cannot freeze"):
        TemporalAndMask(optim.Adafactor(weights), 0.9, 0.5, "frozen")


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"beta": 1.0}, r"`beta = 1\.0`"),
        ({"beta": -0.5}, r"`beta = -0\.5`"),
        ({"threshold": 1.1}, r"`threshold = 1\.1`"),
        ({"threshold": 1.0}, "bias_correction = True"),
        ({"on": "weights"}, "`on = 'weights'`"),
        ({"decay": "later"}, "`decay = 'later'`"),
        ({"rescale": "sum"}, "`rescale = 'sum'`"),
        ({"max_rescale": 2.0}, r"`max_rescale = 2\.0`"),
        ({"rescale": "count", "on": "update"}, "`rescale = 'count'` with `on = 'update'`"),
    ],
)
def test_settings_outside_their_ranges(settings_, words):
    with pytest.raises(ValueError, match=words):
        TemporalAndMask(optim.SGD(ones(), 0.1), **{"beta": 0.9, "threshold": 0.5, **settings_})


def test_parameters_that_cannot_vote():
    complex_ = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"should be real.*complex128.*view_as_real"):
        TemporalAndMask(optim.SGD([complex_], 0.1), 0.5, 0.5)
    (weight,) = ones((2,), dtype=torch.float32)
    mask = TemporalAndMask(optim.SGD([weight], 0.1), 0.5, 0.5)
    with pytest.raises(TypeError, match="should be real"):
        mask.add_param_group({"params": [complex_]})
    weight.grad = torch.ones(2)
    mask.step()  # nothing was added
    assert len(mask.param_groups) == 1
    with pytest.raises(ValueError, match=r"at most 0\.999976 .* `beta = 0\.99999`"):
        TemporalAndMask(optim.SGD([weight], 0.1), 0.99999, 0.5)
    TemporalAndMask(optim.SGD(ones((2,)), 0.1), 0.99999, 0.5)  # in double


def test_votes_are_frozen_with_the_state():
    (weight,) = ones((2,))
    mask = TemporalAndMask(optim.SGD([weight], 0.1, momentum=0.9), 0.5, 0.0)
    for keep in ([1, 0], [1, 1], [1, 0]):
        weight.grad = torch.ones_like(weight)
        masked_step(mask, {weight: torch.tensor(keep)}, masked="frozen")
    assert mask._averages[weight][1].tolist() == [0.875, 0.5]
    assert mask.state[weight]["momentum_buffer"].tolist() == pytest.approx([2.71, 1])


@pytest.mark.parametrize(("rescale", "most"), [("none", 1), ("norm", 1), ("count", 3)])
def test_clipping_before_the_mask_and_after_it(rescale, most):
    limit = 3.0 if rescale == "count" else None
    weights, length = ones((8,), (5,)), 0.01
    mask = TemporalAndMask(optim.SGD(weights, 1.0), 0.5, 0.6, rescale=rescale, max_rescale=limit)
    steps_with(mask, weights, 5)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        nn.utils.clip_grad_norm_(weights, length)
        mask.step()
        assert nn.utils.get_total_norm([w.grad for w in weights]) <= most * length * (1 + 1e-9)
    mask.optimizer.register_step_pre_hook(lambda *_: clip(weights, length))
    before = copy.deepcopy(weights)
    steps_with(mask, weights, 1)
    moved = nn.utils.get_total_norm([w - b for w, b in zip(weights, before, strict=True)])
    assert moved.item() == pytest.approx(length, rel=1e-3)


def clip(weights, length):
    nn.utils.clip_grad_norm_(weights, length)


def test_a_state_without_votes():
    mask = TemporalAndMask(optim.SGD(ones(), 0.1), 0.9, 0.5)
    with pytest.raises(ValueError, match=r"mask\.optimizer\.load_state_dict"):
        mask.load_state_dict(mask.optimizer.state_dict())


def test_repr_reads_as_the_call():
    text = repr(TemporalAndMask(optim.SGD(ones(), 0.1), 0.9, 0.5, "update"))
    assert text.startswith("TemporalAndMask(SGD (")
    assert "beta=0.9, threshold=0.5, on='update'" in text
