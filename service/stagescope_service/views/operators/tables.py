"""Operator tables: the calls of a dump, their stacks, the first non-finite results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple, TypedDict

from typing_extensions import Unpack

from stagescope_service.compare.operators import comparison_process
from stagescope_service.core.operators import TABLE_WRITTEN
from stagescope_service.dumps.msprobe.operator_query import (
    OperatorFilter,
    load_columns,
    read_operators,
    read_stack,
)
from stagescope_service.store.tables import OperatorTableRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.pages import Page, StepName, cursor, parse_step
from stagescope_service.views.reading.completeness import ALL_ROWS
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import chosen_columns, matching
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import InvalidInput, NotFound, StagescopeError
from stagescope_wire.links import Link
from stagescope_wire.schema import Part
from stagescope_wire.tensors import DTYPE_BYTES

_FIRST_COLUMNS: Final = (
    "order", "name", "operator", "module_class", "parent", "direction", "section", "index",
    "non_finite", "dtype", "shape", "source", "stack_id", "bad_inputs",
)  # fmt: skip

_TABLE_COLUMNS: Final = (
    "capture_id", "calls", "rows", "non_finite_rows", "truncated", "truncated_at", "done", "task",
    "level", "bytes", "dump_path", "path", "node_id",
)  # fmt: skip


_STEPS_NAMED: Final = 16
"""Most captured steps that an error lists."""


class TableFilters(TypedDict, total=False):
    """Selects operator tables; None: no filter."""

    stage: str | None
    role: str | None
    rank: int | None
    part: str | None
    capture_id: str | None


class OperatorTable(OperatorTableRow):
    """A row of `operators` with its part as text."""

    part: str


class TableGroup(NamedTuple):
    """The ranks of a role that dumped the same part for the same capture."""

    stage: str
    capture_id: str
    part: str
    role: str


class TableKey(NamedTuple):
    """Identifies an operator table of a step."""

    stage: str
    role: str
    rank: int
    part: str
    capture_id: str


class _PageOfRows(NamedTuple):
    rows: list[JsonObject]
    next_cursor: str | None
    unread: dict[int, JsonObject]
    """Index of a table that could not be read -> its `state` and `reason`."""


def _page_of_rows(
    deps: Dependencies, tables: list[OperatorTable], page: Page, filters: OperatorFilter
) -> _PageOfRows:
    """Return a page of the rows of all tables; its cursor is (index of the table, offset in it)."""
    index, offset = (*(max(number, 0) for number in page.position), 0, 0)[:2]
    rows: list[JsonObject] = []
    unread: dict[int, JsonObject] = {}
    while index < len(tables) and len(rows) < page.limit:
        try:
            path = deps.operator_files.path(tables[index])
            part = read_operators(path, filters, offset=offset, limit=page.limit - len(rows))
        except StagescopeError as error:
            # The tables of other ranks are listed all the same.
            if is_digested(tables[index]):
                unread[index] = {"state": error.code, "reason": str(error)}
            index, offset = index + 1, 0
            continue
        key = table_key(tables[index])._asdict()
        names = list(part.columns)
        rows += [
            {**key, **dict(zip(names, values, strict=True))}
            for values in zip(*part.columns.values(), strict=True)
        ]
        offset += len(part.columns["name"])
        if not part.more:
            index, offset = index + 1, 0
    return _PageOfRows(rows, cursor(index, offset) if index < len(tables) else None, unread)


def _check_values(
    deps: Dependencies, tables: Sequence[OperatorTable], owner: str, filters: OperatorFilter
) -> None:
    """Refuse a filter by a value that no row has: an empty list would look like no such tensor.

    Raises:
        NotFound: names the values that exist.
    """
    for name in ("kind", "direction", "section", "dtype"):
        wanted = getattr(filters, name)
        if wanted is None or (name == "dtype" and wanted in DTYPE_BYTES):
            continue  # that a step has no tensor of a known dtype is an answer
        existing: set[str] = set()
        for row in tables:
            with contextlib.suppress(StagescopeError):  # its `state` says why it cannot be read
                path = deps.operator_files.path(row)
                existing |= {*load_columns(path, [name])[name].values}
        if existing and wanted not in existing:
            raise NotFound(
                f"{owner} has no operator with {name} {wanted!r:.100}",
                expected=f"one of {', '.join(sorted(existing)[:30])}",
            )


def _only_table(rows: list[OperatorTable], target: Target) -> OperatorTable:
    see = (Link.to_step("dumps", target.step_number).within(target.run, target.number),)
    if not rows:
        raise NotFound(f"step {target.step_number} has no such dump", see=see)
    if len(rows) > 1:
        raise InvalidInput(
            f"{len(rows)} dumps of step {target.step_number} fit",
            expected="the stage, role, rank, part and capture_id of one",
            see=see,
        )
    return rows[0]


def first_non_finite(
    deps: Dependencies, target: Target, filters: TableFilters
) -> tuple[list[JsonObject], JsonObject | None]:
    """Return a row for each table, and the earliest call of them."""
    rows: list[JsonObject] = []
    earliest: JsonObject | None = None
    for _, group in groupby(tables_of(deps, target, **filters), key=table_group):
        tables = list(group)
        across_ranks = _across_ranks(deps, tables)
        for table in tables:
            row = _first_row(table, across_ranks)
            rows.append(row)
            if earliest is None and row["earliest"] and across_ranks is not None:
                earliest = {**row, "together": across_ranks["together"]}
    return rows, earliest


def _across_ranks(
    deps: Dependencies, tables: list[OperatorTable]
) -> comparison_process.Fields | None:
    """Return the earliest call over the readable ranks; None where all results are finite."""
    if all(row["first_non_finite"] is None for row in tables):
        return None
    paths = {}
    for row in tables:
        try:
            paths[row["rank"]] = deps.operator_files.path(row)
        except StagescopeError:  # noqa: PERF203 - the table is listed with its state
            continue
    rows = sum(row["rows"] or 0 for row in tables if row["rank"] in paths)
    return comparison_process.non_finite(paths, rows=rows)


def _first_row(table: OperatorTable, across_ranks: comparison_process.Fields | None) -> JsonObject:
    """Return the first non-finite call of a table, given the earliest over ranks."""
    first, summary = table["first_non_finite"] or {}, table["summary"] or {}
    rank, status = table["rank"], table_row(table)
    return {
        **table_key(table)._asdict(),
        **{name: first.get(name) for name in _FIRST_COLUMNS},
        "certain": table["certain"] if first else None,
        "earliest": across_ranks is not None and across_ranks["earliest"] == rank,
        "order_differs": across_ranks is not None and rank in across_ranks["order_differs"],
        "culprits": summary.get("culprits"),
        "masks": summary.get("masks"),
        "not_read": summary.get("not_read"),
        "calls": table["calls"],
        "task": table["task"],
        "measured": summary.get("measured"),
        "unmeasured": summary.get("unmeasured"),
        **{name: status[name] for name in ("state", "reason", "truncated", "done")},
    }


# --- tables ---------------------------------------------------------------------------------
def tables_of(
    deps: Dependencies, target: Target, **filters: Unpack[TableFilters]
) -> list[OperatorTable]:
    """Return a step's operator tables, sorted by when their stage was dumped first.

    Where a rank was recreated inside a step, its newest incarnation's table is returned.

    Raises:
        NotFound: there is none, or none that matches the filters.
    """
    step = target.step_number
    newest: dict[TableKey, OperatorTable] = {}
    for row in deps.catalogue.operators(target.attempt_id, step, limit=ALL_ROWS):
        table: OperatorTable = {**row, "part": str(Part.of_columns(row))}
        newest[table_key(table)] = table  # rows are in the order of announcement
    if not newest:
        others = _captured_steps(deps, target)
        raise NotFound(
            f"step {step} of run {target.run} has no operators",
            expected=f"one of {', '.join(others)}" if others else "",
            advice="request a capture with `stagescope capture`; `stagescope dumps` lists dumps",
        )
    return matching(_sorted_tables(newest.values()), f"step {step}", **filters)


def _captured_steps(deps: Dependencies, target: Target) -> list[str]:
    """Return the newest steps of a run that have operators, those of its attempt first of all.

    A step that a question without an attempt would not find is named with its attempt.
    """
    catalogue = deps.catalogue
    attempts = catalogue.attempts(target.run)
    attempts.sort(key=lambda each: each["attempt_id"] != target.attempt_id)  # then newest first
    found: list[tuple[int, int]] = []
    for attempt in attempts:
        if len(found) >= _STEPS_NAMED:
            break
        steps = catalogue.operator_steps(attempt["attempt_id"], limit=_STEPS_NAMED - len(found))
        found += [(step, attempt["number"]) for step in steps]
    texts = []
    for step, number in sorted(found):
        answers = catalogue.attempt_of_step(target.run, step)
        is_newest = answers is None or answers["number"] == number
        texts.append(str(step) if is_newest else f"{step} (attempt {number})")
    return texts


def _sorted_tables(tables: Iterable[OperatorTable]) -> list[OperatorTable]:
    """Return tables by the first announcement of their stage and capture, then part and rank."""
    rows = list(tables)
    announced: dict[tuple[str, str], float] = {}
    for row in rows:
        wall, key = row["announced_wall"] or 0.0, (row["stage"], row["capture_id"])
        announced[key] = min(wall, announced.get(key, wall))
    return sorted(
        rows,
        key=lambda row: (
            announced[row["stage"], row["capture_id"]],
            Part.of_columns(row),
            row["role"],
            row["rank"],
        ),
    )


def table_group(row: OperatorTable) -> TableGroup:
    """Return the group of a table."""
    return TableGroup(row["stage"], row["capture_id"], row["part"], row["role"])


def table_key(row: OperatorTable) -> TableKey:
    """Return the key of a table."""
    return TableKey(row["stage"], row["role"], row["rank"], row["part"], row["capture_id"])


def is_digested(row: OperatorTable) -> bool:
    """Return whether the table of the last announced dump was written."""
    return row["digested_mark"] == row["mark"] and row["state"] == TABLE_WRITTEN


def table_row(row: OperatorTable) -> JsonObject:
    """Return a dump's table: its key, state, size and extent."""
    digested = row["digested_mark"] == row["mark"]
    return {
        **table_key(row)._asdict(),
        "state": row["state"] if digested else "announced",
        "reason": row["reason"] if digested else None,
        **chosen_columns(row, _TABLE_COLUMNS),
    }


def operators(
    deps: Dependencies,
    target: Target,
    page: Page,
    table_filters: TableFilters,
    filters: OperatorFilter,
) -> JsonObject:
    """List operator calls in execution order: a row an argument, result, parameter or gradient."""
    tables = tables_of(deps, target, **table_filters)
    result = _page_of_rows(deps, tables, page, filters)
    if not result.rows and not page.position:
        _check_values(deps, tables, f"step {target.step_number}", filters)
    listed = [
        {**table_row(row), **result.unread.get(index, {})} for index, row in enumerate(tables)
    ]
    return {**target.heading(), "tables": listed, "rows": result.rows, "next": result.next_cursor}


def stack(deps: Dependencies, target: Target, filters: TableFilters, stack_id: str) -> JsonObject:
    """Return the Python frames of an operator's call, the innermost first."""
    row = _only_table(tables_of(deps, target, **filters), target)
    frames = read_stack(deps.operator_files.path(row), stack_id)
    key = table_key(row)._asdict()
    return {**target.heading(), **key, "stack_id": stack_id, "frames": frames}


def operator_target(
    deps: Dependencies,
    step: str,
    run: str | None,
    attempt: int | None,
    attempt_key: str | None = None,
) -> Target:
    """Return the step of a path; `latest` is here what `captured` is."""
    name = parse_step(step)
    named: StepName = "captured" if name == "latest" else name
    return deps.finder.named(run, attempt, named, key=attempt_key)
