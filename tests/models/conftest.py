from collections.abc import Iterator

import jax
import pytest

from megajax.config.model import ModelConfig
from tests.models.tiny import STYLES


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """These tests compile much and run little."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(params=STYLES)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """Each style in turn."""
    return STYLES[request.param]
