"""Marks and checks of keys that mean nothing without another key, and of sizes that have to divide one another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from megajax.config.base import InputError
from megajax.config.yaml_text import yaml_text


class Needs(NamedTuple):
    """Mark a field that means something only where another key has one of some values.

    Anywhere else the field would be ignored, so it is refused there unless it has its default.
    """

    key: str
    values: tuple[str | None, ...] = ()
    """Values of the key; empty stands for any value that is set (not 0, false, unset or empty)."""
    others: tuple[str, ...] = ()
    """Keys that give the field a meaning as well, if any of them is set."""

    def are_met(self, values: Mapping[str, Any]) -> bool:
        """Tell whether these values, by key, give the field a meaning; they do where the key is not among them."""
        if self.key not in values:
            return True
        there = values[self.key]
        met = there in self.values if self.values else bool(there)
        return met or any(values.get(key) for key in self.others)


def refuse_ignored(section: str, component: Any) -> None:
    """Refuse fields of a component that are set although its other fields leave them without a meaning.

    Raises:
        InputError: names the key, what it needs and the remedy.
    """
    fields = {f"{section}.{name}": field for name, field in component.__pydantic_fields__.items()}
    values = {key: getattr(component, key.partition(".")[2]) for key in fields}
    if values.get("data.kind") == "auto":  # as the model's family, which is not known here
        del values["data.kind"]
    refuse_ignored_keys(fields, values)


def refuse_ignored_keys(fields: Mapping[str, FieldInfo], values: Mapping[str, Any]) -> None:
    """Refuse keys that are set although other values leave them without a meaning.

    Args:
        fields: declaration of every key.
        values: values that are known, by key.

    Raises:
        InputError: names the key, what it needs and the remedy.
    """
    for key, needs in ignored_keys(fields, values).items():
        value, default = yaml_text(values[key]), yaml_text(fields[key].default)  # a preset may set what this takes back
        if needs.values:
            right = " or ".join([f"{needs.key} {' or '.join(map(yaml_text, needs.values))}", *needs.others])
            there = yaml_text(values[needs.key])
            raise InputError(f"{key} is for {right}, not {there}: leave it at its default {default} (it is {value})")
        right = " or ".join([needs.key, *needs.others])
        raise InputError(
            f"{key} is {value} without {right}, to which it belongs: set that, or leave it at its default {default}"
        )


def ignored_keys(fields: Mapping[str, FieldInfo], values: Mapping[str, Any]) -> dict[str, Needs]:
    """Return the keys that are set where they are ignored, with what each of them needs."""
    found: dict[str, Needs] = {}
    for key, field in fields.items():
        if values.get(key, field.default) != field.default:
            missing = (mark for mark in field.metadata if isinstance(mark, Needs) and not mark.are_met(values))
            if needs := next(missing, None):
                found[key] = needs
    return found


def require_multiple(
    name: str, value: int, divisor_name: str, divisor: int, remedy: str, common: int = 0, step: int = 1
) -> None:
    """Refuse a value that is no multiple of a divisor, and name divisors that it is a multiple of.

    Args:
        name: name of the value, as messages call it.
        value: number that has to be a multiple.
        divisor_name: name of the key that has to divide it, or a product of several that ends with "=".
        divisor: number that has to divide it.
        remedy: advice on what to change.
        common: another number that the divisor has to divide as well; 0 for none.
        step: number of which a divisor always has to be a multiple.
    """
    if value % divisor:
        remainder = f"{value} % {divisor} = {value % divisor}"
        sizes = [size for size in _divisors(math.gcd(value, common)) if size % step == 0]
        near = sorted(sorted(sizes, key=lambda size: abs(math.log(size / divisor)))[:_SHOWN])
        what = "products" if divisor_name.endswith("=") else f"sizes of {divisor_name}"
        works = f"{what} that work: {', '.join(map(str, near)) or 'none'}{', ...' if len(sizes) > len(near) else ''}"
        raise InputError(
            f"{name} {value} is not a multiple of {divisor_name} {divisor} ({remainder}): {remedy} ({works})"
        )


_SHOWN = 12
"""Number of sizes that a message names, those nearest to the one that does not work."""


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
