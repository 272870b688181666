"""Values of rows that are no numbers, and rows whose values do not fit: each costs itself alone."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import DumpEntry, DumpProblem
from stagescope_wire.batch import Tensor, widened
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import Array

NUMBERS: Final = frozenset({int, float, bool})
"""Types of numbers."""
INTEGERS_64: Final = range(-(1 << 63), 1 << 63)
"""Range of an int64."""
BOOLS: Final = {"True": 1.0, "False": 0.0}
"""Texts of truth values, as numbers."""
_MAX_TEXT: Final = 100_000
_MAX_NAMED: Final = 60
_LISTED: Final = 5
_KINDS: Final[Mapping[type, str]] = {
    str: "a text", list: "a list", dict: "an object", int: "a number", float: "a number",
}  # fmt: skip


class OddValue(NamedTuple):
    """A value that is no number, in a column of numbers; the row has no number there."""

    row: int
    """Index in the rows that were read."""
    column: str
    """Name in the file."""
    what: str
    """Description of the value."""


def without_odd(
    values: list[FileValue], *, is_number: bool
) -> tuple[list[FileValue], list[tuple[int, str]]]:
    """Return the values of a column, null for odd ones, and (row, description) of the odd ones.

    Args:
        values: one value per row.
        is_number: the column has numbers if any value is a number, also as a text.
    """
    given = [value for value in values if value is not None]
    if not is_number and all(isinstance(value, list) for value in given):
        return _without_odd_items(values)
    if not is_number and _are_mostly_numbers_of_tokens(given):
        odd_rows = [
            (row, value_in_words(value))
            for row, value in enumerate(values)
            if value is not None and not isinstance(value, list | FileTensor)
        ]
        wrong_rows = {row for row, _ in odd_rows}
        return [None if at in wrong_rows else each for at, each in enumerate(values)], odd_rows
    # Other columns that mix numbers and texts are valid: they are kept as texts.
    if not is_number and not {*map(type, given)} <= NUMBERS:
        return values, []
    if {*map(type, given)} == {FileTensor}:
        return values, []
    numbers = [number_in(value, of_text=is_number) for value in values]
    odd = [
        (row, value_in_words(value))
        for row, value in enumerate(values)
        if value is not None and numbers[row] is None
    ]
    if len(odd) == len(given):
        return values, []
    wrong = {row for row, _ in odd}
    kept: list[FileValue] = [
        None if row in wrong else numbers[row] if isinstance(value, FileTensor) else value
        for row, value in enumerate(values)
    ]
    return kept, odd


def _are_mostly_numbers_of_tokens(given: Sequence[FileValue]) -> bool:
    """Return whether most values, but not all, are lists of numbers or tensors of several."""
    several = [
        each
        for each in given
        if (isinstance(each, FileTensor) and each.wire[1])
        or (isinstance(each, list) and {*map(type, each)} - {type(None)} <= NUMBERS)
    ]
    others = [each for each in given if not isinstance(each, list | FileTensor)]
    return bool(others) and 2 * len(several) > len(given)


def _without_odd_items(
    values: list[FileValue],
) -> tuple[list[FileValue], list[tuple[int, str]]]:
    """Return lists with null for each item that is no number, if most items are numbers."""
    items = [item for value in values if isinstance(value, list) for item in value]
    given = [item for item in items if item is not None]
    wrong = sum(number_in(item) is None for item in given)
    if not wrong or 2 * wrong >= len(given):
        return values, []
    kept: list[FileValue] = []
    odd: list[tuple[int, str]] = []
    for row, value in enumerate(values):
        if isinstance(value, list):
            at = [
                index
                for index, item in enumerate(value)
                if item is not None and number_in(item) is None
            ]
            if at:
                more = f" and {len(at) - 1} more" if len(at) > 1 else ""
                odd.append((row, f"at index {at[0]}{more} {value_in_words(value[at[0]])}"))
                value = [None if index in at else item for index, item in enumerate(value)]
        kept.append(value)
    return kept, odd


def number_in(value: FileValue, *, of_text: bool = False) -> float | None:
    """Return a value as a number, or None; with `of_text` also a number in a text."""
    if isinstance(value, FileTensor):
        tag, _, array, _ = value.wire
        return float(number_of(tag, array)) if array.size == 1 else None
    if isinstance(value, str) and of_text:
        value = BOOLS.get(value, value)
    elif not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def value_in_words(value: FileValue) -> str:
    """Return a description of a value that is no number."""
    if isinstance(value, int) and value not in INTEGERS_64:
        return "an integer beyond the numbers of 64 bits"
    kind = _KINDS.get(type(value), f"a {type(value).__name__}")
    text = json_text(value)
    return kind if text is None else f"{kind}, {text[:_MAX_NAMED]}"


def listed(texts: Sequence[str]) -> str:
    """Return the first of some texts for a message, and how many more there are."""
    more = [f"{len(texts) - _LISTED} more"] if len(texts) > _LISTED else []
    return "; ".join([*texts[:_LISTED], *more])


def number_of(tag: str, values: Array) -> float | int:
    """Return the value of a tensor of one value, bfloat16 too."""
    found: float | int = widened(Tensor(tag, values)).reshape(-1)[0].item()
    return found


def json_text(value: object) -> str | None:
    """Return a plain value as JSON text; None if it is not plain, or very long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if len(text) <= _MAX_TEXT else None


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
    message += f". {total - len(wrong)} of the {total} rows were read"
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
