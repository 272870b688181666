"""Queries on an operator table; only the row groups and columns that they need are read.

pyarrow is imported where a table is read: most services never read one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from stagescope_wire.errors import InvalidInput, NotFound, StoreError
from stagescope_wire.nonfinite import Json

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

MAX_ROWS: Final = 10_000
"""Rows of one page."""
_BATCH_ROWS: Final = 16_384


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorFilter:
    """Selects rows; None matches any value.

    Attributes:
        name: a pattern with `*` and `?` that matches msprobe's full name or, without either, a text
            that the name contains; case-sensitive.
        kind, direction, section, dtype: exact values.
        non_finite: only tensors with a NaN or an infinity.
        first_order, last_order: range of calls by their index in the dump, both included.
    """

    name: str | None = None
    kind: str | None = None
    direction: str | None = None
    section: str | None = None
    dtype: str | None = None
    non_finite: bool = False
    first_order: int | None = None
    last_order: int | None = None


class OperatorPage(NamedTuple):
    """Rows as columns of plain values, and whether more follow."""

    columns: dict[str, list[Any]]
    more: bool


class CodedText(NamedTuple):
    """A column of texts: `values[codes[row]]`; code -1 is an unknown text."""

    codes: np.ndarray[Any, np.dtype[np.int32]]
    values: list[str]

    def text(self, row: int) -> str | None:
        """Return the text of a row."""
        code = int(self.codes[row])
        return None if code < 0 else self.values[code]


def read_operators(
    path: Path,
    where: OperatorFilter | None = None,
    *,
    offset: int = 0,
    limit: int = 1000,
) -> OperatorPage:
    """Read rows in execution order.

    Args:
        path: an operator table.
        where: which rows.
        offset: number of matching rows to skip.
        limit: most rows to return, at most `MAX_ROWS`.

    Raises:
        InvalidInput: an offset or limit out of range.
        NotFound: there is no such file.
        StoreError: it is not an operator table.
    """
    import pyarrow as pa

    from stagescope_service.dumps.msprobe.operator_table import SCHEMA

    if not 0 <= limit <= MAX_ROWS or offset < 0:
        raise InvalidInput(
            f"offset {offset} and limit {limit}", expected=f"from 0, a limit up to {MAX_ROWS}"
        )
    found: list[pa.RecordBatch] = []
    skip, left = offset, limit + 1
    for batch in _batches(path, where, SCHEMA.names):
        piece = batch.slice(skip, left)
        skip = max(0, skip - batch.num_rows)
        left -= piece.num_rows
        found.append(piece)
        if not left:
            break
    page = pa.Table.from_batches(found, SCHEMA).slice(0, limit)
    return OperatorPage(page.to_pydict(), more=not left)


def iterate_rows(
    path: Path, where: OperatorFilter | None = None, *, columns: Sequence[str] | None = None
) -> Iterator[dict[str, Json]]:
    """Yield every matching row as a dict, in execution order; a few thousand are in memory.

    Raises:
        InvalidInput, NotFound, StoreError: see `read_operators`.
    """
    for batch in _batches(path, where, _check_columns(columns)):
        yield from batch.to_pylist()


def load_columns(path: Path, columns: Sequence[str]) -> dict[str, Json]:
    """Read complete columns for a computation.

    Returns:
        Texts and shapes (`[2, 6]`) as `CodedText`, order as int32, and floats as float64. A NaN may
        also be an unknown value, so each column of floats has a column `{name}_known` (bool).

    Raises:
        InvalidInput, NotFound, StoreError: see `read_operators`.
    """
    import pyarrow as pa

    from stagescope_service.dumps.msprobe.operator_table import SCHEMA

    wanted = _check_columns(columns)
    schema = pa.schema([_encoded_field(SCHEMA.field(name)) for name in wanted])
    batches = [_encode(batch, schema) for batch in _batches(path, None, wanted)]
    table = pa.Table.from_batches(batches, schema).unify_dictionaries()
    found: dict[str, Json] = {}
    for name in wanted:
        column = table[name].combine_chunks()
        if pa.types.is_dictionary(schema.field(name).type):
            found[name] = _coded(column)
        elif pa.types.is_floating(column.type):
            found[name] = column.to_numpy(zero_copy_only=False)
            found[f"{name}_known"] = column.is_valid().to_numpy(zero_copy_only=False)
        else:
            found[name] = column.to_numpy(zero_copy_only=False)
    return found


def read_stack(path: Path, stack_id: str) -> list[str]:
    """Return the frames of a stack, the innermost first, as msprobe wrote them.

    Raises:
        NotFound: no such file, or no such stack in it.
        StoreError: it is not an operator table.
    """
    stacks = read_stacks(path)
    if stack_id not in stacks:
        raise NotFound(f"there is no stack {stack_id!r:.100} in {path.name}")
    return stacks[stack_id]


def read_stacks(path: Path) -> dict[str, list[str]]:
    """Return the frames of every stack of the table, by the stack's id.

    Raises:
        NotFound, StoreError: see `read_operators`.
    """
    from stagescope_service.dumps.msprobe.operator_table import STACKS_KEY

    return _metadata(path, STACKS_KEY)


def _metadata(path: Path, key: bytes) -> dict[str, Json]:
    import pyarrow.parquet as pq

    with _table_errors(path):
        metadata = pq.read_metadata(path).metadata or {}
        if key not in metadata:
            raise StoreError(f"{path} is no operator table")
        found: dict[str, Json] = json.loads(metadata[key])
        return found


def _batches(
    path: Path, where: OperatorFilter | None, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    import pyarrow.dataset as ds  # imports pandas: half a second of every process's start

    from stagescope_service.dumps.msprobe.operator_table import SCHEMA, SUMMARY_KEY

    with _table_errors(path):
        _metadata(path, SUMMARY_KEY)  # the missing columns of a foreign file would all be null
        scanner = ds.dataset(path, SCHEMA, format="parquet").scanner(
            columns=list(columns),
            filter=_expression(where or OperatorFilter()),
            batch_size=_BATCH_ROWS,
            # One batch ahead, on this thread: rows come in order, and memory stays small.
            batch_readahead=1,
            fragment_readahead=1,
            use_threads=False,
        )
        yield from scanner.to_batches()


def _expression(where: OperatorFilter) -> pc.Expression | None:
    import pyarrow.compute as pc

    parts = [
        pc.field(name) == value
        for name in ("kind", "direction", "section", "dtype")
        if (value := getattr(where, name)) is not None
    ]
    if where.name is not None:
        parts.append(_name_matches(where.name))
    if where.non_finite:
        parts.append(pc.field("non_finite").is_valid())
    if where.first_order is not None:
        parts.append(pc.field("order") >= where.first_order)
    if where.last_order is not None:
        parts.append(pc.field("order") <= where.last_order)
    return functools.reduce(lambda one, other: one & other, parts) if parts else None


def _name_matches(pattern: str) -> pc.Expression:
    import pyarrow.compute as pc

    if not {"*", "?"} & set(pattern):
        return pc.match_substring(pc.field("name"), pattern)  # pyright: ignore[reportAttributeAccessIssue]
    wildcards = {"*": ".*", "?": "."}
    regex = "".join(wildcards.get(character) or re.escape(character) for character in pattern)
    # RE2 has no backtracking: a hostile pattern costs no more than another.
    full_match = f"^(?s:{regex})$"
    return pc.match_substring_regex(pc.field("name"), full_match)  # pyright: ignore[reportAttributeAccessIssue]


def _check_columns(columns: Sequence[str] | None) -> list[str]:
    from stagescope_service.dumps.msprobe.operator_table import SCHEMA

    wanted = list(SCHEMA.names if columns is None else columns)
    unknown = [name for name in wanted if name not in SCHEMA.names]
    if unknown or not wanted:
        raise InvalidInput(f"columns {unknown!r:.200}", expected=f"some of {SCHEMA.names}")
    return wanted


def _encoded_field(field: pa.Field) -> pa.Field:
    import pyarrow as pa

    if not pa.types.is_string(field.type) and not pa.types.is_list(field.type):
        return field
    return pa.field(field.name, pa.dictionary(pa.int32(), pa.string()))


def _encode(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        if pa.types.is_list(column.type):
            texts = [None if shape is None else str(shape) for shape in column.to_pylist()]
            column = pa.array(texts, pa.string())
        encoded = pa.types.is_dictionary(field.type)
        columns.append(column.dictionary_encode() if encoded else column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _coded(column: Any) -> CodedText:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):  # no row at all
        return CodedText(np.empty(0, np.int32), [])
    codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return CodedText(codes.astype(np.int32, copy=False), column.dictionary.to_pylist())


@contextlib.contextmanager
def _table_errors(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"there is no operator table {path}") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read as an operator table: {error}") from error
