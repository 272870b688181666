"""JSON in and out: non-finite numbers are the strings "nan", "inf" and "-inf".

JSON has no such numbers, `null` would say "unknown", and zero would be a lie (promise 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from stagescope.wire.errors import InvalidInput

NONFINITE: Final[Mapping[str, float]] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode(value: Any) -> bytes:
    """Return `value` as JSON.

    Raises:
        TypeError: `value` holds something that is neither JSON nor numpy.
    """
    text = orjson.dumps(value, default=_default, option=_OPTIONS)
    # orjson writes a non-finite number as null: without a null there was none, and the walk
    # over every number of the answer, many times the cost of writing it, is spared.
    if b"null" not in text:
        return text
    return orjson.dumps(spell(value), default=_default, option=_OPTIONS)


def spell(value: Any) -> Any:
    """Return `value` with each non-finite number as its string, through lists and mappings."""
    if isinstance(value, float | np.floating):
        number = float(value)
        if math.isfinite(number):
            return number
        return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: spell(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return spell(value.tolist())
    if isinstance(value, list | tuple):
        return [spell(item) for item in value]
    return value


def unspell(value: Any) -> Any:
    """Return the number that "nan", "inf" or "-inf" stands for; anything else as it is."""
    return NONFINITE.get(value, value) if isinstance(value, str) else value


def decode(text: bytes | bytearray | memoryview, *, what: str = "the body") -> Any:
    """Read JSON that came from outside.

    Raises:
        InvalidInput: not JSON, or with the literals NaN and Infinity, which are not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(
            f"{what} is not JSON ({error})",
            expected='JSON in UTF-8, with the strings "nan", "inf", "-inf" for such numbers',
        ) from error


def _default(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # not contiguous, or of a dtype that orjson lacks
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
