"""The slow, obviously right way, written without a look at the library's own.

Everything is in float64, and nothing here imports the engine except :func:`check`, which
compares the two through the public API alone.
"""

from oracle._check import BAND, SINGLE, Found, check, compare, make_agreement, observe_once
from oracle._record import Record
from oracle._shares import (
    Oracle,
    groups_of,
    row_weights,
    shares_alone,
    shares_of_a_joint_graph,
    shares_of_uses,
    wavy,
)
from oracle._strategies import environments, label_spellings

__all__ = [
    "BAND",
    "SINGLE",
    "Found",
    "Oracle",
    "Record",
    "check",
    "compare",
    "environments",
    "groups_of",
    "label_spellings",
    "make_agreement",
    "observe_once",
    "row_weights",
    "shares_alone",
    "shares_of_a_joint_graph",
    "shares_of_uses",
    "wavy",
]
