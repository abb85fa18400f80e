"""A forward pass that the compiler partitions sends what its docstring says.

Shapes: B rows, S sequence, D embed.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest

from megajax.inference.scores import score_batch
from megajax.inference.trained import load_model
from megajax.planning.collectives import Traffic, collectives
from tests.made_runs import MODEL, make_run

B, S, D, L = 4, 16, MODEL.hidden_size, MODEL.num_layers


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Traffic]:
    """Collectives of scoring a batch on a layout."""
    run = make_run(tmp_path_factory.mktemp("partitioned") / "run")

    def of(*words: str) -> Traffic:
        trained = load_model(run, words=words)
        tokens = np.ones((B, S), np.int32)
        compiled = jax.jit(partial(score_batch, layout=trained.layout)).lower(trained.model, tokens, tokens).compile()
        return collectives(compiled, trained.layout.rules.mesh)

    return of


def test_replicas_send_nothing(traffic: Callable[..., Traffic]):
    assert len(traffic("parallel.data=4")) == 0


@pytest.mark.parametrize(
    ("words", "rows"), [(["parallel.tensor=4"], B), (["parallel.tensor=2", "parallel.data=2"], B // 2)]
)
def test_a_layer_sends_two_all_reduces(traffic: Callable[..., Traffic], words: list[str], rows: int):
    """Of this replica's [B, S, D] over `tensor`, and nothing else."""
    inside = traffic(*words).inside(L)
    assert inside.count("all-reduce") == sum(collective.count for collective in inside) == 2 * L
    assert inside.total_bytes() == 2 * L * rows * S * D * 4


def test_weights_are_gathered_by_layer(traffic: Callable[..., Traffic]):
    """Over `fsdp` the four matrices of a layer, when it runs."""
    inside = traffic("parallel.fsdp=4").inside(L)
    assert inside.count("all-gather") == sum(collective.count for collective in inside) == 4 * L
