"""Kills of several processes at once, and a store that refuses: what a journal says is on disk."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import pytest
import sqlalchemy.exc as sa_errors
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support.journal import World
from tests.support.stores import rows_of, url_of

from stagescope_service.store.contract import Put, Submitted, Write
from stagescope_service.store.sql import SqlStore


async def live(world: World, happenings: int) -> None:
    for _ in range(happenings):
        await world.go_on()
    await world.finish()


@pytest.mark.parametrize("ids", ["none", "stable", "fresh"])
def test_each_token_of_the_newest_content_counts_once(ids: str, tmp_path: Path) -> None:
    store = SqlStore(url_of(tmp_path))
    store.open()
    runs = itertools.count()

    @settings(max_examples=4, phases=[Phase.generate], deadline=None)
    @given(seed=st.integers(0, 1 << 32))
    def check(seed: int) -> None:
        world = World(store, tmp_path, f"run-{next(runs)}", random.Random(seed), ids)
        try:
            asyncio.run(live(world, 300))
            assert world.wrong() == []
        finally:
            world.catalogue.close()

    try:
        check()
    finally:
        store.close()


class RefusingStore(SqlStore):
    """A store whose database fails at random moments, and refuses random rows for good."""

    _COLUMN: Final = {"stages": "begin_wall", "payloads": "digest", "summaries": "summary"}

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.chance: random.Random | None = None
        self.outages = 0
        self.refused: set[tuple[str, int]] = set()
        """(incarnation, seq) of the BEGINs, ENDs and payloads that it refuses."""

    def submit(self, writes: Sequence[Write], *, isolate: bool = False) -> Submitted:
        if isolate and self.chance is not None:
            for write in writes:
                if isinstance(write, Put) and self.chance.random() < 0.03:
                    self._spoil(write)
        return super().submit(writes, isolate=isolate)

    def _spoil(self, put: Put) -> None:
        """Give a row a value for which no database has a type."""
        row = cast("dict[str, object]", put.row)
        if put.table in self._COLUMN:
            row[self._COLUMN[put.table]] = object()
            for name in ("begin_seq", "end_seq", "seq"):
                self.refused.add((str(row["incarnation"]), cast("int", row.get(name))))

    def _check_file(self) -> None:
        """Fail in a transaction, before or after its rows."""
        super()._check_file()
        if self.chance is not None and self.chance.random() < 0.05:
            self.outages += 1
            raise sa_errors.OperationalError("", {}, sqlite3.OperationalError("no such table: x"))


def test_what_is_acknowledged_is_on_disk_whatever_the_store_refuses(tmp_path: Path) -> None:
    store = RefusingStore(url_of(tmp_path))
    store.open()
    runs = itertools.count()

    @settings(max_examples=4, phases=[Phase.generate], deadline=None)
    @given(seed=st.integers(0, 1 << 32))
    def check(seed: int) -> None:
        world = World(store, tmp_path, f"run-{next(runs)}", random.Random(seed), "stable")
        store.chance = random.Random(seed)
        try:
            asyncio.run(live(world, 200))
            store.chance = None
            assert [key for key in world.unwritten() if key not in store.refused] == []
            assert len(world.acknowledged) > 20
        finally:
            world.catalogue.close()

    try:
        check()
        assert store.outages > 20
        assert len(store.refused) > 5
        assert "refused_row" in {row["kind"] for row in rows_of(store, "findings")}
    finally:
        store.close()
