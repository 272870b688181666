"""JSON encoding and decoding; non-finite numbers are the strings "nan", "inf" and "-inf".

JSON has no such numbers, `null` means "unknown", and zero would be a wrong value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import orjson

from stagescope.wire.errors import InvalidInput

JsonObject = dict[str, object]
"""A JSON object: the body of a request or of an answer, or a part of one."""

NONFINITE: Final[Mapping[str, float]] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

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


def parse_nonfinite(value: object) -> object:
    """Return the number that "nan", "inf" or "-inf" stands for; any other value unchanged."""
    return NONFINITE.get(value, value) if isinstance(value, str) else value


def decode(text: bytes | bytearray | memoryview, *, what: str = "the body") -> object:
    """Parse JSON of a client.

    Args:
        text: JSON in UTF-8.
        what: the name of `text` in error messages.

    Raises:
        InvalidInput: not JSON; the literals NaN and Infinity are not JSON either.
    """
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(
            f"{what} is not JSON ({error})",
            expected='JSON in UTF-8, with the strings "nan", "inf", "-inf" for such numbers',
        ) from error
    return value


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
