"""Masked steps against optimizers of one component each, which are masked by hand."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from consilience.optim import TemporalAndAdam, masked_step

OPTIMIZERS = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {"lr": 0.1}),
    "amsgrad": (optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "adamw": (optim.AdamW, {"lr": 0.1}),
    "maximizing": (optim.AdamW, {"lr": 0.1, "maximize": True}),
    "dampened": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "rmsprop": (optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "adadelta": (optim.Adadelta, {"lr": 0.1}),
    "adamax": (optim.Adamax, {"lr": 0.1}),
    "nadam": (optim.NAdam, {"lr": 0.1}),
    "radam": (optim.RAdam, {"lr": 0.1}),
    "asgd": (optim.ASGD, {"lr": 0.1}),
    "rprop": (optim.Rprop, {"lr": 0.1}),
    "temporal": (TemporalAndAdam, {"lr": 0.1, "threshold": 0.2}),
}
FUSED = ("sgd", "momentum", "nesterov", "adam", "amsgrad", "adamw", "maximizing", "adagrad")
WAYS = [(name, {"foreach": foreach}) for name in OPTIMIZERS for foreach in (False, True)]
WAYS += [(name, {"fused": True}) for name in FUSED]


def same(a, b, way):
    """Equal; or, fused, but for the roundings that whole vectors and their rests differ in."""
    return torch.allclose(a, b, rtol=1e-13, atol=1e-15) if "fused" in way else torch.equal(a, b)


def make(name, way, parameters, weight_decay=0.0):
    kind, options = OPTIMIZERS[name]
    if kind is not optim.Rprop:
        options = {**options, "weight_decay": weight_decay}
    return kind(parameters, **options, **way)


class ByHand:
    """One optimizer a component, each with a parameter of its own, so that one can be left out."""

    def __init__(self, name, way, values, weight_decay):
        self.weights = [nn.Parameter(value.clone()) for value in values]
        self.optimizers = [make(name, way, [weight], weight_decay) for weight in self.weights]
        # What the averages begin with, before there are any.
        self.begin = [None] * len(values)
        self.weight_decay = weight_decay

    def step(self, gradient, keep, masked, decay):
        for weight, optimizer, g, kept in zip(
            self.weights, self.optimizers, gradient, keep, strict=True
        ):
            before = weight.detach().clone()
            state = copy.deepcopy(optimizer.state_dict()["state"])
            for group in optimizer.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = self.weight_decay if decay == "before" else 0.0
            weight.grad = g.clone()
            optimizer.step()
            if not kept and masked != "gradient":
                with torch.no_grad():
                    weight.copy_(before)
            if not kept and masked == "frozen":
                self._restore(optimizer, weight, state.get(0, {}))
            if decay == "after":
                with torch.no_grad():
                    weight.mul_(1 - 0.1 * self.weight_decay)

    @staticmethod
    def _restore(optimizer, weight, state):
        for key, value in optimizer.state[weight].items():
            if not isinstance(value, torch.Tensor) or key in ("step", "mu", "eta", "mu_product"):
                continue
            start = 0.1 if key == "step_size" else 0.0
            value.copy_(state[key] if key in state else torch.full_like(value, start))


@pytest.mark.parametrize("masked", ["gradient", "update", "frozen"])
@pytest.mark.parametrize(
    ("name", "way", "decay"),
    [
        (name, way, decay)
        for name, way in WAYS
        for decay in ("before", "after", "none")
        if (name, decay) != ("rprop", "after")  # it has no weight decay
    ],
)
def test_every_component_is_as_by_hand(name, way, decay, masked):
    generator = torch.Generator().manual_seed(3)
    shapes, rate = [(2, 3), (), (1,), (4,)], 0.3
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    weights = [nn.Parameter(value.clone()) for value in values]
    half = len(weights) // 2
    optimizer = make(name, way, [{"params": weights[:half]}, {"params": weights[half:]}], rate)
    hands = [ByHand(name, way, value.reshape(-1), rate) for value in values]
    for t in range(6):
        keep = {}
        for weight, hand in zip(weights, hands, strict=True):
            gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            mask = torch.rand(weight.shape, generator=generator) < 0.5
            if t == 0 and weight.dim() == 0:
                mask = torch.tensor(False)
            keep[weight] = mask if t % 2 else mask.double() * 0.7
            if masked == "gradient":
                gradient *= mask
            weight.grad = gradient
            hand.step(gradient.reshape(-1), mask.reshape(-1), masked, decay)
        masked_step(optimizer, keep, masked=masked, decay=decay)
        for weight, hand in zip(weights, hands, strict=True):
            expected = torch.stack([part.detach() for part in hand.weights]).view(weight.shape)
            assert same(weight, expected, way)
            for key, value in optimizer.state[weight].items():
                if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                    parts = [
                        o.state[w][key] for o, w in zip(hand.optimizers, hand.weights, strict=True)
                    ]
                    assert same(value, torch.stack(parts).view(weight.shape), way), key
    assert all(group["weight_decay"] == rate for group in optimizer.param_groups if name != "rprop")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["nesterov", "adam", "adamw", "rmsprop"]),
    st.lists(st.sampled_from([(), (1,), (0,), (3,), (2, 2), (1, 3, 1)]), min_size=1, max_size=4),
    st.sampled_from(["update", "frozen"]),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_masked_weights_stay_and_kept_ones_never_notice(name, shapes, masked, seed, foreach):
    """Kept components step as if there were no mask: an element's step is its own."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(shape, generator=generator) < 0.6 for shape in shapes]
    weights, free = (
        [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes] for _ in range(2)
    )
    optimizer, plain = (make(name, {"foreach": foreach}, w, 0.1) for w in (weights, free))
    for _ in range(4):
        for weight, other in zip(weights, free, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            other.grad = weight.grad.clone()
        masked_step(optimizer, dict(zip(weights, masks, strict=True)), masked=masked)
        plain.step()
    for weight, other, mask in zip(weights, free, masks, strict=True):
        assert torch.equal(weight, torch.where(mask, other, torch.ones_like(other)))


def weight_of(optimizer_kind=optim.SGD, **options):
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return weight, optimizer_kind([weight], lr=0.1, **options)


def test_the_defaults_are_a_plain_step():
    weight, optimizer = weight_of(optim.AdamW)
    other, plain = weight_of(optim.AdamW)
    masked_step(optimizer, {weight: torch.tensor([1, 0, 1])})
    plain.step()
    assert torch.equal(weight, other)


@pytest.mark.parametrize("masked", ["gradient", "update", "frozen"])
def test_no_mask_masks_nothing(masked):
    weight, optimizer = weight_of(momentum=0.9)
    masked_step(optimizer, {weight: None}, masked=masked)
    assert torch.equal(weight, torch.full((3,), 0.9))


def test_parameters_of_other_optimizers_and_without_masks_are_ignored():
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    for parameter in (first, second):
        parameter.grad = torch.ones(2)
    optimizer = optim.SGD([first, second], lr=0.5)
    keep = {first: torch.tensor([True, False]), third: torch.tensor([True, True])}
    masked_step(optimizer, keep, masked="update")
    assert first.tolist() == [0.5, 1.0]
    assert second.tolist() == [0.5, 0.5]


def test_parameters_without_a_gradient_do_not_decay():
    weight, optimizer = weight_of(weight_decay=0.5)
    weight.grad = None
    masked_step(optimizer, {weight: torch.ones(3)}, masked="update", decay="after")
    assert torch.equal(weight, torch.ones(3))


def test_groups_decay_at_their_own_rates():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 0.2}]
    optimizer = optim.SGD(groups, lr=torch.tensor(0.25), weight_decay=0.4)
    first.grad, second.grad = torch.zeros(2), torch.zeros(2)
    keep = {first: torch.zeros(2), second: torch.zeros(2)}
    masked_step(optimizer, keep, masked="frozen", decay="after")
    assert torch.allclose(first, torch.tensor(1 - 0.5 * 0.4))
    assert torch.allclose(second, torch.tensor(1 - 0.25 * 0.2))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.4, 0.2]


def test_a_mask_over_all_of_a_gradient_that_is_not_masked():
    """With `update` the averages see what the step does not do."""
    weight, optimizer = weight_of(momentum=0.5)
    masked_step(optimizer, {weight: torch.zeros(3)}, masked="update")
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.ones(3))
    masked_step(optimizer, {weight: torch.ones(3)}, masked="update")
    assert torch.allclose(weight, torch.tensor(1 - 0.1 * 1.5))


def test_a_frozen_weight_resumes_where_it_was():
    """Freezing for a while and going on equals going on, but for the count behind Adam's bias."""
    for kind, options in ((optim.SGD, {"momentum": 0.9}), (optim.RMSprop, {"momentum": 0.9})):
        (weight, optimizer), (other, plain) = (weight_of(kind, **options) for _ in range(2))
        for t in range(9):
            weight.grad = torch.full((3,), float(t))
            if 3 <= t < 6:
                masked_step(optimizer, {weight: torch.zeros(3)}, masked="frozen")
                continue
            masked_step(optimizer, {weight: torch.ones(3)}, masked="frozen")
            other.grad = weight.grad.clone()
            plain.step()
        assert torch.equal(weight, other)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masked", ["update", "frozen"])
def test_with_a_grad_scaler(fused, masked):
    weight = nn.Parameter(torch.ones(3))
    optimizer = optim.Adam([weight], lr=0.1, weight_decay=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    mask = torch.tensor([True, False, True])
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        before = weight.detach().clone()
        scaler.scale((weight * factor).sum()).backward()
        masked_step(
            optimizer,
            {weight: mask},
            masked=masked,
            decay="after",
            step=lambda: scaler.step(optimizer),
        )
        scaler.update()
        if factor == 1:
            assert torch.allclose(weight[1], before[1] * 0.95)
            assert (weight[0] < before[0] * 0.95).all()
        else:
            assert torch.equal(weight, before)
        assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_hooks_and_decay_are_put_back_after_an_error():
    class Broken(optim.SGD):
        def step(self, closure=None):
            raise KeyError("broken")

    weight, optimizer = weight_of(Broken, weight_decay=0.5)
    with pytest.raises(KeyError):
        masked_step(optimizer, {weight: torch.ones(3)}, masked="frozen", decay="none")
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_an_optimizer_whose_step_calls_that_of_its_base():
    class Louder(optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(1)

    optim.SGD([nn.Parameter(torch.ones(1))])  # its step has hooks of its own from here on
    weight, optimizer = weight_of(Louder, weight_decay=0.5)
    masked_step(optimizer, {weight: torch.tensor([1, 0, 1])}, masked="update", decay="after")
    assert torch.allclose(weight, 0.95 * torch.tensor([1.9, 1.0, 1.9]))


def test_schedulers_see_the_step():
    weight, optimizer = weight_of()
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    masked_step(optimizer, {weight: torch.ones(3)}, masked="frozen")
    scheduler.step()  # warns, and warnings are errors, if it saw no step
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_the_result_of_the_step_is_returned():
    weight, optimizer = weight_of()
    assert masked_step(optimizer, {weight: torch.ones(3)}) is None
    assert masked_step(optimizer, {weight: torch.ones(3)}, step=lambda: "done") == "done"


@pytest.mark.parametrize("masked", ["update", "frozen"])
def test_gradients_that_are_not_finite(masked):
    weight, optimizer = weight_of(momentum=0.9)
    weight.grad[1] = float("nan")
    with pytest.raises(RuntimeError, match="1 of 3 components of parameter 0 of group 0"):
        masked_step(optimizer, {weight: torch.ones(3)}, masked=masked, decay="none")
    assert torch.equal(weight, torch.ones(3))
    assert not optimizer.state


def test_optimizers_that_cannot():
    weight = nn.Parameter(torch.ones(3, 3))
    keep = {weight: torch.ones(3, 3)}
    with pytest.raises(ValueError, match="LBFGS cannot take a masked step"):
        masked_step(optim.LBFGS([weight]), keep)
    with pytest.raises(ValueError, match="SparseAdam cannot take a masked step"):
        masked_step(optim.SparseAdam([weight]), keep)
    with pytest.raises(ValueError, match="Adafactor cannot freeze"):
        masked_step(optim.Adafactor([weight]), keep, masked="frozen")
    with pytest.raises(TypeError, match="Found Parameter"):
        masked_step(weight, keep)
    with pytest.raises(ValueError, match="those of Rprop have none"):
        masked_step(optim.Rprop([weight]), keep, decay="after")


def test_adafactor_and_muon_mask_updates():
    for kind in (optim.Adafactor, optim.Muon):
        weight = nn.Parameter(torch.ones(3, 3))
        weight.grad = torch.arange(9.0).view(3, 3)
        mask = torch.eye(3)
        masked_step(kind([weight]), {weight: mask}, masked="update")
        assert (weight[mask == 0] == 1).all()
        assert (weight[mask == 1] != 1).any()


def test_state_of_another_shape_cannot_be_frozen():
    class Rows(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["rows"] = torch.ones(2)

    weight, optimizer = weight_of(Rows)
    with pytest.raises(RuntimeError, match=r"Rows keeps `rows` of shape \[2\]"):
        masked_step(optimizer, {weight: torch.ones(3)}, masked="frozen")


def peak_of(step, size):
    """Return the most bytes that were allocated at once while stepping, in floats per component."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / 4 / size


def test_memory_while_stepping():
    """What the docs say, beside the two floats that a step of Adam takes itself."""
    size = 2**20
    peaks = {}
    for masked in ("gradient", "update", "frozen"):
        weight = nn.Parameter(torch.ones(size))
        weight.grad = torch.ones(size)
        optimizer, keep = optim.Adam([weight], foreach=False), torch.arange(size) % 2
        step = partial(masked_step, optimizer, {weight: keep.bool()}, masked=masked)
        step()
        peaks[masked] = peak_of(step, size) - peak_of(optimizer.step, size)
    assert peaks["gradient"] == pytest.approx(0, abs=0.01)
    assert peaks["update"] == pytest.approx(1.25, abs=0.01)  # the quarter is the mask
    assert peaks["frozen"] == pytest.approx(3.25, abs=0.01)


class Stateful(optim.SGD):
    """Keeps what `made` gives a parameter at its first step."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p].update(self.made(p.detach()))
            p.data.sub_(0.1 * p.grad)


@pytest.mark.parametrize(
    "made",
    [
        lambda p: {"history": [p.clone(), p.clone()]},
        lambda p: {"nested": {"average": p.clone()}},
    ],
)
def test_state_in_containers_cannot_be_frozen(made):
    weight, optimizer = weight_of(Stateful)
    optimizer.made = made
    with pytest.raises(RuntimeError, match=r"Stateful keeps `\w+` of several for a parameter"):
        masked_step(optimizer, {weight: torch.ones(3)}, masked="frozen")


def test_state_that_begins_somewhere_unknown_cannot_be_frozen_on_the_first_step():
    """Slow copies of the weights, say, which would be put back to 0."""
    weight, optimizer = weight_of(Stateful)
    optimizer.made = lambda p: {"slow": p.clone(), "flags": [1, "a"], "number": torch.ones(1)}
    with pytest.raises(RuntimeError, match="Stateful made `slow` on this step"):
        masked_step(optimizer, {weight: torch.ones(3)}, masked="frozen")
    masked_step(optimizer, {weight: torch.tensor([1, 0, 1])}, masked="frozen")
    assert torch.allclose(weight, torch.tensor([0.8, 0.9, 0.8]))
    assert torch.equal(optimizer.state[weight]["slow"], torch.ones(3))


def test_a_wrapper_without_hooks():
    class Wrapper(optim.Optimizer):
        def __init__(self, wrapped):
            self.wrapped, self.param_groups = wrapped, wrapped.param_groups

        def step(self, closure=None):
            self.wrapped.step()

    weight, optimizer = weight_of(momentum=0.9)
    wrapper = Wrapper(optimizer)
    with pytest.raises(TypeError, match=r"Wrapper was not set up by `torch\.optim\.Optimizer"):
        masked_step(wrapper, {weight: torch.ones(3)}, masked="update")
    with pytest.raises(TypeError, match=r"Give the optimizer that it wraps"):
        masked_step(wrapper, {weight: torch.ones(3)}, decay="none")
    masked_step(optimizer, {weight: torch.tensor([1, 0, 1])}, masked="update", step=wrapper.step)
    assert weight.tolist() == pytest.approx([0.9, 1, 0.9])
    weight.grad.zero_()
    masked_step(wrapper, {weight: torch.zeros(3)})  # the default needs no hooks
    assert weight.tolist() == pytest.approx([0.81, 0.91, 0.81])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(dtype):
    weight, other = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
    optimizer = optim.SGD([weight, other], lr=0.1)
    weight.grad, other.grad = torch.ones_like(weight), torch.ones_like(other)
    with pytest.raises(TypeError, match=r"Masked parameters should be real.*view_as_real"):
        masked_step(optimizer, {weight: torch.ones(2)}, masked="update")
    masked_step(optimizer, {weight: None}, masked="update")
    assert torch.equal(weight, other)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("masked", ["update", "frozen"])
def test_a_compiled_step(masked):
    (weight, optimizer), (other, plain) = weight_of(optim.Adam), weight_of(optim.Adam)
    compiled = torch.compile(optimizer.step, backend="eager")
    keep = torch.tensor([1, 0, 1])
    for _ in range(3):
        masked_step(optimizer, {weight: keep}, masked=masked, step=compiled)
        masked_step(plain, {other: keep}, masked=masked)
    assert torch.allclose(weight, other)
    assert weight[1] == 1


def test_sparse_gradients():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = optim.SGD(embedding.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        masked_step(optimizer, {embedding.weight: torch.ones(5, 2)}, masked="update")


def test_closures():
    weight, optimizer = weight_of()
    with pytest.raises(ValueError, match="takes no closure"):
        masked_step(
            optimizer, {weight: torch.ones(3)}, step=lambda: optimizer.step(closure=lambda: 0.0)
        )
    with pytest.raises(ValueError, match="takes no closure"):
        masked_step(optimizer, {weight: torch.ones(3)}, step=lambda: optimizer.step(lambda: 0.0))


def test_other_parameters_other_shapes_and_other_words():
    weight, optimizer = weight_of()
    with pytest.raises(ValueError, match="It was given other parameters"):
        masked_step(optimizer, {nn.Parameter(torch.ones(3)): torch.ones(3)})
    with pytest.raises(ValueError, match=r"mask of shape \[2\] for a parameter of shape \[3\]"):
        masked_step(optimizer, {weight: torch.ones(2)})
    with pytest.raises(ValueError, match="`masked = 'all'`"):
        masked_step(optimizer, {weight: torch.ones(3)}, masked="all")
    with pytest.raises(ValueError, match="`decay = 'later'`"):
        masked_step(optimizer, {weight: torch.ones(3)}, decay="later")
    assert torch.equal(weight, torch.ones(3))
