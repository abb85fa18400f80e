"""Reading and writing of YAML by the core schema of version 1.2: a value is what it looks like.

PyYAML follows version 1.1, in which `no` is false, `90:5:5` is 324305 (base 60), `010` is 8, `1_000` is a number,
`2024-01-01` a date and `1e-4` a text. Here every value is a text but `true`, `false`, `null`, `~`, decimal, 0o and 0x
integers, and floats such as `1e-4` and `.inf`. A number remembers how it was written, for keys that hold a text: `1.10`
may be the name of a folder. Dumped texts are quoted where either version would read something else.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from megajax.config.base import InputError

_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),  # of version 1.1, and too useful to be lost
)
"""Tag, pattern and possible first letters of each kind of value in the core schema (YAML 1.2.2, section 10.3.2)."""


class WrittenInt(int):
    """Whole number that remembers how it was written."""

    text: str


class WrittenFloat(float):
    """Number that remembers how it was written."""

    text: str


class _Loader(yaml.SafeLoader):
    """Loader of the core schema, which refuses a key that is given twice."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - as PyYAML declares it

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                first = seen[name]
                problem = f"`{name}` is given twice" + (
                    f", first in line {first}" if first <= key.start_mark.line else ""
                )
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes a text if either version of YAML would read something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(found) for first, found in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


for _name, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> WrittenInt:
    base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
    number = WrittenInt(node.value, base)
    number.text = node.value
    return number


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> WrittenFloat:
    number = WrittenFloat(re.sub(r"\.(?=inf|nan)", "", node.value.lower()))
    number.text = node.value
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def parse_yaml(text: str, source: str) -> Any:
    """Parse a text, whose numbers become `WrittenInt` and `WrittenFloat`.

    Raises:
        InputError: it is no YAML, or gives a key twice; the message names `source` and the line.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark and "\n" in text else source
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise InputError(f"{place}: not valid YAML: {problem}") from error


def plain(value: Any, *, as_text: bool = False) -> Any:
    """Return a parsed value with plain numbers or, for a key that holds texts, with numbers as they were written."""
    match value:
        case WrittenInt() | WrittenFloat():
            return value.text if as_text else int(value) if isinstance(value, int) else float(value)
        case list():
            return [plain(item, as_text=as_text) for item in value]
        case dict():
            return {plain(key, as_text=True): plain(item) for key, item in value.items()}
    return value


def dump_yaml(value: Any, **style: Any) -> str:
    """Write a value of plain types as YAML that `parse_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style)


def yaml_text(value: Any) -> str:
    """Write one value as YAML on one line, as it could be typed into a file or after KEY=."""
    return dump_yaml(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()
