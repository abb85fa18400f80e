"""`python -m megajax.generate` writes text with a run that was trained on eight devices and is read onto one."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.store import Checkpoints
from megajax.config import InputError, load_config
from megajax.data.tokenizers import NullTokenizer
from megajax.generate import generate_text, main
from megajax.inference.sample import Continuation, Options, continue_prompts
from megajax.inference.sampling import Sampling
from megajax.inference.trained import TrainedModel, load_model
from megajax.models.layout import Layout
from megajax.train import train
from tests.made_runs import MODEL, make_run

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def loggers_stay_as_they_are() -> Iterator[None]:
    """The command line sets up the root logger of its process, which here is that of all tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on 8 devices, a checkpoint of each."""
    directory = tmp_path_factory.mktemp("generate")
    corpus = directory / "corpus.jsonl"
    line = "How vainly men themselves amaze to win the palm, the oak, or bays. "
    corpus.write_text("\n".join(json.dumps({"text": line * n}) for n in range(1, 21)), encoding="utf-8")
    config = load_config(
        None,
        [
            f"output_dir={directory / 'run'}", f"data.text=[{corpus}]", "data.seq_length=16",
            "tokenizer.type=sentencepiece", "tokenizer.vocab_size=300",
            "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.max_positions=32",
            "model.init_std=0.2", "train.steps=2", "train.global_batch_size=8", "checkpoint.every=1",
            "evaluation.steps=0", "parallel.fsdp=8", "log.tensorboard=false",
        ],
    ).config  # fmt: skip
    return train(config).output_dir


@pytest.fixture(scope="module")
def loaded(run: Path) -> TrainedModel:
    return load_model(run)


def continued(loaded: TrainedModel, *prompts: str, tokens: int = 8, seed: int = 0, **how: float) -> list[Continuation]:
    """Without log-probabilities, whose last bits depend on the shape of the batch."""
    options = Options(tokens=tokens, sampling=Sampling(**how), seed=seed)
    return [made._replace(log_probabilities=()) for made in continue_prompts(loaded, prompts, options)]


def reading_ids(loaded: TrainedModel, end: int = 299) -> TrainedModel:
    """The model with the ids themselves for text."""
    return replace(loaded, tokenizer=NullTokenizer(end), end_ids=(end,))


def test_continues_as_the_whole_forward_pass_would(loaded: TrainedModel):
    """Every token of a greedy continuation is the likeliest one after all before it."""
    loaded = reading_ids(loaded)
    [result] = continued(loaded, "5 6 7", temperature=0)
    tokens = jnp.array([loaded.encode("5 6 7" + result.text)])
    batch = {"tokens": tokens, "positions": jnp.arange(11)[None]}
    hidden = jax.jit(lambda model: model.hidden(batch, model.context(batch, Layout(), None)))(loaded.model)
    np.testing.assert_array_equal(loaded.model.logits(hidden).argmax(-1)[0, 2:-1], tokens[0, 3:])
    assert (len(result.ids), result.finish_reason) == (8, "length")


def test_weights_are_those_of_the_checkpoint_on_one_device(run: Path, loaded: TrainedModel):
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        place = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[3]), loaded.model)
        again = checkpoints.restore(loaded.model, place, step=2, part="params").state
        before = checkpoints.restore(loaded.model, place, step=1, part="params").state
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(loaded.model))
    assert all(map(np.array_equal, jax.tree.leaves(loaded.model), jax.tree.leaves(again)))
    assert all(map(np.array_equal, jax.tree.leaves(load_model(run, step=1).model), jax.tree.leaves(before)))
    assert not np.array_equal(before.word_embedding[...], again.word_embedding[...])


def test_weights_have_the_precision_of_the_run(run: Path, tmp_path: Path):
    copy = shutil.copytree(run, tmp_path / "run")
    config = (copy / "config.yaml").read_text().replace("precision: fp32", "precision: bf16")
    (copy / "config.yaml").write_text(config)
    model = load_model(copy).model
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    expected = load_model(run).model.final_norm.scale[...].astype(jnp.bfloat16)
    np.testing.assert_array_equal(model.final_norm.scale[...], expected)


def test_needs_nothing_but_configuration_tokenizer_and_checkpoint(run: Path, tmp_path: Path):
    """The token files and the text are gone, and are not made again."""
    copy = tmp_path / "run"
    for name in ("config.yaml", "run.json", "tokenizer/tokenizer.model"):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(run / name, copy / name)
    shutil.copytree(run / "checkpoints" / "2", copy / "checkpoints" / "2")
    config = (copy / "config.yaml").read_text().replace("corpus.jsonl", "lost.jsonl")
    (copy / "config.yaml").write_text(config)
    before = sorted(copy.rglob("*"))
    assert generate_text(copy, ["How"], sampling=GREEDY) == generate_text(run, ["How"], sampling=GREEDY)
    assert sorted(copy.rglob("*")) == before


def test_prompts_do_not_change_each_other(loaded: TrainedModel):
    """Different lengths, one of them with little room, against each prompt on its own."""
    prompts = ["How", "themselves amaze to win the palm", "the oak"]
    together = continued(loaded, *prompts, tokens=20, temperature=0)
    assert together == [continued(loaded, prompt, tokens=20, temperature=0)[0] for prompt in prompts]
    assert len(together[0].ids) > len(together[1].ids)


def test_seeds(loaded: TrainedModel):
    same = ["How", "How"]
    first, second = continued(loaded, *same, seed=7)
    assert first.text != second.text
    assert continued(loaded, *same, seed=7) == [first, second]
    assert continued(loaded, "How", seed=7) == [first]
    assert continued(loaded, "How", seed=8) != [first]


def test_clips_to_the_positions_of_the_model(loaded: TrainedModel, caplog: pytest.LogCaptureFixture):
    length = len(loaded.tokenizer.encode("How vainly men"))
    [result] = continued(loaded, "How vainly men", tokens=100)
    assert len(result.ids) == 32 - length
    assert f"leaves room for {32 - length} new tokens, not 100" in caplog.text


def test_ids_of_a_prompt_are_told(run: Path, loaded: TrainedModel, capsys: pytest.CaptureFixture[str]):
    """No beginning-of-sequence token unless asked for, as training text had none; all of it shows."""
    bos, ids = loaded.tokenizer.bos_id, loaded.tokenizer.encode("How")
    assert bos is not None
    for flag, expected in {"--no-add-bos": ids, "--add-bos": [bos, *ids]}.items():
        assert main([str(run), "--prompt", "How", "--tokens", "1", flag]) == 0
        assert f"'How' ({len(expected)} ids, from {expected} on) + 1 (length)" in capsys.readouterr().err
    assert continued(loaded, "How")[0].prompt_ids == tuple(ids)


def test_stops_at_the_end_of_a_document(loaded: TrainedModel):
    """With the null tokenizer the id after the last one ends a document: let it be one that the model makes."""
    [free] = continued(reading_ids(loaded), "0")
    made = free.text.split()
    assert (len(made), free.finish_reason) == (8, "length")
    end = made[3]
    count = made.index(end) + 1
    [stopped] = continued(reading_ids(loaded, int(end)), "0")
    assert stopped.text == "".join(f" {token}" for token in made[: count - 1])
    assert (stopped.ids, stopped.finish_reason) == (free.ids[:count], "stop")


def test_command(run: Path, capsys: pytest.CaptureFixture[str]):
    """Continuations alone go to stdout."""
    assert main([str(run), "--prompt", "How", "--prompt", "the oak", "--tokens", "4", "--temperature", "0"]) == 0
    expected = generate_text(run, ["How", "the oak"], tokens=4, sampling=GREEDY)
    assert capsys.readouterr().out == "".join(f"{result.text}\n" for result in expected)


def test_json_lines(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Prompts from the command line and then from a file, in which line ends stand inside JSON strings."""
    (tmp_path / "prompts").write_text('How vainly\n"the\\noak"\n\n"unfinished\n')
    words = ["--prompt", "palm", "--prompts-file", str(tmp_path / "prompts"), "--tokens", "3", "--temperature", "0"]
    assert main([str(run), "parallel.tensor=2", *words, "--json", "--logprobs", "--echo"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["palm", "How vainly", "the\noak", '"unfinished']
    for record in records:
        assert len(record["ids"]) == len(record["logprobs"]) == record["tokens"] == 3
        assert len(record["prompt_ids"]) == len(record["prompt_logprobs"])
        assert record["prompt_logprobs"][0] is None
        assert record["finish_reason"] == "length"


def test_echo_and_log_probabilities_for_people(run: Path, capsys: pytest.CaptureFixture[str]):
    words = [str(run), "--prompt", "How", "--tokens", "3", "--temperature", "0"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--echo", "--logprobs"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(f"How{text}")
    assert len(whole.removeprefix(f"How{text}").split()) == len(load_model(run).encode("How")) - 1 + 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no prompt: give --prompt TEXT or --prompts-file FILE"),
        (["--prompts-file", "/nowhere"], "/nowhere: cannot be read"),
        (["--prompt", "x", "--stop", ""], "a stop string is empty"),
        (["--prompt", "x", "--batch-size", "0"], "batch_size is 0"),
        (["--prompt", "x", "parallel.context=2"], "parallel.context is for training"),
        (["--prompt", "x", "parallel.chunks=2"], "parallel.chunks is for training"),
        (["--prompt", "x", "parallel.tensor=3"], "not divisible by tensor = 3"),
        (["--prompt", "x", "parallel.data=9"], "but there are 8"),
        (["--prompt", "x", "model.num_layers=3"], "model.num_layers=3: settled by the training"),
        (["--prompt", ""], "the prompt '' is empty: give at least one token"),
        (["--prompt", "palm " * 40], "which leaves no room for new ones: the model sees 32 (model.max_positions)"),
        (["--prompt", "x", "--tokens", "0"], "tokens is 0: expected 1 or more"),
        (["--prompt", "x", "--seed", "-1"], "seed is -1: expected 0 to 4294967295"),
        (["--prompt", "x", "--temperature", "nan"], "temperature is nan: expected 0 (greedy) or more"),
        (["--prompt", "x", "--top-k", "-1"], "top_k is -1"),
        (["--prompt", "x", "--top-p", "1.1"], "top_p is 1.1"),
        (["--prompt", "a\udcff"], "the prompt is no text at character 1: half a surrogate pair, or not UTF-8"),
        (["--prompt", "\ud800", "--special-tokens"], "the prompt is no text at character 0"),
        (["--prompt", "\ud800", "--chat"], "message 1 needs a text under content"),
        (["--prompt", "x", "--system", "y"], "--system is said in a chat: give --chat as well"),
        (["--prompt", "x", "--chat", "--add-bos"], "--chat writes a prompt as conversations were: leave"),
        (["--prompt", "x", "--step", "7"], "no finished checkpoint of step 7: finished are 1, 2"),
    ],
)
def test_bad_input(run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([str(run), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]


def test_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A prompt is written as conversations were, the id behind an earlier answer included."""
    made = make_run(
        tmp_path / "run", ["<|user|> <|assistant|> <|system|> hello there"], replace(MODEL, max_positions=64)
    )
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    talk = json.dumps([*said, {"role": "user", "content": "hello"}])
    given = [str(made), "--chat", "--system", "hello", "--tokens=2", "--json", "--temperature=0"]
    assert main([*given, "--prompt", "hello", "--prompt", talk]) == 0
    short, long = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    tokenizer = load_model(made).tokenizer
    first = tokenizer.encode("<|system|>\nhello\n<|user|>\nhello\n<|assistant|>\n")
    assert short["prompt_ids"] == first
    second = tokenizer.encode("<|user|>\nhello\n<|assistant|>\n")
    assert long["prompt_ids"] == [*first, *tokenizer.encode("there"), tokenizer.eod_id, *second]


def test_names_of_special_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Text, as in training, unless they are to be tokens."""
    made = make_run(tmp_path / "run", ["hello there"], vocab_size=275)
    command = [str(made), "--prompt", "hello</s>there", "--tokens=1", "--json"]
    assert main(command) == main([*command, "--special-tokens"]) == 0
    text, marked = (json.loads(line)["prompt_ids"] for line in capsys.readouterr().out.splitlines())
    tokenizer = load_model(made).tokenizer
    assert text == tokenizer.encode("hello</s>there") and tokenizer.eod_id not in text
    assert marked == [*tokenizer.encode("hello"), tokenizer.eod_id, *tokenizer.encode("there")]


def test_encoders_make_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A BERT is refused; a T5 reads the prompt with its encoder, which gives it no log-probabilities."""
    bert = make_run(tmp_path / "bert", model=replace(MODEL, family="bert"))
    assert main([str(bert), "--prompt", "1"]) == 2
    assert f"generation takes a gpt or t5 model, and that of {bert} is a bert" in capsys.readouterr().err
    t5 = make_run(tmp_path / "t5", model=replace(MODEL, family="t5", positions="relative", bias=False, norm="rmsnorm"))
    words = [str(t5), "--prompt", "1 2 3", "--prompt", "4", "--tokens", "4", "--temperature", "0"]
    assert main([*words, "parallel.tensor=2"]) == 0
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines()] == [4, 4]
    assert main([*words, "--echo", "--logprobs"]) == 2
    assert "a prompt that an encoder reads has no log-probabilities" in capsys.readouterr().err


def test_directory_without_a_trained_model(run: Path, tmp_path: Path):
    with pytest.raises(InputError, match=r"is not a run of megajax: it has no config\.yaml"):
        generate_text(tmp_path, ["x"])
    shutil.copy(run / "config.yaml", tmp_path)
    with pytest.raises(InputError, match=r"tokenizer\.model: no such file"):
        generate_text(tmp_path, ["x"])
    shutil.copytree(run / "tokenizer", tmp_path / "tokenizer")
    with pytest.raises(InputError, match="has no finished checkpoint: train it first"):
        generate_text(tmp_path, ["x"])
    assert not (tmp_path / "checkpoints").exists()


def test_checkpoint_of_another_model(run: Path, tmp_path: Path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace("hidden_size: 32", "hidden_size: 64"))
    with pytest.raises(InputError, match=r"is \(2, 4, 8, 32\) there and \(2, 4, 16, 64\) in this model"):
        load_model(copy)
