"""Kills of several processes at once: each token of the newest content counts once."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support.journal import World
from tests.support.stores import url_of

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
