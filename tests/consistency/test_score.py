"""The score as a number, and what it refuses."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from consilience.consistency import inconsistency, quadratic_inconsistency


def square(point):
    return point.square().sum()


def steep(point):
    return 3 * point.square().sum()


LOSSES = [square, steep]
ZERO = torch.zeros(2)


def test_it_reads_as_a_number():
    score = inconsistency(LOSSES, ZERO.double(), epsilon=0.5)
    assert isinstance(score, float)
    assert score == pytest.approx(1.5)
    assert float(str(score)) == score
    assert f"{score:.2f}" == "1.50"
    assert type(score + 1) is float
    assert max(score, 1.0) is score
    assert repr(score) == (
        "Inconsistency(1.5, method='quadratic', epsilon=0.5, pair=(0, 1), "
        "meaning='exact for the quadratic model from whole Hessians')"
    )
    for twin in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):  # noqa: S301
        assert twin == score
        assert torch.equal(twin.matrix, score.matrix)


def test_any_shape_of_tensor():
    center = torch.tensor([[1.0], [2.0]])
    losses = [lambda p: (p - center).square().sum(), lambda p: 3 * (p - center).square().sum()]
    for method in ("quadratic", "grid", "search"):
        score = inconsistency(losses, center, epsilon=0.5, method=method)
        assert float(score) == pytest.approx(1.5, rel=2e-2)
        assert score.witness.parameters.shape == (2, 1)
        assert not center.requires_grad


@pytest.mark.parametrize("method", ["quadratic", "grid", "search"])
@pytest.mark.parametrize(
    ("start", "losses"),
    [
        (torch.tensor([0.3, 0.0]), LOSSES),
        (ZERO, [lambda p: -p.square().sum()] * 2),  # a maximum
        (ZERO, [lambda p: p[0] ** 2 - p[1] ** 2] * 2),  # a saddle
        (ZERO, [lambda p: p.square().sum() + 0.1 * p[0], square]),
    ],
)
def test_what_is_no_minimum_is_refused_with_its_distance(method, start, losses):
    with pytest.raises(ValueError, match=r"minimum of the mean loss.*falls from .* to .* distance"):
        inconsistency(losses, start, epsilon=0.01, method=method)


def test_how_far_is_told():
    message = r"falls from 0.18 to [0-9e.-]+ or below, at a distance of 0.3 .*norm is 1.2\)"
    with pytest.raises(ValueError, match=message):
        inconsistency(LOSSES, torch.tensor([0.3, 0.0]), epsilon=0.01)


def test_the_tolerance_lets_it_pass():
    near = torch.tensor([0.03, 0.0])
    with pytest.raises(ValueError, match="minimum of the mean loss"):
        inconsistency(LOSSES, near, epsilon=0.1, method="search")
    for tolerance in (0.05, math.inf):
        assert inconsistency(LOSSES, near, epsilon=0.1, method="search", tolerance=tolerance) > 0.3


def test_a_minimum_behind_a_ridge_is_none_of_its_business():
    """There is a deeper well elsewhere, and no way down to it."""

    def wells(point):
        return torch.minimum(point.square().sum(), (point - 3).square().sum() - 1)

    assert inconsistency([wells, wells], ZERO, epsilon=0.01, method="search") < 0.0101


def test_quadratic_asks_for_a_minimum_that_all_share():
    """The mean loss has its minimum at zero, where neither environment has one."""
    losses = [lambda p: (p - 1).square().sum(), lambda p: (p + 1).square().sum()]
    message = r"minimum that all environments share.*environment 0 has its minimum 2 lower"
    with pytest.raises(ValueError, match=message):
        inconsistency(losses, ZERO, epsilon=0.1)
    assert inconsistency(losses, ZERO, epsilon=0.1, method="search") > 0.1


def test_quadratic_refuses_a_hessian_that_is_not_semidefinite():
    losses = [lambda p: p[0] ** 2 - 0.5 * p[1] ** 2, lambda p: 9 * p.square().sum()]
    with pytest.raises(ValueError, match=r"semidefinite.*-1 in environment 0.*search"):
        inconsistency(losses, ZERO, epsilon=0.1)
    message = r"positive definite.*-0.\d+ in environment 0. Raise `damping` above 1"
    with pytest.raises(ValueError, match=message):
        inconsistency(losses, torch.zeros(2), epsilon=0.1, dense=False, damping=0.1)
    with pytest.raises(ValueError, match=r"semidefinite.*-0.5 in environment 1"):
        quadratic_inconsistency(torch.tensor([[1.0], [-0.5]]), 0.1)


@pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, math.inf])
def test_epsilon(epsilon):
    with pytest.raises(ValueError, match=r"`epsilon` should be positive"):
        inconsistency(LOSSES, ZERO, epsilon=epsilon)
    with pytest.raises(ValueError, match=r"`epsilon` should be positive"):
        quadratic_inconsistency(torch.ones(2, 1), epsilon)


@pytest.mark.parametrize(
    ("losses", "error", "message"),
    [
        ([], TypeError, "callables of the parameters, one per environment"),
        ([square, 3.0], TypeError, "callables of the parameters"),
        ([square], ValueError, "two environments or more"),
        ([square, lambda p: p], TypeError, r"one number.*\[2\] from that of environment 1"),
        ([square, lambda p: 1.0], TypeError, "one number.*float from that of environment 1"),
        ([square, lambda p: square(p) / 0], ValueError, "finite.*nan in environment 1"),
        ([lambda p: square(p) + math.inf, square], ValueError, "finite.*inf in environment 0"),
        ([square, lambda p: square(p) + torch.rand(())], ValueError, "same number each time"),
    ],
)
@pytest.mark.parametrize("method", ["quadratic", "grid", "search"])
def test_bad_losses(method, losses, error, message):
    with pytest.raises(error, match=message):
        inconsistency(losses, ZERO, epsilon=0.1, method=method)


@pytest.mark.parametrize("method", ["quadratic", "search"])
@pytest.mark.parametrize(
    "loss", [lambda p: square(p.detach()), lambda p: torch.tensor(square(p).item())]
)
def test_a_loss_without_a_gradient_is_refused(method, loss):
    """It would pass for one that nothing changes, and the score be nonsense."""
    with pytest.raises(ValueError, match=r"differentiable.*environment 1.*another copy"):
        inconsistency([square, loss], ZERO, epsilon=0.1, method=method)
    assert inconsistency([square, loss], ZERO, epsilon=0.1, method="grid") > 0.09


def test_losses_as_a_function_and_pairs_that_are_none():
    with pytest.raises(TypeError, match="callables of the parameters, one per environment"):
        inconsistency(square, ZERO, epsilon=0.1)
    for pairs in ([], [0, 1], [(0, 2)], [(0.5, 1)], [(-1, 0)]):
        with pytest.raises(ValueError, match=r"`pairs` should be pairs \(e, e'\)"):
            inconsistency(LOSSES, ZERO, epsilon=0.1, pairs=pairs)


@pytest.mark.parametrize(
    "options",
    [
        {"damping": -1.0},
        {"curvature": "fisher"},
        {"method": "search", "starts": 1.5},
        {"method": "search", "radius": 0.0},
        {"method": "grid", "width": [1.0, 2.0, 3.0]},
        {"method": "grid", "width": -1.0},
        {"method": "grid", "points": 4},
    ],
)
def test_options_are_checked_before_any_descent(options):
    calls = []

    def counted(p):
        calls.append(0)
        return square(p)

    with pytest.raises(ValueError, match="should be"):
        inconsistency([counted, counted], ZERO + 1, epsilon=0.1, **options)
    assert len(calls) <= 4  # each loss twice: is it a number, and the same one each time


def test_dropout_belongs_in_eval_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1))
    losses = [lambda m: m(torch.ones(3, 50)).square().mean()] * 2
    with pytest.raises(ValueError, match=r"same number each time.*eval mode"):
        inconsistency(losses, model, epsilon=0.1)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "tensor, a module or a mapping.*list"),
        (torch.zeros(2, dtype=torch.int64), TypeError, "floating point.*int64"),
        (torch.tensor([0.0, math.nan]), ValueError, "finite.*`parameters`"),
        ({"w": torch.tensor([math.inf])}, ValueError, "finite.*`w`"),
        (torch.zeros(0), ValueError, "at least one number"),
        (nn.Flatten(), ValueError, "at least one number that can vary"),
    ],
)
def test_bad_parameters(parameters, error, message):
    with pytest.raises(error, match=message):
        inconsistency(LOSSES, parameters, epsilon=0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "magic"}, ValueError, "`method` should be one of 'quadratic'.*'magic'"),
        ({"against": "nothing"}, ValueError, "`against` should be 'minimum' or 'point'"),
        ({"tolerance": -1}, ValueError, "`tolerance` should be 0 or more"),
        ({"tolerance": math.nan}, ValueError, "`tolerance` should be 0 or more"),
        ({"pairs": [(0, 2)]}, ValueError, "environments from 0 to 1"),
        ({"pairs": []}, ValueError, "environments from 0 to 1"),
        ({"starts": 3}, TypeError, "takes the options curvature, damping.*Found starts"),
        ({"damping": -1.0}, ValueError, "`damping` should be 0 or more"),
        ({"curvature": "fisher"}, ValueError, "`curvature` should be 'hessian' or"),
        ({"dense": False}, ValueError, "`damping` should be positive for 2 parameters"),
        ({"method": "grid", "points": 4}, ValueError, "`points` should be 5 or more"),
        ({"method": "grid", "width": 0}, ValueError, "`width` should be positive"),
        ({"method": "grid", "points": 10**6}, MemoryError, r"1000000\^2 nodes.*points="),
        (
            {"method": "search", "starts": 0},
            ValueError,
            "`starts` should be a whole number, 1 or more",
        ),
        (
            {"method": "search", "checks": 0},
            ValueError,
            "`checks` should be a whole number, 1 or more",
        ),
        ({"method": "search", "radius": 0}, ValueError, "`radius` should be positive"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        inconsistency(LOSSES, ZERO, epsilon=0.1, **options)


def test_a_grid_of_many_parameters_is_refused():
    with pytest.raises(ValueError, match=r"up to 3 parameters. Found 4.*search"):
        inconsistency(LOSSES, torch.zeros(4), epsilon=0.1, method="grid")


def test_a_grid_too_large_is_refused_before_any_work():
    calls = 0

    def counted(point):
        nonlocal calls
        calls += 1
        return point.square().sum()

    with pytest.raises(MemoryError, match="points=111` or fewer"):
        inconsistency([counted, counted], ZERO, epsilon=0.1, method="grid", points=1000, memory=1e6)
    assert calls == 0


def test_nan_within_the_region_is_refused():
    def holed(point):
        return point.square().sum() + torch.where(point[0] > 0.2, math.nan, 0.0)

    with pytest.raises(ValueError, match=r"NaN in environment 1 within the region.*environment 0"):
        inconsistency([square, holed], ZERO, epsilon=0.1, method="grid", points=51)
    # What lies behind NaN in an environment's own loss is not connected with theta*.
    own = inconsistency([holed, square], ZERO, epsilon=0.1, method="grid", pairs=[(0, 1)])
    assert 0 < float(own) <= 0.1


def test_values_that_differ_in_number_from_hessians():
    with pytest.raises(ValueError, match=r"one loss per environment. Found 3 values and 2 Hess"):
        quadratic_inconsistency(torch.ones(2, 1), 0.1, values=[0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="`damping` should be 0 or more"):
        quadratic_inconsistency(torch.ones(2, 1), 0.1, damping=-1)


def test_progress_is_written_to_standard_error(capsys):
    inconsistency(LOSSES, ZERO, epsilon=0.1, method="search", starts=1, steps=2, progress=True)
    written = capsys.readouterr()
    assert "climbs 4/4" in written.err
    assert written.out == ""


def test_without_scipy_the_error_names_the_extra():
    code = """
import sys
sys.modules["scipy"] = None
import torch
from consilience.consistency import inconsistency
losses = [lambda p: p.square().sum()] * 2
print(f"{inconsistency(losses, torch.zeros(2), epsilon=0.5):.3f}")
try:
    inconsistency(losses, torch.zeros(2), epsilon=0.5, method="grid")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    number, message = done.stdout.splitlines()
    assert number == "0.500"
    assert "pip install 'consilience[consistency]'" in message
