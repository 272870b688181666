"""What ranks are told is on disk is on disk: odd texts, restarts, calls that are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tests.support.local import LocalCoordinator
from tests.support.stores import DATABASES, database, postgresql, rows_of, url_of

from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.restore import restore
from stagescope_service.core.instructions import Ingest
from stagescope_service.core.state import State
from stagescope_service.store.contract import Put, Write
from stagescope_service.store.sql import SqlStore
from stagescope_wire.names import MAX_ID
from stagescope_wire.schema import BEGIN, END, LOG, Event, Sender

SENDER: Final = Sender("i", "r", "a", "actor", 0)
ODD: Final = ["a\ud800b", "a\0b", "p" * 7000, "\U0001f600" * 3000, "plain"]


@pytest.fixture(params=DATABASES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    if request.param == "sqlite":
        made = SqlStore(url_of(tmp_path))
        made.open()
        yield made
        made.close()
        return
    with postgresql() as server, database(server) as url:
        made = SqlStore(url)
        made.open()
        yield made
        made.close()


@contextlib.contextmanager
def coordinator(store: SqlStore, folder: Path) -> Iterator[LocalCoordinator]:
    """A coordinator that goes on with what the catalogue holds."""
    state = State(lease_seconds=45.0)
    restore(state, store.snapshot(), 0.0)
    local = LocalCoordinator(store, folder, state=state)
    yield local
    local.parts.catalogue.close()


def payload(rows: int, **strings: list[str]) -> dict[str, object]:
    values = np.full((rows, 4), -0.5, np.float32)
    mask = np.ones((rows, 4), np.int64)
    return {
        "schema": 1,
        "tensors": {
            "old_log_probs": ("float32", values.shape, values, None),
            "rollout_log_probs": ("float32", values.shape, values - 0.25, None),
            "response_mask": ("int64", mask.shape, mask, None),
        },
        "strings": strings,
        "meta": {"split": ODD, "data_source": "b\ud800\0" * 2000, "engine": "\0" * 3000},
    }


def end(seq: int, step: int, **fields: object) -> tuple[object, ...]:
    work = {"step": step, "stage": "actor_compute_log_prob"}
    announced: dict[str, object] = {"payload": {"tensors": {}, "meta": {"split": ODD}}}
    return Event(END, seq, float(seq), float(seq), {**work, **announced, **fields}).wire()


async def record(
    local: LocalCoordinator, *events: tuple[object, ...], payloads: Mapping[int, object]
) -> dict[str, Any]:
    answer = await local.coordinator.parts.intake.record(SENDER.wire(), list(events), payloads)
    await local.work()
    return dict(answer)


async def receipts(local: LocalCoordinator, *seqs: int) -> dict[int, str]:
    answer = await local.coordinator.parts.intake.poll(SENDER.wire(), 0, seqs, 0.0)
    return answer["receipts"]


@pytest.mark.parametrize("name", ["sample_ids", "group_ids", "prompt_hashes", "engine_ids"])
def test_a_sample_with_an_odd_id_is_stored(store: SqlStore, tmp_path: Path, name: str) -> None:
    async def live(local: LocalCoordinator) -> None:
        ids = {"sample_ids": [f"s{row}" for row in range(len(ODD))], name: ODD}
        await record(local, end(2, 1), payloads={2: payload(len(ODD), **ids)})
        assert await receipts(local, 2) == {2: "ingested"}

    with coordinator(store, tmp_path) as local:
        asyncio.run(live(local))
    (row,) = rows_of(store, "payloads")
    assert row["state"] == "ingested"
    samples = rows_of(store, "samples")
    assert len({each["sample_uid"] for each in samples}) == len(ODD)
    stored = {"sample_ids": "sample_uid", "group_ids": "group_id", "prompt_hashes": "prompt_hash"}
    if name in stored:
        found = [str(each[stored[name]]) for each in samples]
        assert len(set(found)) == len(ODD)
        assert "plain" in found
        assert max(map(len, found)) <= MAX_ID
    assert not [each for each in rows_of(store, "findings") if each["kind"] == "refused_row"]


def test_odd_texts_of_other_events_are_stored(store: SqlStore, tmp_path: Path) -> None:
    work = {"step": 1, "stage": "actor_update"}
    odd = {text: number for number, text in enumerate(ODD)}
    events = [
        Event("hello", 1, 1.0, 1.0, {"layout": {"host": ODD[0], "engine": ODD[2]},
              "settings": {"x": ODD, **odd}, "fingerprint": {"git": {"commit": ODD[2]}, **odd}}),
        Event(BEGIN, 2, 2.0, 2.0, work),
        Event(LOG, 3, 3.0, 3.0, {**work, "scalars": {**odd, "loss": 2.0}}),
        Event("dropped", 4, 4.0, 4.0, {"what": ODD[0], "reason": ODD[2], "count": 2**63 - 1,
                                       "bytes": 2**63 - 1}),
        Event("dropped", 5, 5.0, 5.0, {"what": "event", "count": 2**63 - 1}),
        Event("dropped", 6, 6.0, 6.0, {"what": "event", "count": 2**63 - 1}),
        Event("refused", 7, 7.0, 7.0, {**work, "reason": ODD[1], "tensor": ODD[0], "what": ODD[2]}),
        Event(END, 8, 8.0, 8.0, {**work, "status": "failed", "error_type": ODD[0],
                                 "error_message": ODD[1] * 5000}),
        Event("dump", 9, 9.0, 9.0, {**work, "capture_id": ODD[0], "path": ODD[2], "state": ODD[1],
                                    "error": ODD[0]}),
        Event("weights", 10, 10.0, 10.0, {**work, "version": 1, "side": ODD[0], "kind": ODD[1],
                                          "tensors": odd}),
        Event("canary", 11, 11.0, 11.0, {"policy_version": 2**63 - 1, "side": "engine",
              "source": ODD[0], "arms": {}, "checks": [[ODD[0], False, ODD[1]]],
              "settings": {"x": ODD, **odd}, "problem": ODD[2], "seconds": 10**400}),
        Event("finish", 12, 12.0, 12.0, {"error": ODD[0], "error_message": ODD[1]}),
    ]  # fmt: skip

    async def live(local: LocalCoordinator) -> None:
        answer = await record(local, *(each.wire() for each in events), payloads={})
        again = await record(local, *(each.wire() for each in events), payloads={})
        assert answer["received"] == again["received"] >= len(events) - 1, answer

    with coordinator(store, tmp_path) as local:
        asyncio.run(live(local))
    assert store.health().healthy
    assert not [each for each in rows_of(store, "findings") if each["kind"] == "refused_row"]
    (stage,) = rows_of(store, "stages")
    assert (stage["begin_seq"], stage["end_seq"], stage["status"]) == (2, 8, "failed")


def states(store: SqlStore) -> dict[int, str]:
    return {row["seq"]: row["state"] for row in rows_of(store, "payloads")}


def test_what_was_ingested_long_ago_stays_so_when_it_is_offered_again(
    store: SqlStore, tmp_path: Path
) -> None:
    """A rank whose receipts did not arrive offers all its payloads to the next coordinator."""
    steps = range(1, 31)

    async def train(local: LocalCoordinator) -> None:
        for step in steps:
            await record(local, end(2 * step, step), payloads={2 * step: payload(1)})

    async def offer(local: LocalCoordinator, *, with_refs: bool) -> dict[int, str]:
        seqs = [2 * step for step in steps]
        refs = dict.fromkeys(seqs, payload(1)) if with_refs else {}
        answer = await record(local, *(end(seq, seq // 2) for seq in seqs), payloads=refs)
        receipts: dict[int, str] = answer["receipts"]
        return receipts

    with coordinator(store, tmp_path) as local:
        asyncio.run(train(local))
    assert set(states(store).values()) == {"ingested"}
    for with_refs in (False, True):
        with coordinator(store, tmp_path) as local:
            receipts = asyncio.run(offer(local, with_refs=with_refs))
            assert receipts == {2 * step: "ingested" for step in steps}
            assert set(states(store).values()) == {"ingested"}
            # The rank dies: nothing of it is lost.
            expired = local.coordinator.parts.state.expire(1e9, 1e9)
            asyncio.run(local.parts.runner.carry_out(expired))
        assert set(states(store).values()) == {"ingested"}
        assert rows_of(store, "losses") == []


def test_a_raw_callers_payload_of_an_earlier_coordinator_counts_once(
    store: SqlStore, tmp_path: Path
) -> None:
    """Ray makes a call again whose actor died before it had answered."""
    fields = {"run": "r", "stage": "actor_compute_log_prob"}
    tensors = {"old_log_probs": [[-1.0]], "rollout_log_probs": [[-1.5]], "response_mask": [[1]]}

    async def call(local: LocalCoordinator, step: int) -> object:
        raw = local.coordinator.raw_calls
        ended = asyncio.create_task(
            raw.record("end", f"call-{step}", {**fields, "step": step}, tensors)
        )
        while not ended.done():
            await local.work()
            await asyncio.sleep(0.001)
        return (await ended)["payload"]

    async def train(local: LocalCoordinator) -> None:
        for step in range(1, 20):
            assert await call(local, step) == "ingested"

    with coordinator(store, tmp_path) as local:
        asyncio.run(train(local))
    before = rows_of(store, "payloads")
    with coordinator(store, tmp_path) as local:
        assert asyncio.run(call(local, 2)) == "ingested"
    assert rows_of(store, "payloads") == before
    assert not [each for each in local.queue.queue if isinstance(each, Ingest)]


def test_a_call_that_is_cancelled_gives_no_receipt_before_the_commit(tmp_path: Path) -> None:
    store = SqlStore(url_of(tmp_path))  # not open: what is submitted waits
    local = LocalCoordinator(store, tmp_path)
    local.coordinator.parts.commits.check_ready = lambda: None  # type: ignore[method-assign]
    dropped = {"payload_dropped": {"reason": "no memory"}}
    work = {"step": 1, "stage": "actor_update"}

    async def live() -> None:
        intake = local.coordinator.parts.intake
        ended = Event(END, 2, 1.0, 1.0, {**work, **dropped}).wire()
        call = asyncio.create_task(intake.record(SENDER.wire(), [ended]))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait({call})
        assert local.coordinator.parts.commits.receipts("i", [2]) == {}
        store.open()
        until = asyncio.get_running_loop().time() + 30
        while not (found := local.coordinator.parts.commits.receipts("i", [2])):
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.01)
        assert found == {2: "dropped"}

    asyncio.run(live())
    assert states(store) == {2: "dropped"}
    store.close()


def test_a_call_that_is_cancelled_leaves_the_turn_that_it_waits_for(store: SqlStore) -> None:
    commits = Commits(State(), store)

    async def live() -> None:
        is_written = asyncio.Event()

        async def first() -> None:
            async with commits.turn("i"):
                await is_written.wait()

        async def again() -> None:
            async with commits.turn("i"):
                pass

        sent = asyncio.create_task(first())
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(again())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        is_written.set()
        await sent

    asyncio.run(live())


def test_outcomes_reach_the_loop_that_waits_for_them(store: SqlStore) -> None:
    commits = Commits(State(), store)
    run: Write = Put("runs", {"run": "r", "display_name": "r"})

    async def live() -> None:
        answers = await asyncio.gather(*(commits.commit([run]) for _ in range(20)))
        assert answers == [()] * 20

    for _ in range(2):  # a loop that ended wakes nobody
        asyncio.run(live())
