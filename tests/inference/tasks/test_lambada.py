"""LAMBADA in its two definitions, with a model that is right by construction."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megajax.config import InputError
from megajax.inference.tasks.lambada import Lambada, evaluate_lambada, passages
from megajax.inference.tasks.scoring import Scorer
from megajax.inference.trained import TrainedModel, load_model
from tests.made_runs import make_run
from tests.models.tiny import batch_of, forward


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A model whose text is ids."""
    return load_model(make_run(tmp_path_factory.mktemp("lambada") / "run"))


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """One with pieces of words."""
    texts = ["the quick brown fox jumps over the lazy dog", "a remarkable unbreakable thing"] * 4
    return load_model(make_run(tmp_path_factory.mktemp("lambada") / "worded", texts, vocab_size=300))


def likeliest(trained: TrainedModel, ids: list[int]) -> int:
    return int(forward(trained.model, batch_of(np.array([ids])))[0, -1].argmax())


def test_counts_passages_whose_last_token_is_the_likeliest(trained: TrainedModel, tmp_path: Path):
    contexts = [[1, 2, 3], [9, 8, 7, 6], [4], [250, 3, 17, 80, 99]]
    last = [likeliest(trained, context) for context in contexts]
    last[2] = (last[2] + 1) % 299
    file = tmp_path / "lambada.jsonl"
    texts = [" ".join(map(str, [*context, token])) for context, token in zip(contexts, last, strict=True)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    found = evaluate_lambada(trained, file, Scorer(trained, 3))

    assert found == Lambada(3, 4)
    assert found.accuracy == 0.75
    assert found.line() == (
        "validation results on LAMBADA | number correct: 3.0000E+00 | total examples: 4.0000E+00 | "
        "avg accuracy: 7.5000E-01"
    )


def test_targets(worded: TrainedModel):
    """Strictly the last word with the space before it; else the last token, which is a part of the word."""
    encode = worded.tokenizer.encode
    text = "the quick unbreakable "
    [strict] = passages(worded, [text], strict=True)
    assert strict.ids[-strict.scored :] == encode(" unbreakable")
    assert strict.ids[: -strict.scored] == encode("the quick")
    [plain] = passages(worded, [text], strict=False)
    assert (plain.ids, plain.scored) == (encode(text), 1)


def test_strict_takes_every_token_of_the_word(worded: TrainedModel, tmp_path: Path):
    """A model that gets the last token right, but not the first of the word, does not count."""
    file = tmp_path / "lambada.jsonl"
    file.write_text(json.dumps({"text": "the quick remarkable"}) + "\n")
    [window] = passages(worded, ["the quick remarkable"], strict=True)
    greedy = Scorer(worded)([window])[0].greedy
    assert evaluate_lambada(worded, file, Scorer(worded), strict=True).correct == int(greedy.all())


def test_long_passages_lose_their_beginning(trained: TrainedModel):
    [window] = passages(trained, [" ".join(map(str, range(40)))], strict=False)
    assert list(window.ids) == list(range(23, 40))


def test_a_prefix_stands_before_every_context(trained: TrainedModel):
    [window] = passages(replace(trained, prefix=(5,)), ["1 2 3"], strict=False)
    assert window.ids == [5, 1, 2, 3]


@pytest.mark.parametrize(("text", "message"), [("7", "1 tokens to predict from 0"), ("", "0 tokens to predict from 0")])
def test_passages_without_a_context(trained: TrainedModel, tmp_path: Path, text: str, message: str):
    file = tmp_path / "lambada.jsonl"
    file.write_text(json.dumps({"text": text}) + "\n")
    with pytest.raises(InputError, match=message):
        evaluate_lambada(trained, file, Scorer(trained))


def test_no_passages(trained: TrainedModel, tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="holds no passage"):
        evaluate_lambada(trained, tmp_path / "empty.jsonl", Scorer(trained))
