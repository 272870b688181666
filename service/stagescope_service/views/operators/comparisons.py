"""The two sides of a comparison of operator tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from stagescope_service.compare.operators import comparison_process
from stagescope_service.compare.operators.differences import Thresholds
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
from stagescope_wire.errors import InvalidInput, NotFound, Unreachable
from stagescope_wire.links import Link

OTHER_DEVICE: Final = 100.0
"""The factor of the thresholds where the two sides ran on devices of different kinds."""

_SIDES_LISTED: Final = 8


def default_factor(devices: Sequence[str | None]) -> float:
    """Return the factor of the thresholds of two sides on devices of these kinds."""
    other_device = None not in devices and devices[0] != devices[1]
    return OTHER_DEVICE if other_device else Thresholds().factor


def device_kind(deps: Dependencies, side: TableSide) -> str | None:
    """Return the kind of the device on which a side was dumped; None: unknown."""
    table = side.table
    for process in deps.catalogue.processes(
        table["attempt_id"], role=table["role"], rank=table["rank"]
    ):
        if process["incarnation"] == table["incarnation"]:
            return process["device_kind"]
    return None


# --- sides ----------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class TableSide:
    """One side of a comparison: an operator table and its step."""

    target: Target
    table: OperatorTable

    def heading(self) -> JsonObject:
        """Return the fields of an answer that describe it."""
        step = {"run": self.target.run, "attempt": self.target.number}
        return {**step, "step": self.target.step_number, **table_row(self.table)}


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
    ranks = {(row["stage"], row["role"], row["rank"]) for row in tables}
    if len(ranks) > 1:
        texts = [f"{stage} {role}/{rank}" for stage, role, rank in sorted(ranks)]
        raise InvalidInput(
            f"side {name} names {len(ranks)} dumps of step {step}",
            expected=f"the stage, role and rank of one of {_shortened(texts)}",
        )
    captures = [row["capture_id"] for row in tables if is_digested(row)]
    captures = captures or [row["capture_id"] for row in tables]
    newest = list(dict.fromkeys(captures))[-1]
    chosen = preferred_capture if preferred_capture in captures else newest
    return TableSide(target, next(row for row in tables if row["capture_id"] == chosen))


def _shortened(texts: Sequence[str]) -> str:
    more = f", ... ({len(texts)})" if len(texts) > _SIDES_LISTED else ""
    return ", ".join(texts[:_SIDES_LISTED]) + more


def find_divergence(deps: Dependencies, body: DivergenceRequest) -> JsonObject:
    """Return the first operator in which two dumps differ."""
    a, b = find_sides(deps, *body.sides())
    devices = [device_kind(deps, side) for side in (a, b)]
    by_dtype = body.by_dtype or {}
    thresholds = Thresholds(
        factor=default_factor(devices) if body.factor is None else body.factor,
        by_dtype={name.removeprefix("torch."): value for name, value in by_dtype.items()},
        exact=body.exact,
    )
    result = comparison_process.divergence(
        deps.operator_files.path(a.table),
        deps.operator_files.path(b.table),
        thresholds,
        rows=(a.table["rows"] or 0) + (b.table["rows"] or 0),
        skip_sharded=body.skip_sharded,
        limit=body.limit,
    )
    return {
        "a": {**a.heading(), "device": devices[0]},
        "b": {**b.heading(), "device": devices[1]},
        "factor": None if thresholds.exact else thresholds.factor,
        "exact": thresholds.exact,
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
