"""Losses of modules, data and loaders: values, gradients and curvature against autograd."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import hessian as hessian_of
from torch.utils.data import DataLoader, TensorDataset

from consilience.consistency import check_witness, environment_losses, inconsistency
from consilience.consistency._landscape import Landscape


def network(seed=0, **options):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(
        dtype=torch.float64, **options
    )


def data(seed, rows=12):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 2, (rows,), generator=generator)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def explicit(model, inputs, targets):
    """The loss as a function of a flat vector, by hand."""

    def loss(point):
        weights = [p.view(s) for p, s in zip(point.split([15, 5, 10, 2]), shapes, strict=True)]
        hidden = torch.tanh(inputs @ weights[0].T + weights[1])
        return F.cross_entropy(hidden @ weights[2].T + weights[3], targets)

    shapes = [p.shape for p in model.parameters()]
    return loss


@pytest.mark.parametrize("kind", ["callable", "pair", "loader", "batches", "mapping"])
def test_values_gradients_and_curvature_are_autograds(kind):
    model, (inputs, targets) = network(), data(1)
    parameters = model
    if kind == "callable":
        losses = [lambda m: F.cross_entropy(m(inputs), targets)]
    elif kind == "mapping":
        parameters = dict(model.named_parameters())
        losses = [
            lambda p: F.cross_entropy(torch.func.functional_call(model, p, (inputs,)), targets)
        ]
    else:
        batches = {
            "pair": (inputs, targets),
            "loader": DataLoader(TensorDataset(inputs, targets), batch_size=5),
            "batches": [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])],
        }
        losses = environment_losses(F.cross_entropy, [batches[kind]])
    landscape = Landscape(losses, parameters)
    expected = explicit(model, inputs, targets)
    torch.testing.assert_close(landscape.origin, flat(model))
    point = flat(model) + 0.1
    vector = torch.randn(32, dtype=torch.float64)
    value, gradient = landscape.value_and_gradient(0, point)
    assert value == pytest.approx(expected(point).item(), rel=1e-12)
    assert landscape.value(0, point) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(gradient, torch.func.grad(expected)(point))
    hessian = hessian_of(expected, point)
    torch.testing.assert_close(landscape.hessian_product(0, point, vector), hessian @ vector)
    points = torch.stack([point, point + 1, point - 1])
    torch.testing.assert_close(
        landscape.values(0, points), torch.stack([expected(p) for p in points])
    )


@pytest.mark.parametrize("criterion", [F.cross_entropy, None])
def test_gauss_newton_is_the_jacobians_product(criterion):
    model, (inputs, targets) = network(), data(1)
    if criterion is None:
        criterion, targets = F.mse_loss, torch.randn(12, 2, dtype=torch.float64)
    batches = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    landscape = Landscape(environment_losses(criterion, [batches]), model)
    point = flat(model)

    def outputs(point):
        return torch.func.functional_call(model, landscape.unflatten(point), (inputs,)).reshape(-1)

    jacobian = torch.func.jacrev(outputs)(point)
    top = hessian_of(lambda out: criterion(out.view(12, 2), targets), outputs(point))
    expected = jacobian.T @ top @ jacobian
    vector = torch.randn(32, dtype=torch.float64)
    torch.testing.assert_close(landscape.gauss_newton_product(0, point, vector), expected @ vector)


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("against", ["minimum", "point"])
def test_matrix_free_is_dense(curvature, against):
    model = network()
    losses = environment_losses(F.cross_entropy, [data(1), data(2)])
    options = {"method": "quadratic", "epsilon": 0.01, "tolerance": math.inf, "damping": 0.5}
    options |= {"curvature": curvature, "against": against}
    dense = inconsistency(losses, model, **options)
    free = inconsistency(losses, model, dense=False, precision=1e-8, **options)
    torch.testing.assert_close(free.matrix, dense.matrix, rtol=1e-6, atol=1e-9)
    assert "matrix-free" in free.meaning
    assert "whole" in dense.meaning


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("against", ["minimum", "point"])
def test_rows_are_dense(dtype, against):
    """Beyond 256 parameters Gauss-Newton matrices of few rows are held as rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 2)).to(dtype)
    batches = [[(x[:5].to(dtype), y[:5]), (x[5:].to(dtype), y[5:])] for x, y in map(data, (1, 2))]
    losses = environment_losses(F.cross_entropy, batches)
    options = {"method": "quadratic", "epsilon": 0.01, "tolerance": math.inf, "damping": 0.01}
    options |= {"curvature": "gauss-newton", "against": against}
    whole = inconsistency(losses, model, dense=True, **options)
    rows = inconsistency(losses, model, **options)
    assert "whole" in whole.meaning
    assert "rows" in rows.meaning
    exact = dtype is torch.float64
    torch.testing.assert_close(rows.matrix, whole.matrix, rtol=1e-9 if exact else 1e-4, atol=1e-6)
    # The witness's step reaches the border of the region in the damped quadratic model.
    landscape, step = Landscape(losses, model), rows.witness.path[1] - rows.witness.path[0]
    e, other = rows.witness.pair
    inner, outer = (
        float(step @ landscape.gauss_newton_product(i, landscape.origin, step) + 0.01 * step @ step)
        for i in (e, other)
    )
    assert inner / 2 == pytest.approx(0.01, rel=1e-3)
    if against == "minimum":
        heights = [landscape.value(i, landscape.origin) for i in (e, other)]
        assert heights[1] - heights[0] + outer / 2 == pytest.approx(float(rows), rel=1e-3)


def test_rows_of_one_environment_alone():
    """Without curvature a pair's eigenvalue is 1; a criterion that is not convex is refused."""
    model = nn.Linear(300, 1).double()
    x = torch.randn(3, 300, dtype=torch.float64)
    flat, curved = (
        (torch.zeros_like(x), torch.zeros(3, 1).double()),
        (x, torch.zeros(3, 1).double()),
    )
    model.bias.requires_grad_(False)
    options = {"epsilon": 0.1, "curvature": "gauss-newton", "damping": 1.0, "tolerance": math.inf}
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    losses = environment_losses(F.mse_loss, [flat, curved])
    score = inconsistency(losses, model, **options)
    torch.testing.assert_close(
        score.matrix, inconsistency(losses, model, dense=True, **options).matrix
    )
    assert score.matrix[1, 0] == pytest.approx(0.1)
    linear = environment_losses(lambda out, _: out.sum(), [flat, curved])
    assert not Landscape(linear, model).gauss_newton_rows(1, torch.ones(300).double()).any()
    assert not Landscape(linear, model).gauss_newton_product(1, *torch.ones(2, 300).double()).any()
    losses = environment_losses(lambda out, _: -out.square().mean(), [flat, curved])
    with pytest.raises(ValueError, match=r"convex in the model's output.*environment 0.*'hessian'"):
        inconsistency(losses, model, **options)


def test_nothing_of_the_module_changes():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model[0].weight.requires_grad_(False)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    losses = environment_losses(F.cross_entropy, [data(1), data(2)])
    identities = [id(p) for p in model.parameters()]
    score = inconsistency(
        losses, model, epsilon=0.1, method="search", tolerance=math.inf, starts=1, steps=5, radius=1
    )
    inconsistency(losses, model, epsilon=0.1, tolerance=math.inf, damping=1.0)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert identities == [id(p) for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(generator, torch.get_rng_state())
    # What is frozen does not vary, and a witness loads into the module.
    assert "0.weight" not in score.witness.parameters
    missing, unexpected = model.load_state_dict(score.witness.parameters, strict=False)
    assert not unexpected
    assert "0.weight" in missing
    assert losses[score.pair[1]](model).item() != pytest.approx(
        before["1.num_batches_tracked"].item()
    )


def test_the_witness_of_a_module_can_be_checked():
    model = network()
    losses = environment_losses(F.cross_entropy, [data(1), data(2)])
    score = inconsistency(
        losses, model, epsilon=0.1, method="search", tolerance=math.inf, starts=2, radius=3.0
    )
    check = check_witness(losses, model, score)
    assert check.holds
    e, other = score.pair
    base = losses[e](model).item()
    moved = copy.deepcopy(model)
    moved.load_state_dict(score.witness.parameters, strict=False)
    assert abs(losses[e](moved).item() - base) <= 0.1
    assert losses[other](moved).item() - base == pytest.approx(float(score), rel=1e-9)
    assert float(score) > 0.2
    with pytest.raises(ValueError, match="another point than the witness starts from"):
        check_witness(losses, moved, score)


def test_inputs_of_several_tensors():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, left, right):
            return self.weight * (left + right)

    one, two = torch.ones(4), torch.full((4,), 2.0)
    target = torch.full((4,), 3.0)
    losses = environment_losses(
        F.mse_loss, [((one, two), target), [({"left": one, "right": one}, target)]]
    )
    model = Two()
    assert [loss(model).item() for loss in losses] == [0.0, 1.0]
    assert repr(losses[0]) == "EnvironmentLoss(mse_loss, 4 rows)"


def test_a_tied_weight_moves_in_both_places():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    target = torch.eye(2)
    landscape = Landscape(environment_losses(F.mse_loss, [(torch.eye(2), target)]), model)
    assert landscape.size == 4
    assert landscape.value(0, torch.eye(2).reshape(-1)) == 0.0


def test_losses_that_cannot_be_vectorized_are_taken_one_by_one():
    def loss(point):
        return point.square().sum() * (2.0 if point[0].item() > 0 else 1.0)

    points = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    assert Landscape([loss], torch.zeros(2)).values(0, points).tolist() == [4.0, 2.0]


def test_half_precision_and_mixed_types():
    model = network().half()
    model[2].float()
    landscape = Landscape([lambda m: m[0].weight.float().sum() + m[2].weight.sum()], model)
    assert landscape.origin.dtype == torch.float32
    named = landscape.unflatten(landscape.origin)
    assert named["0.weight"].dtype == torch.float16
    assert torch.equal(named["2.bias"], model[2].bias)


@pytest.mark.parametrize(
    ("environments", "error", "message"),
    [
        (
            [(torch.ones(2), torch.ones(2), torch.ones(2))],
            ValueError,
            "tuple of 3 as environment 0",
        ),
        ([iter([(torch.ones(2), torch.ones(2))])], TypeError, "again and again.*environment 0"),
        ([3], TypeError, "Found int as environment 0"),
        ([[]], ValueError, "should hold rows"),
    ],
)
def test_bad_environments(environments, error, message):
    with pytest.raises(error, match=message):
        environment_losses(F.mse_loss, environments)


def test_a_saturated_softmax_has_rounding_and_no_negative_curvature():
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    x = 30 * torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.weight[1] -= 2
    losses = environment_losses(F.cross_entropy, [(x, model(x).argmax(1))] * 2)
    rows = Landscape(losses, model).gauss_newton_rows(0, flat(model))
    assert rows.isfinite().all()


def test_what_is_no_mean_and_what_is_no_module():
    batches = [data(1), data(2)]
    for reduction in ("sum", "none"):
        with pytest.raises(ValueError, match=f"mean over rows.*'{reduction}'"):
            environment_losses(nn.CrossEntropyLoss(reduction=reduction), batches)
    with pytest.raises(ValueError, match="an entry or more"):
        environment_losses(F.cross_entropy, [])
    losses = environment_losses(nn.CrossEntropyLoss(), {"a": batches[0], "b": batches[1]})
    assert [loss.rows for loss in losses] == [12, 12]
    with pytest.raises(TypeError, match=r"functions of a module.*`Tensor`"):
        inconsistency(losses, torch.zeros(3), epsilon=0.1)


def test_gauss_newton_asks_for_the_models_output():
    losses = [lambda p: p.square().sum()] * 2
    with pytest.raises(TypeError, match="environment_losses"):
        inconsistency(losses, torch.zeros(2), epsilon=0.1, curvature="gauss-newton")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    model = network().cuda()
    losses = environment_losses(F.cross_entropy, [data(1), data(2)])
    for method, options in [("quadratic", {"damping": 1.0}), ("search", {"starts": 1})]:
        score = inconsistency(
            losses, model, epsilon=0.1, method=method, tolerance=math.inf, **options
        )
        assert float(score) > 0.1
