"""Processes that a test has started end with it."""

from collections.abc import Iterator

import pytest

from tests.launch.programs import STARTED


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    while STARTED:
        with STARTED.pop() as process:  # which closes its pipes
            process.kill()
