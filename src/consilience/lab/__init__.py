"""Configurations, run directories, the training loop, figures and the report."""
