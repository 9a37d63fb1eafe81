"""What the tests of all rules share: stacked gradients, thresholds and one comparison."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from consilience.rules import Rule

SHAPES = [(), (1,), (7,), (0,), (3, 5), (1, 1, 4), (2, 3, 4)]

Stack = np.ndarray
"""Gradients of environments, stacked as [environments, ...], in float64."""


@st.composite
def stacks(draw: st.DrawFn, most: int = 40) -> Stack:
    """Draw stacked gradients in which signs agree, disagree, balance and are zero."""
    environments = draw(st.integers(1, most) | st.integers(1, 5))
    shape = draw(st.sampled_from(SHAPES))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = (environments, *shape)
    gradients = random.normal(size=size) * 10.0 ** random.integers(-4, 5, size=shape)
    # A component's own bias: from coin flips to all of one sign.
    bias = random.choice([0.0, 0.5, 0.9, 1.0], size=shape)
    agreeing = np.abs(gradients) * random.choice([-1.0, 1.0], size=shape)
    gradients = np.where(random.random(size) < bias, agreeing, gradients)
    zeros = draw(st.sampled_from([0.0, 0.0, 0.3]))
    return np.where(random.random(size) < zeros, 0.0, gradients)


@st.composite
def thresholds(draw: st.DrawFn, least: int = 0) -> Fraction:
    """Draw thresholds that fall on a number of votes, and between two."""
    denominator = draw(st.integers(1, 40) | st.sampled_from([10, 100]))
    return Fraction(draw(st.integers(least, denominator)), denominator)


def votes(stack: Stack) -> np.ndarray:
    return np.sign(stack).sum(0).astype(int)


def passes(stack: Stack, threshold: Fraction) -> np.ndarray:
    """Say where |votes| >= threshold x environments, in whole numbers."""
    asked = threshold.numerator * len(stack)
    return np.abs(votes(stack)) * threshold.denominator >= asked


def agrees(make_rule: Callable[..., Rule], transcription: Callable[..., np.ndarray], **others):
    """Return a test that compares a rule with a transcription of its formula.

    Both are called with a threshold, if the test draws one, and with what ``others`` draw.
    """

    @settings(max_examples=100, deadline=None)
    @given(stack=stacks(), drawn=st.fixed_dictionaries(others))
    def test(stack: Stack, drawn: dict) -> None:
        plain = {k: float(v) if isinstance(v, Fraction) else v for k, v in drawn.items()}
        found = make_rule(**plain).combine(torch.from_numpy(np.asarray(stack)))
        expected = torch.from_numpy(np.asarray(transcription(stack, **drawn)))
        # What is left of a sum that cancels is noise of the size of its terms.
        noise = 1e-13 * float(np.abs(stack).max(initial=0.0))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=noise)

    return test


def all_patterns(environments: int) -> Tensor:
    """Every pattern of signs, as [environments, 2^environments]."""
    numbers = torch.arange(2**environments)
    return torch.stack([(numbers >> e) & 1 for e in range(environments)]).double() * 2 - 1
