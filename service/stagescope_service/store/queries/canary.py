"""Queries for the canary's records, and for the verdicts on its versions."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import sqlalchemy as sa

from stagescope_service.store.queries.reader import LIMIT, Reader, all_rows, conditions
from stagescope_service.store.tables import TABLES, CanaryRow, CanaryVerdictRow

_records = TABLES["canaries"]
_verdicts = TABLES["canary_verdicts"]
_attempts = TABLES["attempts"]
_ORDER = "version source pair"


class CanaryVersion(NamedTuple):
    """A version with records that are kept."""

    attempt_id: int
    version: int
    records: int
    """Number of its records that are kept."""
    judged: int
    """Number of records that its verdict is based on; 0: it has none."""


class CanaryAgreement(NamedTuple):
    """An engine instance in a version, and the pairs of its arms that agree."""

    attempt_id: int
    version: int
    step: int | None
    source: str
    pairs: frozenset[str]
    compared: frozenset[str]
    """The pairs that were compared, whether they agree or not."""


class CanaryQueries(Reader):
    """Queries for a canary's records and verdicts."""

    def canaries(self, attempt_id: int, version: int) -> list[CanaryRow]:
        """Return the records of a version, in the order of their creation."""
        where = conditions("canaries", attempt_id=attempt_id, version=version)
        return self._page(CanaryRow, "canaries", where, "wall incarnation seq")

    def scored_versions(self, run: str) -> list[CanaryVersion]:
        """Return the versions of a run whose records are kept, the earliest attempt first."""
        judged = (
            sa.select(
                _verdicts.c.attempt_id, _verdicts.c.version,
                sa.func.max(_verdicts.c.records).label("judged"),
            )
            .group_by(_verdicts.c.attempt_id, _verdicts.c.version)
            .subquery()
        )  # fmt: skip
        key = (_records.c.attempt_id, _records.c.version)
        query = (
            sa.select(*key, sa.func.count(), sa.func.coalesce(sa.func.max(judged.c.judged), 0))
            .join(_attempts, _attempts.c.attempt_id == key[0])
            .outerjoin(judged, (judged.c.attempt_id == key[0]) & (judged.c.version == key[1]))
            .where(_attempts.c.run == run)
            .group_by(*key, _attempts.c.number)
            .order_by(_attempts.c.number, *key)
        )
        return [CanaryVersion(*row) for row in self._tuples(query)]

    def runs_with_canaries(self) -> list[str]:
        """Return the runs with records of a canary, by name."""
        query = sa.select(_attempts.c.run).where(
            _attempts.c.attempt_id.in_(sa.select(_records.c.attempt_id))
        )
        return self._values(query.distinct().order_by(_attempts.c.run))

    def canary_verdicts_before(
        self, run: str, attempt_id: int, version: int, versions: int, *, newest: bool
    ) -> list[CanaryVerdictRow]:
        """Return the verdicts on versions of a run before one of them, in order.

        Args:
            run: the run.
            attempt_id: the attempt of that version.
            version: that version.
            versions: how many versions.
            newest: whether the last ones; False: the run's first ones.
        """
        number, key = _attempts.c.number, (_verdicts.c.attempt_id, _verdicts.c.version)
        own = sa.select(number).where(_attempts.c.attempt_id == attempt_id).scalar_subquery()
        is_before = (number < own) | ((key[0] == attempt_id) & (key[1] < version))
        order = [number.desc(), key[1].desc()] if newest else [number, key[1]]
        query = (
            sa.select(*key)
            .join(_attempts, _attempts.c.attempt_id == key[0])
            .where((_attempts.c.run == run) & is_before)
            .group_by(*key, number)
            .order_by(*order)
            .limit(versions)
        )
        keys = [(row[0], row[1]) for row in self._tuples(query)]
        return self._of_versions(keys[::-1] if newest else keys)

    def canary_agreements(self, attempts: Collection[int]) -> list[CanaryAgreement]:
        """Return each engine instance in each version of some attempts, without order."""
        columns = [_verdicts.c[name] for name in ("attempt_id", "version", "step", "source")]
        pair = sa.case((_verdicts.c.verdict != "not compared", _verdicts.c.pair))
        agrees = _verdicts.c.verdict == "agrees"
        query = sa.select(*columns, pair, agrees).where(_verdicts.c.attempt_id.in_(attempts))
        found: dict[tuple[int, int, int | None, str], dict[str | None, bool]] = {}
        for *key, name, is_equal in self._tuples(query):
            found.setdefault((key[0], key[1], key[2], key[3]), {})[name] = bool(is_equal)
        return [
            CanaryAgreement(
                *key,
                frozenset(name for name, is_equal in pairs.items() if name and is_equal),
                frozenset(name for name in pairs if name),
            )
            for key, pairs in found.items()
        ]

    def _of_versions(self, keys: list[tuple[int, int]]) -> list[CanaryVerdictRow]:
        """Return the verdicts on some versions, in their order."""
        if not keys:
            return []
        attempts = {attempt_id for attempt_id, _ in keys}
        ranges = [
            (_verdicts.c.attempt_id == each)
            & _verdicts.c.version.in_([v for attempt_id, v in keys if attempt_id == each])
            for each in sorted(attempts)
        ]
        query = all_rows("canary_verdicts", f"attempt_id {_ORDER}").where(sa.or_(*ranges))
        rows = self._rows(CanaryVerdictRow, query)
        place = {key: at for at, key in enumerate(keys)}
        return sorted(rows, key=lambda row: place[row["attempt_id"], row["version"]])

    def judged_engines(
        self, attempt_id: int, *, limit: int = LIMIT, offset: int = 0
    ) -> list[tuple[int, str]]:
        """Return (version, engine instance) of an attempt's verdicts, the newest version first."""
        query = (
            sa.select(_verdicts.c.version, _verdicts.c.source)
            .where(_verdicts.c.attempt_id == attempt_id)
            .distinct()
            .order_by(_verdicts.c.version.desc(), _verdicts.c.source)
        )
        return [(row[0], row[1]) for row in self._tuples(query.limit(limit).offset(offset))]

    def canary_verdicts(self, attempt_id: int, versions: Collection[int]) -> list[CanaryVerdictRow]:
        """Return the verdicts on versions of an attempt, by version, engine instance and pair."""
        where = conditions("canary_verdicts", attempt_id=attempt_id, version=[*versions])
        return self._page(CanaryVerdictRow, "canary_verdicts", where, _ORDER)
