"""Claims of docs/errata.md that no other test holds, and that each names tests which exist."""

import math
import re
from pathlib import Path

import pytest
import torch

from consilience import AndMask, quorum
from consilience.consistency import (
    determinant_bound,
    expected_norm,
    norm_bound,
    quadratic_inconsistency,
)
from consilience.lab.settings import PRESETS
from consilience.paper import patchwork

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_claim_names_tests_that_exist():
    page = (ROOT / "docs" / "errata.md").read_text()
    for path, name in TEST.findall(page):
        text = (ROOT / path).read_text()
        assert f"\ndef {name}(" in text, f"{path}::{name}"
    body = page[page.index("\n## ") :]
    entries = re.split(r"^### ", body.split("\n## Slips\n")[0], flags=re.MULTILINE)[1:]
    slips = re.split(r"^- ", body.split("\n## Slips\n")[1], flags=re.MULTILINE)[1:]
    assert entries
    assert slips
    for entry in [*entries, *slips]:
        assert TEST.search(entry), f"names no test: {entry.splitlines()[0]}"


def test_only_the_sharp_bound_is_tight_for_equal_hessians():
    pair = torch.tensor([[1.0, 3.0], [1.0, 3.0]], dtype=torch.float64)
    forms = {form: determinant_bound(pair, 1.0, form=form) for form in ("sharp", "corrected")}
    assert float(quadratic_inconsistency(pair, 1.0)) == 1.0
    assert forms["sharp"] == pytest.approx(1.0, abs=1e-6)
    assert forms["corrected"] == pytest.approx(2.0)


def test_just_above_half_there_is_no_exponential_decay():
    """t = d/2 + 1 agreeing signs is a threshold of 2/d: nearly as long as without a mask."""
    shares = [expected_norm(d, 2 / d) / expected_norm(d, 0.0) for d in (10, 100, 1000)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.99


def test_at_half_the_bound_grows_while_the_norm_falls():
    """t = d/2 is threshold 0 for even d, with n/d exactly; the bound is like sqrt(2 d / pi)."""
    for d in (10, 100, 1000):
        assert expected_norm(d, 0.0) == pytest.approx(1 / d)
        for form in ("corrected", "printed"):
            bound = norm_bound(d, 0.0, form=form)
            assert bound == pytest.approx(math.sqrt(2 * d / math.pi), rel=2.5 / d)
        kept_as_counted = 1 + math.comb(d, d // 2) / 2**d  # the middle term is there twice
        assert kept_as_counted > 1


def test_two_neurons_do_not_fit_arbitrarily_well():
    inputs = list(patchwork.environments(401).values())
    theta = torch.tensor(patchwork.MINIMUM, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([theta], max_iter=500, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = sum(patchwork.loss(x, theta) for x in inputs) / 2
        loss.backward()
        return loss.detach()

    before = float(closure())
    for _ in range(3):
        optimizer.step(closure)
    assert before == pytest.approx(0.0032, abs=1e-4)
    assert float(closure()) == pytest.approx(0.00037, abs=1e-5)


def test_the_same_shape_on_another_scale_is_inconsistent():
    hessian = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    assert float(quadratic_inconsistency(torch.stack([hessian, 4 * hessian]), 1.0)) == (
        pytest.approx(4.0)
    )


def test_a_zero_gradient_tells_t_from_tau():
    gradients = torch.tensor([1.0, 1.0, 0.0, 0.0])
    needed = 4 / 2 * (0.5 + 1)  # the paper's t
    assert int((gradients > 0).sum()) < needed
    assert quorum(4, 0.5) == 2
    assert AndMask(0.5).combine(gradients.unsqueeze(1)).item() == 0.5


def test_the_stray_factor_in_the_first_proof_makes_it_false():
    """Descent on theta^2 / 2, where L = 1, at a rate of 0.1."""
    rate, theta, norms = 0.1, 1.0, []
    for _ in range(11):
        norms.append(theta**2)
        theta -= rate * theta
    for k in range(1, 11):
        least, mean = min(norms[: k + 1]), sum(norms[:k]) / k
        assert rate / 2 * mean < least <= mean <= 2 * 0.5 / (rate * k)


def test_two_thousand_rows_are_the_test_set():
    paper = PRESETS["paper"]
    assert paper.test_rows == 2000
    assert paper.environments * paper.rows_per_environment == 40960
