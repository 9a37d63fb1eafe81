"""Optimizers that the paper adds, and masks that optimizers do not undo."""
