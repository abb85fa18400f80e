"""WikiText-103: undoing its tokenisation, its windows, and its three numbers, compared with a plain computation."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.config import InputError
from megajax.inference.tasks.scoring import Scorer
from megajax.inference.tasks.wikitext import detokenized, evaluate_wikitext, perplexity
from megajax.inference.trained import load_model
from tests.made_runs import make_run
from tests.models.tiny import batch_of, forward

TEXT = (
    " \n = Valkyria = \n \n The game sold 1 @,@ 200 @.@ 5 copies ( in Japan ) . It is a role @-@ playing game ; "
    'she said " well done " , and the players \' scores rose . \n '
    "= = Plot = = \n \n What now ? He 's here : N times . \n "
) * 3


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        ("1 @,@ 234 @.@ 5", "1,234.5"),
        ("role @-@ playing", "role-playing"),
        ("well , then ; no : yes . Stop ! Why ? So", "well, then; no: yes. Stop! Why? So"),
        ("a ( b ) [ c ] { d }", "a (b) [c] {d}"),
        ('say " this one " and " that "', 'say "this one" and "that"'),
        ("the players ' scores", "the players' scores"),
        ("it 's so", "it's so"),
        ("= Title =\n= = Part = =", "= Title =\n== Part =="),
        ("= = = Deep = = =\n= = = = Deeper = = = =", "=== Deep ===\n==== Deeper ===="),
        ("20 ° C", "20°C"),
        ("end . \n begin", "end.\nbegin"),
        ("N or N times", "N or 1 times"),
        ("plain text, as it is.", "plain text, as it is."),
    ],
)
def test_marks_are_undone(marked: str, plain: str):
    assert detokenized(marked) == plain


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("wikitext") / "run", [TEXT, detokenized(TEXT)], vocab_size=320, scale=0.1)


@pytest.mark.parametrize("stride", [4, 16, None])
def test_numbers(run: Path, tmp_path: Path, stride: int | None):
    """Every token after at least 16 - stride others of its own window, but for the first window's."""
    (tmp_path / "wiki.test.tokens").write_text(TEXT, encoding="utf-8")
    trained = load_model(run)

    found = evaluate_wikitext(trained, tmp_path / "wiki.test.tokens", Scorer(trained, 4), stride)

    ids = np.array(trained.tokenizer.encode(detokenized(TEXT)))
    total, stride = 0.0, stride or 16
    for place in range(1, len(ids)):
        window = 0 if place <= 16 else -(-(place - 16) // stride)
        before = ids[window * stride : place]
        logits = forward(trained.model, batch_of(np.pad(before, (0, 16 - len(before)))[None]))[0, len(before) - 1]
        total -= float(jax.nn.log_softmax(logits)[ids[place]])
    words = len(TEXT.strip().split(" "))
    assert found.loss == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found.token_ratio == pytest.approx((len(ids) - 1) / (words - 1))
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.adjusted_perplexity == pytest.approx(math.exp(found.loss * found.token_ratio))
    assert found.tokens == len(ids) - 1
    assert f"| token ratio: {found.token_ratio} |" in found.line()


def test_perplexity_is_capped():
    assert perplexity(25.0) == math.exp(20)
    assert perplexity(2.0) == math.exp(2)


def test_bad_files(run: Path, tmp_path: Path):
    trained = load_model(run)
    score = Scorer(trained)
    (tmp_path / "short").write_text("x")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for name, message in {"none": "cannot be read", "binary": "cannot be read", "short": "nothing to predict"}.items():
        with pytest.raises(InputError, match=message):
            evaluate_wikitext(trained, tmp_path / name, score, 4)
