"""The one background thread of a probe: it owns all traffic, and training never waits for it.

Calls are futures, so a hung service hangs nothing: the thread sleeps on a condition that answers
wake, and between them it finishes device copies and looks for the coordinator. At any moment there
is at most one batch, one long poll and one poll for receipts on the way. A call to an actor that
still has its name is never made twice (the answers would pile up in a hung actor): its future is
kept until the actor answers, dies or another one takes its name.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from stagescope.wire.errors import StagescopeError, Unauthorized
from stagescope_workers.device import PinnedPool
from stagescope_workers.transport.calls import MOST_BACKOFF, Backoff, Call, Clock
from stagescope_workers.transport.link import Link
from stagescope_workers.transport.outbox import BATCH_EVENTS, Entry, Outbox

_log = logging.getLogger("stagescope.workers")

POLL_SECONDS: Final = 20.0
RECEIPT_POLL_SECONDS: Final = 3.0
CALL_SECONDS: Final = 10.0
"""After so long without an answer the coordinator's name is looked up again."""
UNCONNECTED_SECONDS: Final = 10.0
_UNAUTHORIZED_SECONDS: Final = 10.0
"""After a refused token: it changes by hand alone."""
_LEAST_BETWEEN_POLLS: Final = 0.05
_MOST_REFUSALS: Final = 5
_DEVICE_SECONDS: Final = 0.005
_LONGEST_PAUSE: Final = 1.0
MOST_PAUSE: Final = 60.0
"""A service that is behind may hold a sender's batches back for so many seconds."""


class PlanHolder(Protocol):
    """Where the plan of each poll goes."""

    @property
    def revision(self) -> int:
        """The revision that this process has applied."""
        ...

    def apply(self, plan: Mapping[str, Any]) -> None:
        """Put a plan in force."""
        ...


class EventSender:
    """Carries an outbox to the service and brings receipts, the plan and the clock back."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        connect: Callable[[], Link | None],
        sender: Callable[[Clock], tuple[Any, ...]],
        prepare: Callable[[], None],
        plan: PlanHolder,
        pool: PinnedPool,
        asked: Callable[[Sequence[Mapping[str, Any]]], None],
        alive: Callable[[], float],
        unconnected: Callable[[str], None],
        after: EventSender | None = None,
    ) -> None:
        """Make a courier; `start` begins its thread.

        Args:
            outbox: what is to be sent.
            connect: looks for the service once; None while there is none.
            sender: the sender's tuple, asked before each batch.
            prepare: called once, in the thread, before anything else.
            plan: told every new plan.
            pool: device copies to finish.
            asked: told what the service asks for in a poll's answer.
            alive: called as long as the thread runs, once a service was reached; returns the
                seconds after which it is to be called again.
            unconnected: told once, with the last problem, where no service has answered for
                `UNCONNECTED_SECONDS`.
            after: whose events go first, all of them; it is told to `leave`.
        """
        self._outbox = outbox
        self._connect = connect
        self._sender = sender
        self._prepare = prepare
        self._plan = plan
        self._pool = pool
        self._asked_for = asked
        self._alive = alive
        self._unconnected = unconnected
        self._after = after
        self._next: EventSender | None = None
        self._leaving = False
        self._unconnected_at: float | None = time.monotonic() + UNCONNECTED_SECONDS
        self.problem = ""
        """What the last call failed with; empty after an answer."""
        self._longest_pause = _LONGEST_PAUSE
        self.clock = Clock()
        self.coordinator: str | None = None
        self.answers = 0
        self._search = 1  # the number of the search under way, and of the last that ended
        self._searched = 0
        self._condition = threading.Condition()
        self._awake = False
        self._stopping = False
        self._prepared = False
        self._link: Link | None = None
        self._is_new_link = True
        self._batch_limit = BATCH_EVENTS
        self._refusals = 0
        self._sending: Call | None = None
        self._sending_by: Link | None = None
        self._polling: Call | None = None
        self._receipts: Call | None = None
        self._asked: set[int] = set()
        self._poll_seconds = POLL_SECONDS
        self._connecting = Backoff(first=0.1)
        self._sends = Backoff()
        self._polls = Backoff()
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="stagescope", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def wake(self) -> None:
        """There is something to do."""
        with self._condition:
            self._awake = True
            self._condition.notify_all()

    def notice(self) -> None:
        """Something was put into the outbox; wake only if it can be sent now.

        Waking for nothing costs the training thread: the two would contend for the interpreter.
        What is not noticed here is found when the answer under way, or the next search, is over.
        """
        if self._link is None or self._sending is not None:
            if self._pool.taken == 0:
                return
        elif time.monotonic() < self._sends.until:
            return
        self.wake()

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait, `timeout` seconds at most, until `done()`; checked after each turn."""
        with self._condition:
            return self._condition.wait_for(done, timeout)

    def search_anew(self) -> None:
        """Look for the service now, if there is no way to it: what was found before is stale."""
        self._search += 1
        if self._link is None:
            self._connecting.succeed()
        self.wake()

    @property
    def has_looked(self) -> bool:
        """Say whether the service was looked for since the start, or since `search_anew`."""
        return self._searched == self._search

    def stop(self) -> None:
        """End the thread after its present turn; waits for nothing."""
        self._stopping = True
        self.wake()

    def leave(self, following: EventSender) -> None:
        """End the thread once everything is acknowledged; `following` sends after that."""
        self._leaving, self._next = True, following
        self.wake()

    @property
    def has_unsent(self) -> bool:
        """Say whether an event is still to be acknowledged; payloads may be on their way."""
        return self._outbox.waiting > 0 and not self._stopping

    @property
    def has_left(self) -> bool:
        """Say whether nothing that it was given is still to be acknowledged."""
        return self._outbox.is_empty and not self._outbox.has_drops

    @property
    def is_connected(self) -> bool:
        """Say whether the service answered the last call."""
        return self._link is not None and self.answers > 0

    def describe(self, *, closed: bool) -> str:
        """Return in words how the way to the service stands; `closed`: nobody waits for it."""
        link = self._link
        if self.is_connected and link is not None:
            return f"connected to {link.address}"
        in_time = not self.has_looked or self._unconnected_at is not None
        if in_time and not (closed or self.answers or self.problem):
            # Nobody has had the time to answer, or this process to join its Ray cluster.
            doing = "looking for a service" if link is None else f"calling {link.address}"
            return f"not connected yet, {doing}"
        lost = "the service answers no more" if self.answers else "no service was found"
        wrong = lost if link is None else f"no answer from {link.address}"
        return f"not connected, {wrong}" + (f" ({self.problem})" if self.problem else "")

    @property
    def link(self) -> Link | None:
        """The way to the service that is open now; None while none was found."""
        return self._link

    def _run(self) -> None:
        while not (self._stopping or (self._leaving and self.has_left)):
            try:
                self._turn()
            except Exception:
                # The thread is the only way out for what waits: it must outlive any mistake.
                self._warn("turn", "a turn of the background thread failed", exc_info=True)
                self._sends.fail()
                self._sleep(MOST_BACKOFF)
            with self._condition:
                self._condition.notify_all()
            if self._next is not None:
                self._next.wake()
        if self._link is not None:
            self._link.close()

    def _turn(self) -> None:
        self._sleep(self._pause())
        if not self._prepared:
            self._prepared = True
            self._prepare()
        self._pool.settle()
        if self.answers:
            self._longest_pause = min(self._alive(), _LONGEST_PAUSE)
        elif self._unconnected_at is not None and time.monotonic() >= self._unconnected_at:
            self._unconnected_at = None
            self._unconnected(self.problem)
        if self._link is None and not self._join():
            return
        self._collect()
        self._submit()

    def _sleep(self, seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._awake, seconds)
            self._awake = False

    def _pause(self) -> float:
        """Return how long there is nothing to do unless something wakes us."""
        if not self._prepared:
            return 0.0
        if self._pool.settle():
            return _DEVICE_SECONDS
        now = time.monotonic()
        if self._after is not None and self._after.has_unsent:
            return self._longest_pause
        if self._link is None:
            return max(0.0, min(self._connecting.until - now, self._longest_pause))
        due = [now + self._longest_pause]
        if self._sending is None and self._outbox.waiting:
            due.append(max(self._sends.until, self._outbox.due))
        if self._polling is None or (self._receipts is None and self._unasked()):
            due.append(self._polls.until)
        return max(0.0, min(due) - now)

    def _join(self) -> bool:
        if self._after is not None and self._after.has_unsent:
            return False
        self._after = None
        if time.monotonic() < self._connecting.until:
            return False
        search = self._search
        try:
            self._link = self._connect()
        except Exception as error:
            self.problem = f"{error!s:.300}"
            self._warn("connect", f"looking for the service failed: {error!r:.300}")
        self._searched = search
        if self._link is None:
            self._connecting.fail()
            return False
        self._connecting.succeed()
        self._is_new_link = True
        return True

    # --- answers --------------------------------------------------------------------------

    def _collect(self) -> None:
        self._look_again()
        if self._sending is not None and self._sending.future.done():
            call, self._sending = self._sending, None
            self._sent(call)
        if self._polling is not None and self._polling.future.done():
            call, self._polling = self._polling, None
            self._polled(call)
        if self._receipts is not None and self._receipts.future.done():
            call, self._receipts = self._receipts, None
            self._asked = set()
            self._polled(call)

    def _look_again(self) -> None:
        """Look up the coordinator's name where a batch has no answer for long."""
        call, now = self._sending, time.monotonic()
        if call is None or call.future.done() or now - call.looked < CALL_SECONDS:
            return
        call.looked = now
        self._warn("slow", "the service has not answered for %.0f s", now - call.mono)
        if self._link is None:
            return
        if self._link is not self._sending_by or self._link.moved():
            self._lose_link()
            self._sending = None
            self._outbox.put_back()

    def _lose_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._polling = self._receipts = None
        self._asked = set()

    def _answer(self, call: Call, backoff: Backoff, what: str) -> dict[str, Any] | None:
        """Return what the service answered; None where it did not, and the link is dropped."""
        try:
            answer = call.future.result()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error!s:.500}"
            unauthorized = isinstance(error, Unauthorized)
            self._warn(
                "token" if unauthorized else what,
                f"{what} failed, and is tried again: {self.problem}",
            )
            backoff.fail()
            if unauthorized:
                backoff.until = time.monotonic() + _UNAUTHORIZED_SECONDS * random.uniform(0.5, 1.0)
            self._connecting.until = backoff.until
            if _is_refusal(error):
                self._refusals += what == "sending"
            else:
                self._refusals = 0
                self._lose_link()
            return None
        if answer.get("not_ready") is not None:
            self._warn("not_ready", f"the service is not ready: {answer['not_ready']}")
            backoff.fail()
            backoff.hold(_pause(answer))
            return None
        backoff.succeed()
        self._connecting.succeed()
        self.answers += 1
        self.problem = ""
        if "wall" in answer:
            self.clock.add(
                sent=call.wall,
                took=call.answered - call.mono,
                service=float(answer["wall"]),
                mono=call.answered,
            )
        self._outbox.settle(answer.get("receipts") or {})
        return answer

    def _sent(self, call: Call) -> None:
        answer = self._answer(call, self._sends, "sending")
        if answer is None:
            if self._refusals >= _MOST_REFUSALS and self._batch_limit == 1:
                self._outbox.discard("the service cannot take it")
                self._refusals = 0
            else:
                # One event may be what the service stumbles over: smaller batches find it.
                self._batch_limit = (
                    max(1, self._batch_limit // 2) if self._refusals else BATCH_EVENTS
                )
                self._outbox.put_back()
            return
        self._refusals = 0
        self._batch_limit = BATCH_EVENTS
        # First: what this very coordinator has just taken need not be offered to it again.
        self._meet(answer)
        self._outbox.acknowledge()
        # Again, now that the batch's own bodies are waiting for theirs.
        self._outbox.settle(answer.get("receipts") or {})
        refused = answer.get("refused") or {}
        if refused:
            self._warn("refused", f"the service refused {len(refused)} events: {refused!r:.300}")
            self._outbox.settle(dict.fromkeys(refused, "refused"))
        if self._outbox.has_drops:
            self._outbox.report_drops()
        if pause := _pause(answer):
            self._warn("behind", f"the service is behind: events are sent every {pause:.1f} s")
            self._sends.hold(pause)

    def _polled(self, call: Call) -> None:
        answer = self._answer(call, self._polls, "polling")
        if answer is None:
            return
        # A service that answers at once must not be asked in a tight loop.
        self._polls.until = time.monotonic() + _LEAST_BETWEEN_POLLS
        if answer.get("plan") is not None:
            self._plan.apply(answer["plan"])
        if answer.get("requests"):
            self._asked_for(answer["requests"])
        seconds = answer.get("poll_seconds")
        if isinstance(seconds, int | float) and 0 < seconds <= 600:
            self._poll_seconds = float(seconds)
        self._meet(answer)
        if self._outbox.has_drops:
            self._outbox.report_drops()

    def _meet(self, answer: Mapping[str, Any]) -> None:
        """Offer what has no payload receipt again when the coordinator is another one."""
        name = answer.get("coordinator")
        if name is None or name == self.coordinator:
            return
        if self.coordinator is not None:
            again = self._outbox.offer_again()
            _log.info("a new coordinator answers; %d payloads are offered again", again)
        self.coordinator = name

    # --- calls ----------------------------------------------------------------------------

    def _submit(self) -> None:
        link, now = self._link, time.monotonic()
        if link is None:
            return
        due = max(self._sends.until, self._outbox.due)
        if self._sending is None and now >= due and self._outbox.waiting:
            self._send(link)
        if self._polling is None and now >= self._polls.until:
            # The first poll waits for nothing: it meets the coordinator, whoever it is by now.
            self._polling = self._poll(link, 0.0 if self._is_new_link else self._poll_seconds)
            self._is_new_link = False
        if self._receipts is None and now >= self._polls.until and self._unasked():
            self._receipts = self._poll(link, RECEIPT_POLL_SECONDS)

    def _unasked(self) -> bool:
        """Say whether receipts are missing that no poll on the way asks for."""
        return not self._asked.issuperset(self._outbox.unreceipted())

    def _send(self, link: Link) -> None:
        batch = self._outbox.take(limit=self._batch_limit)
        if not batch:  # all that waits, waits for a device
            self._sends.until = time.monotonic() + _DEVICE_SECONDS
            return
        for entry in batch:
            _finalise(entry)
            self._outbox.pack(entry, link.pack)
        self._outbox.offer(batch)
        payloads = {entry.seq: entry.packed for entry in batch if entry.packed is not None}
        events = [entry.wire() for entry in batch]
        try:
            future = link.record(self._sender(self.clock), events, payloads)
        except Exception:
            self._outbox.put_back()
            self._lose_link()
            self._sends.fail()
            raise
        self._sending, self._sending_by = Call(future, self.wake), link

    def _poll(self, link: Link, wait: float) -> Call:
        unreceipted = self._outbox.unreceipted()
        self._asked.update(unreceipted)
        sender = self._sender(self.clock)
        return Call(link.poll(sender, self._plan.revision, unreceipted, wait), self.wake)

    def _warn(self, kind: str, message: str, *values: object, exc_info: bool = False) -> None:
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        _log.log(level, message, *values, exc_info=exc_info)


def _pause(answer: Mapping[str, Any]) -> float:
    """Return the seconds for which a service that is behind asks its senders to wait."""
    pause = answer.get("pause")
    return float(pause) if isinstance(pause, int | float) and 0 < pause <= MOST_PAUSE else 0.0


def _is_refusal(error: Exception) -> bool:
    """Say whether the service ran the call and raised, so that the way to it is sound."""
    if isinstance(error, StagescopeError):
        return error.code in {"error", "invalid_input", "invalid_event"}
    # Ray raises a RayTaskError that also is the actor's exception; its own errors of transport
    # (dead, unavailable, timed out) are no RayTaskErrors.
    return any(kind.__name__ == "RayTaskError" for kind in type(error).__mro__)


def _finalise(entry: Entry) -> None:
    finalise, entry.finalise = entry.finalise, None
    if finalise is not None:
        try:
            finalise(entry.fields)
        except Exception as error:
            _log.debug("event %d could not be completed: %r", entry.seq, error)
