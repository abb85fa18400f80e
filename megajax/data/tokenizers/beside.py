"""Hugging Face's files beside that of a tokenizer: names of special and added tokens, and the chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megajax.config.base import InputError
from megajax.data.tokenizers.tokenizer import ROLES, check_text

_SETTINGS, _NAMES, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
BESIDE = (_SETTINGS, _NAMES, _ADDED, *_TEMPLATES)
"""Files that belong to a tokenizer if they lie in the folder of its own file."""


@dataclass(frozen=True)
class Beside:
    """The contents of these files, any of which may be missing."""

    names: dict[str, str] = field(default_factory=dict)
    """Names of special tokens, by role."""
    added: dict[str, int] = field(default_factory=dict)
    """Ids of tokens that were added to the vocabulary, special or not, by name."""
    adds_bos: bool | None = None
    """Whether a beginning-of-sequence token precedes texts; a tokenizer.json tells that itself."""
    adds_eos: bool | None = None
    chat_template: str | None = None


def read_beside(file: Path) -> Beside:
    """Read the files that lie beside the file of a tokenizer.

    Raises:
        InputError: a file does not have the contents that its name implies.
    """
    settings = _read(file.with_name(_SETTINGS))
    tokens = _read(file.with_name(_NAMES)) | settings
    names = {role: _content(token) for role in ROLES if (token := tokens.get(f"{role}_token")) is not None}
    decoder = settings.get("added_tokens_decoder") or {}
    try:
        added = {_content(token): int(i) for i, token in decoder.items()}
        added |= {name: int(i) for name, i in _read(file.with_name(_ADDED)).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file.parent}: tokens are added, but not by id and content ({error!r})") from None
    return Beside(names, added, settings.get("add_bos_token"), settings.get("add_eos_token"), _template(file, settings))


def _template(file: Path, settings: dict[str, Any]) -> str | None:
    jinja, older = (file.with_name(name) for name in _TEMPLATES)
    if jinja.is_file():
        return read_text(jinja)
    template = _read(older).get("chat_template") or settings.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        template = next((named.get("template") for named in template if named.get("name") == "default"), None)
    return template


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a JSON object")
    check_text(json.dumps(content, ensure_ascii=False), str(path))
    return content


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
