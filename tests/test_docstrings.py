"""The examples in docstrings run."""

import doctest
import pkgutil
from importlib import import_module

import pytest
import torch

import consilience

MODULES = ["consilience"] + [
    module.name
    for module in pkgutil.walk_packages(consilience.__path__, "consilience.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(import_module(name), optionflags=flags).failed == 0
