"""JSON values, and non-finite numbers in them: the strings "nan", "inf" and "-inf".

JSON has no such numbers, and null means unknown; the client turns the strings back into floats. A
string may also be a name (a run may be called `nan`), so the column decides: `TEXT` lists the
columns that never hold numbers.
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


def spell(value: object) -> Json:
    """Return `value` as strict JSON can hold it, with each non-finite float as its string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell(item) for item in value]
    return value


def dumps(value: object) -> str:
    """Return `value` as indented strict JSON text."""
    return json.dumps(spell(value), indent=2, allow_nan=False, ensure_ascii=False)
