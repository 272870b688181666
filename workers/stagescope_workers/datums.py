"""Datums for a remote trainer, a list of dicts of lists, as columns: one tensor a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from stagescope.errors import InvalidTensor
from stagescope_workers.payload import describe, is_tensor_like

PREFIX: Final = "datums/"
_DEPTH: Final = 4


def datum_columns(datums: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return name -> column of what was sent to a remote trainer, a row a datum.

    A list of numbers (a 1-D tensor or array) makes a row of a packed tensor, a number one element
    of `[rows]`, a text one of a list. `datums` says how many there are, and of each key that not
    all of them have which lack it: there the row is empty (a number NaN, a text '').

    Raises:
        InvalidTensor: not a list of dicts, or values of unlike kinds under one key.
    """
    if isinstance(datums, Mapping | str) or not isinstance(datums, Sequence):
        raise InvalidTensor(f"datums are {describe(datums)}", expected="a list of dicts")
    rows = [dict(_flat(datum)) for datum in datums]
    keys = dict.fromkeys(key for row in rows for key in row)
    columns: dict[str, object] = {}
    absent: dict[str, list[int]] = {}
    for key in keys:
        lacking = [at for at, row in enumerate(rows) if key not in row]
        if lacking:
            absent[key] = lacking
        columns[PREFIX + key] = _column(key, [row.get(key) for row in rows])
    return {**columns, "datums": {"count": len(rows), "absent": absent}}


def _flat(datum: object, prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, object]]:
    if not isinstance(datum, Mapping):
        raise InvalidTensor(f"a datum is {describe(datum)}", expected="a dict of lists")
    for key, value in datum.items():
        if isinstance(value, Mapping) and depth > 0:
            yield from _flat(value, f"{prefix}{key}.", depth - 1)
        elif value is not None:
            yield f"{prefix}{key}", value


def _rows(values: list[Any]) -> list[Any]:
    """Return rows of one dtype: whole numbers beside others in a list of Python's are floats."""
    kinds = {np.asarray(value).dtype.kind for value in values if isinstance(value, list) and value}
    if kinds != {"i", "f"}:
        return values
    return [np.asarray(value, np.float64) if isinstance(value, list) else value for value in values]


def _column(key: str, values: list[object]) -> object:
    there = [value for value in values if value is not None]
    if all(isinstance(value, str) for value in there):
        return ["" if value is None else value for value in values]
    if all(isinstance(value, bool | int | float | np.number) for value in there):
        gaps = len(there) < len(values)
        return np.array([np.nan if value is None else value for value in values] if gaps else there)
    if all(is_tensor_like(value) for value in there):
        return _rows([[] if value is None else value for value in values])
    raise InvalidTensor(
        f"datums have {describe(there[0])} and others under {key!r}",
        expected="lists of numbers, or numbers, or texts, of one kind in all datums",
    )
