"""Tests against PyTorch and transformers, which MegaJAX does not need, are skipped without the packages that they
`need`.
"""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a package that is not installed, and say which."""
    for item in items:
        needed = {name for marker in item.iter_markers("needs") for name in marker.args}
        if missing := sorted(name for name in needed if find_spec(name) is None):
            reason = f"not installed: {', '.join(missing)} (pip install {' '.join(missing)})"
            item.add_marker(pytest.mark.skip(reason=reason))
