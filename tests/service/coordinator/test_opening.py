"""A coordinator whose catalogue cannot be opened tries again, whatever the error, and names it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.support.stores import database, postgresql

pytest.importorskip("ray")
from tests.support.ingestors import LocalIngestors

from stagescope_service.coordinator.actor import DebugCoordinator
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.ingest import actor as ingest_actor
from stagescope_service.ingest.ingestors import IngestWorker
from stagescope_service.rules.document import defaults
from stagescope_service.settings import Settings
from stagescope_service.store.sql import SqlStore
from stagescope_wire.nonfinite import JsonObject

SECONDS = 30.0


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    made = Settings(home=tmp_path / "home", data_dir=tmp_path / "data")

    def ingestors(settings: Settings, coordinator: str) -> LocalIngestors:
        data = settings.data_path
        return LocalIngestors(lambda node: IngestWorker(node, data, [data], ring_bytes=0))

    monkeypatch.setattr(ingest_actor, "RayIngestors", ingestors)
    return made


@contextlib.asynccontextmanager
async def begun(settings: Settings) -> AsyncIterator[DebugCoordinator]:
    fields = settings.model_dump(mode="json", exclude_none=True)
    coordinator = DebugCoordinator(fields)
    await coordinator.status()  # the first call opens the catalogue
    try:
        yield coordinator
    finally:
        await coordinator.stop()


async def status_where(
    coordinator: DebugCoordinator, holds: Callable[[JsonObject], bool]
) -> JsonObject:
    deadline = time.monotonic() + SECONDS
    while not holds(status := await coordinator.status()):
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.01)
    return status


def is_ready(status: JsonObject) -> bool:
    return "not_ready" not in status


def test_an_error_that_nobody_expected_is_named_logged_once_and_tried_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened, tries = Coordinator.open, []

    async def fails(*arguments: object, **more: object) -> Coordinator:
        tries.append(arguments)
        if len(tries) < 4:
            raise KeyError("a row that nobody expected")
        return await opened(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Coordinator, "open", fails)

    async def work() -> None:
        async with begun(settings) as coordinator:
            status = await status_where(coordinator, lambda status: "KeyError" in str(status))
            named = "the catalogue cannot be opened: KeyError: 'a row that nobody expected'"
            assert named in status["not_ready"]
            assert status["problem"] == "the catalogue cannot be opened (KeyError)"
            await status_where(coordinator, is_ready)

    asyncio.run(work())
    assert len(tries) == 4
    named = [each for each in caplog.records if "cannot be opened" in each.getMessage()]
    assert [each.levelno for each in named] == [logging.WARNING]
    assert named[0].exc_info


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgresql() as url:
        yield url


FAULTS = {
    "privileges are revoked": (
        "REVOKE ALL ON ALL TABLES IN SCHEMA public FROM writer",
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO writer",
        "InsufficientPrivilege",
    ),
    "a table is away": (
        "ALTER TABLE findings RENAME TO away",
        "ALTER TABLE away RENAME TO findings",
        "UndefinedTable",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_catalogue_that_is_given_back_is_opened(
    settings: Settings, server: str, fault: str
) -> None:
    broken, mended, kind = FAULTS[fault]
    with database(server) as url:
        admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

        def execute(statement: str) -> None:
            with admin.connect() as connection:
                connection.exec_driver_sql(statement)

        execute("DROP ROLE IF EXISTS writer")
        execute("CREATE ROLE writer LOGIN")
        execute("GRANT ALL ON SCHEMA public TO writer")
        own = settings.model_copy(update={"database_url": url.replace("tester@", "writer@")})
        store = SqlStore(own.catalogue_url)
        store.open()
        store.close()
        execute(broken)

        async def work() -> None:
            async with begun(own) as coordinator:
                status = await status_where(coordinator, lambda status: kind in str(status))
                assert status["problem"] == f"the catalogue cannot be opened ({kind})"
                execute(mended)
                await status_where(coordinator, is_ready)
                rules = coordinator._ready().parts.triggers
                # They are read in the background.
                await status_where(coordinator, lambda _: rules.revision > 0)
                assert rules._rules == defaults()

        asyncio.run(asyncio.wait_for(work(), 2 * SECONDS))
        execute("DROP OWNED BY writer CASCADE")
