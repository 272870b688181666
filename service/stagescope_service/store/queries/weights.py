"""Queries for the weight checksums that ranks recorded, and the verdict of each version."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from stagescope_service.store import connect
from stagescope_service.store.queries.reader import LIMIT, Reader, conditions
from stagescope_service.store.tables import (
    TABLES,
    OddReplicaRow,
    WeightManifestRow,
    WeightsRow,
    WeightVerdictRow,
)

_records = TABLES["weights"]
_verdicts = TABLES["weight_verdicts"]


def newest_version(attempt_id: int) -> sa.Select[int]:
    """Select the highest version that an attempt recorded (null if none)."""
    return sa.select(sa.func.max(_records.c.version)).where(_records.c.attempt_id == attempt_id)


def versions_of_step(attempt_id: int, step: int) -> sa.Select[int]:
    """Select the versions that were recorded at a step, the highest first."""
    of_step = (_records.c.attempt_id == attempt_id) & (_records.c.step == step)
    return sa.select(_records.c.version).where(of_step).distinct().order_by(sa.desc("version"))


def incomplete(attempt_id: int, before: int) -> sa.Select[int]:
    """Select the versions below `before` whose verdict is incomplete."""
    unsettled = (_verdicts.c.attempt_id == attempt_id) & (_verdicts.c.version < before)
    return sa.select(_verdicts.c.version).where(unsettled, _verdicts.c.complete == sa.false())


def uncompared() -> sa.Select[int, int]:
    """Select (attempt_id, version) with more records than its verdict is based on."""
    recorded = (
        sa.select(_records.c.attempt_id, _records.c.version, sa.func.count().label("records"))
        .group_by(_records.c.attempt_id, _records.c.version)
        .subquery()
    )
    same = (_verdicts.c.attempt_id == recorded.c.attempt_id) & (
        _verdicts.c.version == recorded.c.version
    )
    return (
        sa.select(recorded.c.attempt_id, recorded.c.version)
        .outerjoin(_verdicts, same)
        .where(sa.func.coalesce(_verdicts.c.records, 0) < recorded.c.records)
        .order_by(recorded.c.attempt_id, recorded.c.version)
    )


class WeightQueries(Reader):
    """Queries for recorded weights, their verdicts and diverging replicas."""

    def weights(self, attempt_id: int, version: int) -> list[WeightsRow]:
        """Return the records of a version, in the order of their creation."""
        return self._page(
            WeightsRow,
            "weights",
            conditions("weights", attempt_id=attempt_id, version=version),
            "wall side role rank incarnation seq",
        )

    def weight_manifests(self, manifests: Sequence[str]) -> dict[str, bytes]:
        """Return digest -> packed manifest of those that exist."""
        table = TABLES["weight_manifests"]
        chosen = sa.select(table).where(table.c.manifest.in_(manifests))
        found = self._rows(WeightManifestRow, chosen)
        return {row["manifest"]: row["tensors"] for row in found}

    def newest_weights(self, attempt_id: int) -> int | None:
        """Return the highest version of weights that an attempt recorded, or None."""
        return self._values(newest_version(attempt_id))[0]

    def weight_versions(self, attempt_id: int, step: int) -> list[int]:
        """Return the versions of weights that were recorded at a step, the highest first."""
        return self._values(versions_of_step(attempt_id, step))

    def weight_verdicts(
        self, attempt_id: int, *, version: int | None = None, limit: int = LIMIT, offset: int = 0
    ) -> list[WeightVerdictRow]:
        """Return the verdicts of an attempt's versions, or of one, the newest first."""
        where = conditions("weight_verdicts", attempt_id=attempt_id, version=version)
        return self._page(WeightVerdictRow, "weight_verdicts", where, "-version", limit, offset)

    def incomplete_weights(self, attempt_id: int, before: int) -> list[int]:
        """Return the versions below `before` that still lacked records of some ranks."""
        return self._values(incomplete(attempt_id, before))

    def uncompared(self) -> list[tuple[int, int]]:
        """Return (attempt_id, version) with records that were not compared."""
        with connect.catalogue_errors(self._where), self._connect() as connection:
            return [
                (attempt_id, version) for attempt_id, version in connection.execute(uncompared())
            ]

    def odd_replicas(self) -> list[OddReplicaRow]:
        """Return every divergence of a rank's weights from its replicas, the newest first."""
        order = "-wall attempt_id version side role rank"
        return self._page(OddReplicaRow, "odd_replicas", [], order)
