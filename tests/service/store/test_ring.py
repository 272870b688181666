"""The ring: bounded, the oldest go first, pins hold, restarts and full disks are survived."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.stores import fill

from stagescope_service.store.ring import Ring, RingKey, rings_left
from stagescope_service.store.tensorfile import WireTensor, size_of
from stagescope_wire.errors import NotFound


def tensors(kilobytes: int = 10, value: int = 0) -> dict[str, WireTensor]:
    """One tensor of so many kilobytes."""
    shape = (kilobytes * 1000,)
    return {"p": ("uint8", shape, np.full(shape, value, np.uint8), None)}


def key(seq: int, step: int | None = None, attempt_id: int = 1) -> RingKey:
    """The payload `seq` of a process."""
    return RingKey(attempt_id, seq if step is None else step, "incarnation", seq)


def ring_of(directory: Path, kilobytes: int = 55, pin_share: float = 1.0) -> Ring:
    return Ring(directory, kilobytes * 1000, reserve_bytes=0, pin_share=pin_share)


def held(ring: Ring) -> list[int]:
    return [entry.key.seq for entry in ring.entries()]


@given(
    st.integers(0, 99), st.none() | st.integers(-5, 99), st.text(max_size=20), st.integers(0, 99)
)
def test_keys_are_file_names_and_back(
    attempt_id: int, step: int | None, incarnation: str, seq: int
) -> None:
    wanted = RingKey(attempt_id, step, incarnation, seq)
    try:
        name = wanted.name
    except UnicodeEncodeError:
        return
    assert RingKey.parse(name) == wanted
    assert "/" not in name
    assert not name.startswith(".")


def test_the_oldest_make_room(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "ring")
    for seq in range(9):
        entry = ring.keep(key(seq), tensors(value=seq), {"seq": seq})
        assert entry is not None
        assert entry.path.stat().st_size == entry.bytes
    assert held(ring) == [4, 5, 6, 7, 8]
    assert [entry.key.seq for entry in ring.take_evicted()] == [0, 1, 2, 3]
    assert ring.take_evicted() == []
    assert ring.bytes == sum(path.stat().st_size for path in (tmp_path / "ring").iterdir())
    assert ring.bytes <= ring.max_bytes
    found = ring.read(key(8))
    assert found.metadata == {"seq": 8}
    assert set(found.tensors["p"][2]) == {8}
    with pytest.raises(NotFound, match="pin"):
        ring.read(key(0))
    assert ring.health().healthy


def test_the_same_key_replaces(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)
    for value in (1, 2):
        for seq in range(5):
            ring.keep(key(seq), tensors(value=value))
    assert held(ring) == [0, 1, 2, 3, 4]
    assert ring.take_evicted() == []
    assert set(ring.read(key(0)).tensors["p"][2]) == {2}


def test_pinned_payloads_stay_also_over_a_restart(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)
    ring.pin_step(1, 2)  # before its payloads come
    ring.keep(key(0), tensors())
    ring.pin(key(0))
    ring.keep(key(1, step=2), tensors())
    for seq in range(3, 9):
        ring.keep(key(seq), tensors())
    assert held(ring)[:2] == [0, 1]
    again = ring_of(tmp_path)
    assert again.entries() == ring.entries()
    for seq in range(9, 15):
        again.keep(key(seq), tensors())
    assert held(again)[:2] == [0, 1]
    again.unpin(key(0))
    again.unpin_step(1, 2)
    for seq in range(15, 20):
        again.keep(key(seq), tensors())
    assert held(again) == [15, 16, 17, 18, 19]
    assert not any(path.suffix == ".pin" for path in tmp_path.iterdir())


def test_a_ring_full_of_pins_says_so(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)
    for seq in range(5):
        ring.keep(key(seq), tensors())
        ring.pin(key(seq))
    assert ring.keep(key(5), tensors()) is None
    assert "unpin" in ring.health().reason
    assert ring.not_kept == 1
    ring.unpin(key(3))
    assert ring.keep(key(5), tensors()) is not None
    assert ring.health().healthy
    assert held(ring) == [0, 1, 2, 4, 5]


def test_pins_take_a_share_and_what_does_not_fit_is_said(tmp_path: Path) -> None:
    ring = ring_of(tmp_path, pin_share=0.5)
    for seq, step in enumerate((1, 1, 2, 3, 4)):
        ring.keep(key(seq, step), tensors())
    assert ring.pin_step(1, 1) == (2, 2 * size_of(tensors()), "")
    refused = ring.pin_step(1, 2)
    assert refused.payloads == 0
    assert "pinned payloads use" in refused.reason
    assert ring.pin_step(1, 1).reason == ""  # again: nothing changes
    again = ring_of(tmp_path, pin_share=0.5)
    for seq in range(5, 20):
        assert again.keep(key(seq), tensors()) is not None  # there is always room for the newest
    assert held(again) == [0, 1, 17, 18, 19]
    again.unpin_step(1, 1)
    assert again.pin_step(1, 19).payloads == 1


def test_what_comes_late_to_a_pinned_step_and_finds_no_room_is_said(tmp_path: Path) -> None:
    ring = ring_of(tmp_path, pin_share=0.5)
    assert ring.pin_step(1, 7) == (0, 0, "")
    for seq in range(3):
        ring.keep(key(seq, 7), tensors())
    assert [entry.pinned for entry in ring.entries()] == [True, True, False]
    assert [entry.key.seq for entry in ring.take_unpinned()] == [2]
    assert ring.take_unpinned() == []
    again = ring_of(tmp_path, pin_share=0.5)
    assert [entry.pinned for entry in again.entries()] == [True, True, False]


def test_what_is_larger_than_the_ring_evicts_nothing(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)
    ring.keep(key(0), tensors())
    assert ring.keep(key(1), tensors(60)) is None
    assert held(ring) == [0]
    assert "more bytes" in ring.health().reason
    assert ring_of(tmp_path / "none", 0).keep(key(0), tensors(0)) is None


def test_a_restart_takes_what_is_whole_and_removes_the_rest(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)
    for seq in range(4):
        ring.keep(key(seq), tensors())
        os.utime(ring.entries()[-1].path, (seq, seq))
    paths = [entry.path for entry in ring.entries()]
    os.truncate(paths[1], 5000)
    os.truncate(paths[2], 0)
    (tmp_path / ".abc.tmp").write_bytes(b"unfinished")
    (tmp_path / "mine.safetensors").write_bytes(b"somebody else's")
    (tmp_path / "1~x~y~z.safetensors").write_bytes(b"somebody else's")
    again = ring_of(tmp_path)
    assert held(again) == [0, 3]
    assert again.bytes == 2 * size_of(tensors())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [paths[0].name, paths[3].name, "mine.safetensors", "1~x~y~z.safetensors"]
    )
    smaller = ring_of(tmp_path, 15)
    assert held(smaller) == [3]


def test_bad_tensors_do_not_raise_into_ingestion(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)
    wrong: WireTensor = ("float32", (2,), np.ones(3, np.float32), None)
    assert ring.keep(key(0), {"p": wrong}) is None
    assert ring.keep(RingKey(1, 1, "x" * 300, 1), tensors()) is None
    assert ring.keep(key(0), tensors(), {"x": object()}) is None
    assert ring.not_kept == 3
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "ring").write_text("a file")
    ring = ring_of(tmp_path / "ring")
    assert "cannot be used" in ring.health().reason
    assert ring.keep(key(0), tensors()) is None
    (tmp_path / "ring").unlink()
    assert ring.keep(key(0), tensors()) is not None
    assert ring.health().healthy


def test_the_ring_of_a_gone_node_is_taken_over_with_its_pins(tmp_path: Path) -> None:
    old, own = tmp_path / "old", tmp_path / "own"
    ring = ring_of(old)
    for seq in range(3):
        ring.keep(key(seq), tensors(value=seq), {"seq": seq})
    ring.pin(key(1))
    left = rings_left(tmp_path, "own", {"own"})
    assert left == [old]
    again = Ring(own, 55_000, reserve_bytes=0, pin_share=1.0, left=left)
    assert held(again) == [0, 1, 2]
    assert {entry.path.parent for entry in again.entries()} == {old}  # as the catalogue has them
    assert [entry.key.seq for entry in again.take_taken_over()] == [0, 1, 2]
    assert again.take_taken_over() == []
    assert set(again.read(key(2)).tensors["p"][2]) == {2}
    again.keep(key(2), tensors(value=9))  # a joined payload: now in its own directory alone
    assert not (old / f"{key(2).name}.safetensors").exists()
    for seq in range(3, 9):
        again.keep(key(seq), tensors())
    assert held(again) == [1, 5, 6, 7, 8]
    assert [entry.key.seq for entry in again.take_evicted()] == [0, 2, 3, 4]
    # The next node has both directories, and the pin.
    third = Ring(
        tmp_path / "third", 55_000, reserve_bytes=0, pin_share=1.0,
        left=rings_left(tmp_path, "third", {"third"}),
    )  # fmt: skip
    assert sorted(held(third)) == [1, 5, 6, 7, 8]
    third.unpin(key(1))
    for seq in range(9, 15):
        third.keep(key(seq), tensors())
    assert held(third) == [10, 11, 12, 13, 14]
    # Nothing is left in them: the next start removes them.
    left = rings_left(tmp_path, "third", {"third"})
    assert left == [old, own]
    assert held(Ring(tmp_path / "third", 55_000, reserve_bytes=0, left=left)) == held(third)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["third"]


def test_on_a_shared_disk_one_living_node_takes_a_ring_over(tmp_path: Path) -> None:
    for name in ("gone", "a", "b"):
        ring_of(tmp_path / name).keep(key(1), tensors())
    alive = {"a", "b"}
    assert rings_left(tmp_path, "a", alive) == [tmp_path / "gone"]
    assert rings_left(tmp_path, "b", alive) == []
    assert rings_left(tmp_path, "a", alive) == [tmp_path / "gone"]  # its next process
    # With the node that took it over, that one's ring is left, too.
    assert rings_left(tmp_path, "b", {"b"}) == [tmp_path / "a", tmp_path / "gone"]
    # A list without the node that asks is not believed.
    assert rings_left(tmp_path, "c", {"b"}) == []
    assert rings_left(tmp_path / "nowhere", "a", alive) == []


def test_a_full_disk_stops_keeping_and_says_so(small_disk: Path) -> None:
    ring = Ring(small_disk / "ring", 3_000_000, reserve_bytes=100_000, pin_share=1.0)
    for seq in range(3):
        assert ring.keep(key(seq), tensors(500)) is not None
    fill(small_disk / "ballast")
    # The ring gives way to others on the disk, the oldest first, as far as it can.
    assert ring.keep(key(3), tensors(500)) is not None
    assert held(ring) == [2, 3]
    for seq in (2, 3):
        ring.pin(key(seq))
    assert ring.keep(key(4), tensors(500)) is None
    assert "free space" in ring.health().reason
    assert held(ring) == [2, 3]
    (small_disk / "ballast").unlink()
    assert ring.keep(key(5), tensors(500)) is not None
    assert ring.health().healthy


def test_a_disk_that_fills_while_it_writes(small_disk: Path) -> None:
    # The reserve is not seen by a disk that others fill in between: free space is asked first.
    ring = Ring(small_disk / "ring", 100_000_000, reserve_bytes=-100_000_000)
    assert ring.keep(key(0), tensors(6_000)) is None
    assert "No space left" in ring.health().reason
    assert list((small_disk / "ring").iterdir()) == []


def test_threads(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)

    def work(start: int) -> None:
        for seq in range(start, start + 40):
            ring.keep(key(seq), tensors(value=seq % 250))
            for entry in ring.entries():
                try:
                    found = ring.read(entry.key)
                except NotFound:
                    continue
                assert set(found.tensors["p"][2]) == {entry.key.seq % 250}

    failures: list[BaseException] = []

    def guarded(start: int) -> None:
        try:
            work(start)
        except BaseException as error:  # shown by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(start,)) for start in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert ring.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


class RingMachine(RuleBasedStateMachine):
    """Any order of keeping, pinning and restarting: bounded, pins hold, memory equals disk."""

    directory: Path
    number = 0

    def __init__(self) -> None:
        super().__init__()
        RingMachine.number += 1
        self.path = self.directory / str(RingMachine.number)
        self.ring = ring_of(self.path)
        self.pinned: set[int] = set()
        self.must: set[int] = set()

    @rule(seq=st.integers(0, 12), kilobytes=st.integers(0, 30))
    def keep(self, seq: int, kilobytes: int) -> None:
        entry = self.ring.keep(key(seq), tensors(kilobytes))
        if entry is not None and seq in self.pinned:
            self.must.add(seq)

    @rule(seq=st.integers(0, 12))
    def pin(self, seq: int) -> None:
        self.ring.pin(key(seq))
        self.pinned.add(seq)
        if seq in held(self.ring):
            self.must.add(seq)

    @rule(seq=st.integers(0, 12))
    def unpin(self, seq: int) -> None:
        self.ring.unpin(key(seq))
        self.pinned.discard(seq)
        self.must.discard(seq)

    @rule()
    def restart(self) -> None:
        before = set(held(self.ring))
        self.ring = ring_of(self.path)
        assert set(held(self.ring)) == before

    @invariant()
    def holds(self) -> None:
        files = [path for path in self.path.iterdir() if path.suffix == ".safetensors"]
        assert {entry.path for entry in self.ring.entries()} == set(files)
        assert self.ring.bytes == sum(path.stat().st_size for path in files)
        assert self.ring.bytes <= self.ring.max_bytes
        assert self.must <= set(held(self.ring))
        assert {entry.key.seq for entry in self.ring.entries() if entry.pinned} == (
            self.pinned & set(held(self.ring))
        )


def test_any_order_of_keeping_pinning_and_restarting(tmp_path: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    RingMachine.directory = tmp_path
    run_state_machine_as_test(
        RingMachine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )
