"""Kept files go by bytes, age and steps; on a real catalogue and disk, without Ray."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from tests.support.ingestors import LocalIngestors
from tests.support.measure import ingest_job, payload
from tests.support.stores import rows_of_step, url_of

from stagescope_service.coordinator import retention
from stagescope_service.coordinator.aggregation import assembly
from stagescope_service.coordinator.retention import Limits, Retention
from stagescope_service.core.instructions import IngestJob, PayloadKey, Put
from stagescope_service.ingest import kept_files
from stagescope_service.ingest.ingestors import IngestWorker
from stagescope_service.ingest.kept_files import Keeper
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import RemoveRows, Write
from stagescope_service.store.queries.files import KeptBytes
from stagescope_service.store.ring import Ring
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables.declare import RankWork
from stagescope_service.views.reading.completeness import ROWS_REMOVED, gaps, is_behind
from stagescope_wire.errors import Unreachable

T = TypeVar("T")
SIZE = 700
"""Bytes of tensors of the payloads here; a file of one has some 3000."""


class Node(LocalIngestors):
    """A node's disk with its reader of payloads, the catalogue, and the retention over both."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self.data_dir = directory / "data"
        self.store = SqlStore(url_of(directory))
        self.store.open()
        self.catalogue = Catalogue(url_of(directory))
        self.gone = False
        self.now = 1e9
        self.node_id = "node-1"

        def worker_of(node: str) -> IngestWorker:
            return IngestWorker(node, self.data_dir, [self.data_dir], ring_bytes=0)

        super().__init__(worker_of, home=self.node_id)
        self.retention = self.made(limits)
        self.ring = Ring(directory / "ring", 0)
        self.intake = self.reader()
        attempt = {"attempt_id": 1, "run": "r", "number": 1, "key": "k"}
        self.write_now([Put("attempts", attempt)])

    def made(self, limits: Limits) -> Retention:
        return Retention(
            self.catalogue, self, self.write, limits, wall=lambda: self.now, mono=lambda: self.now
        )

    def reader(self, reserve: int = 0) -> PayloadReader:
        keeper = Keeper(self.data_dir, self.node_id, reserve)
        return PayloadReader(self.data_dir, self.node_id, self.ring, keeper)

    def node_of(self, node_id: str | None) -> str:
        return self.node_id

    async def discard(self, node_id: str, paths: Sequence[str]) -> list[str]:
        if self.gone:
            raise Unreachable("the node is gone")
        return await super().discard(node_id, paths)

    async def write(self, rows: Sequence[Write]) -> None:
        self.write_now(rows)

    # --- what tests do ------------------------------------------------------------------------
    def write_now(self, rows: Sequence[Write]) -> None:
        self.store.submit(rows).result(30)

    def keep(self, step: int, seq: int = 0, *, commit: bool = True, **job: Any) -> str:
        """Have a payload kept; return its path, '' where there was no room."""
        return run(self.keeping(step, seq, commit=commit, **job))

    async def keeping(
        self,
        step: int,
        seq: int = 0,
        *,
        commit: bool = True,
        between: Callable[[], Awaitable[object]] | None = None,
        **job: object,
    ) -> str:
        """As `keep`; `between` is awaited between the commit and the accounting of its bytes."""
        made = {
            "step": step, "stage": "actor_update", "microbatch": seq, "bytes": SIZE,
            "keep": ["old_log_probs"], "scalars": {}, **job,
        }  # fmt: skip
        work = ingest_job(**made)
        reservation = await self.retention.make_room(self.node_id, work)
        work["no_room"] = reservation.refused
        outcome = self.intake.read(PayloadKey("i", 100 * step + seq), work, payload())
        rows = [
            Put(put.table, {**put.row, "wall": self.now} if put.table == "artifacts" else put.row)
            for put in outcome.rows
            if put.table in ("artifacts", "findings")
        ]
        if commit:
            self.write_now(rows)
            if between is not None:
                await between()
            await self.retention.settled(reservation, rows)
        paths = [put.row["path"] for put in rows if put.table == "artifacts"]
        self.now += 1.0
        return paths[0] if paths else ""

    def mark_pinned(self, step: int, pinned: bool = True) -> None:
        self.write_now([Put("steps", {"attempt_id": 1, "step": step, "pinned": pinned})])

    def steps(self) -> list[int]:
        """The steps of which the catalogue says that something is kept; the disk agrees."""
        rows = self.catalogue.artifacts(1, kind="kept")
        assert {row["path"] for row in rows} == {*kept_files.find(self.data_dir)}
        return sorted({row["step"] for row in rows if row["step"] is not None})

    def bytes(self) -> int:
        return sum(os.path.getsize(path) for path in kept_files.find(self.data_dir))


def run(call: Coroutine[Any, object, T]) -> T:
    return asyncio.run(call)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    made: list[Node] = []
    yield made
    for node in made:
        node.catalogue.close()
        node.store.close()


@pytest.fixture
def node(nodes: list[Node], tmp_path: Path) -> Node:
    nodes.append(Node(tmp_path, Limits(1 << 30)))
    return nodes[0]


def file_bytes(node: Node) -> int:
    node.keep(0)
    size = node.bytes()
    kept_files.discard(node.data_dir, kept_files.find(node.data_dir))
    run(node.retention.adopt(node.node_id))
    return size


def test_the_oldest_steps_make_room_each_whole(node: Node) -> None:
    size = file_bytes(node)
    node.retention = node.made(Limits(5 * size))
    for step in range(1, 7):
        assert node.keep(step, 0)
        assert node.keep(step, 1)
        assert node.bytes() <= 5 * size
    assert node.steps() == [5, 6]
    assert len(node.catalogue.artifacts(1, kind="kept", deleted=True)) == 1 + 8
    assert not (node.data_dir / "r/k/step_1").exists()
    assert node.retention.health()["healthy"]


def test_pinned_steps_stay_and_where_nothing_may_go_keeping_stops_and_starts_again(
    node: Node,
) -> None:
    size = file_bytes(node)
    node.retention = node.made(Limits(2 * size + SIZE - 1))
    node.keep(1)
    node.keep(2)
    for step in (1, 2):
        node.mark_pinned(step)
    assert node.keep(3) == ""
    health = node.retention.health()
    assert (health["healthy"], health["not_kept"]) == (False, 1)
    assert "pinned" in health["reason"]
    (said,) = node.catalogue.findings(run="r")
    assert (said["kind"], said["over_wall"]) == ("not_kept", None)
    node.mark_pinned(1, False)
    assert node.keep(4)
    assert node.steps() == [2, 4]
    assert node.retention.health()["healthy"]
    assert node.catalogue.findings(run="r")[0]["over_wall"] is not None


def test_what_was_not_kept_is_over_also_after_a_restart(node: Node) -> None:
    node.intake = node.reader(reserve=1 << 60)
    assert node.keep(2) == ""
    (said,) = node.catalogue.findings(run="r")
    assert said["over_wall"] is None
    node.intake = node.reader()  # another ingestor, under another coordinator
    node.retention = node.made(Limits(1 << 30))
    node.retention.adopt_findings(node.catalogue.findings())
    assert node.keep(3)
    (over,) = node.catalogue.findings(run="r")
    assert over["finding_id"] == said["finding_id"]
    assert over["over_wall"] == pytest.approx(node.now, abs=10)
    node.intake = node.reader(reserve=1 << 60)
    assert node.keep(4) == ""
    assert node.catalogue.findings(run="r")[0]["over_wall"] is None


def test_a_step_never_makes_room_for_itself(node: Node) -> None:
    size = file_bytes(node)
    node.retention = node.made(Limits(2 * size + SIZE - 1))
    kept = [node.keep(1, seq) for seq in range(4)]
    assert [bool(path) for path in kept] == [True, True, False, False]
    assert node.retention.health()["not_kept"] == 2


def test_payloads_under_way_are_counted(node: Node) -> None:
    size = file_bytes(node)
    node.retention = node.made(Limits(3 * size))

    async def together() -> list[str]:
        job = cast("IngestJob", {"attempt_id": 1, "step": 1, "stage": "s", "bytes": size})
        asked = [node.retention.make_room(node.node_id, job) for _ in range(5)]
        return [room.refused for room in await asyncio.gather(*asked)]

    assert [reason == "" for reason in run(together())] == [True] * 3 + [False] * 2


def test_bytes_that_are_counted_while_a_payload_is_under_way_count_once(node: Node) -> None:
    size = file_bytes(node)
    node.retention = node.made(Limits(3 * size))

    async def refuse() -> None:
        """Ask for more than there is: the kept bytes are counted anew."""
        job = cast("IngestJob", {"attempt_id": 1, "step": 2, "stage": "s", "bytes": 1 << 40})
        assert (await node.retention.make_room(node.node_id, job)).refused

    async def together() -> None:
        await asyncio.gather(*(node.keeping(2, seq, between=refuse) for seq in range(3)))

    run(node.keeping(2, 9, between=refuse))
    assert node.retention.health()["bytes"] == {node.node_id: node.bytes()}
    run(together())
    assert node.retention.health()["bytes"] == {node.node_id: node.bytes()}


def test_room_is_released_before_payloads_that_wait_for_it_are_answered(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = file_bytes(node)
    node.retention = node.made(Limits(4 * size))
    job = cast("IngestJob", {"step": 9, "stage": "s", "attempt_id": 1, "bytes": size})
    kept_bytes, goes_on = node.catalogue.kept_bytes, threading.Event()

    async def together() -> list[str]:
        loop, counting = asyncio.get_running_loop(), asyncio.Event()
        committed = asyncio.Semaphore(0)

        def count_slowly() -> list[KeptBytes]:
            loop.call_soon_threadsafe(counting.set)
            assert goes_on.wait(30)
            return kept_bytes()

        async def until_somebody_counts() -> None:
            committed.release()
            await counting.wait()

        keeping = [
            asyncio.create_task(node.keeping(1, seq, bytes=size, between=until_somebody_counts))
            for seq in range(4)
        ]
        for _ in keeping:
            await committed.acquire()
        # Every byte is of step 1, which may go; its payloads are still to be accounted for.
        monkeypatch.setattr(node.catalogue, "kept_bytes", count_slowly)
        asked = [asyncio.create_task(node.retention.make_room(node.node_id, job)) for _ in range(4)]
        await counting.wait()
        for _ in range(10):  # whatever does not wait for the lock is done
            await asyncio.sleep(0)
        goes_on.set()
        answers = await asyncio.gather(*asked)
        assert all(await asyncio.gather(*keeping))
        return [answer.refused for answer in answers]

    assert run(together()) == [""] * 4


def test_what_a_file_has_beside_its_tensors_is_reserved_too(node: Node) -> None:
    size = file_bytes(node)
    node.retention = node.made(Limits(6 * size))
    node.keep(1)
    job = cast("IngestJob", {"attempt_id": 1, "step": 2, "stage": "actor_update", "bytes": SIZE})

    async def reserve() -> list[int]:
        asked = [node.retention.make_room(node.node_id, job) for _ in range(9)]
        return [reservation.bytes for reservation in await asyncio.gather(*asked)]

    assert run(reserve()) == [size] * 6 + [0] * 3  # the first step makes room, too


def test_old_files_go_by_age_but_pinned_ones(node: Node) -> None:
    node.retention = node.made(Limits(1 << 30, days=2.0))
    node.keep(1)
    node.mark_pinned(1)
    node.keep(2)
    node.now += 86_400.0
    node.keep(3)
    run(node.retention.check())
    assert node.steps() == [1, 2, 3]
    node.now += 86_400.0
    run(node.retention.check())
    assert node.steps() == [1, 3]


def test_only_the_newest_steps_stay_but_pinned_ones(node: Node) -> None:
    node.retention = node.made(Limits(1 << 30, steps=2))
    for step in (1, 2, 3, 4):
        node.keep(step)
        if step == 1:
            node.mark_pinned(1)
    assert node.steps() == [1, 3, 4]
    node.keep(2, 1)  # a late payload: it is older than the newest, and the next step clears it
    node.keep(5)
    assert node.steps() == [1, 4, 5]


def test_a_file_without_a_row_is_taken_up_at_the_start(node: Node) -> None:
    node.keep(1)
    orphan = node.keep(2, commit=False)
    assert [row["step"] for row in node.catalogue.artifacts(1, kind="kept")] == [1]
    foreign = node.keep(3, commit=False, run="other", attempt_key="x")
    broken = Path(orphan).with_name("actor_rank0_0123456789ab_7.safetensors")
    broken.write_bytes(b"no such thing")
    run(node.retention.adopt(node.node_id))
    rows = {row["path"]: row for row in node.catalogue.artifacts(1, kind="kept")}
    assert orphan in rows
    assert (rows[orphan]["checksum"] or "").startswith("sha256:")
    assert (rows[orphan]["step"], rows[orphan]["sections"]) == (
        2, {"old_log_probs": ["old_log_probs", "response_mask"]}
    )  # fmt: skip
    assert Path(foreign).exists()
    assert not {foreign, str(broken)} & {*rows}


def test_a_row_without_a_file_ends(node: Node) -> None:
    path = node.keep(1)
    os.unlink(path)
    run(node.retention.adopt(node.node_id))
    assert node.catalogue.artifacts(1, kind="kept") == []
    (row,) = node.catalogue.artifacts(1, kind="kept", deleted=True)
    assert row["deleted_wall"] == node.now


def test_a_node_that_came_back_under_another_id_has_its_files(node: Node) -> None:
    node.keep(1)
    node.node_id = "node-2"
    run(node.retention.adopt("node-2"))
    (row,) = node.catalogue.artifacts(1, kind="kept")
    assert row["node_id"] == "node-2"


def test_where_a_node_does_not_answer_payloads_are_read_all_the_same(node: Node) -> None:
    size = file_bytes(node)
    node.retention = node.made(Limits(size + SIZE))
    node.keep(1)
    node.gone = True
    assert node.keep(2)  # whether there is room is not known
    assert node.steps() == [1, 2]


def test_only_kept_files_below_the_data_directory_are_deleted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "r").mkdir(parents=True)
    outside = tmp_path / "actor_rank0_0123456789ab_1.safetensors"
    other = data / "catalogue.db"
    link = data / "r" / outside.name
    for path in (outside, other):
        path.write_text("x")
    link.symlink_to(outside)
    assert kept_files.discard(data, [str(outside), str(other), str(link), "a\0b"]) == []
    assert outside.exists()
    assert other.exists()


# --- rows of old steps ------------------------------------------------------------------------
def attempts_with_steps(node: Node, *steps: int) -> None:
    for number, count in enumerate(steps, 1):
        row = {"attempt_id": number, "run": "r", "number": number, "key": f"k{number}"}
        node.write_now([Put("runs", {"run": "r"}), Put("attempts", row)])
        for step in range(1, count + 1):
            node.write_now(rows_of_step(number, step))


def remaining(node: Node) -> list[tuple[int, int | None]]:
    """The steps of which there are rows."""
    catalogue = node.catalogue
    rows: list[Callable[[int], Sequence[RankWork]]] = [
        catalogue.stages,
        catalogue.scalars,
        catalogue.payloads,
        catalogue.summaries,
    ]
    found = [
        [(each["attempt_id"], each["step"]) for number in (1, 2) for each in read(number)]
        for read in rows
    ]
    steps = sorted({*found[0]})
    assert all(sorted({*each}) == steps for each in found)
    return steps


def test_rows_of_old_steps_go_and_what_was_learned_of_them_stays(tmp_path: Path) -> None:
    node = Node(tmp_path, Limits(1 << 30, row_steps=4))
    attempts_with_steps(node, 5, 3)
    node.write_now([Put("steps", {"attempt_id": 1, "step": 2, "pinned": True})])
    node.write_now([Put("steps", {"attempt_id": 1, "step": 1, "closed_wall": None})])
    run(node.retention.remove_rows())
    # The newest four of the run: all of attempt 2, and one of attempt 1; 2 is pinned, 1 is open.
    assert remaining(node) == [(1, 1), (1, 2), (1, 5), (2, 1), (2, 2), (2, 3)]
    step = node.catalogue.step(1, 3)
    assert step is not None
    assert (step["step_summary"], step["rows_removed"], step["summary_mark"]) == (b"w", True, 2)
    assert len(node.catalogue.findings(attempt_id=1, step=3)) == 1
    # A file that exists keeps its row, with all that it says.
    (kept,) = node.catalogue.artifacts(1, 3, deleted=None)
    assert (kept["rank"], kept["stage"], kept["deleted_wall"]) == (0, "actor_update", None)
    assert node.catalogue.scalar_names([1, 2]) == {"loss": 5}
    before = node.catalogue.step(1, 4)
    run(node.retention.remove_rows())
    assert node.catalogue.step(1, 4) == before
    # The pin is taken back, and the step closes.
    node.write_now([Put("steps", {"attempt_id": 1, "step": 2, "pinned": False})])
    node.write_now([Put("steps", {"attempt_id": 1, "step": 1, "closed_wall": 9.0})])
    run(node.retention.remove_rows())
    assert remaining(node) == [(1, 5), (2, 1), (2, 2), (2, 3)]


def test_answers_say_that_rows_were_removed(tmp_path: Path) -> None:
    node = Node(tmp_path, Limits(1 << 30, row_steps=1))
    attempts_with_steps(node, 2)
    node.write_now([Put("steps", {"attempt_id": 1, "step": 1, "step_summary": None})])
    run(node.retention.remove_rows())
    found = gaps(node.catalogue, node.catalogue.steps(1))
    assert found[1, 1] == f"no numbers: {ROWS_REMOVED}"
    assert not is_behind(node.catalogue.steps(1)[1])
    assert node.store.snapshot().unaggregated == [(1, 2)]
    # What comes that late is no step of its own.
    node.write_now(rows_of_step(1, 1)[1:5])
    late = assembly.too_late(node.catalogue, 1, 1, "r")
    assert late == [Put("steps", {"attempt_id": 1, "step": 1, "summary_mark": 2})]


def test_a_removal_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    node = Node(tmp_path, Limits(1 << 30, row_steps=1))
    attempts_with_steps(node, 3)
    written: list[Write] = []

    async def killed(rows: Sequence[Write]) -> None:
        if len(written) >= 3:
            raise Unreachable("killed")
        written.extend(rows)
        node.write_now(rows)

    node.retention._write = killed
    with pytest.raises(Unreachable):
        run(node.retention.remove_rows())
    node.write_now([RemoveRows(1, 2, 4)])  # and a part of the next
    assert node.catalogue.step(1, 1)["rows_removed"] is True  # type: ignore[index]
    assert node.catalogue.step(1, 2)["rows_removed"] is None  # type: ignore[index]
    node.retention = node.made(Limits(1 << 30, row_steps=1))
    run(node.retention.remove_rows())
    assert remaining(node) == [(1, 3)]
    with sqlite3.connect(tmp_path / "catalogue.db") as connection:
        works = connection.execute("SELECT DISTINCT step FROM works ORDER BY step").fetchall()
        rows = connection.execute("SELECT count(*) FROM stage_rows").fetchone()
    connection.close()
    assert works == [(1,), (2,), (3,)]  # of steps 1 and 2 for the files that exist
    assert rows == (3,)


def test_removal_is_in_small_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_ROWS", 4)
    node = Node(tmp_path, Limits(1 << 30, row_steps=1))
    attempts_with_steps(node, 2)
    written: list[Sequence[Write]] = []

    async def write(rows: Sequence[Write]) -> None:
        written.append(rows)
        node.write_now(rows)

    node.retention._write = write
    node.retention._mono = lambda: node.now + len(written) / 1e3
    run(node.retention.remove_rows())
    assert len(written) > 17 / 4
    assert remaining(node) == [(1, 2)]
    # A row that comes later finds its work anew.
    node.write_now(rows_of_step(1, 1)[1:2])
    assert [row["step"] for row in node.catalogue.stages(1)] == [1, 2, 2, 2]
