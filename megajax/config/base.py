"""Building blocks of configuration components: frozen dataclasses that are validated, documented and strict.

A component checks in `__post_init__` whether its own values fit together, so that no component exists whose values do
not; `megajax.config.checks` checks what concerns several components. A field may carry marks in its `Annotated`: its
names in other programs (`Elsewhere`), and the other key without which it would be ignored
(`megajax.config.needs.Needs`).
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
"""Name of a file or folder, relative to the working directory; `~` at its beginning is the home directory."""


class InputError(ValueError):
    """Report bad input in one line that names the thing and the remedy; entry points exit with code 2."""


class NotReady(InputError):  # noqa: N818 - a state of things
    """Report that a process, a port or a lock is not there yet: as a restart can help, the exit code is 5."""


class Elsewhere(NamedTuple):
    """Mark a field that other programs have too with its names in Megatron-LM and Hugging Face, which users type."""

    names: str
    """Names separated by spaces; a switch is followed by the value that it stands for here: `swiglu=swiglu
    hidden_act`."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def component(cls: type[T]) -> type[T]:
    """Declare a configuration component: immutable, unknown keys and infinities refused, docstrings kept as help.

    Building a component raises pydantic's ValidationError if values have wrong types, and otherwise the InputError of
    the component's checks.
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
    """Wrap a component's `__init__` to let an InputError through, which pydantic would wrap like every ValueError."""

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
