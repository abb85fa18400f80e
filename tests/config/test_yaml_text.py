"""Values are read by YAML 1.2's core schema, and texts that look like other values stay texts."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import Config, load_config
from megajax.config.yaml_text import dump_yaml, parse_yaml, plain, yaml_text

LOOKALIKES = st.from_regex(
    r"[-+]?[0-9_]{1,4}(:[0-5]?[0-9]){0,2}|[-+]?[0-9]*\.[0-9]*([eE][-+]?[0-9]+)?|0[xob]?[0-9a-fA-F_]+"
    r"|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([tT ][0-9:.]+)?|(?i:yes|no|on|off|y|n|true|false|null)"
    r"|(?i:nan|\.nan|[-+]?\.inf)|~|=|<<|",
    fullmatch=True,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("off", "off"), ("y", "y"), ("NO", "NO"), ("90:5:5", "90:5:5"), ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"), ("2024-99-99", "2024-99-99"), ("1_000", "1_000"), ("=", "="), ("1e", "1e"),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("010", 10), ("-7", -7), ("0o17", 15), ("0x1F", 31),
        ("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-.inf", -math.inf),
        ("'010'", "010"), ("[010, no, 1e2]", [10, "no", 100.0]), ("{a: 0x10}", {"a": 16}),
    ],
)  # fmt: skip
def test_core_schema(text: str, value: object) -> None:
    """YAML 1.2.2, section 10.3.2: Norway is no boolean, and a ratio no number of base 60."""
    found = plain(parse_yaml(text, "here"))
    assert found == value and type(found) is type(value)


def test_not_a_number() -> None:
    assert math.isnan(plain(parse_yaml(".nan", "here")))


@pytest.mark.parametrize("text", ["1.10", "007", "1e5", "0x1F", "+3", "2024.10"])
def test_a_text_that_is_all_digits_stays_as_written(text: str) -> None:
    """A folder `2024.10` is not the folder `2024.1`."""
    config = load_config(None, [f"data.text_key={text}", f"data.path=[0.30, {text}]"]).config
    assert (config.data.text_key, config.data.path) == (text, ("0.30", text))


def test_switches_may_still_be_said_in_words() -> None:
    for word, value in {"no": False, "off": False, "yes": True, "on": True}.items():
        assert load_config(None, [f"model.bias={word}"]).config.model.bias is value


@given(st.one_of(LOOKALIKES, st.text()))
def test_dumped_texts_come_back_in_both_versions(text: str) -> None:
    for dumped in (dump_yaml({"a": [text]}), f"a: [{yaml_text(text)}]"):
        assert parse_yaml(dumped, "here") == {"a": [text]}
        assert yaml.safe_load(dumped) == {"a": [text]}


@given(st.one_of(st.floats(allow_nan=False), st.integers(), st.booleans(), st.none()))
def test_dumped_values_come_back(value: object) -> None:
    found = plain(parse_yaml(yaml_text(value), "here"))
    assert found == value and type(found) is type(value)


def test_anchors_and_merges_still_work() -> None:
    text = "a: &x {b: 1, c: 2}\nd:\n  <<: *x\n  c: 3\n"
    assert plain(parse_yaml(text, "here")) == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}


def test_defaults_are_unchanged_by_a_round_trip(tmp_path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("data: {split: 90:5:5, text_key: no}\n")
    config = load_config(file).config
    assert (config.data.split, config.data.text_key) == ("90:5:5", "no")
    assert Config() == load_config().config
