"""`python -m megajax.convert` imports and exports models without PyTorch; tests/interop checks their results."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from megajax.checkpoint.fingerprint import fingerprint
from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, InputError, ModelConfig, ParallelConfig, dump_config, load_config
from megajax.convert import main
from megajax.inference.trained import load_model
from megajax.interop.hf.families import FAMILIES
from megajax.interop.hf.transfer import export_model, import_model
from megajax.models.families import build_model
from tests.harness import compile_layout, tiny_config
from tests.interop.hf.made import GROUPED, MODELS, change, made, tensors


def restored(run: Path, vocab_multiple: int = 64) -> tuple[Any, dict[str, Any]]:
    """Weights and record of an imported run."""
    model = replace(load_config(run / "config.yaml").config.model, vocab_multiple=vocab_multiple)
    like = jax.eval_shape(lambda: build_model(jax.random.key(0), model))
    device = SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        return checkpoints.restore(like, jax.tree.map(lambda _: device, like), part="params")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_round_trip(model_type: str, tmp_path: Path) -> None:
    """A checkpoint that restores on a padded vocabulary with the fingerprints it has, and the very files again."""
    source = made(tmp_path / "source", model_type)
    import_model(source, tmp_path / "run")
    state, record = restored(tmp_path / "run")
    assert state.word_embedding.shape == (64, 16) and not state.word_embedding[50:].any()
    assert record["fingerprint"] == {f"params.{name}": value for name, value in fingerprint(state).items()}
    assert (record["version"], record["step"], record["imported"]) == (3, 0, model_type)
    export_model(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize(("dtype", "precision"), [(jnp.bfloat16, "bf16"), (np.float16, "fp16"), (np.float32, "fp32")])
def test_dtypes(dtype: Any, precision: str, tmp_path: Path) -> None:
    """Numbers are held exactly, the run computes in that precision, and it is what export goes back to."""
    source = made(tmp_path / "source", dtype=dtype)
    import_model(source, tmp_path / "run")
    assert load_config(tmp_path / "run/config.yaml").config.train.precision == precision
    export_model(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    export_model(tmp_path / "run", tmp_path / "other", precision="bf16")
    assert json.loads((tmp_path / "other/config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, value in load_file(tmp_path / "other/model.safetensors").items():
        expected = load_file(source / "model.safetensors")[name].astype(np.float32).astype(jnp.bfloat16)
        np.testing.assert_array_equal(value, expected, err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_that_began_here(tied: bool, tmp_path: Path) -> None:
    """Trained on data 2 x tensor 4 with 104 rows for 100 words; the files have 100, and say so."""
    model = ModelConfig(**GROUPED | {"tied_head": tied, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 100})
    config = tiny_config(replace(model, vocab_multiple=8))
    state, _, _, _ = compile_layout(config, ParallelConfig(data=2, tensor=4))
    assert state.params.word_embedding.shape == (104, 16)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(replace(config, tokenizer=replace(config.tokenizer, vocab_size=99))))
    with Checkpoints(run / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(7, state, {"step": 7, "tokenizer": {"type": "null", "vocab_size": 100}})
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert (settings["vocab_size"], settings["eos_token_id"], settings["dtype"]) == (100, 99, "float32")
    files = load_file(tmp_path / "out/model.safetensors")
    assert files.keys() == tensors("llama", model).keys() and ("lm_head.weight" in files) != tied
    np.testing.assert_array_equal(files["model.embed_tokens.weight"], state.params.word_embedding[:100])
    down = np.asarray(state.params.blocks.mlp.fc2[1])
    np.testing.assert_array_equal(files["model.layers.1.mlp.down_proj.weight"], down.T)


def test_what_comes_with_a_model_goes_with_it(tmp_path: Path) -> None:
    """Tokenizer files and the settings of generation; config.yaml names the tokenizer as from the run."""
    source = made(tmp_path / "source")
    vocab = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    files = {"vocab.json": json.dumps(vocab), "merges.txt": "#version: 0.2\na b\n", "generation_config.json": "{}"}
    for name, text in files.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("not carried")
    assert main(["import", str(source), "--out", str(tmp_path / "run"), "optim.lr=1e-5", "data.seq_length=8"]) == 0
    config = load_config(tmp_path / "run/config.yaml").config
    assert (config.optim.lr, config.data.seq_length) == (1e-5, 8)
    assert (config.tokenizer.type, config.tokenizer.vocab) == ("gpt2_bpe", f"{tmp_path}/run/huggingface/vocab.json")
    assert "  vocab: huggingface/vocab.json\n" in (tmp_path / "run/config.yaml").read_text()
    assert restored(tmp_path / "run")[1]["tokenizer"]["vocab_size"] == 4
    export_model(tmp_path / "run", tmp_path / "out")
    made_files = {path.name for path in (tmp_path / "out").iterdir()}
    assert made_files == {"config.json", "model.safetensors", *files}
    for name, text in files.items():
        assert (tmp_path / "out" / name).read_text() == text


def test_another_tokenizer_or_template_than_came_with_the_model(tmp_path: Path) -> None:
    """Another tokenizer's ids are told, nothing of the old one goes out; a template alone takes the old one's place."""
    source = made(tmp_path / "source")
    change(source, eos_token_id=[0, 3])
    came = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    other = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    (tmp_path / "other").mkdir()
    for folder, vocab in ((source, came), (tmp_path / "other", other)):
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (source / "chat_template.jinja").write_text("old")
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    (tmp_path / "new.jinja").write_text("new")
    words = [f"tokenizer.vocab={tmp_path}/other/vocab.json", f"tokenizer.merges={tmp_path}/other/merges.txt"]
    import_model(source, tmp_path / "run", words)
    assert load_model(tmp_path / "run").end_ids == (3,)
    export_model(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 3
    (tmp_path / "run/tokenizer/vocab.json").write_text(json.dumps(came))
    with pytest.raises(InputError, match=r"the tokenizer of .*/run changed since its checkpoint \(sha256\)"):
        export_model(tmp_path / "run", tmp_path / "again")
    assert not {"chat_template.jinja", "generation_config.json"} & {path.name for path in (tmp_path / "out").iterdir()}

    import_model(source, tmp_path / "run2", [f"tokenizer.chat_template={tmp_path}/new.jinja"])
    export_model(tmp_path / "run2", tmp_path / "out2")
    assert json.loads((tmp_path / "out2/config.json").read_text())["eos_token_id"] == [0, 3]
    assert json.loads((tmp_path / "out2/tokenizer_config.json").read_text())["chat_template"] == "new"
    assert not (tmp_path / "out2/chat_template.jinja").exists()
    assert json.loads((tmp_path / "out2/generation_config.json").read_text())["eos_token_id"] == [0, 3]


def test_another_end_of_texts_of_the_same_tokenizer(tmp_path: Path) -> None:
    """The same tokenizer.json beside other names of special tokens: what ends texts here ends them there as well."""
    source = made(tmp_path / "source")
    change(source, eos_token_id=0, bos_token_id=0)
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 3], "max_length": 9}')
    (tmp_path / "other").mkdir()
    for folder, end in ((source, "<|endoftext|>"), (tmp_path / "other", "<|im_end|>")):
        vocabulary = {"<|endoftext|>": 0, "<|im_end|>": 1, "a": 2, "b": 3}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary)).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    import_model(source, tmp_path / "run", [f"tokenizer.model={tmp_path}/other/tokenizer.json"])
    assert load_model(tmp_path / "run").end_ids == (1, 0, 3)
    export_model(tmp_path / "run", tmp_path / "out")
    after = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*config.json")}
    assert after["config.json"]["eos_token_id"] == [1, 0] and after["config.json"]["bos_token_id"] == 0
    assert after["generation_config.json"] == {"eos_token_id": [1, 0, 3], "max_length": 9}
    assert after["tokenizer_config.json"]["eos_token"] == "<|im_end|>"


def test_instruction_data_without_a_template_goes_out_with_one(tmp_path: Path) -> None:
    """Of a model whose tokenizer came without: how this run has written conversations."""
    source = made(tmp_path / "source")
    (source / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    import_model(source, tmp_path / "run", ["data.kind=instruction"])
    export_model(tmp_path / "run", tmp_path / "out")
    about = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert "<|assistant|>" in about["chat_template"]


def test_a_longer_context_is_told_in_the_settings(tmp_path: Path) -> None:
    """Everything else in config.json is as it came, what megajax does not know included."""
    source = made(tmp_path / "source", "llama")
    change(source, some_day="a setting")
    import_model(source, tmp_path / "run", ["model.max_positions=64", "model.rope_base=1e6"])
    export_model(tmp_path / "run", tmp_path / "out")
    settings = json.loads((tmp_path / "out/config.json").read_text())
    expected = {"max_position_embeddings": 64, "rope_theta": 1e6}
    assert settings == json.loads((source / "config.json").read_text()) | expected


def test_a_single_file_without_prefix_and_with_constants(tmp_path: Path) -> None:
    """GPT-2 as it was first published: names without `transformer.`, and the causal mask among the weights."""
    source = made(tmp_path / "source")
    weights = {name.removeprefix("transformer."): value for name, value in tensors("gpt2", MODELS["gpt2"]).items()}
    file = source / "weights.safetensors"
    save_file(weights | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}, file, {"format": "pt"})
    (source / "model.safetensors").unlink()
    import_model(file, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")
    again = load_file(tmp_path / "out/weights.safetensors")
    assert again.keys() == weights.keys()
    for name, value in again.items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)


def test_missing_heads_are_drawn_and_left_out_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An encoder with a pooler but no heads: what it lacks is as in a new model, and the files do not get it."""
    source = made(tmp_path / "source", "bert")
    weights = {name: value for name, value in tensors("bert", MODELS["bert"]).items() if not name.startswith("cls.")}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks .*cls\.predictions\.transform\.dense\.weight.*--draw-heads"):
        import_model(source, tmp_path / "run")
    import_model(source, tmp_path / "run", draw_heads=True)
    assert "lacks head_bias, pair_bias, pair_head, transform, " in caplog.text
    state, _ = restored(tmp_path / "run", vocab_multiple=1)
    assert 0.015 < np.std(state.transform) < 0.025 and not state.pair_bias[...].any()  # model.init_std is 0.02
    export_model(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_tied_head_may_be_there_twice(tmp_path: Path) -> None:
    """The same numbers under a second name come back under both; other numbers are refused."""
    source = made(tmp_path / "source")
    weights = tensors("gpt2", MODELS["gpt2"])
    weights["lm_head.weight"] = weights["transformer.wte.weight"].copy()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    import_model(source, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    weights["lm_head.weight"][0] += 1
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        import_model(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transformer.wte.weight": None}, "lacks the tensor transformer.wte.weight"),
        ({"transformer.h.1.ln_1.bias": None}, "lacks the tensor transformer.h.1.ln_1.bias"),
        (
            {"transformer.h.2.ln_1.bias": np.zeros(16, np.float32)},
            "holds the tensor transformer.h.2.ln_1.bias, which a gpt2 as config.json has it",
        ),
        (
            {"transformer.ln_f.bias": np.zeros(15, np.float32)},
            r"ln_f.bias in model.safetensors is \(15,\), config.json says \(16,\)",
        ),
        ({"transformer.ln_f.bias": np.zeros(16, np.int8)}, "ln_f.bias is I8: save the model as one of F32, BF16, F16"),
    ],
)
def test_tensors_that_do_not_fit(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, nothing half written."""
    source = made(tmp_path / "source")
    weights = tensors("gpt2", MODELS["gpt2"]) | changes
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, source / "model.safetensors", {"format": "pt"})
    assert main(["import", str(source), "--out", str(tmp_path / "run")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megajax: ")]
    with pytest.raises(InputError, match=said):
        import_model(source, tmp_path / "run")
    assert line.startswith("megajax: error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        (
            "llama",
            {"attention_bias": True, "mlp_bias": True},
            r"lacks the tensor model.layers.*self_attn.o_proj.bias, wh",
        ),
        ("llama", {"num_hidden_layers": 1}, r"holds the tensor model.layers.1.*as config.json has it does not"),
        ("llama", {"num_hidden_layers": 3}, r"lacks the tensor model.layers.2.*which config.json asks for"),
        ("llama", {"num_hidden_layers": 10**9}, "holds 21 tensors, too few for the 1000000000 layers of config.json"),
        ("llama", {"hidden_size": 24}, r"in model.safetensors is .*, config.json says"),
        (
            "llama",
            {"vocab_size": 51},
            r"weight in model.safetensors is \(50, 16\), config.json says \(51, 16\)",
        ),
        (
            "llama",
            {"tie_word_embeddings": True},
            "lm_head.weight differs from model.embed_tokens.weight, which config.jso",
        ),
        ("gpt2", {"tie_word_embeddings": False}, r"lacks lm_head.weight, which .* \(tie_word_embeddings is false\)"),
        ("qwen2", {"model_type": "llama"}, "holds the tensor model.layers.0.self_attn.k_proj.bias, which a llama as"),
        ("llama", {"model_type": ["llama"]}, r"model_type is \['llama'\], which megajax lacks"),
        ("llama", {"eos_token_id": [1, "2"]}, r"config.json: eos_token_id is \[1, '2'\], no id"),
    ],
)
def test_settings_and_tensors_that_contradict_each_other(
    model_type: str, changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names both, exit code 2, nothing half written."""
    source = made(tmp_path / "source", model_type)
    change(source, **changes)
    assert main(["import", str(source), "--out", str(tmp_path / "run")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megajax: error: ")]
    assert re.search(said, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '"llama"', "{", "{}", '{"model_type": "opt"}', 10**5 * "["])
def test_files_that_are_no_settings(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = made(tmp_path / "source")
    (source / "config.json").write_text(text)
    assert main(["import", str(source), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megajax: error: ") and error.count("\n") == 1 and "config.json" in error


def test_numbers_of_another_dtype_than_the_settings_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are taken as the files hold them, and that is said."""
    source = made(tmp_path / "source", dtype=jnp.bfloat16)
    change(source, torch_dtype="float32")
    import_model(source, tmp_path / "run")
    assert "config.json says float32, most tensors are BF16: taken as they are" in caplog.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import", "SRC", "--out", "SRC"], "exists: choose another directory"),
        (["import", "nowhere", "--out", "RUN"], "nowhere does not exist: give the directory of a Hugging Face model"),
        (["import", "SRC", "--out", "RUN", "optim.rl=1"], "unknown key `optim.rl`"),
        (["import", "SRC", "--out", "RUN", "--interleaved-rope"], "gpt2 has no rotary embedding"),
        (["import", "SRC", "--out", "RUN", "model.num_kv_heads=1"], "no gpt2 has the blocks.attention.qkv of this"),
        (["import", "SRC", "--out", "RUN", "--step", "1"], "--step is for `convert export`"),
        (["export", "SRC", "--out", "RUN"], "is not a run of megajax"),
        (["export", "SRC", "--out", "RUN", "a=1"], "a=1 is for `convert import`"),
    ],
)
def test_bad_command_lines(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "SRC")
    places = {name: str(tmp_path / name) for name in ("SRC", "RUN")}
    assert main([places.get(word, word) for word in words]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "RUN").exists()


def test_damage_is_found_on_the_way_out(tmp_path: Path) -> None:
    """A flipped bit in a checkpoint does not become a model."""
    import_model(made(tmp_path / "source"), tmp_path / "run")
    file = tmp_path / "run/checkpoints/0/state/params.blocks.mlp.fc2/1.0.0"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"is damaged \(the contents of blocks.mlp.fc2 are not"):
        export_model(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as a process may write to one file stand in for a disk."""
    source = made(tmp_path / "source", model=replace(MODELS["gpt2"], vocab_size=1000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # enough for all but the embedding
    try:
        with pytest.raises(InputError, match=rf"writing .*run failed .*{os.strerror(errno.EFBIG)}"):
            import_model(source, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    """Sixteen layers, of which no more than one tensor, its fp32 copy and its new layout are held."""
    shape = GROUPED | {"num_layers": 16, "hidden_size": 128, "ffn_hidden_size": 512, "vocab_size": 1000}
    source = made(tmp_path / "source", "llama", ModelConfig(**shape))
    import_model(made(tmp_path / "small", "llama"), tmp_path / "warm")  # what is loaded once does not count
    largest, total = 1000 * 128 * 4, (source / "model.safetensors").stat().st_size
    run, out = tmp_path / "run", tmp_path / "out"
    for convert, at, to in ((import_model, source, run), (export_model, run, out)):
        tracemalloc.start()
        convert(at, to)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * largest + 2**20 < total / 4, f"{convert.__name__}: {peak / largest:.1f} x the largest tensor"
