"""Continuations of prompts: layouts, batches, stop strings, end tokens, log-probabilities; ids serve as text here."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.config import InputError
from megajax.inference.decode import begin
from megajax.inference.sample import Continuation, Options, continue_prompts, encode_prompt, print_sample
from megajax.inference.sampling import Sampling
from megajax.inference.trained import TrainedModel, load_model
from megajax.models.layout import Layout
from tests.made_runs import make_run

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sample") / "run")


@pytest.fixture(scope="module")
def loaded(run: Path) -> TrainedModel:
    return load_model(run)


def continued(loaded: TrainedModel, *prompts: str, tokens: int = 8, seed: int = 0, **how: float) -> list[Continuation]:
    """Without log-probabilities, whose last bits depend on the shape of the batch."""
    options = Options(tokens=tokens, sampling=Sampling(**how), seed=seed)
    return [made._replace(log_probabilities=()) for made in continue_prompts(loaded, prompts, options)]


LAYOUTS = {
    "tensor": ["parallel.tensor=4"],
    "data": ["parallel.data=2"],
    "fsdp": ["parallel.fsdp=4"],
    "tensor-data": ["parallel.tensor=2", "parallel.data=2"],
    "all": ["parallel.tensor=2", "parallel.data=2", "parallel.fsdp=2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_tokens_on_every_layout(run: Path, loaded: TrainedModel, layout: str):
    """Three ragged prompts on 1, 2, 4 and 8 replicas or shards; greedy, and drawn."""
    there = load_model(run, words=LAYOUTS[layout])
    prompts = ["5 6 7", "250", "20 21 22 23 24 25"]
    for how in ({"temperature": 0.0}, {"top_k": 50, "top_p": 0.9, "seed": 3}):
        assert continued(there, *prompts, **how) == continued(loaded, *prompts, **how)


def test_cache_and_weights_are_cut_as_the_rules_say(run: Path):
    """Heads over `tensor`, rows over `data`."""
    there = load_model(run, words=["parallel.tensor=4", "parallel.data=2"])
    state = begin(
        there.model, np.ones((2, 4), np.int32), np.array([4, 3]), np.uint32(0), new_tokens=4, layout=there.layout
    )
    keys = state.caches[0].whole.keys
    assert keys.sharding.shard_shape(keys.shape) == (2, 1, 8, 1, 8)
    assert there.model.blocks.mlp.fc1[...].sharding.shard_shape((2, 32, 1, 128)) == (2, 32, 1, 32)


def test_batches_change_nothing(loaded: TrainedModel):
    """Prompt i draws from (seed, i) whichever batch it is in."""
    prompts = ["5", "20 21 22", "5", "7 7", "5"]
    together, apart = (list(continue_prompts(loaded, prompts, Options(tokens=6, batch_size=n))) for n in (5, 2))
    assert [made.ids for made in together] == [made.ids for made in apart]
    assert len({together[i].ids for i in (0, 2, 4)}) == 3


def test_any_of_several_end_tokens(loaded: TrainedModel):
    """The earliest end token that is made ends a continuation, whichever it is."""
    [free] = continued(loaded, "0", temperature=0)
    for end in (free.ids[2], free.ids[5]):
        [made] = continued(replace(loaded, end_ids=(298, end)), "0", temperature=0)
        assert made.ids == free.ids[: free.ids.index(end) + 1]
        assert made.finish_reason == "stop"


def stopped(loaded: TrainedModel, prompt: str, tokens: int, *stop: str) -> Continuation:
    options = Options(tokens=tokens, sampling=GREEDY, stop=stop)
    [made] = continue_prompts(loaded, [prompt], options)
    return made


def test_stop_strings_end_a_text_wherever_tokens_end(loaded: TrainedModel):
    """Ids "12 34" stop before "2 3", which begins inside one token and ends inside the next; far into the text too."""
    free = stopped(loaded, "5", 30)
    words = free.text.split()
    for place in (2, 20):
        stop = f"{words[place][-1]} {words[place + 1][0]}"
        before = free.text[: free.text.index(stop)]
        made = stopped(loaded, "5", 30, "never", stop)
        assert (made.text, made.finish_reason) == (before, "stop")
        assert len(made.ids) == len(made.log_probabilities) == len(f"{before}{stop}".split())
    assert stopped(loaded, "5", 30, "never") == free


def test_first_of_several_stop_strings(loaded: TrainedModel):
    words = stopped(loaded, "5", 8).text.split()
    assert stopped(loaded, "5", 8, words[4], words[2]).text.split() == words[: words.index(words[2])]


def test_log_probabilities_of_prompt_and_continuation(loaded: TrainedModel):
    """One of each token but the first, as a softmax over the whole forward pass has them."""
    [made] = continue_prompts(loaded, ["5 6 7"], Options(tokens=5, score_prompts=True))
    ids = np.array([*made.prompt_ids, *made.ids])
    batch = {"tokens": ids[None], "positions": np.arange(len(ids))[None]}
    logits = loaded.model.logits(loaded.model.hidden(batch, loaded.model.context(batch, Layout(), None)))[0]
    expected = jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
    found = [*made.prompt_log_probabilities, *made.log_probabilities]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_scores_a_prompt_without_continuing_it(loaded: TrainedModel):
    [made] = continue_prompts(loaded, ["5 6 7"], Options(tokens=0, score_prompts=True))
    assert (made.ids, made.text, len(made.prompt_log_probabilities)) == ((), "", 2)


def test_a_sample_after_training(loaded: TrainedModel, capsys: pytest.CaptureFixture[str]):
    """The prompt and what follows, the same each time; nothing without a prompt."""
    config = replace(loaded.config, log=replace(loaded.config.log, sample_prompt="5 6 7", sample_tokens=4))
    print_sample(loaded.config, loaded.model, loaded.tokenizer)
    assert capsys.readouterr().out == ""
    print_sample(config, loaded.model, loaded.tokenizer)
    title, text = capsys.readouterr().out.splitlines()
    assert title == "sample at temperature 0.8, top-p 0.95:"
    assert text.startswith("5 6 7 ")
    assert len(text.split()) == 3 + 4


def test_samples_that_cannot_be(loaded: TrainedModel):
    """Said before the training begins."""
    log = replace(loaded.config.log, sample_prompt=" ".join(["5"] * 32))
    with pytest.raises(InputError, match=r"log\.sample_prompt has 32 tokens, model\.max_positions is 32: shorten it"):
        encode_prompt(log, loaded.config.model, loaded.tokenizer)
    bert = replace(loaded.config.model, family="bert")
    with pytest.raises(InputError, match=r"log\.sample_prompt: a bert does not continue text: unset it"):
        encode_prompt(log, bert, loaded.tokenizer)


@pytest.mark.parametrize("prompts", [[], "5 6"])
def test_no_list_of_prompts(loaded: TrainedModel, prompts: list[str] | str):
    with pytest.raises(InputError, match="prompts: expected a list of at least one text"):
        continue_prompts(loaded, prompts, Options())
