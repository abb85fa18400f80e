"""Loading of a configuration from a YAML file, its presets and `key=value` words, with the origin of every value.

Later sources win, in this order: defaults, the run that `init_from` names, preset of the preset, preset, file, command
line. A file names its preset with the key `preset`: a path relative to the file itself, or the name of one that MegaJAX
brings (see `megajax.config.presets`). Paths that are values (`data.path`, `output_dir`) stay as the user wrote them,
relative to the working directory. In config.yaml of a run they are relative to the run (see `run_files`), and
`output_dir` is the folder that holds the file, so that it serves to resume the run from anywhere.
"""

from __future__ import annotations

import os.path
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megajax.config.base import InputError
from megajax.config.config import Config
from megajax.config.keys import (
    FIELDS,
    MEGATRON_TOKENIZERS,
    SECTIONS,
    TEXT_KEYS,
    did_you_mean,
    first_key,
    flat_values,
    type_name,
    with_kind,
)
from megajax.config.needs import ignored_keys
from megajax.config.presets import find_config
from megajax.config.run_files import CONFIG, IDENTITY, for_the_run, from_the_run
from megajax.config.yaml_text import dump_yaml, parse_yaml, plain, yaml_text

StartOf = Callable[[str, str], Mapping[str, Any]]
"""Function that takes `init_from` and `output_dir` and returns the values by key that `init_from` implies."""


@dataclass(frozen=True)
class Loaded:
    """A configuration and the origin of its values."""

    config: Config
    origins: Mapping[str, str]
    """Dotted key -> "default", "preset NAME", "file PATH", "command line" or "derived" (see `derived_values`)."""


@dataclass(frozen=True)
class _Layer:
    """The values that one source gives, by dotted key."""

    origin: str
    values: dict[str, Any]


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), start_of: StartOf | None = None
) -> Loaded:
    """Read a configuration and check each of its components.

    Args:
        path: YAML file, relative to the working directory, or the name of a preset (`gpt2_124m`); None for the
            defaults.
        overrides: `KEY=VALUE` words, e.g. `optim.lr=3e-4`, `train.rampup=[16,16,1000]`; the values are YAML.
            `preset=gpt2_124m` takes the place of the file's preset.
        start_of: function that works out the values by key that `init_from` implies where it names no run; None if
            there are none.

    Raises:
        InputError: a file is missing or not YAML, a key or value is not one the configuration has, or the values of a
            component do not fit together. `check_config` tells whether the components fit together.
    """
    words = _Layer("command line", _read_words(overrides))
    preset = words.values.pop("preset", None)
    layers = [] if path is None else _read_file(find_config(str(path)), f"file {path}")
    if preset is not None:
        layers = [*_read_preset(preset, Path()), *layers[-1:]]
    layers.append(words)
    given = ChainMap(*(layer.values for layer in reversed(layers)), {"output_dir": FIELDS["output_dir"].default})
    if isinstance(given.get("init_from"), str) and isinstance(given["output_dir"], str):
        init_from, output_dir = map(os.path.expanduser, (given["init_from"], given["output_dir"]))
        _refuse_wrong_types(layers)
        start = _read_start(Path(init_from))
        if start_of and not start:
            start = dict(start_of(init_from, output_dir))
        layers.insert(0, _Layer(f"init_from {Path(init_from)}", start))
    return _join(layers)


def load_run(run: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Return the configuration that a run keeps, whose files are found wherever the run lies by now.

    Args:
        run: directory of the run. Keys that older versions took although they were ignored are taken as unset.
        overrides: `KEY=VALUE` words, as in `load_config`.
    """
    file = run / CONFIG
    layers = _read_file(file, f"file {file}", of_run=True)
    defaults = {key: field.default for key, field in FIELDS.items()}
    while ignored := ignored_keys(FIELDS, with_kind(defaults | layers[-1].values)):  # one may need another of them
        for key in ignored:
            del layers[-1].values[key]
    return _join([*layers, _Layer("command line", _read_words(overrides))])


def dump_run(config: Config, run: Path) -> str:
    """Return the text of config.yaml in which a run keeps its configuration."""
    return dump_config(_build(for_the_run(run, flat_values(config)), {}))


def _refuse_wrong_types(layers: Sequence[_Layer]) -> None:
    """Refuse values of wrong types; those of right ones may fit together once more values are known."""
    try:
        _join(layers)
    except InputError as error:
        if isinstance(error.__cause__, ValidationError):
            raise


def _join(layers: Sequence[_Layer]) -> Loaded:
    """Build the configuration from layers, of which later ones win."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        values |= layer.values
        origins |= dict.fromkeys(layer.values, layer.origin)
    config = _build(values, origins)
    origins = dict.fromkeys(FIELDS, "default") | origins | dict.fromkeys(derived_values(config), "derived")
    return Loaded(config, origins)


def dump_config(config: Config) -> str:
    """Return the whole configuration as YAML that `load_config` reads back equal."""
    return dump_yaml(asdict(config))


def derived_values(config: Config) -> dict[str, Any]:
    """Return by key what unset keys amount to, and the padded vocabulary, as far as a configuration tells."""
    model, train = config.model, config.train
    values = {
        "model.num_kv_heads": model.kv_heads,
        "model.head_dim": model.head_size,
        "model.ffn_hidden_size": model.ffn_size,
        "model.qkv_bias": model.has_qkv_bias,
        "optim.decay_steps": train.steps,
        "optim.decay_samples": train.samples,
    }
    derived = {key: value for key, value in values.items() if value is not None and attrgetter(key)(config) is None}
    if model.vocab_size is not None:
        derived["model.padded_vocab_size"] = model.padded_vocab_size
    return derived


def _read_words(words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"`{word}` on the command line is not KEY=VALUE")
        values |= _flatten({key.strip(): parse_yaml(value, f"`{word}` on the command line")}, "on the command line")
    return values


def _read_file(path: Path, origin: str, seen: tuple[Path, ...] = (), of_run: bool = False) -> list[_Layer]:
    """Return the layers of a file: those of its presets, which give way, and then its own."""
    seen = (*seen, path.resolve())
    if len(set(seen)) < len(seen):
        raise InputError(f"presets in a circle: {' -> '.join(map(str, seen))}")
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read configuration file {path}: {error}") from error
    if not isinstance(content, dict | None):
        raise InputError(f"{path}: expected lines of `key: value`, found {yaml_text(plain(content))}")
    values = _flatten(content or {}, f"in {path}")
    preset = values.pop("preset", None)
    if of_run or (path.name == CONFIG and path.with_name(IDENTITY).is_file()):
        values = from_the_run(path.parent, values)
    layers = [] if preset is None else _read_preset(preset, path.parent, seen)
    return [*layers, _Layer(origin, values)]


def _read_preset(preset: Any, beside: Path, seen: tuple[Path, ...] = ()) -> list[_Layer]:
    if not isinstance(preset, str):
        raise InputError(f"`preset` is {yaml_text(preset)}: expected the name of one YAML file")
    return _read_file(find_config(preset, beside), f"preset {preset}", seen)


def _read_start(run: Path) -> dict[str, Any]:
    """Return architecture and tokenizer of the run that training starts from, or nothing for what is no run."""
    return start_values(load_run(run).config) if (run / CONFIG).is_file() else {}


def start_values(config: Config) -> dict[str, Any]:
    """Return the values by key that a run takes over when it starts from a model: architecture and tokenizer."""
    values = flat_values(config).items()
    return {key: value for key, value in values if key.startswith(("model.", "tokenizer.")) and value is not None}


def _flatten(content: Mapping[Any, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Turn a nested mapping into dotted keys, and refuse keys that do not exist."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key in FIELDS or key == "preset":
            inner = {key: plain(value, as_text=key in TEXT_KEYS)}
        elif key in SECTIONS and value is None:
            inner = {}
        elif isinstance(value, dict) and (value or key in SECTIONS):
            inner = _flatten(value, where, f"{key}.")
        elif key in SECTIONS:
            raise InputError(f"`{key}` {where} is a section: give it keys, such as `{first_key(key)}`")
        else:
            raise InputError(f"unknown key `{key}` {where}: {did_you_mean(key)}")
        if twice := flat.keys() & inner.keys():
            raise InputError(f"`{min(twice)}` {where} is given twice")
        flat |= inner
    return flat


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    try:
        return Config(**nested)
    except ValidationError as error:
        raise InputError(_explain(error, values, origins)) from error


_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")


def _explain(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Put pydantic's report into one line: the key, the value given, its origin, and what is expected."""
    expected: dict[str, str] = {}
    for problem in error.errors():
        loc = [str(part) for part in problem["loc"]]
        key = loc[0] if loc[0] in FIELDS else ".".join(loc[:2])
        if key not in FIELDS:
            continue  # a section whose values do not fit together: a matter for when all are of their types
        expected.setdefault(key, type_name(FIELDS[key].annotation))
        if problem["type"] in _BOUNDS:
            expected[key] += f", {problem['msg'].removeprefix('Input should be ')}"
    if (theirs := MEGATRON_TOKENIZERS.get(str(values.get("tokenizer.type")))) and "tokenizer.type" in expected:
        expected["tokenizer.type"] += ": write " + " ".join(f"tokenizer.{k}={yaml_text(v)}" for k, v in theirs.items())
    return "; ".join(
        f"`{key}` is {yaml_text(values[key])} ({origins[key]}): expected {wish}" for key, wish in expected.items()
    )
