"""Reports of processes about their starts (HELLO), and how their attempt uses them.

An attempt has the fingerprint of the first incarnation of its lowest (role, rank). Only the
configuration may come from another process: the largest one, since a driver knows more than ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stagescope_service.core.catalogue_rows import (
    attempt_row,
    integer,
    layout_columns,
    plain,
    text,
)
from stagescope_service.core.entities import Attempt, Handshake, Process, RankAge, leaves
from stagescope_service.core.instructions import Put
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import LAYOUT_COLUMNS

MAX_WORLD_SIZE: Final = 1 << 18
"""No role has more ranks; a greater number is a mistake, and is ignored."""

MAX_ROLES: Final = 100

RESTORED: Final[RankAge] = ("", -1, (0.0, ""))
"""Placeholder for the owner of a restored fingerprint: no later process replaces it."""

VALUES_REMEMBERED: Final = 1000
"""Number of reported values in the cache that shares equal ones."""

_STORED_ELSEWHERE: Final = ("layout", "settings", "fingerprint")
"""Fields of a HELLO that have columns of their own."""

_FOR_READERS: Final = frozenset({"keep", "producers"})
"""Settings that are mappings and that the reader of a payload needs."""


def role_names(reported: object) -> frozenset[str]:
    """Return the roles that a HELLO expects to report beside its sender (its field `expects`)."""
    names = reported if isinstance(reported, list | tuple) else ()
    return frozenset(name for name in names[:MAX_ROLES] if isinstance(name, str) and name)


def reading_settings(settings: JsonObject | None) -> dict[str, Json]:
    """Return the part of a process's settings that goes to the ingestor with each payload.

    A trainer's whole configuration (50 kB in verl) is left out.
    """
    given = settings or {}
    return {k: v for k, v in given.items() if k in _FOR_READERS or not isinstance(v, Mapping)}


class ReportedValues:
    """Values that many processes report alike, each kept in memory once."""

    def __init__(self) -> None:
        self._known: dict[str, Json] = {}

    def share(self, reported: JsonObject) -> dict[str, Json]:
        """Return a reported mapping as JSON."""
        shared: dict[str, Json] = {}
        for name, value in reported.items():
            value = plain(value)
            shared[str(name)] = self._known.setdefault(f"{type(value).__name__} {value!r}", value)
            if len(self._known) > VALUES_REMEMBERED:
                del self._known[next(iter(self._known))]
        return shared


def read_hello(
    process: Process, fields: JsonObject, wall: float, values: ReportedValues
) -> dict[str, Json]:
    """Apply the fields of a HELLO to its process; return the columns of the process's row."""
    size = integer(fields.get("world_size"))
    if size is not None and process.rank < size <= MAX_WORLD_SIZE:
        process.world_size = size
    data_rank = integer(fields.get("data_rank"))
    process.data_rank = process.data_rank if data_rank is None else data_rank
    layout = fields.get("layout")
    if isinstance(layout, Mapping):
        process.layout.update({str(name): plain(value) for name, value in layout.items()})
    settings, fingerprint = fields.get("settings"), fields.get("fingerprint")
    settings = plain(settings) if isinstance(settings, Mapping) else None
    process.settings = reading_settings(settings) or process.settings
    process.captures = fields.get("captures") is not False
    process.launch = text(fields.get("launch"), 1000) or process.launch
    process.is_single = process.is_single or fields.get("single") is True
    process.watchdog = text(fields.get("watchdog"), 1000) or process.watchdog
    process.expected_roles |= role_names(fields.get("expects"))
    process.handshake = Handshake(
        wall,
        fingerprint=values.share(fingerprint) if isinstance(fingerprint, Mapping) else None,
        settings=None if settings is None else values.share(settings),
        resumed_from_step=integer(fields.get("resumed_from_step")),
        world_size=size,
    )
    others = {name: plain(value) for name, value in fields.items() if name not in _STORED_ELSEWHERE}
    others["layout"] = {
        name: value for name, value in process.layout.items() if name not in LAYOUT_COLUMNS
    }
    return {
        **layout_columns(process.layout),
        "pid": integer(fields.get("pid")),
        "settings": settings,
        "hello": others,
    }


def columns_to_carry(attempt: Attempt, process: Process) -> dict[str, Json]:
    """Return the fields of a process's `hello` that only a restart of the coordinator reads.

    Only the lowest rank of a role stores them: an attempt has the fingerprint of its first.
    """
    reported = process.handshake
    lower = (attempt.by_rank.get((process.role, rank)) for rank in range(process.rank))
    if reported is None or reported.fingerprint is None or any(lower):
        return {}
    return {"fingerprint": reported.fingerprint, "said_wall": reported.wall}


def adopt_handshake(attempt: Attempt, process: Process, *, is_newest: bool) -> list[Put]:
    """Apply a process's handshake to its attempt; return the changed rows.

    Args:
        attempt: the attempt that the process certainly belongs to.
        process: the process that reported.
        is_newest: whether the attempt is its run's newest, whose settings are the run's.
    """
    if process.handshake is None:
        return []
    resume_is_new = _adopt_resume(attempt, process.handshake)
    columns: dict[str, Json] = {}
    if _adopt_fingerprint(attempt, process, process.handshake):
        columns["fingerprint"] = _fingerprint(attempt)
    out = [attempt_row(attempt, **columns)] if resume_is_new or columns else []
    # Ranks know less of the configuration than a driver: the largest one is kept.
    settings = process.handshake.settings
    if settings and is_newest and attempt.is_fullest(settings):
        out.append(Put("runs", {"run": attempt.run, "settings": settings}))
    return out


def forget_handshakes(attempt: Attempt) -> None:
    """Undo what an attempt took from handshakes, except for what a restart restored."""
    attempt.resumed_from_step = attempt.resumed_restored
    attempt.resume_reported = attempt.resumed_restored is not None
    if not attempt.resume_reported and attempt.number > 1 and attempt.first_step is not None:
        attempt.resumed_from_step = attempt.first_step - 1
    if attempt.fingerprint_of != RESTORED:
        attempt.fingerprint_of, attempt.fingerprint = None, {}
        attempt.config_of, attempt.config = None, None


def fingerprint_column(attempt: Attempt) -> dict[str, Json]:
    """Return the column of an attempt's fingerprint; none where the stored one stays."""
    return {} if attempt.fingerprint_of == RESTORED else {"fingerprint": _fingerprint(attempt)}


def _adopt_resume(attempt: Attempt, reported: Handshake) -> bool:
    """Apply the resume step that a process reports; return whether it reported one."""
    resumed = reported.resumed_from_step
    if resumed is None:
        return False
    known = attempt.resumed_from_step if attempt.resume_reported else None
    attempt.resume_reported = True
    attempt.resumed_from_step = resumed if known is None else min(known, resumed)
    return True


def _adopt_fingerprint(attempt: Attempt, process: Process, reported: Handshake) -> bool:
    """Apply a process's fingerprint; return whether that changed the attempt's."""
    fingerprint = reported.fingerprint
    if fingerprint is None:
        return False
    owner, known = (process.role, process.rank, process.age), attempt.fingerprint_of
    changed = known is None or owner < known
    if changed:
        attempt.fingerprint_of, attempt.fingerprint = owner, dict(fingerprint)
    config = fingerprint.get("config")
    if known != RESTORED and isinstance(config, Mapping):
        size = (-leaves(config), owner)
        if attempt.config_of is None or size < attempt.config_of:
            attempt.config_of, attempt.config = size, config
            changed = True
    return changed


def _fingerprint(attempt: Attempt) -> dict[str, Json] | None:
    config = {} if attempt.config_of is None else {"config": attempt.config}
    return {**attempt.fingerprint, **config} or None
