"""Dotted keys of the configuration (`optim.lr`): what each of them holds, and which key a wrong one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from megajax.config.base import IS_PATH, Elsewhere
from megajax.config.config import Config


def _walk(component: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in component.__pydantic_fields__.items():
        if is_dataclass(field.annotation):
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


FIELDS: dict[str, FieldInfo] = dict(_walk(Config))
"""Every key with its type, default and meaning, in the order of the components."""
SECTIONS: dict[str, str] = {
    name: str(field.annotation.__doc__)
    for name, field in cast(Any, Config).__pydantic_fields__.items()
    if is_dataclass(field.annotation)
}
"""Name of every section, a key that holds other keys (model, data, train, ...) -> its meaning."""


def _takes(annotation: Any, kind: Any) -> bool:
    """Tell whether values of a type are, or hold, those of a kind: a class, or a mark that `Annotated` bears."""
    inner = [part for part in get_args(annotation) if get_origin(annotation) is not Literal]
    return annotation is kind or kind in inner or any(_takes(part, kind) for part in inner)


TEXT_KEYS = frozenset(key for key, field in FIELDS.items() if _takes(field.annotation, str))
"""Keys whose value is a text or a list of texts."""
PATH_KEYS = tuple(
    key for key, field in FIELDS.items() if IS_PATH in field.metadata or _takes(field.annotation, IS_PATH)
)
"""Keys whose value names files or folders."""

_SPELT = [
    (key, *other.partition("=")[::2])
    for key, field in FIELDS.items()
    for mark in field.metadata
    if isinstance(mark, Elsewhere)
    for other in mark.names.split()
]
OTHER_NAMES: dict[str, str] = {other: key for key, other, _ in _SPELT}
"""Name of a key in another program -> our key."""
_VALUES: dict[str, str] = {other: value for _, other, value in _SPELT if value}
"""Switch of another program -> the value of our key that it stands for."""
MEGATRON_TOKENIZERS: dict[str, dict[str, Any]] = {
    "SentencePieceTokenizer": {"type": "sentencepiece", "special_ids": True},
    "GPTSentencePieceTokenizer": {"type": "sentencepiece"},
    "Llama2Tokenizer": {"type": "sentencepiece", "bos": True},
    "GPT2BPETokenizer": {"type": "gpt2_bpe"},
    "HuggingFaceTokenizer": {"type": "huggingface"},
    "BertWordPieceLowerCase": {"type": "bert_wordpiece"},
    "BertWordPieceCase": {"type": "bert_wordpiece", "lower_case": False},
    "TikTokenizer": {"type": "tiktoken"},
    "NullTokenizer": {"type": "null"},
}
"""Value of Megatron-LM's `--tokenizer-type` -> values of our fields in the section `tokenizer`."""


_VALUES_OF = attrgetter(*FIELDS)


def flat_values(config: Config) -> dict[str, Any]:
    """Return every value by its dotted key."""
    return dict(zip(FIELDS, _VALUES_OF(config), strict=True))


def with_kind(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all keys, in which `data.kind` is the model's family where it is auto."""
    kind, family = values["data.kind"], values["model.family"]
    return {**values, "data.kind": family if kind == "auto" else kind}


def first_key(section: str) -> str:
    """Return the first key of a section."""
    return next(key for key in FIELDS if key.startswith(f"{section}."))


def nearest(key: str) -> list[str]:
    """Return the real keys that a wrong key (or `--flag`) may have meant, best first; none when nothing is near."""
    key = _plain(key)
    name = key.rpartition(".")[2]
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name]]
    misplaced = [real for real in FIELDS if real.rpartition(".")[2] == name]
    if misplaced:
        return difflib.get_close_matches(key, misplaced, n=1, cutoff=0.8) or misplaced
    by_key = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.7)
    names = {real.rpartition(".")[2]: real for real in FIELDS}
    by_name = [names[near] for near in difflib.get_close_matches(name, names, n=1, cutoff=0.7)]
    return by_key or by_name


def value_for(key: str) -> str | None:
    """Return the value that a switch of another program stands for, or None for what is no such switch."""
    return _VALUES.get(_plain(key).rpartition(".")[2])


def did_you_mean(key: str) -> str:
    """Return the end of an error message about an unknown key, which names the keys that it may have meant."""
    near = nearest(key)
    if near and (value := value_for(key)):
        return f"did you mean `{near[0]}={value}`?"
    return "did you mean " + " or ".join(f"`{real}`" for real in near) + "?" if near else "--help lists all keys"


def _plain(key: str) -> str:
    return key.lstrip("-").lower().replace("-", "_")


def type_name(annotation: Any) -> str:
    """Name the type of a field for readers: `int`, `cosine | linear`, `[int, int, int]`; None (unset) is left out."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(type_name(argument) for argument in arguments if argument is not NoneType)
    if origin is tuple:
        return "[" + ", ".join("..." if argument is Ellipsis else type_name(argument) for argument in arguments) + "]"
    return str(annotation.__name__)
