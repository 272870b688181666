"""A node's relay in front of a real coordinator: every rank is answered as if it called itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.local import coordinator_of
from tests.support.stores import rows_of, url_of

from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.core.instructions import PayloadKey
from stagescope_service.ingest.relay import Batch, Relay, RelayAnswer, RelayedPoll
from stagescope_service.store.sql import SqlStore
from stagescope_wire.captures import validate_capture
from stagescope_wire.errors import StagescopeError, StoreError, Unreachable
from stagescope_wire.schema import Sender

PLACE = {"step": 1, "stage": "actor_update"}
PAYLOAD = {**PLACE, "payload": {"tensors": {"x": {}}}}


class Target:
    """The coordinator, with a count of what it is called for; `away` fails every call."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.calls: list[int] = []
        self.polls: list[Sequence[RelayedPoll]] = []
        self.away = False
        self._polled = asyncio.Event()

    async def polled(self, times: int) -> None:
        """Wait until the coordinator was polled so often."""
        while len(self.polls) < times:
            self._polled.clear()
            await asyncio.wait_for(self._polled.wait(), 10)

    async def record_together(self, batches: Sequence[Batch]) -> RelayAnswer:
        self._called()
        self.calls.append(len(batches))
        return await self.coordinator.record_together(batches=batches)

    async def poll_together(self, polls: Sequence[RelayedPoll], wait: float) -> RelayAnswer:
        self._called()
        self.polls.append(polls)
        self._polled.set()
        return await self.coordinator.poll_together(polls=polls, wait=wait)

    def _called(self) -> None:
        if self.away:
            raise Unreachable("the actor died")


def sender(rank: int, revision: int | None = None) -> tuple[object, ...]:
    return Sender(f"i{rank}", "r", "a", "actor", rank, plan_revision=revision).wire()


def event(kind: str, seq: int, **fields: object) -> tuple[object, ...]:
    return (1, kind, seq, 1.0, 1.0, {**PLACE, **fields})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(url_of(tmp_path))
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def target(store: SqlStore, tmp_path: Path) -> Target:
    return Target(coordinator_of(store, tmp_path, poll_seconds=20.0))


def test_batches_that_come_together_are_one_call_and_each_has_its_own_answer(
    target: Target, store: SqlStore
) -> None:
    async def record() -> None:
        relay = Relay(target)
        begun = [relay.record(sender(rank), [event("begin", 1)], None) for rank in range(5)]
        bad = relay.record(sender(5), [event("begin", 1), event("nothing", 2)], {})
        *answers, refused = await asyncio.gather(*begun, bad)
        assert [each["received"] for each in answers] == [1] * 5
        assert (refused["received"], list(cast("Any", refused["refused"]))) == (1, [2])
        assert target.calls == [6]
        # What it is told is on disk.
        assert sorted(row["rank"] for row in rows_of(store, "stages")) == list(range(6))

    asyncio.run(record())


def test_a_batch_that_cannot_be_read_is_refused_alone(target: Target) -> None:
    async def record() -> None:
        relay = Relay(target)
        results = await asyncio.gather(
            relay.record("nobody", [event("begin", 1)], None),
            relay.record(sender(1), cast("Any", 7), None),
            relay.poll("nobody", 0, [], 0.0),
            relay.record(sender(2), [event("begin", 1)], None),
            return_exceptions=True,
        )
        for refused in results[:3]:
            assert isinstance(refused, StagescopeError)
        assert cast("Mapping[str, object]", results[3])["received"] == 1
        assert target.calls == [3]

    asyncio.run(record())


@pytest.mark.parametrize("where", ["in the state machine", "in the catalogue"])
def test_a_batch_that_fails_takes_no_other_with_it(
    target: Target, store: SqlStore, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    state, commits = target.coordinator.parts.state, target.coordinator.parts.commits
    handle, commit = state.handle, commits.commit

    def fails(sender: Sender, *arguments: Any) -> Any:
        if sender.rank == 1:
            raise KeyError("not expected")
        return handle(sender, *arguments)

    async def refuses(rows: Sequence[Any], *arguments: Any) -> Any:
        if any(row.row.get("rank") == 1 for row in rows):
            raise StoreError("refused")
        return await commit(rows, *arguments)

    if where == "in the state machine":
        monkeypatch.setattr(state, "handle", fails)
    else:
        monkeypatch.setattr(commits, "commit", refuses)

    async def record() -> None:
        relay = Relay(target)
        calls = [relay.record(sender(rank), [event("begin", 1)], None) for rank in range(3)]
        first, failed, last = await asyncio.gather(*calls, return_exceptions=True)
        for answer in (first, last):
            assert cast("Mapping[str, object]", answer)["received"] == 1
        if where == "in the state machine":
            assert cast("Mapping[str, object]", failed)["refused"] == {
                1: "KeyError: 'not expected'"
            }
        else:
            assert type(failed) is StagescopeError
        assert [row["rank"] for row in rows_of(store, "stages")] == [0, 2]

    asyncio.run(record())


def test_a_service_that_is_behind_has_every_rank_wait(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = target.coordinator.parts.load
    monkeypatch.setattr(load, "_most", 1)
    monkeypatch.setattr(load, "_waiting", 1)

    async def record() -> None:
        relay = Relay(target)
        calls = [relay.record(sender(rank), [event("begin", 1)], None) for rank in range(2)]
        for answer in await asyncio.gather(*calls):
            assert "behind" in str(answer["not_ready"])
            assert cast("float", answer["pause"]) > 0

    asyncio.run(record())


def test_an_answer_of_another_kind_is_an_error_of_each_call(target: Target) -> None:
    class Other(Target):
        async def record_together(self, batches: Sequence[Batch]) -> RelayAnswer:
            return cast("RelayAnswer", {"answers": []})

        async def poll_together(self, polls: Sequence[RelayedPoll], wait: float) -> RelayAnswer:
            raise AttributeError("poll_together")

    async def call() -> None:
        relay = Relay(Other(target.coordinator))
        for _ in range(2):
            results = await asyncio.gather(
                relay.record(sender(0), [event("begin", 1)], None),
                relay.poll(sender(0), 0, [], 0.0),
                return_exceptions=True,
            )
            assert [type(each) for each in results] == [StagescopeError] * 2

    asyncio.run(call())


def test_a_rank_that_looks_up_its_relay_imports_no_library_of_the_service() -> None:
    program = """
    import sys
    import stagescope_service.ingest.relay_actor
    heavy = {"numba", "scipy", "sqlalchemy", "pydantic", "fastapi", "torch"} & sys.modules.keys()
    assert not heavy - ray_alone, heavy
    """
    before = "import sys, ray; from ray.util import scheduling_strategies; "
    before += "ray_alone = set(sys.modules)"
    code = before + textwrap.dedent(program)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_while_the_coordinator_is_away_ranks_are_to_call_again(target: Target) -> None:
    async def record() -> None:
        relay = Relay(target)
        target.away = True
        calls = relay.record(sender(0), [event("begin", 1)], None), relay.poll(sender(0), 0, [], 9)
        for answer in await asyncio.gather(*calls):
            assert "the actor died" in str(answer["not_ready"])
        target.away = False
        assert (await relay.record(sender(0), [event("begin", 1)], None))["received"] == 1

    asyncio.run(record())


def test_a_receipt_ends_the_poll_of_its_rank_alone(target: Target) -> None:
    async def settle() -> None:
        relay, coordinator = Relay(target), target.coordinator
        payloads: dict[int, object] = {2: {}}
        for rank in range(3):
            await relay.record(sender(rank), [event("end", 2, **PAYLOAD)], payloads)
        polls = [asyncio.create_task(relay.poll(sender(rank), 0, [2], 20.0)) for rank in range(3)]
        await target.polled(1)
        await coordinator.parts.payloads.settle(PayloadKey("i1", 2), "ingested", None)
        answer = await asyncio.wait_for(polls[1], 10)
        assert answer["receipts"] == {2: "ingested"}
        assert [poll.done() for poll in polls] == [False, True, False]
        # The coordinator renews a lease once for each call of a rank, not for those that wait on.
        await target.polled(2)
        first, second = target.polls[:2]
        assert all(cast("float", each["called_ago"]) < 10 for each in first)
        assert [each["called_ago"] for each in second] == [None, None]
        for rank in (0, 2):
            await coordinator.parts.payloads.settle(PayloadKey(f"i{rank}", 2), "lost", "gone")
        for answer in await asyncio.wait_for(asyncio.gather(polls[0], polls[2]), 10):
            assert answer["receipts"] == {2: "lost"}

    asyncio.run(settle())


def test_a_capture_request_reaches_every_rank_that_polls(target: Target) -> None:
    async def order() -> None:
        relay, coordinator = Relay(target), target.coordinator
        for rank in range(3):
            await relay.record(sender(rank, 0), [event("begin", 1)], None)
        polls = [asyncio.create_task(relay.poll(sender(rank), 0, [], 20.0)) for rank in range(3)]
        await target.polled(1)
        spec = {"run": "r", "stages": ["actor_update"], "steps": "next", "task": "statistics"}
        valid = validate_capture(spec, allowed_roots=())
        entry = coordinator.parts.requests.add(valid, by="me", mono=0.0, wall=0.0)
        await coordinator.parts.plan_changes.change([coordinator.parts.requests.row(entry)])
        for answer in await asyncio.wait_for(asyncio.gather(*polls), 10):
            assert answer["plan"] == coordinator.parts.plan.wire("r")

    asyncio.run(order())


def test_a_poll_ends_when_its_own_wait_does(target: Target) -> None:
    async def wait() -> None:
        relay = Relay(target)
        await relay.record(sender(0), [event("begin", 1)], None)
        long = asyncio.create_task(relay.poll(sender(0), 0, [], 20.0))
        short = await asyncio.wait_for(relay.poll(sender(0), 0, [], 0.05), 10)
        assert (short["receipts"], short["plan"]) == ({}, None)
        assert not long.done()
        long.cancel()

    asyncio.run(wait())


def test_a_lease_counts_from_when_the_rank_called(store: SqlStore, tmp_path: Path) -> None:
    now = 100.0
    coordinator = coordinator_of(
        store, tmp_path, poll_seconds=20.0, lease_seconds=45.0, mono=lambda: now
    )

    def polled(ago: float | None) -> RelayedPoll:
        return {
            "sender": sender(0), "revision": 0, "unreceipted": [], "wait": 0.0, "called_ago": ago,
        }  # fmt: skip

    async def poll() -> None:
        nonlocal now
        await coordinator.parts.intake.record(sender(0), [event("begin", 1)])
        process = coordinator.parts.state.registry.processes["i0"]
        assert process.lease_until == 145.0
        now = 120.0
        for ago, until in ((30.0, 145.0), (None, 145.0), (5.0, 160.0), (0.0, 165.0)):
            await coordinator.poll_together(polls=[polled(ago)], wait=0.0)
            assert process.lease_until == until

    asyncio.run(poll())


def test_ranks_are_asked_to_call_a_relay_once_they_are_many(
    store: SqlStore, tmp_path: Path
) -> None:
    now = 100.0
    coordinator = coordinator_of(store, tmp_path, relay_ranks=3, mono=lambda: now)

    async def answers(ranks: int) -> list[Mapping[str, object]]:
        nonlocal now
        for rank in range(ranks):
            who = Sender(f"i{rank}", "r", "a", "actor", rank, node_id=f"n{rank % 2}").wire()
            await coordinator.parts.intake.record(who, [event("begin", 1)])
        now += 6.0
        await coordinator.check()
        return [
            await coordinator.parts.intake.record(sender(0), [event("log", 2)]),
            await coordinator.parts.intake.poll(sender(0), 0, [], 0.0),
        ]

    assert all("relay" not in each for each in asyncio.run(answers(2)))
    assert coordinator.parts.load.relay_nodes == set()
    assert all(each["relay"] is True for each in asyncio.run(answers(3)))
    assert coordinator.parts.load.relay_nodes == {"n0", "n1"}
    assert 0.0 < coordinator.parts.load.gather_seconds < 0.1


KINDS = st.sampled_from(["begin", "end", "log", "nothing"])
CALLS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.lists(KINDS, max_size=3)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@given(calls=CALLS)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_relayed_is_stored_and_answered_as_what_is_not(
    calls: list[list[tuple[int, list[str]]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each inner list of batches comes at the same time."""

    def told(relayed: bool) -> tuple[list[object], list[list[dict[str, Any]]]]:
        folder = tmp_path_factory.mktemp("relayed" if relayed else "direct")
        store = SqlStore(url_of(folder))
        store.open()
        seqs = dict.fromkeys(range(3), 0)

        async def send() -> list[object]:
            target = Target(coordinator_of(store, folder))
            relay = Relay(target)
            answers: list[object] = []
            for together in calls:
                batches: list[tuple[int, list[object]]] = []
                for rank, kinds in together:
                    events: list[object] = []
                    for kind in kinds:
                        seqs[rank] += 1
                        events.append(event(kind, seqs[rank], scalars={"loss": 1.0}))
                    batches.append((rank, events))
                if relayed:
                    sent = [relay.record(sender(rank), events, None) for rank, events in batches]
                    answers += await asyncio.gather(*sent)
                else:
                    for rank, events in batches:
                        answers.append(
                            await target.coordinator.parts.intake.record(sender(rank), events)
                        )
            return [(each["received"], each["refused"]) for each in cast("Any", answers)]

        answers = asyncio.run(send())
        tables = [
            # The rows of one transaction are in no order.
            sorted((_settled(row) for row in rows_of(store, name)), key=repr)
            for name in ("processes", "stages", "scalars", "steps")
        ]
        store.close()
        return answers, tables

    assert told(relayed=True) == told(relayed=False)


def _settled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the times of the service's own clock."""
    return {name: value for name, value in row.items() if not name.endswith("_wall")}
