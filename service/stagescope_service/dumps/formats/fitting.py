"""Rows whose values of each token do not fit one another: each costs itself alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from stagescope_service.dumps.formats.odd_values import INTEGERS_64, NUMBERS, listed, value_in_words
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import DumpEntry, DumpProblem
from stagescope_wire.errors import InvalidTensor


class NamedRow(NamedTuple):
    """A row, what a problem calls it, and how many tokens its values are of."""

    name: str
    values: dict[str, FileValue]
    length: int


def objects_in(
    values: Sequence[FileValue], word: str
) -> tuple[list[tuple[str, dict[str, FileValue]]], dict[str, str]]:
    """Return the dicts of a list with their names, and why the other items are left out."""
    rows = [(f"{word} {at}", value) for at, value in enumerate(values)]
    objects = [(name, value) for name, value in rows if isinstance(value, dict)]
    wrong = {
        name: f"it is {value_in_words(value)}" for name, value in rows if type(value) is not dict
    }
    return objects, wrong


def fitting_rows(
    rows: Sequence[NamedRow], *, per_token: Collection[str], masks: Collection[str]
) -> tuple[list[NamedRow], dict[str, str]]:
    """Return the rows with one value per token, and why the other rows do not fit.

    Values that a row lacks and others have become NaN. A mask cannot have NaN, so an empty mask of
    a row with tokens does not fit. A name that fits fewer than half of the rows stays as it is: its
    file has another layout.

    Args:
        rows: the rows.
        per_token: names of values of each token.
        masks: those of them that are masks or ids, which are whole numbers.
    """
    names = [name for name in per_token if any(_count(row.values.get(name)) for row in rows)]
    wrong: dict[str, str] = {}
    for name in names:
        counts = [_count(row.values.get(name)) for row in rows]
        fits = [
            count == row.length
            or (count == 0 and _is_absent(row.values.get(name), is_mask=name in masks))
            for row, count in zip(rows, counts, strict=True)
        ]
        if 2 * sum(fits) < len(fits):
            continue
        for row, count, fit in zip(rows, counts, fits, strict=True):
            if not fit:
                wrong.setdefault(row.name, f"{name} has {count} values for {row.length} tokens")
            elif name in masks and (odd := _odd_integer(row.values.get(name))) is not None:
                wrong.setdefault(row.name, f"{name} holds no whole number {odd}")
    kept = []
    for row in rows:
        nan: list[FileValue] = [math.nan] * row.length
        lacking = {n: nan for n in names if n not in masks and not _count(row.values.get(n))}
        if row.name not in wrong:
            kept.append(row._replace(values={**row.values, **lacking}))
    return kept, wrong


def left_out_problem(entry: DumpEntry, wrong: Mapping[str, str], total: int) -> list[DumpProblem]:
    """Return the problem of the rows that are left out, if there are any.

    Raises:
        InvalidTensor: no row is left.
    """
    if not wrong:
        return []
    message = f"{entry.path}: {listed([f'{name}: {why}' for name, why in wrong.items()])}"
    if len(wrong) >= total:
        raise InvalidTensor(f"{message}. None of its {total} rows can be read")
    message += f". Of the {total} rows {total - len(wrong)} were read"
    return [DumpProblem(entry.path, "damaged", message, entry)]


def _is_absent(value: FileValue, *, is_mask: bool) -> bool:
    """Return whether a row has no such values, which a mask always has."""
    return not is_mask and (value is None or isinstance(value, list | FileTensor))


def _count(value: FileValue) -> int:
    """Return the number of values of a list or one-dimensional tensor, else 0."""
    if isinstance(value, FileTensor):
        return int(value.wire[2].size) if len(value.wire[1]) > 0 else 0
    return len(value) if isinstance(value, list) else 0


def _odd_integer(value: FileValue) -> str | None:
    """Return the place and the text of a list item that is no whole number of 64 bits, or None."""
    for at, each in enumerate(value if isinstance(value, list) else ()):
        is_number = type(each) in NUMBERS and (not isinstance(each, float) or each.is_integer())
        if not is_number or (isinstance(each, int) and each not in INTEGERS_64):
            return f"at index {at}: {value_in_words(each)}"
    return None
