"""From the state machine's objects to the catalogue's rows (the names are the columns)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, Final, NamedTuple

from stagescope_service.core.entities import Attempt, Process, Span
from stagescope_service.core.instructions import PayloadKey, Put
from stagescope_service.redaction import without_secrets
from stagescope_wire.names import storable_text
from stagescope_wire.nonfinite import Json, JsonObject, valid_int, valid_text
from stagescope_wire.render import printable
from stagescope_wire.schema import LAYOUT_COLUMNS, MAX_SCALAR_NAME, Work

_INT64: Final = 1 << 63
_LONG: Final = 100_000
ATTEMPT_COLUMNS: Final = (
    "attempt_id", "run", "number", "key", "unkeyed", "opened_wall", "ended_wall", "end_reason",
    "first_step", "resumed_from_step", "last_closed_step",
)  # fmt: skip
"""The columns of `attempts` that are attributes of an `Attempt`."""
PROCESS_COLUMNS: Final = ("incarnation", "attempt_id", "role", "rank", "raw", "unkeyed")
"""The columns of `processes` that are always known, and attributes of a `Process`."""
_RANK: Final = ("attempt_id", "role", "rank")
OPTIONAL_PROCESS_COLUMNS: Final = ("world_size", "data_rank", "node_id", "max_step")
_process_values: Final = attrgetter(*PROCESS_COLUMNS)
_optional_values: Final = attrgetter(*OPTIONAL_PROCESS_COLUMNS)
_MOST: Final = 1 << 53


def audit_row(wall: float, by: str, action: str, detail: JsonObject) -> Put:
    """Return the row of the audit that says who did what."""
    return Put("audit", {"wall": wall, "by": by, "action": action, "detail": dict(detail)})


def attempt_row(attempt: Attempt, **columns: object) -> Put:
    """Return the row of an attempt, with further `columns`."""
    return Put("attempts", {**named(attempt, ATTEMPT_COLUMNS), **columns})


def named(entity: object, names: Iterable[str]) -> dict[str, Any]:
    """Return some attributes of an object, by name."""
    return {name: getattr(entity, name) for name in names}


def process_row(process: Process, **columns: object) -> Put:
    """Return the row of a process's identity, with further `columns`."""
    # A value that is unknown now may have been stored before a restart: it is not overwritten.
    row: dict[str, Any] = dict(zip(PROCESS_COLUMNS, _process_values(process), strict=True))
    optional = zip(OPTIONAL_PROCESS_COLUMNS, _optional_values(process), strict=True)
    row.update({name: value for name, value in optional if value is not None})
    row.update(columns)
    return Put("processes", row)


def layout_columns(layout: JsonObject) -> dict[str, Json]:
    """Return the columns of a process's layout, converted to the columns' types."""
    return {
        name: integer(layout[name]) if name.endswith(("_rank", "_size", "_index")) else text(value)
        for name, value in layout.items()
        if name in LAYOUT_COLUMNS and value is not None
    }


def span_columns(attempt_id: int, span: Span) -> dict[str, Any]:
    """Return the columns of a span's identity and status, for the caller to add others."""
    row: dict[str, Any] = span.work.fields()
    row["incarnation"] = span.incarnation
    row["work_key"] = span.work.key
    row["revision"] = span.revision
    row["attempt_id"] = attempt_id
    row["role"] = span.role
    row["rank"] = span.rank
    row["status"] = span.status
    if span.superseded is not None:
        row["superseded"] = span.superseded
    return row


def span_row(attempt_id: int, span: Span) -> Put:
    """Return the row of a span's identity and status."""
    return Put("stages", span_columns(attempt_id, span))


def payload_row(
    process: Process, key: PayloadKey, work: Work, state: str, **columns: object
) -> Put:
    """Return the row of a payload's identity and state, with further `columns`."""
    own = {**key._asdict(), **named(process, _RANK), **work.fields()}
    return Put("payloads", {**own, "work_key": work.key, "state": state, **columns})


class ScalarRows(NamedTuple):
    """The rows of named numbers."""

    rows: list[Put]
    non_finite: list[str]
    """The names of those that are not finite."""
    refused: list[str]
    """"name (type)" of the values that are not numbers."""


def scalar_rows(process: Process, work: Work, scalars: JsonObject, wall: float) -> ScalarRows:
    """Return the rows of named numbers."""
    where: dict[str, Any] = work.fields()
    where["incarnation"] = process.incarnation
    where["work_key"] = work.key
    where["attempt_id"] = process.attempt_id
    where["role"] = process.role
    where["rank"] = process.rank
    where["wall"] = wall
    rows: list[Put] = []
    non_finite: list[str] = []
    refused: list[str] = []
    for name, value in scalars.items():
        found = value if type(value) is float else number(value)
        shown = _scalar_name(name)
        if len(shown) > MAX_SCALAR_NAME:  # cut, it could be the name of another one
            refused.append(f"{shown[:60]}… (a name of more than {MAX_SCALAR_NAME} characters)")
        elif not shown:
            refused.append("'' (no name)")
        elif found is None:
            refused.append(f"{shown} ({type(value).__name__})")
        else:
            row = where.copy()
            row["name"] = shown
            row["value"] = found
            rows.append(Put("scalars", row))
            if not isfinite(found):
                non_finite.append(shown)
    return ScalarRows(rows, non_finite, refused)


@functools.lru_cache(maxsize=4096, typed=True)  # each step has the same names
def _scalar_name(name: object) -> str:
    return text(name, MAX_SCALAR_NAME + 1) or ""


def loss_row(
    attempt: Attempt, process: Process, work: Work, kind: str, reason: str, **columns: object
) -> Put:
    """Return the row of something that was announced and will not arrive."""
    identity = (process.incarnation, work.key, kind, columns.pop("identity", ""))
    own = {**named(attempt, ("run", "attempt_id")), **named(process, ("role", "rank"))}
    own |= named(work, ("step", "stage"))
    what = {"loss_id": row_id(*identity), "kind": kind, "reason": text(one_line(reason))}
    return Put("losses", {**own, **what, **columns})


def integer(value: object) -> int | None:
    """Return `value` if it is an int that a column can hold, else None."""
    if value is None:
        return None
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        return None
    value = int(value)
    return value if -_INT64 <= value < _INT64 else None


def amount(value: object) -> int | None:
    """Return a count or a size if `value` is one; at most 2**53, so that sums fit into a column."""
    found = integer(value)
    return None if found is None else min(max(found, 0), _MOST)


def number(value: object) -> float | None:
    """Return a number (NaN, infinities and numpy's included) as a float; None: none of float64."""
    if type(value) is float or value is None:
        return value
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def text(value: object, most: int = 4000) -> str | None:
    """Return a value as a text that each database stores; None is None."""
    return None if value is None else storable_text(str(value), most)


def said(value: object, most: int = 4000) -> str | None:
    """Return a text that a training said, such as an exception's message, without secrets."""
    return None if value is None else text(without_secrets(str(value)), most)


def one_line(value: str) -> str:
    """Return a text without secrets, its line breaks and control characters escaped."""
    return printable(without_secrets(value))


def numbers(value: object) -> dict[str, float]:
    """Return the named numbers of an event; other values are left out."""
    named = value if isinstance(value, Mapping) else {}
    found = {valid_text(str(name)): number(item) for name, item in named.items()}
    return {name: item for name, item in found.items() if item is not None}


def plain(value: object, depth: int = 20) -> Json:
    """Return a value as JSON; its `repr` where JSON has no type for it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value, _LONG)
    if isinstance(value, Integral):
        return valid_int(int(value))
    if isinstance(value, Real):
        return number(value)
    if depth and isinstance(value, Mapping):
        return {text(name): plain(item, depth - 1) for name, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth - 1) for item in value]
    return text(repr(value), 1000)


def row_id(*parts: object) -> str:
    """Return a short stable identifier of a tuple of values."""
    text = "\x1f".join(str(part) for part in parts).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=12).hexdigest()
