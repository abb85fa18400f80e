"""Perplexity of documents, compared with plain sums."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.config import InputError
from megajax.inference.tasks.documents import evaluate_documents
from megajax.inference.tasks.scoring import Scorer
from megajax.inference.trained import TrainedModel, load_model
from tests.made_runs import make_run
from tests.models.tiny import batch_of, forward

DOCUMENTS = [list(range(3, 23)), [7, 7, 9], [5], [200, 100, 250, 4, 4, 4, 4]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return load_model(make_run(tmp_path_factory.mktemp("documents") / "run"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(map(str, ids))}) + "\n" for ids in DOCUMENTS))
    return path


def test_mean_over_all_predicted_tokens(trained: TrainedModel, file: Path):
    """Documents see nothing of each other; the first is cut into 16 + 3 predictions, the one of one token has none."""
    total, tokens = 0.0, 0
    for ids in [DOCUMENTS[0][:17], DOCUMENTS[0][16:], DOCUMENTS[1], DOCUMENTS[3]]:
        logits = forward(trained.model, batch_of(np.array([ids])))[0, :-1]
        total -= float(jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), np.array(ids[1:])].sum())
        tokens += len(ids) - 1

    found = evaluate_documents(trained, file, Scorer(trained))

    size = sum(len(" ".join(map(str, ids))) for ids in DOCUMENTS if len(ids) > 1)
    assert (found.tokens, found.documents) == (tokens, 3) == (19 + 2 + 6, 3)
    assert found.loss == pytest.approx(total / tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert found.line().startswith("results on 3 documents | tokens: 27 | avg loss: ")


def test_overlap_changes_the_long_document_only(trained: TrainedModel, file: Path):
    apart = evaluate_documents(trained, file, Scorer(trained))
    over = evaluate_documents(trained, file, Scorer(trained), overlapping_eval=2)
    assert apart.tokens == over.tokens
    assert apart.loss != over.loss


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "5"}', "no document has two tokens"),
        ('{"txt": "5 6"}', 'no key "text"'),
        ("5 6", "documents.jsonl:1: "),
    ],
)
def test_bad_files(trained: TrainedModel, file: Path, content: str, message: str):
    file.write_text(content + "\n")
    with pytest.raises(InputError, match=message):
        evaluate_documents(trained, file, Scorer(trained))
