"""A line that says how far a long computation has come."""

from __future__ import annotations

import sys
import time


class Progress:
    """Count steps on one line of standard error.

    Args:
        label: What is counted.
        total: How many steps there will be.
        shown: Whether to write at all.
    """

    def __init__(self, label: str, total: int, *, shown: bool) -> None:
        self._label, self._total, self._shown = label, total, shown
        self._done, self._written, self._start = 0, 0.0, time.monotonic()

    def step(self, note: str = "") -> None:
        """Count one step, with a word about how things stand."""
        self._done += 1
        now = time.monotonic()
        last = self._done == self._total
        if not self._shown or (now - self._written < 0.2 and not last):
            return
        self._written = now
        elapsed = now - self._start
        left = elapsed / self._done * (self._total - self._done)
        line = (
            f"{self._label} {self._done}/{self._total}  {elapsed:.0f} s, {left:.0f} s left  {note}"
        )
        sys.stderr.write(f"\r{line:<79}" + ("\n" if last else ""))
        sys.stderr.flush()
