"""A state machine on a real catalogue, whose checks of versions run at once."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.trainings import Delivery

from stagescope_service.coordinator import canary, weights
from stagescope_service.core.instructions import CompareWeights, Delete, JudgeCanary, Put
from stagescope_service.core.state import State
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Write, WriteRows
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import TABLES, WeightVerdictRow

_TABLES = (
    "weight_verdicts", "odd_replicas", "findings", "weights", "weight_manifests", "canaries",
    "canary_verdicts",
)  # fmt: skip


class Scales:
    """A state machine on a real catalogue."""

    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder / 'catalogue.db'}"
        self.store = SqlStore(url)
        self.store.open()
        self.catalogue = Catalogue(url)
        self.state = State()
        self.orders: list[CompareWeights | JudgeCanary] = []

    def give(self, *said: Delivery, compare: bool = True) -> None:
        for each in said:
            out = self.state.handle(each.sender, each.event, 0.0)
            self.write([order for order in out if isinstance(order, Put | Delete)])
            self.orders = [each for each in out if isinstance(each, CompareWeights | JudgeCanary)]
            for order in self.orders if compare else ():
                self.write(_checked(self.catalogue, order))

    def write(self, rows: Sequence[Write]) -> None:
        self.store.submit([*rows]).result(30)

    async def write_soon(self, rows: Sequence[Write]) -> None:
        self.write(rows)

    def findings(self) -> dict[str, str]:
        return {row["kind"]: row["message"] for row in self.catalogue.findings()}

    def verdict(self, version: int = 4) -> WeightVerdictRow:
        [row] = [r for r in self.catalogue.weight_verdicts(1) if r["version"] == version]
        return row

    def rows(self) -> dict[str, list[str]]:
        """Everything that was concluded, in words."""
        return {
            name: [*map(repr, self.catalogue._page(dict, name, [], _key(name)))] for name in _TABLES
        }

    def close(self) -> None:
        self.catalogue.close()
        self.store.close()


def _checked(catalogue: Catalogue, order: CompareWeights | JudgeCanary) -> Sequence[Write]:
    if isinstance(order, JudgeCanary):
        return canary.judge(catalogue, order)
    return weights.judge(catalogue, order)


def _key(name: str) -> str:
    return " ".join(column.name for column in TABLES[name].primary_key)


# Commits wait for the disk, and these tests make thousands.
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@contextmanager
def opened() -> Iterator[Scales]:
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        made = Scales(Path(folder))
        try:
            yield made
        finally:
            made.close()


def check_any_order(said: Sequence[Delivery], hellos: int, chance: random.Random) -> None:
    """The rows are the same whatever came after the first hellos in another order, or again."""
    first, rest = said[:hellos], said[hellos:]
    shuffled = [*rest, *chance.choices(rest, k=10)]
    chance.shuffle(shuffled)
    with opened() as expected, opened() as got:
        expected.give(*first, *rest)
        got.give(*first, *shuffled)
        assert got.rows() == expected.rows()


def check_restart(
    said: Sequence[Delivery],
    where: int,
    catch_up: Callable[[Catalogue, WriteRows], Awaitable[None]],
    is_done: Callable[[Catalogue], bool],
) -> None:
    """The rows are the same if the coordinator is killed after it committed what was said."""
    with opened() as expected, opened() as got:
        expected.give(*said)
        got.give(*said[:where], compare=False)
        got.state = State()
        asyncio.run(_awaited(catch_up(got.catalogue, got.write_soon)))
        assert is_done(got.catalogue)
        got.give(*said[where:])
        assert got.rows() == expected.rows()


async def _awaited(work: Awaitable[None]) -> None:
    await work
