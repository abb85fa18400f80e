"""Windows over long texts, and log-probabilities, compared with a softmax over all logits.

Shapes: S tokens that the model reads at once, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import InputError, ModelConfig
from megajax.inference.tasks.scoring import Scorer, Window, check_stride, windows
from megajax.inference.trained import load_model
from megajax.models import losses
from tests.made_runs import MODEL, make_run
from tests.models.tiny import batch_of, forward

LAYOUTS = {
    "one-device": [],
    "tensor": ["parallel.tensor=4"],
    "data": ["parallel.data=2"],
    "fsdp-tensor": ["parallel.fsdp=2", "parallel.tensor=2"],
    "all": ["parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2"],
}
OTHERS = {
    "mixture": replace(MODEL, experts=4, activation="swiglu", bias=False, shared_ffn_size=24),
    "alibi": replace(MODEL, positions="alibi", embedding_norm=True),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("scoring") / "run")


def test_windows_that_do_not_overlap():
    """10 tokens, 4 at a time: the first is never scored, each of the others once."""
    cut = [(list(ids), scored) for ids, scored in windows(range(10), 4, 4)]
    assert cut == [([0, 1, 2, 3, 4], 4), ([4, 5, 6, 7, 8], 4), ([8, 9], 1)]


def test_overlapping_windows():
    """Windows of 4 tokens move on by 2: only the first scores what it does not share. The last is short.

    Megatron-LM counts max(ceil(max(9 - 2, 0) / 2) + 1, 1) = 5 of them; of the fifth, which starts at token 8, the last
    two positions are padding.
    """
    cut = [(list(ids), scored) for ids, scored in windows(range(10), 4, 2)]
    assert cut == [([0, 1, 2, 3, 4], 4), ([2, 3, 4, 5, 6], 2), ([4, 5, 6, 7, 8], 2), ([6, 7, 8, 9], 1)]


def test_a_text_that_fits():
    assert [(list(ids), scored) for ids, scored in windows([7, 8, 9], 16, 4)] == [([7, 8, 9], 2)]


@given(st.integers(2, 60), st.integers(1, 12), st.data())
def test_every_token_is_scored_once(tokens: int, length: int, data: st.DataObject):
    stride = data.draw(st.integers(1, length))
    cut = list(windows(range(tokens), length, stride))
    assert [i for ids, scored in cut for i in ids[len(ids) - scored :]] == list(range(1, tokens))
    assert all(0 < scored < len(ids) <= length + 1 for ids, scored in cut)


@pytest.mark.parametrize("stride", [0, 17, -1])
def test_strides_that_leave_tokens_out(stride: int):
    with pytest.raises(InputError, match=f"--overlapping-eval is {stride}: expected 1 to 16"):
        check_stride(stride, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_whole_softmax(run: Path, layout: str):
    """Windows of any lengths in any order, on every layout; a batch of 3 rows is padded to the replicas."""
    trained = load_model(run, words=LAYOUTS[layout])
    rng = np.random.default_rng(1)
    asked = [Window(rng.integers(0, 299, n), scored) for n, scored in [(5, 2), (17, 16), (9, 8), (17, 1), (2, 1)]]
    alone = load_model(run).model

    found = Scorer(trained, batch_size=3)(asked)

    for (ids, scored), scores in zip(asked, found, strict=True):
        logits = forward(alone, batch_of(ids[None]))[0]
        expected = jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]][-scored:]
        np.testing.assert_allclose(scores.log_probabilities, expected, rtol=2e-4, atol=2e-4)
        np.testing.assert_array_equal(scores.greedy, (jnp.argmax(logits, axis=-1)[:-1] == ids[1:])[-scored:])
        assert scores.loss == pytest.approx(-float(expected.sum()), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_other_models_on_a_mesh(tmp_path: Path, model: ModelConfig):
    """Experts over `expert` and `tensor`, ALiBi's heads over `tensor`."""
    run = make_run(tmp_path / "run", model=model)
    words = ["parallel.tensor=2", "parallel.data=2", *(["parallel.expert=2"] if model.experts else [])]
    asked = [Window(np.arange(3, 3 + n), n - 1) for n in (12, 16, 4)]
    one, many = (Scorer(load_model(run, words=w))(asked) for w in ([], words))
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a.log_probabilities, b.log_probabilities, rtol=1e-4, atol=1e-4)


def test_logits_in_chunks(run: Path, monkeypatch: pytest.MonkeyPatch):
    """With room for the logits of five places only, the scores are the same."""
    asked = [Window(np.arange(14), 13), Window(np.arange(40, 50), 9)]
    whole = Scorer(load_model(run), 2)(asked)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 5 * 2 * 300)
    for a, b in zip(whole, Scorer(load_model(run), 2)(asked), strict=True):
        np.testing.assert_allclose(a.log_probabilities, b.log_probabilities, rtol=1e-5)


def test_batch_size_without_meaning(run: Path):
    with pytest.raises(InputError, match="batch size is 0: expected 1 or more"):
        Scorer(load_model(run), 0)
