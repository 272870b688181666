"""JSON encoding and decoding; non-finite numbers are the strings "nan", "inf" and "-inf".

JSON has no such numbers, `null` means "unknown", and zero would be a wrong value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import orjson

from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import MAX_DEPTH, Json

JsonObject = dict[str, Json]
"""A JSON object: the body of a request or of an answer, or a part of one."""

NONFINITE: Final[Mapping[str, float]] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_NESTS: Final = (dict, list)
_LEVELS_ABOVE: Final = 2
"""Levels of a batch above its events: the object, and the list."""
_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode(value: object) -> bytes:
    """Return `value` as JSON, its non-finite numbers as strings.

    Raises:
        TypeError: `value` holds something that is neither JSON nor numpy.
    """
    text = orjson.dumps(value, default=_default, option=_OPTIONS)
    # orjson writes a non-finite number as null. Without a null in the text there is none, and the
    # walk over every number, which costs many times as much as the encoding, is not needed.
    if b"null" not in text:
        return text
    return orjson.dumps(spell_nonfinite(value), default=_default, option=_OPTIONS)


def spell_nonfinite(value: object) -> object:
    """Return `value` with each non-finite number replaced by its string, in nested values too."""
    if isinstance(value, float | np.floating):
        number = float(value)
        if math.isfinite(number):
            return number
        return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: spell_nonfinite(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return spell_nonfinite(value.tolist())
    if isinstance(value, list | tuple):
        return [spell_nonfinite(item) for item in value]
    return value


def parse_nonfinite(value: object) -> Json:
    """Return the number that "nan", "inf" or "-inf" stands for; any other value unchanged."""
    return NONFINITE.get(value, value) if isinstance(value, str) else value


def decode(text: bytes | bytearray | memoryview, *, what: str = "the body") -> object:
    """Parse JSON of a client.

    Args:
        text: JSON in UTF-8.
        what: the name of `text` in error messages.

    Raises:
        InvalidInput: not JSON; the literals NaN and Infinity are not JSON either. Or JSON that is
            nested too deep: to pickle it could end the process.
    """
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(
            f"{what} is not JSON ({error})",
            expected='JSON in UTF-8, with the strings "nan", "inf", "-inf" for such numbers',
        ) from error
    if _is_too_deep(value, text):
        raise InvalidInput(
            f"{what} is nested too deep", expected=f"JSON that is nested {MAX_DEPTH} deep at most"
        )
    return value


def _is_too_deep(value: object, text: bytes | bytearray | memoryview) -> bool:
    """Return whether JSON has more levels than a batch whose events have `MAX_DEPTH`."""
    brackets = bytes(text)
    if brackets.count(b"[") + brackets.count(b"{") <= MAX_DEPTH:
        return False
    level: list[dict[str, object] | list[object]] = [value] if isinstance(value, _NESTS) else []
    for _ in range(MAX_DEPTH + _LEVELS_ABOVE):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, _NESTS)
        ]
        if not level:
            return False
    return True


def _default(value: object) -> object:
    if isinstance(value, np.ndarray):  # not contiguous, or a dtype that orjson does not support
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
