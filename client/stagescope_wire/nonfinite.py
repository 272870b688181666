"""JSON values, and values that JSON lacks: the strings "nan", "inf", "-inf" stand for such floats.

JSON has no non-finite numbers, and null means unknown. The client turns the strings into floats. A
string may also be a name (a run may be called `nan`), so the column decides: `TEXT` lists the
columns that never hold numbers. An int beyond 64 bits is a string of its digits, and a lone
surrogate, which UTF-8 cannot hold, is its escape: many parsers refuse either.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

Json: TypeAlias = Any
"""A decoded JSON value, as `json.loads` types it; the code that reads it checks it."""
JsonObject: TypeAlias = Mapping[str, Json]

_NUMBERS: Final[Mapping[str, float]] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

MAX_DEPTH: Final = 100
"""Deepest nesting of JSON; parsers and Python have their own limits."""
_INT64: Final = 1 << 63
_MAX_BITS: Final = 2000

TEXT: Final = frozenset({
    "advice", "attempt_key", "by", "capture_id", "code", "data_source", "device", "error",
    "error_message", "error_type", "group_id", "host", "incarnation", "key", "kind", "level",
    "message", "metric", "name", "node", "node_id", "non_finite", "operator", "parent", "path",
    "prompt_hash", "reason", "role", "run", "sample_id", "sample_uid", "source", "split",
    "stage", "state", "status", "stream", "task", "text", "title", "tokens_hash", "verdict",
    "what",
})  # fmt: skip
"""Columns of names and sentences, in which "nan" is text."""


def number(value: Json) -> Json:
    """Return the float that "nan", "inf" or "-inf" spells; return any other value unchanged."""
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def numbers(value: Json) -> Json:
    """Return `value`, a tree whose leaves are all numbers, with spelled numbers as floats."""
    if isinstance(value, Mapping):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return number(value)


def column(name: str, values: Sequence[Json]) -> tuple[Json, ...]:
    """Return a column's values, with spelled numbers as floats if all other values are numbers."""
    if name in TEXT or any(isinstance(item, str) and item not in _NUMBERS for item in values):
        return tuple(values)
    return tuple(map(number, values))


def valid_text(text: str) -> str:
    """Return a text that UTF-8 can hold: each lone surrogate is written as its escape.

    Such a text comes from an undecodable file name, or from text that was cut inside a character.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def valid_int(value: int) -> int | str:
    """Return an int of 64 bits; return a larger one as a text of its digits."""
    if -_INT64 <= value < _INT64:
        return value
    # Python refuses to convert thousands of digits to decimal.
    return str(value) if value.bit_length() < _MAX_BITS else hex(value)


def spell(value: object, depth: int = MAX_DEPTH) -> Json:
    """Return `value` in a form that strict JSON can hold.

    Non-finite numbers become their strings, ints beyond 64 bits their digits, and lone surrogates
    their escapes. Values of types that JSON lacks stay as they are.

    Raises:
        ValueError: it is nested more than `depth` deep.
    """
    if isinstance(value, str):
        return valid_text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return valid_int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if not depth:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {valid_text(str(key)): spell(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell(item, depth - 1) for item in value]
    return value


def dumps(value: object) -> str:
    """Return `value` as indented strict JSON text."""
    return json.dumps(spell(value), indent=2, allow_nan=False, ensure_ascii=False)
