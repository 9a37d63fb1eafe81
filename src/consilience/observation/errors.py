"""Errors that say what would have been silently wrong, and the way out."""

from __future__ import annotations


class ObservationError(RuntimeError):
    """Something would have given a wrong gradient or a wrong vote."""


class UnsupportedOperationError(ObservationError, NotImplementedError):
    """An operation consumes a tracked parameter and has no exact way to be observed."""


class UnknownRowsError(ObservationError):
    """It cannot be told which rows the slices of an activation belong to."""


class CoupledRowsError(ObservationError):
    """An operation mixes rows, so that a row has no gradient of its own."""


class NotVotedOnError(ObservationError):
    """A parameter has a gradient, or a part of one, on which no environment voted."""
