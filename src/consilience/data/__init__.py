"""Datasets, environments and samplers."""

from consilience.data.sampler import EnvironmentBatchSampler
from consilience.data.synthetic import Rows, SyntheticMemorization

__all__ = ["EnvironmentBatchSampler", "Rows", "SyntheticMemorization"]
