"""Which operator tables a question is about: of a step, or one side of a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import Depends

from stagescope.wire.errors import InvalidInput, NotFound
from stagescope.wire.schema import PART_FIELDS
from stagescope_service.api import rows as shape
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.api.dependencies import (
    AttemptKey,
    AttemptNumber,
    Dependencies,
    Deps,
    Run,
    StepWord,
    step_target,
)
from stagescope_service.api.target import Target
from stagescope_service.core.operator_tables import TABLE_WRITTEN

Row = dict[str, Any]

SIDE_FIELDS: Final[Mapping[str, str]] = {
    "run": "a run's name; default: the run whose training stage began last",
    "attempt": "an attempt's number; default: the newest that has the step",
    "step": "the trainer's step",
    "stage": "a stage's name",
    "role": "a role",
    "rank": "a rank",
    "part": "occurrence.epoch.minibatch.microbatch; default: the first",
    "capture_id": "a capture's id; default: the newest",
}
_INHERITED: Final = ("run", "attempt", "step", "stage", "role", "rank", "part")
_INTEGERS: Final = ("attempt", "step", "rank")
_NAMED: Final = 8
_INT64: Final = 1 << 63

_SHOWN: Final = (
    "capture_id", "calls", "rows", "non_finite_rows", "truncated", "truncated_at", "done", "task",
    "level", "bytes", "dump_path", "path", "node_id",
)  # fmt: skip


def operator_target(
    deps: Deps,
    step: StepWord,
    run: Run = None,
    attempt: AttemptNumber = None,
    attempt_key: AttemptKey = None,
) -> Target:
    """Return the step that a path names; `latest` is the newest one that has operators.

    That is one of an earlier attempt where the newest has none: what was captured before a restart
    is what there is to look at after it.
    """
    if step == "latest":
        newest = deps.finder.step(run, attempt, None, key=attempt_key)
        attempts = [newest.attempt]
        if attempt is None and attempt_key is None:
            attempts = deps.catalogue.attempts(newest.run)
        for each in attempts:
            for found in deps.catalogue.operator_steps(each["attempt_id"], limit=1):
                return deps.finder.step(newest.run, each["number"], found)
        return newest
    return step_target(deps, step, run, attempt, attempt_key)


OperatorTarget = Annotated[Target, Depends(operator_target)]


def tables_of(deps: Dependencies, target: Target, **filters: Any) -> list[Row]:
    """Return a step's operator tables, the stage that was dumped first first.

    Where a rank was made anew inside a step, the newest incarnation's table answers.

    Raises:
        NotFound: there is none, or none with these values.
    """
    assert target.step is not None
    step = target.step["step"]
    newest: dict[tuple[Any, ...], Row] = {}
    for row in deps.catalogue.operators(target.attempt_id, step, limit=ALL_ROWS):
        row["part"] = shape.part_text(row)
        place = (row["stage"], row["capture_id"], row["part"], row["role"], row["rank"])
        newest[place] = row  # they come in the order in which they were announced
    if not newest:
        others = deps.catalogue.operator_steps(target.attempt_id)
        raise NotFound(
            f"step {step} of run {target.run} has no operators",
            expected=f"one of {', '.join(map(str, sorted(others)))}" if others else "",
            advice="order a capture with `stagescope capture`; `stagescope dumps` says what came",
        )
    return shape.chosen(_in_order(newest.values()), f"step {step}", **filters)


def _in_order(rows: Iterable[Row]) -> list[Row]:
    rows = list(rows)
    began: dict[tuple[str, str], float] = {}
    for row in rows:
        wall = row["announced_wall"] or 0.0
        began[group_of(row)[:2]] = min(wall, began.get(group_of(row)[:2], wall))
    return sorted(
        rows,
        key=lambda row: (
            began[group_of(row)[:2]],
            [row[name] or 0 for name in PART_FIELDS],
            row["role"],
            row["rank"],
        ),
    )


def group_of(row: Row) -> tuple[str, str, str, str]:
    """Return what the ranks that did one thing together share."""
    return row["stage"], row["capture_id"], row["part"], row["role"]


def is_digested(row: Row) -> bool:
    """Return whether a dump's table was written, for what was announced last."""
    return bool(row["digested_mark"] == row["mark"] and row["state"] == TABLE_WRITTEN)


def place_row(row: Row) -> Row:
    """Return where a table belongs."""
    return {name: row[name] for name in ("stage", "role", "rank", "part", "capture_id")}


def table_row(row: Row) -> Row:
    """Return what there is of a dump: its table's size and how far it goes."""
    digested = row["digested_mark"] == row["mark"]
    return {
        **place_row(row),
        "state": row["state"] if digested else "announced",
        "reason": row["reason"] if digested else None,
        **{name: row[name] for name in _SHOWN},
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a table and what it is of."""

    target: Target
    row: Row

    def heading(self) -> Row:
        """Return what an answer says of it."""
        assert self.target.step is not None
        where = {"run": self.target.run, "attempt": self.target.number}
        return {**where, "step": self.target.step["step"], **table_row(self.row)}


def read_sides(said: Mapping[str, Any]) -> tuple[Row, Row]:
    """Return what a body says of its sides `a` and `b`; what `b` leaves out is as in `a`.

    Raises:
        InvalidInput: a side is missing, or says what cannot be.
    """
    a, b = _read_side(said, "a"), _read_side(said, "b")
    for name in _INHERITED:
        # Another run has attempts of its own.
        if name not in b and name in a and not (name == "attempt" and "run" in b):
            b[name] = a[name]
    for name, side in (("a", a), ("b", b)):
        if "step" not in side:
            raise InvalidInput(f"side {name} names no step", expected="its step, an integer")
    return a, b


def _read_side(said: Mapping[str, Any], name: str) -> Row:
    side = said.get(name)
    if not isinstance(side, Mapping):
        raise InvalidInput(
            f"side {name} is {side!r:.100}",
            expected="; ".join(f"{field}: {text}" for field, text in SIDE_FIELDS.items()),
        )
    unknown = sorted(map(str, set(side) - set(SIDE_FIELDS)))
    if unknown:
        raise InvalidInput(
            f"side {name} has no field {', '.join(map(repr, unknown[:5]))}",
            expected=f"some of {', '.join(SIDE_FIELDS)}",
        )
    found = {field: value for field, value in side.items() if value is not None}
    for field, value in found.items():
        kind = int if field in _INTEGERS else str
        if type(value) is not kind:
            expected = "an integer" if kind is int else "a text"
            raise InvalidInput(f"{field} of side {name} is {value!r:.100}", expected=expected)
        if isinstance(value, int) and not -_INT64 < value < _INT64:
            raise InvalidInput(f"{field} of side {name} is {value}", expected="a smaller number")
    return found


def find_side(deps: Dependencies, said: Row, name: str, like: Side | None = None) -> Side:
    """Return the one table that a side names.

    Args:
        desk: the routes' collaborators.
        said: its fields, see `SIDE_FIELDS`.
        name: the side's, for errors.
        like: the other side: of several captures its own answers, if it is there.

    Raises:
        NotFound: there is no such table.
        InvalidInput: it names several ranks.
    """
    target = deps.finder.step(said.get("run"), said.get("attempt"), said["step"])
    filters = {field: said.get(field) for field in ("stage", "role", "rank", "part", "capture_id")}
    rows = tables_of(deps, target, **filters)
    ranks = {(row["stage"], row["role"], row["rank"]) for row in rows}
    if len(ranks) > 1:
        texts = [f"{stage} {role}/{rank}" for stage, role, rank in sorted(ranks)]
        raise InvalidInput(
            f"side {name} names {len(ranks)} dumps of step {said['step']}",
            expected=f"the stage, role and rank of one of {_few(texts)}",
        )
    captures = {row["capture_id"]: row for row in rows if is_digested(row)} or {
        row["capture_id"]: row for row in rows
    }
    chosen = list(captures)[-1]
    if like is not None and like.row["capture_id"] in captures:
        chosen = like.row["capture_id"]
    return Side(target, next(row for row in rows if row["capture_id"] == chosen))


def _few(texts: Sequence[str]) -> str:
    more = f", ... ({len(texts)})" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more


def sides_schema(**fields: Any) -> dict[str, Any]:
    """Return the OpenAPI body of a question about two sides, with `fields` of its own."""
    side = {
        "type": "object",
        "properties": {name: {"description": text} for name, text in SIDE_FIELDS.items()},
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "required": ["a", "b"],
        "properties": {"a": side, "b": side, **fields},
        "additionalProperties": False,
    }
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def check_fields(said: Mapping[str, Any], *names: str) -> None:
    """Refuse a body with other fields than these."""
    unknown = sorted(set(said) - set(names))
    if unknown:
        raise InvalidInput(
            f"there is no field {', '.join(map(repr, unknown[:5]))}",
            expected=f"some of {', '.join(names)}",
        )


def whole_number(said: Mapping[str, Any], name: str, default: int, *, least: int, most: int) -> int:
    """Return a field of a body that is an integer within bounds."""
    value = said.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise InvalidInput(f"{name} is {value!r:.100}", expected=f"an integer, {least} to {most}")
    return value
