"""The operator tables that the service makes of imported dumps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypedDict

from stagescope.session import Session
from stagescope_wire.errors import NotFound, NotReady
from stagescope_wire.nonfinite import valid_text

if TYPE_CHECKING:
    from stagescope_service.dumps.importing import OperatorDump
    from stagescope_service.dumps.records import DumpProblem, Location

_TABLE_SECONDS: Final = 30.0
"""Time in which the service begins to read a further operator dump."""
_TABLE_BYTES: Final = 1e6
"""Bytes of an operator dump that the service reads in a second at least; 20 million usually."""
_PAUSE: Final = 0.1


class TableRow(TypedDict):
    """The fields of an operator table in an API answer that are used here."""

    capture_id: str
    stage: str
    role: str
    rank: int
    part: str
    state: str
    reason: str | None
    dump_path: str | None
    calls: int | None
    task: str | None
    truncated_at: int | None


Tables: TypeAlias = "dict[Location, TableRow]"
"""By the place of the dump."""


def wait_for_tables(session: Session, run: str, key: str, dumps: Sequence[OperatorDump]) -> Tables:
    """Wait until the service has read operator dumps; return their table rows.

    It gives up when nothing happens for longer than the largest dump may need.
    """
    tables: Tables = {}
    left = {_as_stored(each.work) for each in dumps}
    if not left:
        return tables
    (attempt,) = (row["attempt"] for row in session.attempts(run) if row["attempt_key"] == key)
    patience = _TABLE_SECONDS + max(each.entry.bytes for each in dumps) / _TABLE_BYTES
    deadline = time.monotonic() + patience
    while left and time.monotonic() < deadline:
        for step in sorted({place.step for place in left if place.step is not None}):
            found = _tables_of(session, run, attempt, step)
            read = {place for place in left & found.keys() if found[place]["state"] != "announced"}
            if read or found.keys() & left - tables.keys():
                deadline = time.monotonic() + patience
            tables |= {place: found[place] for place in left & found.keys()}
            left -= read
        if left:
            time.sleep(_PAUSE)
    return tables


def _tables_of(session: Session, run: str, attempt: int, step: int) -> Tables:
    from stagescope_service.dumps.records import IMPORTED_CAPTURE, Location
    from stagescope_wire.schema import Part

    try:
        answer = session.step(step, run=run, attempt=attempt).operators(limit=1)
    except (NotFound, NotReady):  # none is read yet
        return {}
    rows: Sequence[TableRow] = answer.about["tables"]
    return {
        Location(
            step, row["stage"], row["role"], row["rank"], Part(*map(int, row["part"].split(".")))
        ): row
        for row in rows
        if row["capture_id"] == IMPORTED_CAPTURE
    }


def _as_stored(place: Location) -> Location:
    """Return a place as the service knows it: a directory's name may be no valid text."""
    return place._replace(stage=None if place.stage is None else valid_text(place.stage))


def tables_without_calls(tables: Tables) -> Iterator[str]:
    """Yield a sentence for each operator dump without a call."""
    for place, row in tables.items():
        if row["calls"] == 0 and row["truncated_at"] is None:
            alone = row["task"] == "structure"
            what = "the structure alone (task structure)" if alone else "no call"
            yield f"{place}: msprobe recorded {what}"


def cut_off_tables(dumps: Sequence[OperatorDump], tables: Tables) -> Iterator[DumpProblem]:
    """Yield the problem of each operator dump whose file ends too early."""
    from stagescope_service.dumps.records import DumpProblem

    for each in dumps:
        row = tables.get(_as_stored(each.work))
        if row is None or row["truncated_at"] is None:
            continue
        path = _cut_file(each, row["truncated_at"])
        calls = row["calls"] or 0
        read = (
            f"what is before it was read (calls: {calls})" if calls else "it holds no complete call"
        )
        message = f"{path} was cut off while it was written, at byte {row['truncated_at']}: {read}"
        yield DumpProblem(path, "damaged", message, each.entry)


def _cut_file(dump: OperatorDump, byte: int) -> Path:
    """Return which of the files of a dump is cut off at a byte."""
    from stagescope_service.dumps.formats.msprobe_directory import DUMP_FILES
    from stagescope_service.dumps.msprobe.json_window import DumpFile, open_file

    first = dump.entry.path
    for path in (path for name in DUMP_FILES if (path := first.with_name(name)).is_file()):
        if path.stat().st_size < byte:
            continue
        with open_file(path) as file:
            found = DumpFile(file, str(path))
            for _ in found.records():
                pass
        if found.truncated_at == byte:
            return path
    return first


def unread_tables(dumps: Sequence[OperatorDump], tables: Tables) -> Iterator[str]:
    """Yield the operator dumps that have no table in the service, each with the reason."""
    for each in dumps:
        row = tables.get(_as_stored(each.work))
        if row is None or row["state"] == "announced":
            reason = "the service has not read it yet: see `stagescope findings`"
        elif row["state"] == "digested":
            continue
        else:
            reason = str(row["reason"])
        yield f"{each.entry.path}: {reason}"
