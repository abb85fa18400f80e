"""Tests against PyTorch and transformers, which MegaJAX does not need: without them they are skipped."""

from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this directory, and say why."""
    if MISSING:
        reason = pytest.mark.skip(reason=f"not installed: {', '.join(MISSING)} (pip install torch transformers)")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(reason)
