"""The two sides of a comparison of operator tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from stagescope_service.compare.operators import comparison_process
from stagescope_service.compare.operators.differences import EPS, Thresholds
from stagescope_service.compare.operators.layouts import (
    AXES,
    RankTable,
    read_layout,
    read_rule,
)
from stagescope_service.compare.operators.tensors import TensorRow, compare_tensors
from stagescope_service.dumps.formats.msprobe_directory import TENSOR_FOLDER
from stagescope_service.dumps.records import IMPORTED_CAPTURE
from stagescope_service.store.artifacts import confine
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.bodies import DivergenceRequest, SideFields, TensorsRequest
from stagescope_service.views.operators.tables import (
    OperatorTable,
    is_digested,
    table_row,
    tables_of,
)
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.operator_files import describe_table
from stagescope_service.views.reading.target import Target
from stagescope_wire.captures import read_ranks
from stagescope_wire.errors import (
    InvalidInput,
    InvalidPlan,
    NotFound,
    StagescopeError,
    Unreachable,
)
from stagescope_wire.links import Link

OTHER_DEVICE: Final = 100.0
"""The factor of the thresholds where the two sides ran on devices of different kinds."""
OTHER_LAYOUT: Final = 8.0
"""The factor where they ran in two layouts; 100 for float32."""

_SIDES_LISTED: Final = 8
_SHARDING: Final = ("tp", "cp", "etp")
"""Axes along which every rank holds a part of a tensor."""


def thresholds_of(
    devices: Sequence[str | None],
    sides: Sequence[TableSide],
    *,
    factor: float | None = None,
    by_dtype: Mapping[str, float] | None = None,
    exact: bool = False,
) -> Thresholds:
    """Return the thresholds of two sides.

    Args:
        devices: the kinds of their devices.
        sides: both sides; several ranks add numbers in another order.
        factor, by_dtype, exact: of the asker.
    """
    given = {name.removeprefix("torch."): value for name, value in (by_dtype or {}).items()}
    if factor is None:
        factor = Thresholds().factor
        if None not in devices and devices[0] != devices[1]:
            factor = OTHER_DEVICE
        elif any(side.ranks for side in sides):
            # Coarse dtypes hide the order of a sum; it adds up over the layers in float32.
            factor = OTHER_LAYOUT
            given = {"float32": OTHER_DEVICE * EPS["float32"], **given}
    return Thresholds(factor=factor, by_dtype=given, exact=exact)


def device_kind(deps: Dependencies, side: TableSide) -> str | None:
    """Return the kind of the device on which a side was dumped; None: unknown."""
    return _process_of(deps, side.table).get("device_kind")


# --- sides ----------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class TableSide:
    """One side of a comparison: an operator table and its step.

    Attributes:
        target: its step.
        table: the table, of several ranks that of the lowest.
        ranks: the tables of several ranks, empty for one.
        layout: their layout as the asker gives it.
    """

    target: Target
    table: OperatorTable
    ranks: tuple[OperatorTable, ...] = ()
    layout: str | None = None

    @property
    def rows(self) -> int:
        """Number of rows of all its tables."""
        return sum(table["rows"] or 0 for table in self.ranks or (self.table,))

    def heading(self) -> JsonObject:
        """Return the fields of an answer that describe it."""
        step = {"run": self.target.run, "attempt": self.target.number}
        ranks = [table["rank"] for table in self.ranks] or None
        return {
            **step,
            "step": self.target.step_number,
            **table_row(self.table),
            "ranks": ranks,
        }


def find_sides(
    deps: Dependencies, a: tuple[SideFields, int], b: tuple[SideFields, int]
) -> tuple[TableSide, TableSide]:
    """Return the tables of both sides, each given by its fields and its step.

    Raises:
        NotFound: there is no such table.
        InvalidInput: a side matches several ranks.
    """
    first = _find_side(deps, "a", *a)
    capture_id = first.table["capture_id"]
    return first, _find_side(deps, "b", *b, preferred_capture=capture_id)


def _find_side(
    deps: Dependencies,
    name: str,
    fields: SideFields,
    step: int,
    *,
    preferred_capture: str | None = None,
) -> TableSide:
    """Return the table of a side; among several captures it takes the preferred or newest one."""
    target = deps.finder.step(fields.run, fields.attempt, step)
    tables = tables_of(
        deps,
        target,
        stage=fields.stage,
        role=fields.role,
        rank=fields.rank,
        part=fields.part,
        capture_id=fields.capture_id,
    )
    chosen_ranks = None if fields.ranks is None else _read_ranks(name, fields.ranks)
    if isinstance(chosen_ranks, set):
        tables = [row for row in tables if row["rank"] in chosen_ranks]
    groups = {(row["stage"], row["role"], row["rank"]) for row in tables}
    if chosen_ranks is not None:
        groups = {(stage, role, -1) for stage, role, _ in groups}
    if len(groups) != 1:
        texts = [f"{row['stage']} {row['role']}/{row['rank']}" for row in tables]
        raise InvalidInput(
            f"side {name} names {len({*texts})} dumps of step {step}",
            expected=f"the stage, role and rank of one of {_shortened([*dict.fromkeys(texts)])}, "
            "or ranks=all of one stage and role",
        )
    captures = [row["capture_id"] for row in tables if is_digested(row)]
    captures = captures or [row["capture_id"] for row in tables]
    newest = list(dict.fromkeys(captures))[-1]
    chosen = preferred_capture if preferred_capture in captures else newest
    found = {row["rank"]: row for row in reversed(tables) if row["capture_id"] == chosen}
    ranks = tuple(found[rank] for rank in sorted(found)) if chosen_ranks is not None else ()
    first = ranks[0] if ranks else next(row for row in tables if row["capture_id"] == chosen)
    return TableSide(target, first, ranks, fields.layout)


def _read_ranks(name: str, text: str) -> set[int] | str:
    wrong = InvalidInput(f"ranks of side {name} is {text!r:.100}", expected="all, or 0-3")
    try:
        found = read_ranks(text)
    except InvalidPlan:
        raise wrong from None
    if isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise wrong
    return {*found}


def rank_tables(deps: Dependencies, side: TableSide, name: str) -> list[RankTable]:
    """Return the tables of a side with the layout of their ranks.

    Raises:
        InvalidInput: their layout is not complete, or not of this number of ranks.
    """
    tables = side.ranks or (side.table,)
    found = [
        RankTable(table["rank"], deps.operator_files.path(table), {}, _tensors_of(deps, table))
        for table in tables
    ]
    if not side.ranks:
        return found
    if side.layout is not None:
        places = read_layout(side.layout, [table.rank for table in found])
    else:
        places = [_reported_layout(deps, table) for table in tables]
        _check_layout(name, [_process_of(deps, table) for table in tables])
    return [
        dataclasses.replace(table, coordinates=place)
        for table, place in zip(found, places, strict=True)
    ]


def _tensors_of(deps: Dependencies, table: OperatorTable) -> Path | None:
    """Return the directory of the full tensors of a dump, None where it has none here."""
    if table["task"] != "tensor":
        return None
    try:
        directory = confine(table["dump_path"] or "", deps.settings.roots)
    except StagescopeError:
        return None
    folder = directory / TENSOR_FOLDER
    return directory if folder.is_dir() and not folder.is_symlink() else None


def _process_of(deps: Dependencies, table: OperatorTable) -> JsonObject:
    for process in deps.catalogue.processes(
        table["attempt_id"], role=table["role"], rank=table["rank"]
    ):
        if process["incarnation"] == table["incarnation"]:
            return {**process}
    return {}


def _reported_layout(deps: Dependencies, table: OperatorTable) -> dict[str, int]:
    process = _process_of(deps, table)
    return {
        axis: process[f"{axis}_rank"] for axis in AXES if process.get(f"{axis}_rank") is not None
    }


def _check_layout(name: str, processes: Sequence[JsonObject]) -> None:
    """Refuse ranks of several pipeline stages, or without one that holds a part of each tensor."""
    stages = {process.get("pp_rank") or 0 for process in processes}
    if len(stages) > 1:
        raise InvalidInput(
            f"the ranks of side {name} are of {len(stages)} pipeline stages, which hold other "
            "layers",
            expected="the ranks of one pipeline stage, such as ranks=0-3",
        )
    for axis in _SHARDING:
        size = max((process.get(f"{axis}_size") or 1 for process in processes), default=1)
        known = {process.get(f"{axis}_rank") for process in processes} - {None}
        if known and len(known) < size:
            missing = ", ".join(str(index) for index in range(size) if index not in known)
            raise InvalidInput(
                f"side {name} has no dump of {axis} {missing}, and its layout has {axis} {size}",
                expected=f"dumps of all ranks along {axis}",
                advice="capture all ranks: `stagescope capture --ranks all`",
            )


def _shortened(texts: Sequence[str]) -> str:
    more = f", ... ({len(texts)})" if len(texts) > _SIDES_LISTED else ""
    return ", ".join(texts[:_SIDES_LISTED]) + more


def find_divergence(deps: Dependencies, body: DivergenceRequest) -> JsonObject:
    """Return the first operator in which two dumps differ."""
    a, b = find_sides(deps, *body.sides())
    devices = [device_kind(deps, side) for side in (a, b)]
    thresholds = thresholds_of(
        devices, (a, b), factor=body.factor, by_dtype=body.by_dtype, exact=body.exact
    )
    result = comparison_process.divergence(
        rank_tables(deps, a, "a"),
        rank_tables(deps, b, "b"),
        thresholds,
        rows=a.rows + b.rows,
        rules=[read_rule(text) for text in body.shards],
        skip_sharded=body.skip_sharded,
        limit=body.limit,
    )
    return {
        "a": {**a.heading(), "device": devices[0]},
        "b": {**b.heading(), "device": devices[1]},
        "factor": None if thresholds.exact else thresholds.factor,
        "exact": thresholds.exact,
        "by_dtype": {} if thresholds.exact else dict(thresholds.by_dtype),
        **result,
    }


def start_tensors(
    deps: Dependencies, body: TensorsRequest
) -> tuple[tuple[TableSide, TableSide], float, Future[list[TensorRow]]]:
    """Start a comparison of tensors, or find the one that runs.

    Returns:
        The sides, the monotonic time of its start, and its rows to come.
    """
    a, b = find_sides(deps, *body.sides())
    for side in (a, b):
        if side.ranks:
            raise InvalidInput(
                "msprobe compares the tensors of one rank with those of another",
                expected="a rank of each side",
                see=(Link("divergence", shows="a comparison of several ranks"),),
            )
        if side.table["task"] not in (None, "tensor"):
            raise InvalidInput(
                f"the dump of {describe_table(side.table)} is of task {side.table['task']}",
                expected="a dump of msprobe's task 'tensor'",
                see=(Link("divergence", shows="a comparison of its statistics"),),
            )
    tables = (deps.operator_files.path(a.table), deps.operator_files.path(b.table))
    key = (a.table["checksum"] or "", b.table["checksum"] or "")
    began, future = deps.long_computations.start_once(
        key, compare_tensors, _tensor_directory(deps, a), _tensor_directory(deps, b), tables
    )
    return (a, b), began, future


def _tensor_directory(deps: Dependencies, side: TableSide) -> Path:
    directory = confine(side.table["dump_path"] or "", deps.settings.roots)
    if side.table["capture_id"] == IMPORTED_CAPTURE and not (directory / TENSOR_FOLDER).is_dir():
        raise NotFound(
            f"the import of {describe_table(side.table)} copied msprobe's statistics alone",
            advice="`stagescope divergence` compares these, `stagescope compare DIR DIR` the "
            "tensors of the directories that were imported",
        )
    if not (directory / "dump.json").is_file():
        raise Unreachable(
            f"the tensors of {describe_table(side.table)} lie on node {side.table['node_id']} "
            "alone",
            advice="a data_dir that all nodes share lets them be compared",
        )
    return directory
