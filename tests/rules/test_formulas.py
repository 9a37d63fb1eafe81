"""Every rule against a literal transcription of its formula."""

import numpy as np
from hypothesis import strategies as st

from consilience.rules import (
    AndMask,
    GeometricMean,
    MajoritySign,
    Mean,
    SandMask,
    SoftMask,
    XorMask,
)
from rules.samplers import agrees, passes, thresholds, votes


def and_mask(stack, threshold):
    return np.where(passes(stack, threshold), stack.mean(0), 0.0)


def and_mask_by_count(stack, threshold, max_rescale):
    keep = passes(stack, threshold)
    factor = min(keep.size / keep.sum(), max_rescale or np.inf) if keep.any() else 0.0
    return and_mask(stack, threshold) * factor


def and_mask_by_norm(stack, threshold, max_rescale):
    kept = and_mask(stack, threshold)
    if not kept.any():
        return kept
    factor = np.linalg.norm(stack.mean(0)) / np.linalg.norm(kept)
    return kept * min(factor, max_rescale or np.inf)


def geometric_mean(stack, threshold):
    d, shares = len(stack), stack / len(stack)
    magnitude = d * np.prod(np.power(np.abs(shares) + 1e-10, 1 / d), axis=0)
    return np.where(passes(stack, threshold), np.sign(stack.mean(0)) * magnitude, 0.0)


def xor_mask(stack, threshold):
    return np.where(passes(stack, threshold), 0.0, stack.mean(0))


def soft_mask(stack, threshold):
    agreement = np.abs(votes(stack)) / len(stack)
    return np.where(passes(stack, threshold), 1.0, agreement) * stack.mean(0)


def sand_mask(stack, threshold, sharpness):
    beyond = np.abs(votes(stack)) / len(stack) - float(threshold)
    strictly = np.abs(votes(stack)) * threshold.denominator > threshold.numerator * len(stack)
    mean_square = np.mean(stack**2, axis=0)
    variance = np.var(stack, axis=0) / np.where(mean_square > 0, mean_square, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mask = np.where(strictly, np.tanh(sharpness * beyond / variance), 0.0)
    return mask * stack.mean(0)


limits = st.none() | st.floats(1, 20)

test_mean = agrees(Mean, lambda stack: stack.mean(0))
test_and_mask = agrees(AndMask, and_mask, threshold=thresholds())
test_and_mask_by_count = agrees(
    lambda **settings: AndMask(rescale="count", **settings),
    and_mask_by_count,
    threshold=thresholds(),
    max_rescale=limits,
)
test_and_mask_by_norm = agrees(
    lambda **settings: AndMask(rescale="norm", **settings),
    and_mask_by_norm,
    threshold=thresholds(),
    max_rescale=limits,
)
test_geometric_mean = agrees(GeometricMean, geometric_mean, threshold=thresholds())
test_xor_mask = agrees(XorMask, xor_mask, threshold=thresholds())
test_soft_mask = agrees(SoftMask, soft_mask, threshold=thresholds())
test_majority_sign = agrees(MajoritySign, lambda stack: np.sign(votes(stack)).astype(float))
test_sand_mask = agrees(
    SandMask, sand_mask, threshold=thresholds(), sharpness=st.sampled_from([0.1, 1.0, 10.0])
)
