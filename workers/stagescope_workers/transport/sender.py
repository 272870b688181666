"""The one background thread of a probe: it owns all traffic, and training never waits for it.

Calls are futures, so a hung service blocks nothing. The thread sleeps on a condition that answers
notify. Between answers it finishes device copies and searches for the coordinator. At any moment
at most one batch, one long poll and one poll for receipts are pending. A call to an actor that
still has its name is never repeated, because calls would pile up in a hung actor. Its future is
kept until the actor answers, dies or another actor has its name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, cast

from stagescope_wire.errors import Unauthorized, Unreachable
from stagescope_workers.device import PinnedPool
from stagescope_workers.transport.calls import (
    MAX_BACKOFF,
    Backoff,
    Call,
    Clock,
    PlanHolder,
    SenderHooks,
    ServiceAnswer,
    ServiceLink,
    is_refusal,
    requested_pause,
)
from stagescope_workers.transport.outbox import BATCH_EVENTS, Outbox

_log = logging.getLogger("stagescope.workers")

POLL_SECONDS: Final = 20.0
RECEIPT_POLL_SECONDS: Final = 3.0
CALL_SECONDS: Final = 10.0
"""Seconds without an answer after which the coordinator's name is looked up again."""
UNCONNECTED_SECONDS: Final = 10.0
_CLOCK_SECONDS: Final = 1.0
"""Seconds that the first batch waits for the answer to the first poll. The answer contains the
offset of the service's clock, which dates the first events."""
_UNAUTHORIZED_SECONDS: Final = 10.0
"""Seconds to wait after a refused access token, which only a person can change."""
_MIN_POLL_INTERVAL: Final = 0.05
_MAX_REFUSALS: Final = 5
_DEVICE_SECONDS: Final = 0.005
_MAX_SLEEP: Final = 1.0


class EventSender:
    """Sends an outbox to the service; receives receipts, the plan and the service's clock."""

    def __init__(
        self,
        outbox: Outbox,
        hooks: SenderHooks,
        *,
        plan: PlanHolder,
        pool: PinnedPool,
        after: EventSender | None = None,
    ) -> None:
        """Create a sender of `outbox`; `start` begins its thread, which finishes copies of `pool`.

        It sends after `after`, an earlier sender whose `leave` is called.
        """
        self._outbox = outbox
        self._hooks = hooks
        self._plan = plan
        self._pool = pool
        self._after = after
        self._next: EventSender | None = None
        self._unconnected_at: float | None = time.monotonic() + UNCONNECTED_SECONDS
        self.problem = ""
        """The error of the last call; empty after an answer."""
        self._longest_sleep = _MAX_SLEEP
        self.clock = Clock()
        self.coordinator: str | None = None
        self.answers = 0
        self.attempt_key: str | None = None
        """The key that the service gave the attempt of a process without one."""
        self.is_unauthorized = False
        """Whether the service refused the access token of the last call; only people change it."""
        self.has_address = False
        """Whether a search found where a service should answer; it may be down at the moment."""
        self._search = 1  # the number of the current search
        self._searched = 0  # the number of the last search that ended
        self._condition = threading.Condition()
        self._awake = False
        self._stopping = False
        self._prepared = False
        self.link: ServiceLink | None = None
        """The open link to the service; None while there is none."""
        self._is_new_link = True
        self._is_announced = False
        self._batches_after = 0.0
        """When the first batch may be sent, if no answer has given the service's clock yet."""
        self._batch_limit = BATCH_EVENTS
        self._refusals = 0
        self._sending: Call | None = None
        self._polling: Call | None = None
        self._receipts: Call | None = None
        self._polled_receipts: set[int] = set()
        self._poll_seconds = POLL_SECONDS
        self._connecting = Backoff(first=0.1)
        self._sends = Backoff()
        self._polls = Backoff()
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="stagescope", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread."""
        with self._condition:
            self._awake = True
            self._condition.notify_all()

    def wake_if_sendable(self) -> None:
        """Wake the thread after an event was queued, but only if it can be sent now.

        Waking for nothing costs the training thread: the two would contend for the interpreter.
        An event that was missed here is sent when the pending answer or the next search ends.
        """
        if self.link is None or self._sending is not None:
            if self._pool.reserved == 0:
                return
        elif time.monotonic() < self._sends.until:
            return
        self.wake()

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait, `timeout` seconds at most, until `done()`; checked after each cycle."""
        with self._condition:
            return self._condition.wait_for(done, timeout)

    def restart_search(self) -> None:
        """Search for the service now, if there is no link: earlier results are stale."""
        self._search += 1
        if self.is_unauthorized:  # the token may be another one by now: it is tried once more
            self.is_unauthorized = False
            self._sends.succeed()
            self._polls.succeed()
        if self.link is None:
            self._connecting.succeed()
        self.wake()

    @property
    def has_searched(self) -> bool:
        """Whether a search for the service ended since the start, or since `restart_search`."""
        return self._searched == self._search

    def stop(self) -> None:
        """End the thread after its current cycle; does not wait."""
        self._stopping = True
        self.wake()

    def leave(self, following: EventSender) -> None:
        """End the thread once everything is acknowledged; `following` sends after that."""
        self._next = following
        self.wake()

    @property
    def has_unsent(self) -> bool:
        """Whether an event has no receipt yet; receipts of payloads do not count."""
        return self._outbox.waiting > 0 and not self._stopping

    @property
    def has_left(self) -> bool:
        """Whether everything was acknowledged, payloads and reports of drops included."""
        return self._outbox.is_empty and not self._outbox.has_drops

    @property
    def is_connected(self) -> bool:
        """Whether the service answered the last call."""
        return self.link is not None and self.answers > 0

    def describe(self, *, closed: bool) -> str:
        """Return a description of the connection; `closed`: the probe is closed."""
        link = self.link
        if link is not None and self.answers:
            return f"connected to {link.address}"
        in_time = not self.has_searched or self._unconnected_at is not None
        if in_time and not (closed or self.answers or self.problem):
            # There was no time yet for an answer, or for this process to join its Ray cluster.
            activity = "looking for a service" if link is None else f"calling {link.address}"
            return f"not connected yet, {activity}"
        lost = "the service stopped answering" if self.answers else "no service was found"
        if link is None:
            return f"not connected, {self.problem or lost}"
        return f"not connected to {link.address}: {self.problem or 'no answer'}"

    def _run(self) -> None:
        while not (self._stopping or (self._next is not None and self.has_left)):
            try:
                self._run_cycle()
            except Unreachable as error:  # as where this process has just left its Ray cluster
                self.problem = str(error)
            except Exception:
                # Only this thread can send the queue: it must survive any error.
                self._warn("cycle", "a cycle of the background thread failed", exc_info=True)
                self._sends.fail()
                self._sleep(MAX_BACKOFF)
            with self._condition:
                self._condition.notify_all()
            if self._next is not None:
                self._next.wake()
        if self.link is not None:
            self.link.close()

    def _run_cycle(self) -> None:
        self._sleep(self._idle_seconds())
        if not self._prepared:
            self._prepared = True
            self._hooks.prepare()
        self._pool.settle()
        if self.answers:
            self._longest_sleep = min(self._hooks.feed_watchdog(), _MAX_SLEEP)
        elif self._unconnected_at is not None and time.monotonic() >= self._unconnected_at:
            self._unconnected_at = None
            self._hooks.on_unconnected(self.problem)
        if self.link is not None and not self.link.is_open:
            self._put_back_and_lose_link()
        if self.link is None and not self._find_link():
            return
        self._handle_answers()
        self._make_calls()

    def _sleep(self, seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._awake, seconds)
            self._awake = False

    def _idle_seconds(self) -> float:
        if not self._prepared:
            return 0.0
        if self._pool.settle():
            return _DEVICE_SECONDS
        now = time.monotonic()
        if self._after is not None and self._after.has_unsent:
            return self._longest_sleep
        if self.link is None:
            return max(0.0, min(self._connecting.until - now, self._longest_sleep))
        due = [now + self._longest_sleep]
        if self._sending is None and self._outbox.waiting:
            due.append(max(self._sends.until, self._outbox.due, self._batches_after))
        if self._polling is None or (self._receipts is None and self._has_unpolled_receipts()):
            due.append(self._polls.until)
        return max(0.0, min(due) - now)

    def _find_link(self) -> bool:
        if self._after is not None and self._after.has_unsent:
            return False
        self._after = None
        if time.monotonic() < self._connecting.until:
            return False
        search = self._search
        try:
            self.link = self._hooks.connect()
        except Exception as error:
            self.problem = f"{error!s:.1000}"
            self._warn("connect", f"looking for the service failed: {error!r:.300}")
        self._searched = search
        if self.link is None:
            self._connecting.fail()
            return False
        self._connecting.succeed()
        self._is_new_link = self.has_address = True
        return True

    # --- answers --------------------------------------------------------------------------

    def _handle_answers(self) -> None:
        self._check_slow_calls()
        if (call := self._sending) is not None and call.future.done():
            self._sending = None
            self._handle_batch_answer(call)
        if (call := self._polling) is not None and call.future.done():
            self._polling = None
            self._handle_poll_answer(call)
        if (call := self._receipts) is not None and call.future.done():
            self._receipts, self._polled_receipts = None, set()
            self._handle_poll_answer(call)

    def _check_slow_calls(self) -> None:
        """Look for another way to the service where a call has had no answer for long.

        A poll waits longer than that, and yet what it goes through must answer: the lease ends soon
        after an unanswered poll.
        """
        now = time.monotonic()
        for call in (self._sending, self._polling, self._receipts):
            if call is None or call.future.done() or now - call.checked_at < CALL_SECONDS:
                continue
            call.checked_at = now
            is_batch = call is self._sending
            if is_batch:
                self._warn("slow", "the service has not answered for %.0f s", now - call.mono)
            link = self.link
            if link is None:
                continue
            if link is not call.link or link.is_silent() or (is_batch and link.moved()):
                self._put_back_and_lose_link()

    def _put_back_and_lose_link(self) -> None:
        if self._sending is not None:
            self._sending = None
            self._outbox.put_back()
        self._lose_link()

    def _lose_link(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None
        self._polling = self._receipts = None
        self._polled_receipts = set()

    def _answer(self, call: Call, backoff: Backoff, activity: str) -> ServiceAnswer | None:
        """Return the service's answer; None where it failed, in which case the link is dropped."""
        try:
            answer = cast("ServiceAnswer", call.future.result())
        except Exception as error:
            self.problem = _in_one_line(error)
            self.is_unauthorized = isinstance(error, Unauthorized)
            self._warn(
                "token" if self.is_unauthorized else activity,
                f"{activity} failed, and is tried again: {self.problem}",
            )
            backoff.fail()
            if self.is_unauthorized:
                backoff.hold(_UNAUTHORIZED_SECONDS)
            self._connecting.until = backoff.until
            if is_refusal(error):
                self._refusals += activity == "sending"
            else:
                self._refusals = 0
                self._lose_link()
            return None
        self.is_unauthorized = False
        if (reason := answer.get("not_ready")) is not None:
            self._warn("not_ready", f"the service is not ready: {reason}")
            backoff.fail()
            backoff.hold(requested_pause(answer))
            return None
        backoff.succeed()
        self._connecting.succeed()
        self.answers += 1
        self.problem = ""
        if "wall" in answer:
            self.clock.add(
                sent=call.wall,
                duration=call.answered - call.mono,
                service=float(answer["wall"]),
                mono=call.answered,
            )
        self.attempt_key = answer.get("attempt_key", self.attempt_key)
        self._outbox.settle(answer.get("receipts") or {})
        self._apply_plan(answer)
        self._note_coordinator(answer)
        if self._outbox.has_drops:
            self._outbox.report_drops()
        return answer

    def _handle_batch_answer(self, call: Call) -> None:
        answer = self._answer(call, self._sends, "sending")
        if answer is None:
            if self._refusals >= _MAX_REFUSALS and self._batch_limit == 1:
                self._outbox.discard("the service cannot take it")
                self._refusals = 0
            else:
                # One event may be the cause: smaller batches isolate it.
                smaller = max(1, self._batch_limit // 2)
                self._batch_limit = smaller if self._refusals else BATCH_EVENTS
                self._outbox.put_back()
            return
        self._refusals = 0
        self._batch_limit = BATCH_EVENTS
        # After `_note_coordinator`: what this coordinator just accepted needs no second offer.
        self._outbox.acknowledge()
        # Again, now that the batch's own bodies wait for their receipts.
        self._outbox.settle(answer.get("receipts") or {})
        refused = answer.get("refused") or {}
        if refused:
            self._warn("refused", f"the service refused {len(refused)} events: {refused!r:.300}")
            self._outbox.refuse(refused)
        if pause := requested_pause(answer):
            self._warn("behind", f"the service is behind: events are sent every {pause:.1f} s")
            self._sends.hold(pause)

    def _handle_poll_answer(self, call: Call) -> None:
        self._batches_after = 0.0
        answer = self._answer(call, self._polls, "polling")
        if answer is None:
            return
        # A service that answers at once must not be polled in a tight loop.
        self._polls.until = time.monotonic() + _MIN_POLL_INTERVAL
        if not self._is_announced:
            self._is_announced = True
            self._hooks.on_connected(call.link.address, answer.get("page") or call.link.page)
        if requests := answer.get("requests"):
            self._hooks.on_requests(requests)
        seconds = answer.get("poll_seconds")
        if isinstance(seconds, int | float) and 0 < seconds <= 600:
            self._poll_seconds = float(seconds)

    def _apply_plan(self, answer: ServiceAnswer) -> None:
        """Activate the plan of an answer, unless a later answer already brought a newer one.

        Another coordinator may have a lower revision: its catalogue may come from a backup.
        """
        plan = answer.get("plan")
        if plan is None:
            return
        is_older = plan["revision"] < self._plan.revision
        if not (is_older and answer.get("coordinator") == self.coordinator):
            self._plan.apply(plan)

    def _note_coordinator(self, answer: ServiceAnswer) -> None:
        """Offer unreceipted payloads again where another coordinator answers than before."""
        name = answer.get("coordinator")
        if name is None or name == self.coordinator:
            return
        if self.coordinator is not None:
            offered = self._outbox.offer_again()
            _log.info("a new coordinator answers; %d payloads are offered again", offered)
        self.coordinator = name

    # --- calls ----------------------------------------------------------------------------

    def _make_calls(self) -> None:
        link, now = self.link, time.monotonic()
        if link is None:
            return
        if self._is_new_link and not self.answers:
            self._batches_after = now + _CLOCK_SECONDS
        due = max(self._sends.until, self._outbox.due, self._batches_after)
        if self._sending is None and now >= due and self._outbox.waiting:
            self._send(link)
        if self._polling is None and now >= self._polls.until:
            # The first poll returns at once: it identifies the coordinator.
            self._polling = self._poll(link, 0.0 if self._is_new_link else self._poll_seconds)
            self._is_new_link = False
        if self._receipts is None and now >= self._polls.until and self._has_unpolled_receipts():
            self._receipts = self._poll(link, RECEIPT_POLL_SECONDS)

    def _has_unpolled_receipts(self) -> bool:
        """Return whether receipts are missing that no pending poll requests."""
        return not self._polled_receipts.issuperset(self._outbox.unreceipted())

    def _send(self, link: ServiceLink) -> None:
        batch = self._outbox.next_batch(limit=self._batch_limit)
        if not batch:  # every queued event waits for a device
            self._sends.until = time.monotonic() + _DEVICE_SECONDS
            return
        try:
            for entry in batch:
                self._outbox.pack(entry, link.pack)
            self._outbox.offer(batch)
            payloads = {entry.seq: entry.packed for entry in batch if entry.packed is not None}
            events = [entry.wire() for entry in batch]
            sender = self._hooks.sender(self.clock, self._plan.revision)
            future = link.record(sender, events, payloads)
        except Exception:
            self._outbox.put_back()
            self._lose_link()
            self._sends.fail()
            raise
        self._sending = Call(future, link, self.wake)

    def _poll(self, link: ServiceLink, wait: float) -> Call:
        unreceipted = self._outbox.unreceipted()
        self._polled_receipts.update(unreceipted)
        sender = self._hooks.sender(self.clock, self._plan.revision)
        return Call(link.poll(sender, self._plan.revision, unreceipted, wait), link, self.wake)

    def _warn(self, kind: str, message: str, *values: object, exc_info: bool = False) -> None:
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        _log.log(level, message, *values, exc_info=exc_info)


def _in_one_line(error: Exception) -> str:
    # Ray lists the actor's class, id, pid and so on below the first line.
    return f"{type(error).__name__}: {' '.join(str(error).split()):.1000}"
