"""`import megajax` offers what notebooks need, and imports nothing until it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

import megajax


@pytest.mark.parametrize("name", megajax.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(megajax, name) is not None
    assert name in dir(megajax)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'megajax' has no public name 'tarin'"):
        _ = megajax.tarin


def test_no_public_name_hides_a_command() -> None:
    """`megajax.train` is the module of a command as soon as something has imported it."""
    modules = {path.stem for path in Path(megajax.__path__[0]).iterdir()}
    assert modules.isdisjoint(megajax.__all__)


def test_importing_the_package_imports_no_library() -> None:
    code = "import sys, megajax; print(sorted({'jax', 'flax', 'numpy', 'pydantic'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
