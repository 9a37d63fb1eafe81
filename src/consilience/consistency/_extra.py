"""SciPy, imported when it is first needed."""

from __future__ import annotations

import importlib
from types import ModuleType


def scipy(name: str) -> ModuleType:
    """Return the module ``scipy.<name>``, or say which extra brings it."""
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        raise ImportError(
            f"This needs SciPy (`scipy.{name}`), which is not installed. "
            "Install the extra: `pip install 'consilience[consistency]'`."
        ) from error
