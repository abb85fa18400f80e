"""How a component declares its configuration: a frozen dataclass, validated, documented, strict.

A component checks in `__post_init__` whether its own values fit together, so that none exists whose values do not; what
concerns several components is checked in `megajax.config.checks`. A field may carry marks in its `Annotated`: its names
in other programs (`Elsewhere`), and the other key without which it would be ignored (`megajax.config.needs.Needs`).
"""

from __future__ import annotations

import os.path
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
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


class Elsewhere(NamedTuple):
    """The mark of a field that other programs have too: its names in Megatron-LM and Hugging Face, which users type."""

    names: str
    """With spaces between them; a switch with the value that it stands for here: `swiglu=swiglu hidden_act`."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def component(cls: type[T]) -> type[T]:
    """Declare a configuration component: immutable, unknown keys and infinities refused, docstrings kept as help.

    Building one raises pydantic's ValidationError for values of wrong types, and else the InputError of its checks.
    """
    settings = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # YAML reads `path: [0.3, prefix]` and `text_key: 1` as numbers
    )
    decorate: Callable[..., Any] = dataclass(frozen=True, kw_only=True, config=settings)
    made = decorate(cls)
    made.__init__ = _with_own_errors(made.__init__)
    return made


def _with_own_errors(build: Callable[..., None]) -> Callable[..., None]:
    """Let an InputError through, which pydantic would wrap as it does every ValueError."""

    @wraps(build)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            build(self, *args, **values)
        except ValidationError as error:
            for problem in error.errors():
                if not isinstance(problem.get("ctx", {}).get("error"), InputError):
                    raise
            raise error.errors()[0]["ctx"]["error"] from None

    return init
