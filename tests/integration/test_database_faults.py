"""A database server that refuses for a while: what ranks were told is on disk is on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.support.measure import payload
from tests.support.stores import database, postgresql

ray = pytest.importorskip("ray")
from tests.support.cluster import Service, eventually, expect  # noqa: E402
from tests.support.ranks import Rank  # noqa: E402

pytestmark = pytest.mark.ray

FAULTS = {
    "privileges": (
        "REVOKE ALL ON ALL TABLES IN SCHEMA public FROM plain",
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO plain",
    ),
    "a table": ("ALTER TABLE stage_rows RENAME TO gone", "ALTER TABLE gone RENAME TO stage_rows"),
    "payloads": ("REVOKE INSERT, UPDATE ON payload_rows FROM plain",
                 "GRANT INSERT, UPDATE ON payload_rows TO plain"),
}  # fmt: skip


@contextlib.contextmanager
def plain_user(server: str) -> Iterator[tuple[str, sa.Connection]]:
    """The URL of a database for a user that is no superuser, and who may take its privileges."""
    with database(server) as url:
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as admin:
                admin.exec_driver_sql("CREATE ROLE plain LOGIN")
                admin.exec_driver_sql("GRANT ALL ON SCHEMA public TO plain")
                yield url.replace("tester@", "plain@"), admin
        finally:
            engine.dispose()


def test_a_server_that_refuses_for_a_while_loses_nothing(address: str, tmp_path: Path) -> None:
    run = "refused"
    with postgresql() as server, plain_user(server) as (url, admin):
        service = Service.start(tmp_path, address, data_dir=tmp_path / "data", database_url=url)
        try:
            ranks = [Rank(run, number, world_size=2) for number in (0, 1)]
            handed = [payload(seed=number, first_sample=4 * number) for number in (0, 1)]
            steps = [*range(1, 121)]
            training = [r.begins("train", steps, handed[i], 0.1) for i, r in enumerate(ranks)]
            with service.session() as session:
                eventually(lambda: len(session.steps(run)) > 3)
            for take, give in FAULTS.values():
                admin.exec_driver_sql(take)
                eventually(lambda: service.ready()[0] == 503)
                admin.exec_driver_sql(give)
                eventually(lambda: service.ready()[0] == 200)
            ray.get(training, timeout=120)
            for rank in ranks:
                rank.ask("end_step", steps[-1])
                eventually(rank.settled)
                status = rank.status()
                assert (status["dropped"], status["refused"]) == ({}, {})
            with service.session() as session:
                for step in (1, 20, 40, 60, 80, 100, 120):
                    expect(session.step(step, run=run), *handed)
            assert service.losses(run) == []
            where = "FROM stages WHERE step BETWEEN 1 AND 120 AND stage = 'actor_update'"
            count = "count(*), count(begin_seq), count(end_seq)"
            assert [*admin.exec_driver_sql(f"SELECT {count} {where}").one()] == [240] * 3
            states = admin.exec_driver_sql("SELECT state, count(*) FROM payloads GROUP BY state")
            assert {str(state): total for state, total in states} == {"ingested": 240}
            for rank in ranks:
                rank.kill()
        finally:
            service.stop()
