import subprocess
import sys

import pytest

import consilience


def test_every_public_name_is_there():
    for name in consilience.__all__:
        assert getattr(consilience, name) is not None
        assert name in dir(consilience)
    assert consilience.rules.AndMask is consilience.AndMask


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="has no attribute 'AndMsak'"):
        consilience.AndMsak  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    code = "import consilience, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603
