"""Non-finite numbers in JSON: the strings "nan", "inf" and "-inf", floats again in the client.

JSON has no such numbers, and null means unknown. Where a string may as well be a name (a run may
be called `nan`), the place decides: `TEXT` lists the columns that never hold numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

_NUMBERS: Final[Mapping[str, float]] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

TEXT: Final = frozenset({
    "advice", "attempt_key", "by", "capture_id", "code", "data_source", "device", "error",
    "error_message", "error_type", "group_id", "host", "incarnation", "key", "kind", "level",
    "message", "metric", "name", "node", "node_id", "non_finite", "operator", "parent", "path",
    "prompt_hash", "reason", "role", "run", "sample_id", "sample_uid", "source", "split",
    "stage", "state", "status", "stream", "task", "text", "title", "tokens_hash", "verdict",
    "what",
})  # fmt: skip
"""Columns of names and sentences, in which "nan" is a word."""


def number(value: Any) -> Any:
    """Return the float that "nan", "inf" or "-inf" spells; anything else as it is."""
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def numbers(value: Any) -> Any:
    """Return `value`, a tree in which every leaf is a number, with the spelled ones as floats."""
    if isinstance(value, Mapping):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return number(value)


def column(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a column's values, spelled numbers as floats where every other value is a number."""
    if name in TEXT or any(isinstance(item, str) and item not in _NUMBERS for item in values):
        return tuple(values)
    return tuple(map(number, values))


def spell(value: Any) -> Any:
    """Return `value` as strict JSON can hold it: each non-finite float as its string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell(item) for item in value]
    return value


def dumps(value: Any) -> str:
    """Return strict JSON text, indented."""
    return json.dumps(spell(value), indent=2, allow_nan=False, ensure_ascii=False)
