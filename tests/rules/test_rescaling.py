import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from consilience import Agreement
from consilience.rules import AndMask, GeometricMean, Statistic, Tally

masks = pytest.mark.parametrize("mask", [AndMask, GeometricMean])


def tally_of(gradient, votes, voters=4):
    gradient, votes = torch.as_tensor(gradient), torch.as_tensor(votes)
    logs = (gradient.abs() / voters).log() * voters
    return Tally(gradient, voters, votes, logs=logs)


@masks
@pytest.mark.parametrize(
    ("given", "plain"), [(False, "none"), (True, "count"), ("norm", "norm"), ("count", "count")]
)
def test_booleans_mean_the_paper(mask, given, plain):
    assert mask(0.5, given).rescale == plain


@masks
def test_count_is_size_over_kept(mask):
    tally = tally_of([1.0, 2.0, 3.0, 4.0, 5.0], [4.0, 0.0, -4.0, 2.0, 0.0])
    plain, scaled = mask(1.0)(tally), mask(1.0, "count")(tally)
    assert torch.allclose(scaled, plain * 5 / 2)
    assert torch.allclose(mask(1.0, "count", 2.0)(tally), plain * 2)
    assert torch.allclose(mask(1.0, "count", 3.0)(tally), scaled)


@masks
def test_norm_is_the_norm_before(mask):
    tally = tally_of([1.0, 2.0, 3.0, 4.0, 5.0], [4.0, 0.0, -4.0, 2.0, 0.0])
    assert torch.allclose(mask(1.0, "norm")(tally).norm(), tally.gradient.norm())
    assert torch.allclose(mask(1.0, "norm", 1.5)(tally), mask(1.0)(tally) * 1.5)


@masks
@pytest.mark.parametrize("rescale", ["count", "norm"])
@pytest.mark.parametrize("limit", [None, 10.0])
def test_where_nothing_is_kept_all_is_zero(mask, rescale, limit):
    nothing = mask(1.0, rescale, limit)(tally_of([1.0, -2.0], [0.0, 0.0]))
    assert torch.equal(nothing, torch.zeros(2))


@masks
@pytest.mark.parametrize("rescale", ["count", "norm"])
def test_a_layer_of_zeros_and_a_layer_of_nothing(mask, rescale):
    assert torch.equal(mask(0.5, rescale).combine(torch.zeros(3, 4)), torch.zeros(4))
    assert mask(0.5, rescale).combine(torch.zeros(3, 0)).shape == (0,)


def test_a_factor_beyond_half_precision_is_applied_all_the_same():
    size = 100_000  # above the largest float16
    gradient = torch.full((size,), 1e-5, dtype=torch.float16)
    votes = torch.zeros(size)
    votes[0] = 4
    tally = Tally(gradient, 4, votes)
    result = AndMask(1.0, "count")(tally)
    assert result[0].item() == pytest.approx(1.0, rel=5e-3)
    assert torch.equal(result[1:], torch.zeros(size - 1, dtype=torch.float16))


def test_norm_of_half_precision_does_not_overflow():
    gradient = torch.full((400, 400), 300.0, dtype=torch.float16)  # of norm 120000
    votes = torch.zeros(400, 400)
    votes[:100] = 4
    result = AndMask(1.0, "norm")(Tally(gradient, 4, votes))
    assert torch.equal(result[:100], torch.full((100, 400), 600.0, dtype=torch.float16))


@pytest.mark.parametrize("rescale", ["count", "norm"])
def test_an_infinity_does_not_spread(rescale):
    gradient = torch.tensor([1.0, float("inf"), 2.0, 3.0])
    result = AndMask(1.0, rescale)(Tally(gradient, 4, torch.tensor([4.0, 0.0, 4.0, 0.0])))
    assert result[1] == float("inf")
    assert result[[0, 2, 3]].isfinite().all()
    assert result[3] == 0.0


@masks
@pytest.mark.parametrize("rescale", ["sum", None, 2, 10.0])
def test_unknown_rescaling(mask, rescale):
    with pytest.raises(ValueError, match=r"`rescale` should be 'none'.*Found `rescale = "):
        mask(0.5, rescale)


@masks
@pytest.mark.parametrize("limit", [0.5, -1.0, float("nan"), float("inf"), "2"])
def test_limit_out_of_range(mask, limit):
    with pytest.raises(ValueError, match=r"`max_rescale` should be a finite number, 1 or more"):
        mask(0.5, "count", limit)


@masks
def test_limit_of_nothing(mask):
    with pytest.raises(ValueError, match=r"`max_rescale = 10.0` with `rescale = 'none'`"):
        mask(0.5, max_rescale=10.0)


def test_rescaled_noise_is_stronger_than_noise():
    """What the mask takes from pure noise, the rescaling by count gives back, and more."""
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(80, 100_000, generator=random)

    def strength(rule):
        return rule.combine(noise).square().mean().item()

    assert strength(AndMask(0.0)) == pytest.approx(0.0125, rel=0.02)
    assert strength(AndMask(0.2)) == pytest.approx(0.0038, rel=0.03)
    assert strength(AndMask(0.2, "count")) == pytest.approx(0.435, rel=0.03)
    assert strength(AndMask(0.2, "count", 3.0)) == pytest.approx(9 * 0.0038, rel=0.03)
    assert strength(AndMask(0.2, "norm")) == pytest.approx(0.0125, rel=0.02)
    assert frozenset({Statistic.VOTES}) == AndMask.statistics


def test_clipping_after_apply_bounds_what_rescaling_made_large():
    torch.manual_seed(0)
    model = torch.nn.Linear(50, 50)
    x, y = torch.randn(12, 50), torch.randn(12, 50)

    def norm(*, clip_first):
        model.zero_grad()
        agreement = Agreement(model, AndMask(0.5, "count"))
        agreement.backward((model(x) - y).square().mean(1))
        steps = [agreement.apply, lambda: clip_grad_norm_(model.parameters(), 0.01)]
        for step in reversed(steps) if clip_first else steps:
            step()
        return get_total_norm([p.grad for p in model.parameters()]).item()

    assert norm(clip_first=False) == pytest.approx(0.01, rel=1e-3)
    assert norm(clip_first=True) > 0.02
