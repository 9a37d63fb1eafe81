"""What holds for every rule. A new rule joins `RULES`."""

import copy
import inspect
import pickle
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience
from consilience import rules
from consilience.rules import (
    AndMask,
    GeometricMean,
    MajoritySign,
    Mean,
    Rule,
    SandMask,
    SoftMask,
    Statistic,
    Tally,
    XorMask,
)
from rules.samplers import all_patterns, stacks

RULES = [
    Mean(),
    AndMask(0.6),
    AndMask(1.0, rescale="count"),
    AndMask(0.4, rescale="count", max_rescale=3.0),
    AndMask(0.4, rescale="norm"),
    GeometricMean(0.6),
    GeometricMean(0.3, rescale="count"),
    GeometricMean(0.3, rescale="norm", max_rescale=2.0),
    XorMask(0.6),
    SoftMask(0.6),
    MajoritySign(),
    SandMask(0.4),
    SandMask(0.4, sharpness=3.0),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)
with_threshold = pytest.mark.parametrize(
    "make", [AndMask, GeometricMean, XorMask, SoftMask, SandMask]
)


def some_stack(*, environments=9, shape=(40, 11), dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(environments, *shape, generator=random, dtype=torch.float64)
    return (noise + torch.linspace(-2, 2, shape[-1], dtype=torch.float64)).to(dtype)


def test_every_public_rule_is_tested_here():
    public = {getattr(rules, name) for name in rules.__all__}
    public = {found for found in public if inspect.isclass(found) and issubclass(found, Rule)}
    assert public - {Rule} == {type(rule) for rule in RULES}


def test_every_rule_is_exported_at_the_top():
    for name in rules.__all__:
        assert getattr(consilience, name) is getattr(rules, name)
        assert name in consilience.__all__


@every_rule
def test_repr_reads_as_the_constructor_call(rule):
    again = eval(repr(rule), vars(rules))  # noqa: S307
    assert type(again) is type(rule)
    assert vars(again) == vars(rule)


@every_rule
def test_survives_copies(rule):
    for again in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):  # noqa: S301
        assert repr(again) == repr(rule)


@every_rule
def test_reads_what_it_declares_and_changes_nothing(rule):
    stack = some_stack()
    tally = Tally.of(stack, rule.statistics)
    before = copy.deepcopy(tally)
    rule(tally)
    rule.keep(tally)
    for field in fields(Tally):
        found, expected = getattr(tally, field.name), getattr(before, field.name)
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, expected), field.name
        else:
            assert found == expected


@every_rule
def test_asks_for_nothing_it_does_not_need(rule):
    stack = some_stack()
    for statistic in rule.statistics:
        with pytest.raises(ValueError, match=f"`Statistic.{statistic.name}`"):
            rule(Tally.of(stack, rule.statistics - {statistic}))


@every_rule
@settings(max_examples=25, deadline=None)
@given(stack=stacks(), seed=st.integers(0, 1000))
def test_knows_no_order_and_no_direction(rule, stack, seed):
    gradients = torch.as_tensor(stack)
    result = rule.combine(gradients)
    assert result.shape == gradients.shape[1:]
    order = torch.randperm(len(gradients), generator=torch.Generator().manual_seed(seed))
    noise = 1e-13 * float(gradients.abs().amax()) if gradients.numel() else 0.0
    torch.testing.assert_close(rule.combine(gradients[order]), result, rtol=1e-9, atol=noise)
    torch.testing.assert_close(rule.combine(-gradients), -result, rtol=1e-12, atol=0.0)


@every_rule
@settings(max_examples=25, deadline=None)
@given(stack=stacks())
def test_follows_the_scale_of_the_loss(rule, stack):
    gradients = torch.as_tensor(stack)
    result, scaled = rule.combine(gradients), rule.combine(1024 * gradients)
    if isinstance(rule, MajoritySign):
        assert torch.equal(scaled, result)
    elif isinstance(rule, GeometricMean):
        # The floor inside the logarithm has a scale of its own: it shows where a share is small.
        if bool((gradients.abs() / len(gradients) > 1e-6).all()):
            torch.testing.assert_close(scaled, 1024 * result, rtol=1e-3, atol=0.0)
    else:
        torch.testing.assert_close(scaled, 1024 * result, rtol=1e-12, atol=0.0)


@every_rule
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_sight_and_does_not_spread(rule, bad):
    stack = some_stack()
    stack[4, 3, :] = bad  # one row of components, from agreement to disagreement
    result = rule.combine(stack)
    assert not result[3].isfinite().any()
    others = torch.ones(len(result), dtype=torch.bool)
    others[3] = False
    assert result[others].isfinite().all()


@every_rule
def test_gradient_overflow_that_no_vote_shows(rule):
    """The gradient may be infinite where votes and logs are not: its scale, or unknown rows."""
    tally = Tally.of(some_stack(), rule.statistics)
    tally.gradient[5, :] = float("inf")
    assert not rule(tally)[5].isfinite().any()


@pytest.mark.parametrize("rule", [AndMask(0.6), AndMask(0.6, rescale="norm"), XorMask(0.6)])
def test_masks_leave_infinities_as_they_are(rule):
    tally = Tally.of(some_stack(), rule.statistics)
    tally.gradient[5, :] = float("inf")
    tally.gradient[6, :] = -float("inf")
    result = rule(tally)
    assert torch.equal(result[5:7], tally.gradient[5:7])


@every_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_keeps_the_dtype_and_counts_in_single_precision(rule, dtype):
    stack = some_stack(dtype=dtype).float()
    # As the engine has it: a gradient of the parameter's dtype, statistics of at least float32.
    tally = Tally.of(stack, rule.statistics)
    single = rule(tally)
    half = rule(Tally(**{**vars(tally), "gradient": tally.gradient.to(dtype)}))
    assert half.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(half.float(), single, rtol=tolerance, atol=tolerance)


@every_rule
@pytest.mark.parametrize("environments", [257, 2049, 5000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_combines_many_environments_in_half_precision(rule, environments, dtype):
    """Half precision cannot count them, and a share of a small gradient is nothing in it."""
    gradients = torch.ones(environments, 3, dtype=dtype)
    gradients[:, 1] = 1e-6
    gradients[0, 2] = -1.0
    half, single = rule.combine(gradients), rule.combine(gradients.float())
    assert half.dtype == dtype
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(
        half.float(), single, rtol=2 * torch.finfo(dtype).eps, atol=float(tiny)
    )


@every_rule
def test_any_memory_format(rule):
    stack = some_stack(shape=(4, 6, 3, 5))
    expected = rule.combine(stack)
    tally = Tally.of(stack, rule.statistics)
    gradient = tally.gradient.contiguous(memory_format=torch.channels_last)
    assert torch.allclose(rule(Tally(**{**vars(tally), "gradient": gradient})), expected)
    strided = torch.stack([stack, stack], -1)[..., 0]
    assert torch.allclose(rule.combine(strided), expected)


@every_rule
def test_never_waits_for_the_device(rule):
    """A tensor on the meta device has no values: whoever reads one fails."""
    tally = Tally.of(torch.empty(5, 3, 4, device="meta"), rule.statistics)
    assert rule(tally).shape == (3, 4)
    keep = rule.keep(tally)
    assert keep is None or keep.shape == (3, 4)


@every_rule
@pytest.mark.parametrize("environments", [1, 2, 3, 4, 5, 8, 10])
def test_chance_is_the_mean_of_keep_over_all_patterns_of_signs(rule, environments):
    tally = Tally.of(all_patterns(environments), rule.statistics)
    keep, rate = rule.keep(tally), rule.null_keep_rate(environments)
    if isinstance(rule, Mean):
        assert keep is None
        assert rate == 1.0
    elif isinstance(rule, SandMask):
        assert rate is None
    else:
        assert rate == pytest.approx(keep.mean().item(), abs=1e-12)


@every_rule
@settings(max_examples=25, deadline=None)
@given(stack=stacks())
def test_keep_says_what_is_kept(rule, stack):
    gradients = torch.as_tensor(stack)
    tally = Tally.of(gradients, rule.statistics)
    keep = rule.keep(tally)
    if keep is None:
        return
    assert ((keep >= 0) & (keep <= 1)).all()
    assert keep.shape == gradients.shape[1:]
    result = rule(tally)
    if not isinstance(rule, MajoritySign):
        assert torch.equal(result != 0, (keep > 0) & (tally.gradient != 0))


@every_rule
def test_no_voters_is_no_error(rule):
    """Where all rows are of unknown environment nobody votes."""
    nothing = {statistic.value: torch.zeros(3) for statistic in rule.statistics}
    tally = Tally(torch.tensor([1.0, -2.0, 0.0]), voters=0, **nothing)
    assert rule(tally).isfinite().all()
    keep = rule.keep(tally)
    if keep is not None and (rate := rule.null_keep_rate(0)) is not None:
        assert keep.mean() == rate


@with_threshold
@pytest.mark.parametrize("threshold", [1.5, -0.1, float("nan"), float("-inf")])
def test_threshold_out_of_range(make, threshold):
    message = r"Parameter `threshold` should lie in \[0, 1\]. Found `threshold = "
    with pytest.raises(ValueError, match=message):
        make(threshold)


@with_threshold
@pytest.mark.parametrize("threshold", ["0.8", None, [0.8], 1j, True, torch.tensor(0.8)])
def test_threshold_is_no_number(make, threshold):
    with pytest.raises(TypeError, match=r"`threshold` should be a number in \[0, 1\]. Found"):
        make(threshold)


@with_threshold
@pytest.mark.parametrize("threshold", [0, 1, 0.25, torch.tensor(0.25).item()])
def test_threshold_in_range(make, threshold):
    assert make(threshold).threshold == float(threshold)


@pytest.mark.parametrize("sharpness", [0.0, -1.0, float("nan"), float("inf"), "1"])
def test_sharpness_out_of_range(sharpness):
    with pytest.raises(ValueError, match=r"`sharpness` should be positive and finite\. Found"):
        SandMask(0.5, sharpness)


@settings(max_examples=25, deadline=None)
@given(stack=stacks(), threshold=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_and_and_xor_share_the_gradient(stack, threshold):
    gradients = torch.as_tensor(stack)
    both = AndMask(threshold).combine(gradients) + XorMask(threshold).combine(gradients)
    assert torch.equal(both, Mean().combine(gradients))


@settings(max_examples=25, deadline=None)
@given(stack=stacks())
@pytest.mark.parametrize("rule", [AndMask(0), SoftMask(0)], ids=repr)
def test_threshold_zero_is_the_mean(rule, stack):
    gradients = torch.as_tensor(stack)
    assert torch.equal(rule.combine(gradients), Mean().combine(gradients))


def test_sand_mask_at_its_threshold_is_shut():
    """Environments all alike have variance 0; at the threshold, 0 / 0 is not full agreement."""
    assert SandMask(1.0).combine(torch.ones(7, 1)).item() == 0.0
    for agree in (6, 7, 8, 9):
        signs = torch.ones(10, 1)
        signs[agree:] = 0.0
        assert SandMask(agree / 10).combine(signs).item() == 0.0
        assert SandMask((agree - 1) / 10, sharpness=100).combine(signs).item() > 0.0


def test_sand_mask_survives_squares_that_vanish():
    tiny = torch.full((4, 1), 1e-30)
    assert SandMask(0.5).combine(tiny).isfinite().all()


@pytest.mark.parametrize("bad", [torch.tensor(1.0), torch.empty(0, 3)])
def test_combine_needs_environments(bad):
    with pytest.raises(ValueError, match=r"`gradients` should be stacked as \[environments, ...\]"):
        Mean().combine(bad)


@pytest.mark.parametrize("bad", [[[1.0], [2.0]], torch.ones(2, 3, dtype=torch.complex64), None])
def test_combine_needs_a_tensor_of_real_numbers(bad):
    with pytest.raises(TypeError, match="`gradients` should be a tensor of real numbers"):
        Mean().combine(bad)


def test_a_rule_of_ones_own_needs_only_a_call():
    class Doubled(Rule):
        statistics = frozenset()

        def __call__(self, tally):
            return 2 * tally.gradient

    rule = Doubled()
    assert repr(rule) == "Doubled()"
    assert rule.null_keep_rate(3) is None
    assert rule.combine(torch.ones(3, 1)).item() == 2.0
    assert Statistic.VOTES in Rule.statistics


@pytest.mark.parametrize("wrong", [{"votes"}, ["votes"], "votes", {Statistic}])
def test_a_rule_that_asks_for_what_is_no_statistic(wrong):
    with pytest.raises(TypeError, match=r"`Asking.statistics` should hold statistics"):
        type("Asking", (Rule,), {"statistics": wrong, "__call__": lambda self, tally: None})
