"""Values by name, or a list of dicts, converted to the tensors, numbers and texts of a record."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from stagescope_service.dumps.formats.odd_values import (
    BOOLS,
    NUMBERS,
    OddValue,
    json_text,
    listed,
    number_of,
    without_odd,
)
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue, Unreadable
from stagescope_service.dumps.records import DumpContents, DumpEntry, DumpProblem, mapping
from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.batch import Tensor, widened
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.policy_versions import VERSION_NAMES, text_versions
from stagescope_wire.tensorfile import CODES, Array

MISSING: Final = "missing"
"""Key in `DumpContents.about`: name of a column -> number of rows without a value."""
NULLS: Final = "null_values"
"""Key in `DumpContents.about`: name of a column of lists -> number of nulls, which are NaN."""
FROM_TEXTS: Final = "numbers_from_texts"
"""Key in `DumpContents.about`: names of columns of numbers that the file holds as texts."""
_NUMBER_COLUMNS: Final = ("rewards",)
"""Columns whose numbers may be texts, as `json.dumps(default=str)` writes them."""
_NULL: Final = type(None)
_INT64: Final = 1 << 63
_DEPTH: Final = 16
_MAX_LISTED: Final = 10_000

FileRow: TypeAlias = Mapping[str, FileValue]


RowIds: TypeAlias = "tuple[str, ...] | None"


@dataclasses.dataclass
class Columns:
    """Converted values, by name.

    Attributes:
        tensors: see `records.DumpContents`.
        numbers: single numbers.
        texts: a text for each row.
        about: all other plain values.
        left_out: name -> why the value could not be converted.
        upcast: name -> the dtype in the file, if it was widened.
        from_texts: names of numbers that the file holds as texts.
        odd: values that are no numbers, in columns of numbers.
    """

    tensors: dict[str, WireTensor] = dataclasses.field(default_factory=dict)
    numbers: dict[str, float | int] = dataclasses.field(default_factory=dict)
    texts: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    about: dict[str, object] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    upcast: dict[str, str] = dataclasses.field(default_factory=dict)
    from_texts: list[str] = dataclasses.field(default_factory=list)
    odd: list[OddValue] = dataclasses.field(default_factory=list)

    def metadata(self) -> dict[str, object]:
        """Return the metadata for `DumpContents.about`."""
        conversions = {
            "left_out": self.left_out, "upcast": self.upcast, FROM_TEXTS: self.from_texts,
        }  # fmt: skip
        return {**self.about, **{name: value for name, value in conversions.items() if value}}

    def add(self, name: str, value: FileValue) -> None:
        """Add one value as a tensor, a number or, if it is neither, as metadata."""
        if isinstance(value, FileTensor):
            self._add_tensor(name, value)
        elif isinstance(value, Unreadable):
            self.left_out[name] = value.reason
        elif isinstance(value, bool | int | float):
            self.numbers[name] = value
        elif isinstance(value, list) and name == "versions" and self._has_versions(value):
            return
        elif isinstance(value, list) and (tensor := _from_list(value)) is not None:
            self.tensors[name] = tensor
        elif value is not None:
            self.add_about(name, value)

    def contents(
        self,
        entry: DumpEntry,
        *,
        samples: RowIds = None,
        groups: RowIds = None,
        masks: Sequence[str] = (),
        problems: Sequence[DumpProblem] = (),
        rows: Sequence[str] = (),
    ) -> DumpContents:
        """Return the contents of an entry, with the problem of the values that are no numbers.

        Args:
            entry, samples, groups, problems: as of `DumpContents`.
            masks: the first of these tensors that exists is the mask.
            rows: the name of each row in problems, such as `line 3`.
        """
        mask = next((name for name in masks if name in self.tensors), None)
        problems = [*problems, *self._odd_problem(entry, rows)]
        return DumpContents(
            entry, self.tensors, self.numbers, samples, groups, self.texts, mask, self.metadata(),
            problems,
        )  # fmt: skip

    def _odd_problem(self, entry: DumpEntry, rows: Sequence[str]) -> Iterator[DumpProblem]:
        if self.odd:
            named = [f"{rows[odd.row]}: {odd.column} is no number: {odd.what}" for odd in self.odd]
            message = (
                f"{entry.path}: {listed(named)}. These rows have no such number; everything else "
                "was read"
            )
            yield DumpProblem(entry.path, "damaged", message, entry)

    def merge(self, other: Columns) -> None:
        """Add everything that another holds."""
        self.tensors |= other.tensors
        self.numbers |= other.numbers
        self.texts |= other.texts
        self.about |= other.about
        self.left_out |= other.left_out
        self.upcast |= other.upcast
        self.from_texts += other.from_texts
        self.odd += other.odd

    def restore_dtypes(self, tags: Mapping[str, object]) -> None:
        """Give tensors the dtypes that they had before JSON, if these hold the values."""
        for name, tag in tags.items():
            wire = self.tensors.get(name)
            restored = None if wire is None else _as_dtype(wire, str(tag))
            if restored is not None:
                self.tensors[name] = restored

    def add_versions(self, values: list[FileValue]) -> bool:
        """Add policy versions that are texts; False if there are none.

        Raises:
            InvalidTensor: a row has no text.
        """
        coded = text_versions(values)
        if coded is not None:
            self.tensors["versions"], names = coded
            self.about |= {VERSION_NAMES: names} if names else {}
        return coded is not None

    def _has_versions(self, values: list[FileValue]) -> bool:
        try:
            return self.add_versions(values)
        except InvalidTensor as error:
            self.left_out["versions"] = error.wrong
            return True

    def _add_tensor(self, name: str, value: FileTensor) -> None:
        tag, shape, values, offsets = value.wire
        if value.was is not None:
            self.upcast[name] = value.was
        if shape == () and offsets is None:
            self.numbers[name] = number_of(tag, values)
        else:
            self.tensors[name] = value.wire

    def add_about(self, name: str, value: FileValue) -> None:
        """Add a plain value as metadata; list anything else as left out."""
        value = _without_tensors(value)
        if json_text(value) is None:
            self.left_out[name] = f"a {type(value).__name__} that holds more than plain values"
        else:
            self.about[name] = value


def _without_tensors(value: FileValue, depth: int = 0) -> FileValue:
    """Return a tree in which the lists of a converted file are lists again."""
    if isinstance(value, FileTensor) and value.wire[2].size <= _MAX_LISTED:
        values: FileValue = value.wire[2].tolist()
        return values
    if depth < _DEPTH and isinstance(value, dict):
        return {name: _without_tensors(item, depth + 1) for name, item in value.items()}
    if depth < _DEPTH and isinstance(value, list):
        return [_without_tensors(item, depth + 1) for item in value]
    return value


def flatten(values: Mapping[str, FileValue], prefix: str = "") -> dict[str, FileValue]:
    """Return nested dicts as one, with `/` between the names."""
    found: dict[str, FileValue] = {}
    for name, value in values.items():
        if isinstance(value, dict) and prefix.count("/") < _DEPTH:
            found |= flatten(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found


def collect_rows(
    rows: Sequence[FileRow],
    *,
    names: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
) -> Columns:
    """Convert each name that any row has to a column.

    Numbers become a tensor [rows] (NaN where a row has none). Lists and tensors of [n] or [1, n]
    become ragged rows (empty where a row has none). Texts and plain dicts become texts. The counts
    of rows without a value, by name, are in `about[MISSING]`. Nulls in lists are read as NaN, and
    their counts are in `about[NULLS]`.

    Rewards are numbers if any value is one. Items of lists are numbers if most of them are. All
    other values are NaN, and `odd` names them.

    Args:
        rows: dicts of plain values and `FileTensor`.
        names: name in the file -> name in the record.
        skip: names to leave out.
    """
    found = Columns()
    missing: Counter[str] = Counter()
    for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
        if name in skip:
            continue
        values: list[FileValue] = [row.get(name) for row in rows]
        lacking = sum(value is None for value in values)
        if lacking == len(values):
            continue
        target = (names or {}).get(name, name)
        if lacking:
            missing[target] = lacking
        values, odd = without_odd(values, is_number=target in _NUMBER_COLUMNS)
        found.odd += [OddValue(row, name, what) for row, what in odd]
        _add_column(found, target, values)
    if missing:
        found.about[MISSING] = dict(missing)
    return found


def name_samples(rows: Sequence[FileRow], found: Columns) -> tuple[RowIds, RowIds]:
    """Return group_id and sample_uid (`{group_id}_{run_id}`) of each row; None if a row lacks one.

    Ids must be unique: otherwise sample_uids are None, and `found.about` says why.
    """
    if not rows or any(row.get("group_id") is None for row in rows):
        return None, None
    groups = tuple(str(row["group_id"]) for row in rows)
    if any(row.get("run_id") is None for row in rows):
        return groups, None
    indices = (str(row["run_id"]) for row in rows)
    names = [f"{group}_{index}" for group, index in zip(groups, indices, strict=True)]
    return groups, unique_samples(names, found)


def unique_samples(names: Sequence[str], found: Columns) -> tuple[str, ...] | None:
    """Return the names of rows if they are unique; else None, and `found.about` names one."""
    counts = Counter(names)
    if len(counts) == len(names):
        return tuple(names)
    name, count = counts.most_common(1)[0]
    found.about["samples"] = f"{count} rows are named {name}: rows are not paired by their names"
    return None


def _add_column(found: Columns, name: str, values: list[FileValue]) -> None:
    kinds = set(map(type, values)) - {type(None)}
    try:
        if name == "versions" and found.add_versions(values):
            return
        if kinds <= NUMBERS:
            found.tensors[name] = _scalars(values, kinds)
        elif name in _NUMBER_COLUMNS and (read := _numbers_in_texts(values)) is not None:
            found.tensors[name] = _scalars(read, {float})
            found.from_texts.append(name)
        elif kinds == {str}:
            found.texts[name] = tuple("" if value is None else str(value) for value in values)
        elif kinds == {list} and (tensor := _ragged_lists(values)) is not None:
            found.tensors[name] = tensor
            if nulls := sum(row.count(None) for row in values if isinstance(row, list)):
                found.about[NULLS] = {**mapping(found.about, NULLS), name: nulls}
        elif FileTensor in kinds and kinds <= {FileTensor, list}:
            found.tensors[name] = _ragged_tensors(values, found.upcast, name)
        else:
            _add_texts(found, name, values)
            given = [value for value in values if value is not None]
            numbers = sum(type(value) in NUMBERS for value in given)
            if name in found.texts and 2 * numbers > len(given):
                found.left_out[name] = (
                    f"{len(given) - numbers} of its {len(given)} values are no numbers: it is kept "
                    "as texts"
                )
    except (ValueError, OverflowError, InvalidTensor) as error:
        found.left_out[name] = str(error)
    if name in _NUMBER_COLUMNS and name in found.texts:
        found.left_out[name] = "it holds texts that are no numbers, and is kept as texts"


def _add_texts(found: Columns, name: str, values: list[FileValue]) -> None:
    texts = [
        "" if value is None else value if isinstance(value, str) else json_text(value)
        for value in values
    ]
    if None in texts:
        kinds = sorted({type(value).__name__ for value in values})
        found.left_out[name] = f"rows of {', '.join(kinds)}"
    else:
        found.texts[name] = tuple(str(text) for text in texts)


def _scalars(values: list[FileValue], kinds: set[type]) -> WireTensor:
    is_complete = None not in values
    dtype = "bool" if kinds == {bool} else "int64"
    dtype = dtype if is_complete and float not in kinds else "float64"
    if any(isinstance(v, int) and not -_INT64 <= v < _INT64 for v in values):
        dtype = "float64"
    array = np.array([np.nan if v is None else v for v in values], dtype)
    return str(array.dtype), array.shape, array, None


def are_numbers(texts: Iterable[str]) -> bool:
    """Return whether all non-empty texts are numbers, and at least one exists."""
    given: list[FileValue] = [text for text in texts if text]
    return bool(given) and _numbers_in_texts(given) is not None


def _numbers_in_texts(values: list[FileValue]) -> list[FileValue] | None:
    """Return numbers and texts of numbers as floats; None where a value is neither."""
    if not any(isinstance(value, str) for value in values):
        return None
    found: list[FileValue] = []
    for value in values:
        text = BOOLS.get(value, value) if isinstance(value, str) else value
        try:
            found.append(None if text is None else float(text))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return None
    return found


def _ragged_lists(rows: list[FileValue]) -> WireTensor | None:
    """Return lists of numbers as ragged rows, a null as NaN; None if they hold anything else."""
    lists = [row if isinstance(row, list) else [] for row in rows]
    kinds: set[type] = set().union(*(set(map(type, row)) for row in lists))
    if not kinds - {_NULL} <= NUMBERS or kinds == {_NULL}:
        return None
    flat = list(itertools.chain.from_iterable(lists))
    if _NULL in kinds:
        flat, kinds = [np.nan if value is None else value for value in flat], {float}
    return _ragged(flat, map(len, lists), kinds)


def _ragged(flat: list[FileValue], lengths: Iterable[int], kinds: set[type]) -> WireTensor:
    """Return numbers as ragged rows.

    Raises:
        OverflowError: an int of more than 64 bits.
    """
    dtype = "bool" if kinds == {bool} else "float64" if float in kinds or not kinds else "int64"
    array = np.array(flat, dtype)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    return str(array.dtype), array.shape, array, offsets


def _ragged_tensors(rows: list[FileValue], upcast: dict[str, str], name: str) -> WireTensor:
    given = {row.wire[0] for row in rows if isinstance(row, FileTensor)}
    dtype = given.pop() if len(given) == 1 else None
    wires = [_row(row, dtype) for row in rows if row is not None]
    wires = _of_one_dtype(wires, upcast, name)
    tags = {wire[0] for wire in wires if wire[2].size} or {wires[0][0]}
    if len(tags) > 1 or any(wire[3] is not None for wire in wires):
        raise ValueError(f"rows of several dtypes: {', '.join(sorted(tags))}")
    was = {row.was for row in rows if isinstance(row, FileTensor) and row.was}
    if was:
        upcast[name] = ", ".join(sorted(was))
    tag, shapes = tags.pop(), {wire[1] for wire in wires}
    arrays = [wire[2] for wire in wires]
    if shapes == {()} and len(wires) == len(rows):
        return tag, (len(rows),), np.stack(arrays), None
    if {len(shape) for shape in shapes} == {1}:
        sizes = iter([wire[2].size for wire in wires])
        lengths = [0 if row is None else next(sizes) for row in rows]
        flat = np.concatenate([array for array in arrays if array.size] or arrays[:1])
        return tag, flat.shape, flat, np.cumsum([0, *lengths], dtype=np.int64)
    if len(shapes) > 1 or len(wires) < len(rows):
        raise ValueError(f"rows of shapes {sorted(shapes)[:4]}")
    return tag, (len(rows), *shapes.pop()), np.stack(arrays), None


def _of_one_dtype(wires: list[WireTensor], upcast: dict[str, str], name: str) -> list[WireTensor]:
    """Return floats of several dtypes in the widest of them, which holds all values."""
    tags = sorted({wire[0] for wire in wires if wire[2].size})
    wide = {tag: widened(Tensor(tag, np.empty(0, CODES[tag][1]))).dtype for tag in tags}
    if len(tags) < 2 or any(dtype.kind != "f" for dtype in wide.values()):
        return wires
    upcast[name] = ", ".join(tags)
    widest = np.result_type(*wide.values())
    return [
        (str(widest), shape, widened(Tensor(tag, values)).astype(widest), offsets)
        for tag, shape, values, offsets in wires
    ]


def _row(value: FileValue, dtype: str | None) -> WireTensor:
    """Return a row; a list gets the dtype of the column's tensors if that holds its values."""
    if not isinstance(value, FileTensor):  # as short lists of a converted file are
        found = _from_list(value) if isinstance(value, list) else None
        if found is None:
            raise ValueError("rows of tensors and of lists")
        tag, shape, values, offsets = found
        if dtype not in (None, tag, "bfloat16"):
            with np.errstate(invalid="ignore"):
                cast = values.astype(dtype)
            if np.array_equal(cast, values, equal_nan=True):
                return str(dtype), shape, cast, offsets
        return found
    tag, shape, values, offsets = value.wire
    if len(shape) > 1 and shape[0] == 1:
        return tag, shape[1:], values[0], offsets
    return value.wire


def _as_dtype(wire: WireTensor, tag: str) -> WireTensor | None:
    """Return a tensor in another dtype; None if the dtype is unknown or cannot hold the values."""
    _, shape, values, offsets = wire
    if tag not in CODES:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        if tag == "bfloat16":
            cast = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            cast = values.astype(CODES[tag][1])
    same = np.array_equal(widened(Tensor(tag, cast)), values, equal_nan=values.dtype.kind == "f")
    return (tag, shape, cast, offsets) if same else None


def _from_list(values: list[FileValue]) -> WireTensor | None:
    """Return a list of numbers, or of equally or differently long lists of them, as a tensor."""
    kinds = set(map(type, values))
    try:
        if kinds <= NUMBERS:
            tag, shape, flat, _ = _ragged(values, (), kinds)
            return tag, shape, flat, None
        if not kinds <= {list, FileTensor}:
            return None
        if FileTensor in kinds:
            return _ragged_tensors(values, {}, "")
        found = _ragged_lists(values)
        widths = {len(row) for row in values if isinstance(row, list)}
        if found is not None and len(widths) == 1:
            tag, _, flat, _ = found
            shape = (len(values), widths.pop())
            return tag, shape, flat.reshape(shape), None
        return found or _regular(values)
    except (ValueError, OverflowError):
        return None


def _regular(values: list[FileValue]) -> WireTensor | None:
    array: Array = np.array(values)  # raises ValueError if they are ragged
    if array.dtype.name not in ("float64", "int64", "bool") or array.ndim > _DEPTH:
        return None
    return array.dtype.name, array.shape, array, None
