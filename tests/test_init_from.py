"""Training starts from the weights of another run, or of a Hugging Face model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file

from megajax.config import InputError, ModelConfig, load_config
from megajax.config.cli import Command, parse_command_line
from megajax.convert import main as convert
from megajax.inference.trained import load_model
from megajax.interop.init_from import grow_vocabulary, start_of
from megajax.models.families import build_model
from megajax.models.parameters import named_leaves
from megajax.plan import main as plan
from megajax.show import main as show
from megajax.train import main, train
from megajax.verify import main as verify
from tests.interop.hf.made import MODELS, change, made
from tests.runs import ALL_DEVICES, WORDS, arrays, records

pytestmark = pytest.mark.slow

DATA_ALONE = [
    *(f"parallel.{axis}=1" for axis in ("fsdp", "tensor", "pipe")),
    "parallel.data=8",
    "train.micro_batch_size=1",
]
"""A layout for models of any width."""
SHORT = ["train.steps=2", "optim.warmup_steps=0", "checkpoint.every=2", "evaluation.every=2", "model.hidden_dropout=0"]


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps."""
    output = tmp_path_factory.mktemp("runs") / "base"
    assert main([*WORDS, *ALL_DEVICES, *SHORT, f"data.text={corpus}", f"output_dir={output}"]) == 0
    return output


def words(base: Path, corpus: Path, output: Path) -> list[str]:
    """What the next run says: nothing of the architecture, another layout."""
    said = [word for word in [*WORDS, *ALL_DEVICES, *SHORT] if not word.startswith(("model.", "tokenizer."))]
    layout = ["parallel.data=2", "parallel.fsdp=1", "parallel.tensor=2", "parallel.pipe=2", "train.micro_batch_size=2"]
    return [*said, *layout, f"init_from={base}", f"data.text={corpus}", f"output_dir={output}"]


def losses(output: Path) -> list[float]:
    """Validation losses."""
    return [float(str(line["lm loss validation"])) for line in records(output) if "lm loss validation" in line]


def test_begins_where_the_other_ended_with_a_fresh_optimizer(base: Path, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "next"
    result = train(load_config(None, words(base, corpus, output)).config)

    before, after = losses(base), losses(output)
    assert after[0] == pytest.approx(before[-1], rel=1e-6)
    assert after[-1] < after[0]
    assert (result.step, int(arrays(output, 2)["step"])) == (2, 2)
    config = load_config(output / "config.yaml").config
    assert (config.model.hidden_size, config.tokenizer.vocab_size) == (32, 50)


def test_a_hugging_face_model_is_imported_on_the_way(base: Path, corpus: Path, tmp_path: Path) -> None:
    """The export of the run gives the same start as the run, and starting again goes on."""
    model, output = tmp_path / "model", tmp_path / "next"
    assert convert(["export", str(base), "--out", str(model)]) == 0
    said = [*words(model, corpus, output), "tokenizer.type=null", "tokenizer.vocab_size=50", "data.split=90,10,0"]

    assert main([*said, "train.steps=1"]) == 0
    assert losses(output)[0] == pytest.approx(losses(base)[-1], rel=1e-6)
    assert main(said) == 0
    assert len(losses(output)) >= 3


def test_what_is_neither_is_refused(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, corpus, tmp_path / "next")) == 2
    assert "neither a run (config.yaml) nor a Hugging Face model (config.json)" in capsys.readouterr().err


def test_an_architecture_of_its_own_is_refused(base: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"blocks\.mlp\.fc1"):
        train(load_config(None, [*words(base, corpus, tmp_path / "next"), "model.ffn_hidden_size=64"]).config)


def test_a_larger_vocabulary_begins_with_the_mean(
    base: Path, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """51 learned rows, padded to 128, become 81: the new ones are their mean, padding stays zero."""
    output = tmp_path / "next"
    said = [*words(base, corpus, output), "tokenizer.vocab_size=80", "tokenizer.type=null", "train.steps=1"]
    with caplog.at_level("INFO"):
        train(load_config(None, [*said, "checkpoint.every=1", "optim.lr=1e-30", "optim.min_lr=0"]).config)
    assert "the vocabulary grows from 51 to 81: new rows of word_embedding are the mean" in caplog.text
    before, after = (arrays(at, step)["params.word_embedding"] for at, step in ((base, 2), (output, 1)))
    np.testing.assert_array_equal(after[:51], before[:51])
    np.testing.assert_allclose(
        after[51:81], np.tile(before[:51].mean(0, dtype=np.float64), (30, 1)), rtol=1e-5, atol=1e-8
    )
    assert not after[81:].any()


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ({"tied_head": False}, {"word_embedding", "head"}),
        ({"family": "bert", "token_types": 2}, {"word_embedding", "head_bias"}),
    ],
)
def test_every_part_with_a_row_for_every_word_grows(shape: dict[str, Any], names: set[str]) -> None:
    """An untied head and the bias of a head of masked words as well."""
    config = ModelConfig(
        num_layers=1, hidden_size=8, num_heads=2, max_positions=4, vocab_size=10, vocab_multiple=8, **shape
    )
    rng = np.random.default_rng(0)
    model = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), build_model(jax.random.key(0), config)
    )
    before = {name: np.asarray(leaf[...]) for name, leaf in named_leaves(model)}
    shardings = jax.tree.map(lambda x: SingleDeviceSharding(jax.devices()[0]), model)
    for name, leaf in named_leaves(grow_vocabulary(model, 10, 13, shardings, "base")):
        after = np.asarray(leaf[...])
        if name in names:
            np.testing.assert_allclose(after[10:13], np.stack([before[name][:10].mean(0)] * 3), atol=1e-6)
            after = np.concatenate([after[:10], before[name][10:13], after[13:]])
        np.testing.assert_array_equal(after, before[name], err_msg=name)


def test_a_smaller_vocabulary_is_refused(base: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text(8 * (json.dumps({"text": " ".join(map(str, range(30)))}) + "\n"))
    said = [*words(base, small, tmp_path / "next"), "tokenizer.type=null", "tokenizer.vocab_size=40"]
    with pytest.raises(InputError, match=r"a vocabulary of 51 and this run one of 41.* set it to 51 or more"):
        train(load_config(None, said).config)


def test_a_vocabulary_size_says_where_it_came_from(base: Path, corpus: Path, tmp_path: Path) -> None:
    """A model from Hugging Face has one of its own: leaving it unset would help nobody, and what is advised does."""
    model = made(tmp_path / "model")
    said = [*words(model, corpus, tmp_path / "next"), "tokenizer.type=null", "tokenizer.vocab_size=80"]
    argv = [*said, *DATA_ALONE]
    with pytest.raises(InputError) as caught:
        train(parse_command_line("", "", argv, start_of)[0].config)
    assert str(caught.value) == (
        f"model.vocab_size is 50 (that of init_from {model}, if not given beside it) but the tokenizer has 81 ids: set "
        "it to 81 or more, or keep the tokenizer of that model"
    )
    assert main([*argv, "model.vocab_size=81", "train.steps=1"]) == 0


@pytest.mark.parametrize("command", [main, plan, show, verify])
def test_every_command_reads_the_model_that_a_run_begins_from(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sequence as long as the model's positions, which are more than those of the defaults (1024)."""
    model = made(tmp_path / "model", "llama", replace(MODELS["llama"], max_positions=2048))
    with pytest.raises(SystemExit) as caught:
        command([f"init_from={model}", "data.seq_length=2048", "train.steps=1", "parallel.data=1", "--print-config"])
    assert caught.value.code == 0
    assert re.search(rf"^model.num_layers: 2 +# init_from {model}$", capsys.readouterr().out, re.MULTILINE)


def chat_model(directory: Path) -> Path:
    """A LLaMA in bf16 that ends its turns with one token and texts with another, and knows how chats are written."""
    source = made(directory, "llama", dtype=jnp.bfloat16)
    pieces = ["<unk>", "<|im_end|>", "</s>", "<s>", *map(str, range(46))]
    model = tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(pieces[:4])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "max_length": 9}))
    change(source, eos_token_id=[1, 2], bos_token_id=3, some_day="a setting")
    return source


def test_what_came_with_a_model_outlives_training(corpus: Path, tmp_path: Path) -> None:
    """Imported, trained, trained on, moved, exported: dtype, ends, chats and settings are there; weights differ."""
    source = chat_model(tmp_path / "model")
    said = [word for word in [*WORDS, *ALL_DEVICES, *SHORT] if not word.startswith(("model.", "tokenizer."))]
    said += [*DATA_ALONE, f"data.text={corpus}"]
    for start, output in ((source, tmp_path / "one"), (tmp_path / "one", tmp_path / "two")):
        assert main([*said, f"init_from={start}", f"output_dir={output}"]) == 0
    run = (tmp_path / "two").rename(tmp_path / "moved")
    assert load_model(run).end_ids == (2, 1)
    assert convert(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name
    before, after = (json.loads((at / "config.json").read_text()) for at in (source, tmp_path / "out"))
    assert after == before and after["torch_dtype"] == "bfloat16" and after["eos_token_id"] == [1, 2]
    came, out = (load_file(at / "model.safetensors") for at in (source, tmp_path / "out"))
    assert came.keys() == out.keys() and {value.dtype for value in out.values()} == {jnp.dtype(jnp.bfloat16)}
    assert not np.array_equal(came["lm_head.weight"], out["lm_head.weight"])


def test_with_another_tokenizer_its_own_ids_go_out(corpus: Path, tmp_path: Path) -> None:
    """The dtype stays; ends, chats and ids of the old tokenizer do not."""
    source, output = chat_model(tmp_path / "model"), tmp_path / "run"
    said = [word for word in [*WORDS, *ALL_DEVICES, *SHORT] if not word.startswith("model.")]
    said += [*DATA_ALONE, f"data.text={corpus}"]
    assert main([*said, f"init_from={source}", "model.vocab_size=51", f"output_dir={output}"]) == 0
    assert load_model(output).end_ids == (50,)
    assert convert(["export", str(output), "--out", str(tmp_path / "out")]) == 0
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert (after["eos_token_id"], after["vocab_size"], after["torch_dtype"]) == (50, 51, "bfloat16")
    assert not {"chat_template.jinja", "generation_config.json"} & {path.name for path in (tmp_path / "out").iterdir()}
    embedding = load_file(tmp_path / "out/model.safetensors")["model.embed_tokens.weight"]
    assert embedding.shape == (51, 16) and embedding.dtype == jnp.bfloat16


def test_the_other_run_is_needed_once_only(base: Path, corpus: Path, tmp_path: Path) -> None:
    """Resumed when it has moved, when another name leads to it, and when it is gone; never from a third one."""
    start, output = shutil.copytree(base, tmp_path / "start"), tmp_path / "next"
    assert main([*words(start, corpus, output), "train.steps=1"]) == 0
    moved = start.rename(tmp_path / "moved")
    assert main([*words(moved, corpus, output), "train.steps=2"]) == 0
    other = shutil.copytree(base, tmp_path / "other")
    (other / "config.yaml").write_text((base / "config.yaml").read_text().replace("seed: 1234", "seed: 1235"))
    shutil.rmtree(moved)
    assert main([*words(tmp_path / "x" / ".." / "moved", corpus, output), "train.steps=3"]) == 0
    with pytest.raises(InputError, match=f"{output} began from {moved}, not from init_from {other}"):
        train(load_config(None, [*words(other, corpus, output), "train.steps=4"]).config)


def test_a_run_does_not_begin_from_itself(
    base: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(base, tmp_path / "copy")
    assert main([*words(copy, corpus, tmp_path / "x" / ".." / "copy")]) == 2
    assert "the output_dir itself: name another run or model" in capsys.readouterr().err
