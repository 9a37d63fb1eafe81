"""The one exception that the lab raises for what a user can put right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """A sentence that says what is wrong and what to do; the command line exits with status 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean `...`?" with the nearest known name, or nothing.

    Example:
        >>> nearest("and-msak", ["and-mask", "erm"])
        ' Did you mean `and-mask`?'
    """
    found = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean `{found[0]}`?" if found else ""
