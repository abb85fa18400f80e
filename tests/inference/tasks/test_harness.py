"""The model for lm-evaluation-harness answers its three requests, with and without the package itself."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from megajax.config import InputError
from megajax.inference.tasks import harness
from megajax.inference.tasks.harness import HarnessModel, registered
from tests.made_runs import make_run
from tests.models.tiny import batch_of, forward

INSTALLED = find_spec("lm_eval") is not None


def asked(*args: Any) -> Any:
    """What the harness hands over: an `Instance` with arguments."""
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("harness") / "run")


@pytest.fixture(scope="module")
def model(run: Path) -> HarnessModel:
    """A model whose text is ids; 299 is its end of document."""
    return HarnessModel(str(run), batch_size=2)


def scored(model: HarnessModel, ids: list[int], count: int) -> tuple[float, bool]:
    """The last `count` of some ids, from the whole forward pass."""
    logits = forward(model.trained.model, batch_of(np.array([ids])))[0, :-1]
    labels = np.array(ids[1:])
    found = jax.nn.log_softmax(logits)[np.arange(len(labels)), labels][-count:]
    return float(found.sum()), bool((logits.argmax(-1) == labels)[-count:].all())


def test_loglikelihood(model: HarnessModel):
    """Of a continuation after its context; an empty context is the end of a document before."""
    likeliest = int(forward(model.trained.model, batch_of(np.array([[1, 2, 3]])))[0, -1].argmax())
    pairs = [("1 2 3", " 4 5"), ("1 2 3", f" {likeliest}"), ("", "8 9"), ("7 ", "6")]
    expected = [scored(model, *case) for case in
                [([1, 2, 3, 4, 5], 2), ([1, 2, 3, likeliest], 1), ([299, 8, 9], 2), ([7, 6], 1)]]  # fmt: skip
    found = model.loglikelihood([asked(*pair) for pair in pairs])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert found[1][1]
    np.testing.assert_allclose([loss for loss, _ in found], [loss for loss, _ in expected], rtol=1e-4)


WORDS = ["hello world, hello there", "the world says hello\n\nand the other world too", "held helm help lower"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> HarnessModel:
    """A model of 32 tokens that reads words."""
    return HarnessModel(str(make_run(tmp_path_factory.mktemp("reader") / "run", WORDS, vocab_size=300)))


def test_pairs_that_share_a_token(reader: HarnessModel):
    """The context's own tokens, and what the whole text has behind as many of its own."""
    encode = reader.trained.encode
    pairs = [
        ("the w", "orld says hello"),
        ("the other ", "world"),
        ("hello\n\n", "and"),
        ("", "hello"),
        ("the", " other world"),
    ]
    for context, continuation in pairs:
        before = encode(context.rstrip()) or [reader.beginning]
        added = encode(context + continuation)[len(before) if context else 0 :]
        assert reader._pair(context, continuation) == ([*before, *added], len(added))
    assert encode("the world says hello")[:2] != encode("the w"), "or the case is none"
    [found] = reader.loglikelihood([asked("the w", "orld says hello")])
    ids, count = reader._pair("the w", "orld says hello")
    assert found[0] == pytest.approx(scored(reader, list(ids), count)[0], rel=1e-4)


@pytest.mark.parametrize(
    ("context", "continuation", "counts"),
    [("hell", "o", "2 and 0"), ("the world", "", "2 and 0"), ("", "", "1 and 0"), ("  ", "hello", "0 and 2")],
)
def test_pairs_without_a_token_of_their_own(reader: HarnessModel, context: str, continuation: str, counts: str):
    """The harness's own model fails on them; none is certain, none divides by zero."""
    with pytest.raises(InputError, match=f"{continuation!r} have {counts} tokens"):
        reader.loglikelihood([asked(context, continuation)])


def test_a_continuation_that_begins_with_the_beginning(model: HarnessModel):
    """Behind an empty context the token that begins texts is there once."""
    model.beginning, before = 7, model.beginning
    try:
        assert model._pair("", "7 8 9") == ([7, 8, 9], 2)
        assert model._pair("", "8 9") == ([7, 8, 9], 2)
    finally:
        model.beginning = before


def test_a_continuation_longer_than_the_model(model: HarnessModel):
    with pytest.raises(InputError, match="has 33 tokens: the model sees 32"):
        model.loglikelihood([asked("1", " " + " ".join(map(str, range(33))))])


@pytest.mark.skipif(not INSTALLED, reason="lm-evaluation-harness is not installed (pip install lm-eval)")
def test_pairs_are_cut_as_the_harness_does(reader: HarnessModel):
    """Every cut of some texts, by the harness's own class; where one refuses, so does the other."""
    from lm_eval.api.model import TemplateLM

    class Theirs(TemplateLM):
        backend = "causal"
        eot_token_id = prefix_token_id = reader.beginning
        loglikelihood_rolling = generate_until = _loglikelihood_tokens = None

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return reader.trained.encode(string)

    Theirs.__abstractmethods__ = frozenset()
    for text in [*WORDS, "hello  world ", "the\n\nother"]:
        for cut in range(1, len(text)):
            before, added = Theirs()._encode_pair(text[:cut], text[cut:])
            if before and added:
                assert reader._pair(text[:cut], text[cut:]) == ([*before, *added], len(added)), text[:cut]
            else:
                with pytest.raises(InputError, match="each needs one"):
                    reader._pair(text[:cut], text[cut:])


def test_chats(tmp_path: Path):
    """--apply_chat_template writes contexts by the tokenizer's own, and its tokens are tokens."""
    run = make_run(tmp_path / "run", WORDS, vocab_size=300)
    chatty = HarnessModel(str(run))
    with pytest.raises(InputError, match="no chat template"):
        chatty.apply_chat_template([{"role": "user", "content": "hello"}])
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    (run / "chat_template.jinja").write_text(template)
    chatty = HarnessModel(str(run))
    assert chatty.chat_template(True) == template
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}]
    assert chatty.apply_chat_template(history, add_generation_prompt=False) == "hello</s>the"
    context = chatty.apply_chat_template(history[:1])
    assert context == "hello</s>!"
    encode, end = chatty.trained.tokenizer.encode, chatty.trained.tokenizer.eod_id
    assert chatty._pair(context, " other") == ([*encode("hello"), end, *encode("! other")], len(encode(" other")))
    [made] = chatty.generate_until([asked(context, {"until": [], "max_gen_toks": 2})])
    assert isinstance(made, str)


def test_generation_without_room_or_temperature(model: HarnessModel):
    """What the harness's own model refuses."""
    with pytest.raises(InputError, match="256 new tokens leave no room for a context: the model sees 32"):
        model.generate_until([asked("1", {"until": []})])
    with pytest.raises(InputError, match="do_sample=true needs a temperature"):
        model.generate_until([asked("1", {"until": [], "max_gen_toks": 2, "do_sample": True})])


def test_long_contexts_lose_their_beginning(model: HarnessModel):
    """The model sees 32 tokens."""
    ids = list(range(40))
    text = " ".join(map(str, ids[:39]))
    [(loss, _)] = model.loglikelihood([asked(text, " 39")])
    assert loss == pytest.approx(scored(model, ids[-33:], 1)[0], rel=1e-4)


def test_loglikelihood_rolling(model: HarnessModel):
    """70 tokens after an end of document, 32 at a time; the last 6 have as much context as fits."""
    ids = list(range(70))
    whole = [299, *ids]
    expected = sum(
        scored(model, whole[first:last], count)[0] for first, last, count in [(0, 33, 32), (32, 65, 32), (38, 71, 6)]
    )
    [found, short] = model.loglikelihood_rolling([asked(" ".join(map(str, ids))), asked("5")])
    assert found == pytest.approx(expected, rel=1e-4)
    assert short == pytest.approx(scored(model, [299, 5], 1)[0], rel=1e-4)


def test_generate_until(model: HarnessModel):
    """Greedy unless asked otherwise, up to a stop string; requests of different kinds in one list."""
    [free] = model.generate_until([asked("1 2 3", {"until": [], "max_gen_toks": 6})])
    words = free.split()
    assert len(words) == 6
    stop = words[3]
    first = free.index(stop)
    found = model.generate_until(
        [
            asked("1 2 3", {"until": [stop], "max_gen_toks": 6}),
            asked("4 5", {"until": "\n", "max_gen_toks": 2, "do_sample": True, "temperature": 0.7, "top_k": 5}),
            asked("1 2 3", {"until": [], "max_gen_toks": 6}),
        ]
    )
    assert found[0] == free[:first]
    assert len(found[1].split()) == 2
    assert found[2] == free


def test_contexts_make_room_for_what_is_wanted(model: HarnessModel):
    """Of 40 tokens the last 22 stay, so that 10 can follow."""
    ids = list(range(40))
    long, short = (" ".join(map(str, part)) for part in (ids, ids[-22:]))
    wanted = {"until": [], "max_gen_toks": 10}
    [a, b] = model.generate_until([asked(long, wanted), asked(short, wanted)])
    assert a == b
    assert len(a.split()) == 10


@pytest.mark.skipif(INSTALLED, reason="lm-evaluation-harness is installed")
def test_without_the_package():
    with pytest.raises(InputError, match="lm-evaluation-harness is not installed"):
        registered()


@pytest.mark.skipif(not INSTALLED, reason="lm-evaluation-harness is not installed (pip install lm-eval)")
def test_class_of_the_harness(run: Path):
    """Registered once, and built from an argument string as on its command line."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import get_model

    assert registered() is registered() is get_model("megajax")
    model = registered().create_from_arg_string(f"run={run},words=parallel.tensor=2", {"batch_size": 4, "device": None})
    assert isinstance(model, LM)
    assert (model.batch_size, model.trained.config.parallel.tensor) == (4, 2)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not INSTALLED, reason="lm-evaluation-harness is not installed (pip install lm-eval)")
def test_a_task_of_the_harness(run: Path, model: HarnessModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A task of two choices, run by the harness: it counts the choices that we find likelier."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    questions = [{"question": f"{n} {n + 1}", "choices": [str(n + 2), str(n + 50)], "answer": 0} for n in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "counting.yaml").write_text(
        f"task: counting\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'data.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\ntarget_delimiter: ' '\nmetric_list: [{metric: acc}]\n"
    )
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(model=registered()(str(run)), tasks=["counting"], task_manager=tasks, bootstrap_iters=0)
    likelier = [scored(model, [n, n + 1, n + 2], 1)[0] > scored(model, [n, n + 1, n + 50], 1)[0] for n in range(6)]
    assert found["results"]["counting"]["acc,none"] == pytest.approx(np.mean(likelier))


def test_command_without_the_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def missing() -> type:
        raise InputError("lm-evaluation-harness is not installed")

    monkeypatch.setattr(harness, "registered", missing)
    assert harness.main(["--tasks", "arc_easy"]) == 2
    assert "lm-evaluation-harness is not installed" in capsys.readouterr().err
