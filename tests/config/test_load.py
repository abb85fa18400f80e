"""The origin of values, and messages about a wrong key, value or file."""

from dataclasses import is_dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megajax.config import Config, InputError, ModelConfig, OptimConfig, dump_config, load_config
from megajax.config.keys import FIELDS, OTHER_NAMES, PATH_KEYS, SECTIONS
from megajax.config.load import load_run


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | str | None = None, *words: str) -> str:
    with pytest.raises(InputError) as caught:
        load_config(path, words)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_gpt2_small():
    loaded = load_config()
    assert loaded.config == Config()
    assert loaded.origins["optim.lr"] == "default"
    assert set(FIELDS) <= set(loaded.origins)


def test_later_sources_win_and_every_origin_is_kept(tmp_path):
    write(tmp_path / "grandparent.yaml", "model: {num_layers: 1, hidden_size: 64, num_heads: 4}\noptim: {lr: 1.0e-3}")
    write(tmp_path / "sizes/parent.yaml", "preset: ../grandparent.yaml\nmodel: {num_layers: 2}")
    run = write(tmp_path / "run.yaml", "preset: sizes/parent.yaml\nmodel: {num_heads: 2}\nparallel:\n  tensor: 2")

    loaded = load_config(run, ["parallel.tensor=4", "optim.lr=3e-4"])

    model = loaded.config.model
    assert (model.hidden_size, model.num_layers, model.num_heads) == (64, 2, 2)
    assert loaded.config.parallel.tensor == 4
    assert loaded.config.optim.lr == 3e-4
    assert loaded.origins["model.hidden_size"] == "preset ../grandparent.yaml"
    assert loaded.origins["model.num_layers"] == "preset sizes/parent.yaml"
    assert loaded.origins["model.num_heads"] == f"file {run}"
    assert loaded.origins["parallel.tensor"] == "command line"
    assert loaded.origins["model.head_dim"] == "derived"
    assert loaded.origins["log.every"] == "default"


def test_presets_of_the_configs_folder_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write(tmp_path / "run.yaml", "preset: models/gpt2_355m.yaml")
    assert load_config(run).config.model.num_layers == 24
    assert load_config("models/gpt2_355m.yaml").config.model == load_config(run).config.model


def test_the_command_line_can_replace_the_preset(tmp_path):
    run = write(tmp_path / "run.yaml", "preset: models/gpt2_124m.yaml\noptim: {lr: 1.0e-3}")
    loaded = load_config(run, ["preset=models/gpt2_355m.yaml"])
    assert (loaded.config.model.num_layers, loaded.config.optim.lr) == (24, 1e-3)
    assert load_config(None, ["preset=models/gpt2_355m.yaml"]).config.model.num_layers == 24


def test_paths_stay_as_written(tmp_path):
    run = write(tmp_path / "run.yaml", "data: {path: [0.3, web, 0.7, ../books]}\noutput_dir: runs/a")
    config = load_config(run).config
    assert config.data.path == ("0.3", "web", "0.7", "../books")
    assert config.output_dir == "runs/a"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("optim.lr=3e-4", 3e-4),  # YAML 1.1 reads this as text
        ("train.rampup=[16,16,1000]", (16, 16, 1000)),
        ("train.remat=[qkv, attention_out]", ("qkv", "attention_out")),
        ("train.remat=none", "none"),
        ("parallel.data=auto", "auto"),
        ("parallel.data=3", 3),
        ("data.text=corpus.jsonl", ("corpus.jsonl",)),
        ("tokenizer.type=null", "null"),
        ("model.vocab_size=null", None),
        ("model.vocab_size=", None),
        ("model={vocab_size: 7}", 7),
        ("model.bias=false", False),
    ],
)
def test_values_on_the_command_line_are_yaml(word, value):
    key = "model.vocab_size" if word.startswith("model={") else word.partition("=")[0]
    section, name = key.split(".")
    config = load_config(None, ["train.samples=2000", "train.global_batch_size=32", word]).config
    assert getattr(getattr(config, section), name) == value


def test_home_is_found_in_every_path(monkeypatch):
    """A shell replaces `~` at the beginning of a word only, not behind `output_dir=` or in a file."""
    monkeypatch.setenv("HOME", "/home/ada")
    needed = {"checkpoint.local": "checkpoint.local_every=9"}
    needed |= dict.fromkeys(("data.valid_path", "data.test_path"), "data.train_path=a")
    for key in PATH_KEYS:
        name = f"~/{key}"
        value = attrgetter(key)(load_config(None, [f"{key}={name}", needed.get(key, "log.every=9")]).config)
        assert value in (name.replace("~", "/home/ada"), (name.replace("~", "/home/ada"),)), key
    assert load_config(None, ["data.path=[0.3, ~/a, 0.70, b~]"]).config.data.path == (
        "0.3",
        "/home/ada/a",
        "0.70",
        "b~",
    )
    assert {"output_dir", "init_from", "data.text", "checkpoint.local", "tokenizer.merges"} < set(PATH_KEYS)


def test_a_file_that_names_its_own_folder_as_start(tmp_path):
    """It is read once; whether a model is there is for the training to find out."""
    text = f"init_from: {tmp_path}\nmodel: {{num_layers: 3}}\n"
    for name in ("config.yaml", "run.yaml"):
        assert load_config(write(tmp_path / name, text)).config.model.num_layers == 3


def test_an_empty_file_or_section_changes_nothing(tmp_path):
    assert load_config(write(tmp_path / "empty.yaml", "")).config == Config()
    assert load_config(write(tmp_path / "section.yaml", "optim:\nmodel: {}")).config == Config()


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.learning_rate", "`optim.lr`"),
        ("lr", "`optim.lr`"),
        ("optimizer.lr", "`optim.lr`"),
        ("optim.weight_deacy", "`optim.weight_decay`"),
        ("evaluaton.steps", "`evaluation.steps`"),
        ("steps", "`train.steps` or `evaluation.steps`"),
        ("micro_batch_size", "`train.micro_batch_size`"),
        ("num_query_groups", "`model.num_kv_heads`"),
        ("model.kv_channels", "`model.head_dim`"),
        ("tensor_model_parallel_size", "`parallel.tensor`"),
        ("model.n_layer", "`model.num_layers`"),
        ("parallel.pp", "`parallel.pipe`"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(tmp_path, key, meant):
    assert refusal(None, f"{key}=1") == f"unknown key `{key}` on the command line: did you mean {meant}?"
    section, _, name = key.rpartition(".")
    run = write(tmp_path / "run.yaml", f"{section}: {{{name}: 1}}" if section else f"{name}: 1")
    assert refusal(run) == f"unknown key `{key}` in {run}: did you mean {meant}?"


def test_an_unknown_key_like_nothing_at_all():
    assert refusal(None, "zzz=1") == "unknown key `zzz` on the command line: --help lists all keys"
    assert "unknown key `zzz`" in refusal(None, "zzz={}")
    assert "`x` on the command line is not KEY=VALUE" in refusal(None, "x")


def test_every_name_from_elsewhere_leads_to_a_real_key():
    assert set(OTHER_NAMES.values()) <= set(FIELDS)
    assert not set(OTHER_NAMES) & {key.rpartition(".")[2] for key in FIELDS}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lr=fast", "`optim.lr` is fast (command line): expected float"),
        ("optim.lr=-1", "`optim.lr` is -1 (command line): expected float, greater than 0"),
        ("optim.lr=.inf", "`optim.lr` is .inf (command line): expected float, a finite number"),
        ("optim.beta1=1.5", "`optim.beta1` is 1.5 (command line): expected float, less than 1"),
        ("model.num_layers=2.5", "`model.num_layers` is 2.5 (command line): expected int"),
        ("model.num_layers=null", "`model.num_layers` is null (command line): expected int"),
        ("model.norm=batchnorm", "`model.norm` is batchnorm (command line): expected layernorm | rmsnorm"),
        ("parallel.data=x", "`parallel.data` is x (command line): expected int | auto"),
        ("train.remat=some", "`train.remat` is some (command line): expected none | selective | full | [str, ...]"),
        ("train.rampup=[16,16]", "`train.rampup` is [16, 16] (command line): expected [int, int, int]"),
        ("data.path={a: 1}", "`data.path` is {a: 1} (command line): expected [str, ...]"),
        ("checkpoint.keep_last=0", "`checkpoint.keep_last` is 0 (command line): expected int, greater than 0"),
        ("optim=3", "`optim` on the command line is a section: give it keys, such as `optim.name`"),
        ("preset=3", "`preset` is 3: expected the name of one YAML file"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(word, expected):
    assert refusal(None, word) == expected


def test_a_run_of_an_older_version_that_took_keys_which_are_ignored(tmp_path):
    """They change nothing of it, and do not keep it from being read; in any other file they are refused."""
    file = write(tmp_path / "config.yaml", "optim: {decay_style: constant, decay_steps: 5, lr: 1.0e-3}\n")
    assert load_run(tmp_path).config.optim == OptimConfig(decay_style="constant", lr=1e-3)
    assert "optim.decay_steps is for optim.decay_style linear" in refusal(file)
    with pytest.raises(InputError, match=r"optim\.min_lr is for optim\.decay_style linear"):
        load_run(tmp_path, ["optim.min_lr=1e-4"])
    # One of them may need another.
    write(tmp_path / "config.yaml", "model: {rope_scaling_factor: 8.0, rope_low_frequency: 2.0}\n")
    assert load_run(tmp_path).config.model == ModelConfig()


def test_wrong_types_are_named_before_the_start_is_read():
    """Reading a model may take long, or fail; what is given may fit together only once its values are known."""
    asked = []

    def start_of(init_from, output_dir):
        asked.append(init_from)
        return {"model.experts": 8, "model.bias": False}

    with pytest.raises(InputError, match=r"`train\.steps` is few \(command line\): expected int"):
        load_config(None, ["init_from=there", "model.experts_per_token=4", "train.steps=few"], start_of)
    assert asked == []
    loaded = load_config(None, ["init_from=there", "model.experts_per_token=4", "train.steps=9"], start_of)
    assert (loaded.config.model.experts, loaded.config.model.experts_per_token, asked) == (8, 4, ["there"])


def test_two_wrong_values_are_both_named(tmp_path):
    run = write(tmp_path / "run.yaml", "optim: {lr: fast}")
    message = refusal(run, "train.seed=x")
    assert f"`optim.lr` is fast (file {run}): expected float" in message
    assert "`train.seed` is x (command line): expected int" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  num_layers: 2\n bias: no\n", "run.yaml:3: not valid YAML"),
        ("optim: {lr: 1}\noptim: {lr: 2}\n", "run.yaml:2: not valid YAML: `optim` is given twice"),
        ("optim: {lr: 1}\noptim.lr: 2\n", "run.yaml is given twice"),
        (
            "optim:\n  lr: 1\n  beta1: 0.5\n  lr: 2\n",
            "run.yaml:4: not valid YAML: `lr` is given twice, first in line 2",
        ),
        ("optim: !!python/name:os.system\n", "run.yaml:1: not valid YAML: could not determine a constructor"),
        ("- 1\n- 2\n", "run.yaml: expected lines of `key: value`, found [1, 2]"),
        ("preset: run.yaml\n", "presets in a circle: "),
        ("preset: presets/../run.yaml\n", "presets in a circle: "),
        ("preset: nowhere.yaml\n", "configuration file nowhere.yaml not found in "),
        ("a: \0\n", "run.yaml: not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, text, expected):
    (tmp_path / "presets").mkdir()
    assert expected in refusal(write(tmp_path / "run.yaml", text))


def test_files_that_cannot_be_read(tmp_path):
    assert "nope.yaml not found in" in refusal(tmp_path / "nope.yaml")
    assert "cannot read configuration file" in refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot read configuration file" in refusal(tmp_path / "binary.yaml")


def test_configurations_are_built_from_plain_dicts_and_never_change():
    config = Config(model={"num_layers": 2, "num_heads": 4}, data={"text": ["a.jsonl"]})
    assert config.model == ModelConfig(num_layers=2, num_heads=4)
    with pytest.raises(ValidationError):
        Config(model={"layers": 2})
    with pytest.raises(AttributeError):
        config.model.num_layers = 3


TEXTS = st.one_of(st.text(), st.from_regex(r"[-+]?[0-9_.:eExXoO]{1,6}|[yYnN]|on|no|off|~|null|<<|=", fullmatch=True))
"""Anything, and what may look like something else than a text."""


def fitting(component: Any, drawn: tuple[dict[str, Any], list[str]]) -> Any:
    """The component with those of the values that it takes beside the ones before them, tried in the given order.

    Sources of data exclude one another, and other keys mean something beside one source only.
    """
    values, order = drawn
    kept: dict[str, Any] = {}
    for name in order:
        try:
            component(**kept, **{name: values[name]})
        except InputError:
            continue
        kept[name] = values[name]
    return component(**kept)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Legal values of a field's type: positive whole numbers and fractions in (0, 1] satisfy every bound."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        fields = st.fixed_dictionaries({name: values_of(inner) for name, inner in hints.items()})
        return st.tuples(fields, st.permutations(list(hints))).map(partial(fitting, hint))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple:
        items = values_of(arguments[0])
        return st.lists(items).map(tuple) if Ellipsis in arguments else st.tuples(*map(values_of, arguments))
    plain = {
        bool: st.booleans(),
        int: st.integers(1, 2**32 - 1),
        float: st.floats(0, 1, exclude_min=True, exclude_max=True),
        str: TEXTS,
    }
    return plain.get(hint, st.none())


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(config=values_of(Config))
def test_a_dumped_configuration_loads_back_equal(tmp_path_factory, config):
    path = write(tmp_path_factory.mktemp("dump") / "config.yaml", dump_config(config))
    assert load_config(path).config == config


def test_a_dump_holds_every_key():
    dumped = yaml.safe_load(dump_config(Config()))
    assert set(dumped) == {"output_dir", "init_from", *SECTIONS}
    assert dumped["model"]["num_layers"] == 12
