"""What a run takes in the catalogue and on disks, for its deletion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from stagescope_service.store.queries.reader import Reader
from stagescope_service.store.removal import count_rows, has_rows
from stagescope_service.store.tables import (
    artifacts,
    attempts,
    dumps,
    findings,
    operators,
    processes,
    steps,
)

_THERE: Final = artifacts.c.deleted_wall.is_(None)


class RunHoldings(NamedTuple):
    """What a run takes in the catalogue, and where its files are."""

    attempt_ids: list[int]
    keys: list[str]
    """The keys of its attempts."""
    steps: int
    rows: int
    """Rows of the catalogue."""
    files: int
    """Files that the catalogue knows: payloads in rings, kept files, dumps."""
    bytes: int
    """Their bytes."""
    nodes: list[str]
    """The nodes that have some, or had one of its processes."""
    dumps: list[str]
    """Directories of its captures' dumps."""
    checksums: list[str]
    """Of its operator tables."""
    bundles: list[str]
    """Paths of the bundles of its attempts that died."""
    findings: list[str]
    """Ids of its findings that are about no attempt."""


class RemovalQueries(Reader):
    """The query of a deletion."""

    def has_rows_of(self, run: str, attempt_ids: Sequence[int]) -> bool:
        """Return whether a run has rows besides its own."""
        with self._reading() as connection:
            return has_rows(connection, run, attempt_ids)

    def run_holdings(self, run: str, *, imported: str, bundled: str) -> RunHoldings:
        """Return what a run takes.

        Args:
            run: the run.
            imported: the capture_id of dumps that were imported: they are not the service's.
            bundled: the kind of finding that names an attempt's bundle.
        """
        with self._reading() as connection:

            def values(query: sa.Select[Any]) -> list[Any]:
                return list(connection.scalars(query))

            keys = sa.select(attempts.c.attempt_id, attempts.c.key).where(attempts.c.run == run)
            found = connection.execute(keys.order_by(attempts.c.number)).all()
            ids = [row[0] for row in found]
            total, count = sa.func.sum, sa.func.count
            size = sa.select(count(), total(artifacts.c.bytes)).where(
                artifacts.c.attempt_id.in_(ids), _THERE
            )
            files, held = connection.execute(size).one()
            made = dumps.c.attempt_id.in_(ids) & (dumps.c.capture_id != imported)
            dumped = sa.select(total(dumps.c.files), total(dumps.c.bytes)).where(made)
            dump_files, dump_bytes = connection.execute(dumped).one()
            tables = operators.c.attempt_id.in_(ids) & operators.c.checksum.is_not(None)
            evidence = sa.select(findings.c.evidence).where(
                findings.c.run == run, findings.c.kind == bundled
            )
            nodes = {
                node
                for table in (artifacts, dumps, processes)
                for node in values(
                    sa.select(table.c.node_id).where(table.c.attempt_id.in_(ids)).distinct()
                )
            }
            return RunHoldings(
                attempt_ids=ids,
                keys=[row[1] for row in found],
                steps=values(
                    sa.select(count()).select_from(steps).where(steps.c.attempt_id.in_(ids))
                )[0],
                rows=count_rows(connection, run, ids),
                files=files + (dump_files or 0),
                bytes=(held or 0) + (dump_bytes or 0),
                nodes=sorted(nodes - {None}),
                dumps=values(
                    sa.select(dumps.c.path).where(made, dumps.c.path.is_not(None)).distinct()
                ),
                checksums=values(sa.select(operators.c.checksum).where(tables).distinct()),
                findings=values(
                    sa.select(findings.c.finding_id).where(
                        findings.c.run == run, findings.c.attempt_id.is_(None)
                    )
                ),
                bundles=[path for each in values(evidence) if (path := (each or {}).get("path"))],
            )
