"""Datasets, environments and samplers."""
