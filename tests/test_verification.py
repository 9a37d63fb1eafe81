"""`agreement.verify`: batches of any form, what it finds, and what it leaves alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from consilience import Agreement, AndMask
from consilience.observation.errors import NotVotedOnError, ObservationError

ENV = [0, 1, 2, 0, 1, 2]
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("batch", "take"),
    [
        ((X, Y), lambda b: (b[0], b[1])),
        ([X, Y], lambda b: (b[0], b[1])),
        ({"x": X, "y": Y}, lambda b: (b["x"], b["y"])),
        ({"name": "train", "data": [X, {"y": Y}]}, lambda b: (b["data"][0], b["data"][1]["y"])),
        ((None, 3, X, Y), lambda b: (b[2], b[3])),
    ],
    ids=["tuple", "list", "dictionary", "nested", "with others"],
)
def test_batches_of_any_form(batch, take):
    model = linear()

    def compute_loss(batch):
        x, y = take(batch)
        return F.cross_entropy(model(x), y)

    Agreement(model, AndMask(0.5)).verify(compute_loss, batch, ENV)
    Agreement(model, AndMask(0.5)).verify(compute_loss, batch)  # rows as environments


def test_batch_second():
    lstm = nn.LSTM(4, 3)

    def compute_loss(batch):
        x, y = batch  # 2 steps of 6 rows; one label for each row
        return F.cross_entropy(lstm(x)[0][-1], y)

    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    Agreement(lstm, AndMask(0.5), batch_dim=1).verify(compute_loss, (x, Y), ENV)


def test_gradients_votes_and_random_numbers_are_left_alone():
    model, draws = linear(), nn.Dropout(0.0)
    agreement = Agreement(model, AndMask(1.0))
    with agreement.observe(ENV):
        F.cross_entropy(model(X), Y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    agreement.verify(lambda b: draws(model(b)).square().mean() + 0 * torch.rand(()), X, ENV)
    assert torch.equal(torch.get_rng_state(), state)
    for p, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, gradient)
    assert agreement.apply().voters == 3


def test_frozen_and_unused_parameters_are_no_difference():
    model = nn.ModuleDict({"a": linear(), "b": linear(), "c": linear()})
    model["b"].requires_grad_(False)
    Agreement(model, AndMask(1.0)).verify(lambda b: (model["a"](b) + model["b"](b)).sum(), X, ENV)


class Double(torch.autograd.Function):
    """Consumes a parameter where nothing sees it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, (gradient * x).sum(0)


def test_an_operation_that_is_not_seen_is_found():
    model = nn.ParameterDict({"w": torch.randn(4), "v": torch.randn(4)})
    agreement = Agreement(model, AndMask(1.0))
    with pytest.raises(
        NotVotedOnError, match="`w`, consumed by nothing that was seen: it has a gr"
    ):
        agreement.verify(lambda b: (Double.apply(b, model["w"]) + model["v"] * b).sum(), X, ENV)


def test_a_loss_that_couples_rows_is_found():
    model = linear()
    agreement = Agreement(model, AndMask(1.0))
    with pytest.raises(NotVotedOnError, match=r"`weight`, consumed by linear: votes differ on"):
        agreement.verify(lambda b: (model(b) - model(b).mean(0)).square().sum(), X, ENV)


def test_a_wrong_gradient_is_found():
    """The gradient of what the agreement sees, compared with that of what the loss computes."""
    model = linear()
    agreement = Agreement(model, AndMask(1.0))
    calls = []

    def inconstant(batch):
        calls.append(1)
        return model(batch).square().sum() * len(calls)

    with pytest.raises(NotVotedOnError, match="its gradient is off by"):
        agreement.verify(inconstant, X, ENV)


def test_tolerance_is_a_choice():
    """A component that is small in an environment does not count, and which is small is said."""
    model = nn.Linear(1, 1, bias=False).double()
    agreement = Agreement(model, AndMask(1.0))
    x = torch.ones(4, 1).double()

    def coupled(batch):
        return (model(batch) * (1 if len(batch) == 4 else -1)).sum()

    with pytest.raises(NotVotedOnError, match=r"votes differ on 100\.0% of its weights"):
        agreement.verify(coupled, x, [0, 0, 0, 1])
    agreement.verify(coupled, x, [0, 0, 0, 1], tolerance=1.0)


def test_words_that_an_environment_does_not_have_hide_nothing():
    """A component that is zero in one environment is still compared."""
    model = nn.Embedding(3, 2).double()
    agreement = Agreement(model, AndMask(1.0))
    words = torch.tensor([0, 0, 1])  # environments 0 and 1 have word 0, environment 2 has word 1

    def coupled(batch):
        return (model(batch) * (1 if len(batch) == 3 else -1)).sum()

    agreement.verify(lambda b: model(b).sin().sum(), words, [0, 1, 2])
    with pytest.raises(NotVotedOnError, match=r"votes differ on 33\.3% of its weights"):
        agreement.verify(coupled, words, [0, 1, 2])


def test_a_gradient_that_cancels_out_is_no_difference():
    """In single precision a sum of zero is rounded two ways; environments' parts are its scale."""
    model = nn.Sequential(linear(), nn.LayerNorm(2, elementwise_affine=False))
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(300) % 3
    Agreement(model, AndMask(1.0)).verify(lambda b: model(b)[:, 0].sum(), x, labels)


@pytest.mark.parametrize(
    ("batch", "env", "error", "message"),
    [
        (X, [0, 1], ValueError, r"`len\(env\) = 2` and 6 rows"),
        (3.0, ENV, TypeError, "`batch` should be a tensor, or tensors in"),
        ([], ENV, ValueError, "`batch` should hold a tensor with rows"),
    ],
)
def test_what_is_no_batch(batch, env, error, message):
    with pytest.raises(error, match=message):
        Agreement(linear(), AndMask(1.0)).verify(lambda b: b.sum(), batch, env)


def test_where_it_cannot_be_called():
    model = linear()
    joint = Agreement(model, AndMask(1.0), batchnorm="joint")
    with pytest.raises(ValueError, match='should not be "joint" to verify'):
        joint.verify(lambda b: model(b).sum(), X, ENV)
    agreement = Agreement(model, AndMask(1.0))
    with pytest.raises(ObservationError, match="inside of an observation"), agreement.observe(ENV):
        agreement.verify(lambda b: model(b).sum(), X, ENV)
