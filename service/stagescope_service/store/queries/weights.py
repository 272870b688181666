"""Queries for the weight checksums that ranks recorded, and the verdict of each version."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

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
        query = sa.select(sa.func.max(_records.c.version))
        (found,) = self._values(query.where(_records.c.attempt_id == attempt_id))
        return None if found is None else int(found)

    def weight_versions(self, attempt_id: int, step: int) -> list[int]:
        """Return the versions of weights that were recorded at a step, the highest first."""
        where = conditions("weights", attempt_id=attempt_id, step=step)
        query = sa.select(_records.c.version).where(*where).distinct()
        return self._values(query.order_by(sa.desc("version")))

    def weight_verdicts(
        self, attempt_id: int, *, version: int | None = None, limit: int = LIMIT, offset: int = 0
    ) -> list[WeightVerdictRow]:
        """Return the verdicts of an attempt's versions, or of one, the newest first."""
        where = conditions("weight_verdicts", attempt_id=attempt_id, version=version)
        return self._page(WeightVerdictRow, "weight_verdicts", where, "-version", limit, offset)

    def incomplete_weights(self, attempt_id: int, before: int) -> list[int]:
        """Return the versions below `before` that still lacked records of some ranks."""
        table = _verdicts.c
        unsettled = (table.attempt_id == attempt_id) & (table.version < before)
        return self._values(sa.select(table.version).where(unsettled, table.complete == sa.false()))

    def uncompared(self) -> list[tuple[int, int]]:
        """Return (attempt_id, version) with records that were not compared."""
        recorded = (
            sa.select(_records.c.attempt_id, _records.c.version, sa.func.count().label("records"))
            .group_by(_records.c.attempt_id, _records.c.version)
            .subquery()
        )
        key, own = (recorded.c.attempt_id, recorded.c.version), _verdicts.c
        query = (
            sa.select(*key)
            .outerjoin(_verdicts, (own.attempt_id == key[0]) & (own.version == key[1]))
            .where(sa.func.coalesce(own.records, 0) < recorded.c.records)
            .order_by(*key)
        )
        return [(attempt_id, version) for attempt_id, version in self._tuples(query)]

    def odd_replicas(self) -> list[OddReplicaRow]:
        """Return every divergence of a rank's weights from its replicas, the newest first."""
        order = "-wall attempt_id version side role rank"
        return self._page(OddReplicaRow, "odd_replicas", [], order)
