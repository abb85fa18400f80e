"""How a component declares its configuration: a frozen dataclass, validated, documented, strict."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

T = TypeVar("T")
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
IS_PATH = "a file or folder"
PathName = Annotated[str, AfterValidator(os.path.expanduser), IS_PATH]
"""The name of a file or folder, relative to the working directory; `~` at its beginning is the home directory."""


class InputError(ValueError):
    """Bad input, said in one line that names the thing and the remedy; entry points exit with code 2."""


class NotReady(InputError):  # noqa: N818 - a state of things
    """Something that may be there a minute later: a process, a port, a lock. A restart can help: exit code 5."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def component(cls: type[T]) -> type[T]:
    """Declare a configuration component: immutable, unknown keys and infinities refused, docstrings kept as help."""
    settings = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # YAML reads `path: [0.3, prefix]` and `text_key: 1` as numbers
    )
    decorate: Callable[..., Any] = dataclass(frozen=True, kw_only=True, config=settings)
    return decorate(cls)
