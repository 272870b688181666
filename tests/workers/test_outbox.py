"""The outbox stays within its bounds, and whatever it drops is counted exactly."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stagescope_wire.framing import WirePayload
from stagescope_wire.schema import BEGIN, DROPPED, END, FINISH, HELLO, LOG
from stagescope_workers.device import PinnedPool
from stagescope_workers.probe.draft import Draft
from stagescope_workers.transport.outbox import LINGER, Entry, Outbox

UNIT = 8 * 10  # bytes of the smallest payload below


def draft_of(units: int) -> Draft:
    draft = Draft(PinnedPool())
    assert not list(draft.add({"old_log_probs": np.zeros(10 * units - 1)}))
    assert draft.nbytes == UNIT * units
    return draft


def put_end(outbox: Outbox, units: int, step: int = 0) -> Entry:
    draft = draft_of(units)
    fields = {"step": step, "stage": "s", "payload": draft.description(), "scalars": {}}
    return outbox.put(END, fields, draft=draft)


def send(outbox: Outbox) -> list[Entry]:
    batch = outbox.next_batch()
    for entry in batch:
        outbox.pack(entry, lambda payload: payload)
    outbox.offer(batch)
    return batch


def test_oldest_body_not_on_offer_goes_first_and_its_end_stays() -> None:
    outbox = Outbox(max_bytes=3 * UNIT)
    entries = [put_end(outbox, 1, step) for step in range(4)]
    assert [entry.has_body for entry in entries] == [False, True, True, True]
    assert entries[0].fields["payload"] is None
    assert "bytes were waiting" in entries[0].fields["payload_dropped"]["reason"]
    assert outbox.dropped == Counter(payload=1)
    assert outbox.waiting == 4


def test_body_on_offer_stays_and_the_new_one_goes() -> None:
    outbox = Outbox(max_bytes=2 * UNIT)
    put_end(outbox, 2)
    send(outbox)
    late = put_end(outbox, 1)
    assert not late.has_body
    outbox.acknowledge()
    assert outbox.bytes == 2 * UNIT  # pinned until the payload's receipt, not only the event's
    outbox.settle({1: "ingested"})
    assert outbox.bytes == 0
    assert put_end(outbox, 2).has_body


def test_payload_over_the_whole_bound_drops_nothing_else() -> None:
    outbox = Outbox(max_bytes=2 * UNIT)
    kept = put_end(outbox, 1)
    assert not put_end(outbox, 3).has_body
    assert kept.has_body


@pytest.mark.parametrize(
    ("limit", "kinds", "left", "dropped"),
    [
        # Scalars go before BEGIN and END, and new ones push out no event.
        (3, [BEGIN, LOG, END, BEGIN], [BEGIN, END, BEGIN], Counter(event=1, scalar=2)),
        (1, [BEGIN, LOG], [BEGIN], Counter(event=1, scalar=2)),
        (1, [HELLO, BEGIN, FINISH, BEGIN], [HELLO, FINISH], Counter(event=2)),
    ],
)
def test_which_event_is_dropped(
    limit: int, kinds: list[str], left: list[str], dropped: Counter[str]
) -> None:
    outbox = Outbox(max_events=limit)
    for kind in kinds:
        outbox.put(kind, {"scalars": {"loss": 1.0, "kl": 2.0}} if kind == LOG else {})
    assert [entry.kind for entry in outbox.next_batch()] == left
    assert outbox.dropped == dropped


def test_drops_are_reported_with_work_count_and_bytes() -> None:
    outbox = Outbox(max_bytes=UNIT)
    for step in (7, 7, 8):
        put_end(outbox, 1, step)
    outbox.report_drops()
    assert not outbox.has_drops
    reports = [entry.fields for entry in outbox.next_batch() if entry.kind == DROPPED]
    assert [(r["what"], r["step"], r["count"], r["bytes"]) for r in reports] == [
        ("payload", 7, 2, 2 * UNIT)
    ]
    assert reports[0]["stage"] == "s"


def test_details_of_drops_are_bounded_and_counts_stay_exact() -> None:
    outbox = Outbox(max_bytes=0)
    for step in range(1500):
        put_end(outbox, 1, step)
    outbox.report_drops()
    reports = []
    while batch := outbox.next_batch():
        reports += [entry.fields for entry in batch if entry.kind == DROPPED]
        outbox.acknowledge()
    assert len(reports) == 1001
    assert sum(report["count"] for report in reports) == 1500
    assert [report["count"] for report in reports if "step" not in report] == [500]


def test_a_beginning_or_an_end_alone_waits_a_moment_for_company() -> None:
    outbox = Outbox()
    first = outbox.put(BEGIN, {"step": 1, "stage": "s"})
    assert outbox.due == first.mono + LINGER
    outbox.put(BEGIN, {"step": 1, "stage": "inner"})
    outbox.put(END, {"step": 1, "stage": "inner"})
    assert outbox.due == first.mono + LINGER  # no company puts it off
    outbox.put(LOG, {"scalars": {}})
    assert outbox.due == 0.0
    outbox.put(BEGIN, {"step": 2, "stage": "s"})
    assert outbox.due == 0.0
    assert len(outbox.next_batch()) == 5
    late = outbox.put(BEGIN, {"step": 3, "stage": "s"})
    assert outbox.due == late.mono + LINGER
    outbox.put_back()
    assert outbox.due == 0.0  # what was offered before is late as it is
    outbox.next_batch()
    outbox.acknowledge()
    end = outbox.put(END, {"step": 3, "stage": "s"})
    outbox.put(BEGIN, {"step": 3, "stage": "next"})
    assert outbox.due == end.mono + LINGER
    put_end(outbox, 1, 3)
    assert outbox.due == 0.0  # tensors wait for nothing


def test_batch_in_flight_is_the_same_until_it_ends() -> None:
    outbox = Outbox()
    outbox.put(BEGIN, {})
    first = [entry.seq for entry in outbox.next_batch()]
    outbox.put(BEGIN, {})
    assert [entry.seq for entry in outbox.next_batch()] == first
    outbox.put_back()
    assert [entry.seq for entry in outbox.next_batch()] == [1, 2]


def test_batches_keep_to_events_and_bytes() -> None:
    outbox = Outbox()
    for _ in range(3):
        put_end(outbox, 2)
    assert len(outbox.next_batch(limit=2)) == 2
    outbox.acknowledge()
    outbox.put_back()
    put_end(outbox, 2)
    assert len(outbox.next_batch(limit_bytes=1)) == 1


def test_body_that_cannot_be_packed_is_dropped_and_its_event_goes() -> None:
    outbox = Outbox()
    entry = put_end(outbox, 1)

    def full(payload: WirePayload) -> object:
        raise OSError(28, os.strerror(28))

    [entry] = outbox.next_batch()
    outbox.pack(entry, full)
    assert not entry.has_body
    assert "No space left" in entry.fields["payload_dropped"]["reason"]
    outbox.acknowledge()
    assert outbox.is_empty


def test_unreceipted_payloads_are_offered_again_in_order() -> None:
    outbox = Outbox()
    for _ in range(3):
        put_end(outbox, 1)
    send(outbox)
    outbox.acknowledge()
    outbox.settle({2: "ingested"})
    assert outbox.unreceipted() == [1, 3]
    outbox.put(BEGIN, {})
    assert outbox.offer_again() == 2
    assert [entry.seq for entry in outbox.next_batch()] == [1, 3, 4]


@pytest.mark.parametrize("state", ["ingested", "lost", "refused", "dropped"])
def test_any_receipt_lets_the_body_go(state: str) -> None:
    outbox = Outbox()
    put_end(outbox, 1)
    send(outbox)
    outbox.acknowledge()
    outbox.settle({1: state})
    assert outbox.is_empty
    assert outbox.bytes == 0


class OutboxMachine(RuleBasedStateMachine):
    """Any order of puts, sends, failures and receipts: bounds hold, and the sums come out."""

    def __init__(self) -> None:
        super().__init__()
        self.max_events, self.max_bytes = 6, 4 * UNIT
        self.outbox = Outbox(max_bytes=self.max_bytes, max_events=self.max_events)
        self.put: Counter[str] = Counter()
        self.arrived: Counter[str] = Counter()
        self.seen: set[int] = set()
        self.reported: Counter[str] = Counter()

    @rule(step=st.integers(0, 3), units=st.integers(1, 5))
    def end(self, step: int, units: int) -> None:
        put_end(self.outbox, units, step)
        self.put.update(event=1, payload=1)

    @rule(kind=st.sampled_from([BEGIN, LOG]), scalars=st.integers(1, 3))
    def event(self, kind: str, scalars: int) -> None:
        named = {str(i): 0.0 for i in range(scalars)} if kind == LOG else {}
        self.outbox.put(kind, {"step": 0, "scalars": named})
        self.put.update(event=1, scalar=len(named))

    @rule()
    def deliver(self) -> None:
        for entry in send(self.outbox):
            if entry.kind == DROPPED:
                self.reported[entry.fields["what"]] += entry.fields["count"]
            elif entry.seq not in self.seen:
                self.seen.add(entry.seq)
                self.arrived.update(event=1, scalar=len(entry.fields["scalars"]))
                self.arrived["payload"] += entry.has_body
        self.outbox.acknowledge()

    @rule()
    def fail(self) -> None:
        send(self.outbox)
        self.outbox.put_back()

    @rule(data=st.data())
    def receipt(self, data: st.DataObject) -> None:
        if waiting := self.outbox.unreceipted():
            self.outbox.settle({data.draw(st.sampled_from(waiting)): "ingested"})

    @rule()
    def report(self) -> None:
        self.outbox.report_drops()

    @invariant()
    def within_bounds(self) -> None:
        assert 0 <= self.outbox.bytes <= self.max_bytes
        reports = sum(entry.kind == DROPPED for entry in self.outbox._queued.values())
        assert self.outbox.waiting - reports <= self.max_events

    def teardown(self) -> None:
        """Deliver the rest: what arrived and what was reported as dropped is what was put."""
        while self.outbox.waiting or self.outbox.has_drops:
            self.outbox.report_drops()
            self.deliver()
        self.outbox.settle(dict.fromkeys(self.outbox.unreceipted(), "ingested"))
        assert self.outbox.is_empty
        assert self.outbox.bytes == 0
        assert self.reported == self.outbox.dropped
        for what in ("event", "scalar", "payload"):
            assert self.arrived[what] + self.reported[what] == self.put[what], what


OutboxMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOutboxMachine = OutboxMachine.TestCase
