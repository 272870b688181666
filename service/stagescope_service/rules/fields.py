"""Validation of the fields of a rule; errors name the field and its allowed values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from stagescope.wire.errors import InvalidPlan
from stagescope.wire.nonfinite import Json


def wrong(field: str, value: object, expected: str) -> InvalidPlan:
    """Return the error of a field with an invalid value."""
    # Containers are shown by type only: a webhook inside may contain a secret.
    shown = f"a {type(value).__name__}" if isinstance(value, Mapping | list) else repr(value)
    return InvalidPlan(f"{field} is {shown:.200}", expected=expected)


def mapping(value: object, field: str, known: Collection[str], expected: str) -> dict[str, Json]:
    """Read a mapping with fields of these names.

    Raises:
        InvalidPlan: not a mapping, or an unknown field.
    """
    expected = expected or ", ".join(sorted(known))
    if not isinstance(value, Mapping):
        raise wrong(field, value, expected)
    unknown = [str(name) for name in value if name not in known]
    if unknown:
        raise InvalidPlan(f"{field} has no field {', '.join(unknown)!r:.200}", expected=expected)
    return dict(value)


def number(value: object, field: str) -> float:
    """Read a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(field, value, "a finite number")
    return float(value)


def ratio(value: object, field: str) -> float | None:
    """Read a number over 0, or None."""
    if value is None:
        return None
    found = number(value, field)
    if found <= 0.0:
        raise wrong(field, value, "a number over 0")
    return found


def count(value: object, field: str, least: int, most: int) -> int:
    """Read an integer in a range."""
    if type(value) is not int or not least <= value <= most:
        raise wrong(field, value, f"an integer from {least} to {most}")
    return value


def flag(value: object, field: str) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise wrong(field, value, "true or false")
    return value


def text(value: object, field: str, most: int = 1000) -> str:
    """Read a non-empty text."""
    if not isinstance(value, str) or not value.strip() or len(value) > most:
        raise wrong(field, value, f"a text of 1 to {most} characters")
    return " ".join(value.split())
