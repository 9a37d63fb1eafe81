"""Optimizers whose steps follow agreement over time, and steps that masks can hold back."""

from consilience.optim._masked_step import masked_step
from consilience.optim._temporal_and_adam import PUBLISHED_SETTINGS, TemporalAndAdam
from consilience.optim._temporal_and_mask import TemporalAndMask
from consilience.optim._voters import share_of_voters, temporal_null_keep_rate

__all__ = [
    "PUBLISHED_SETTINGS",
    "TemporalAndAdam",
    "TemporalAndMask",
    "masked_step",
    "share_of_voters",
    "temporal_null_keep_rate",
]
