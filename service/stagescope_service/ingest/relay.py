"""Relays the calls of a node's ranks to the coordinator, many of them in one. No Ray in here.

A call costs the coordinator many times as much as an event in it: 10 000 ranks that call it one by
one bring it minutes behind. A relay keeps nothing. Each rank gets the coordinator's answer to its
call, after the coordinator's commit. If the coordinator does not answer, the relay tells the rank,
which calls again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypedDict

from stagescope_service.background import BackgroundTasks
from stagescope_wire.errors import StagescopeError, Unreachable

GATHER_SECONDS: Final = 0.02
"""How long calls are collected until the coordinator sets the time: the more nodes, the longer."""
POLL_SECONDS: Final = 1.0
"""Longest wait of one poll for the whole node: a rank that begins to poll meanwhile waits for its
end."""

Answer = Mapping[str, object]
"""The coordinator's answer to one rank."""
Batch = tuple[object, Sequence[object], Mapping[int, object] | None]
"""Sender, events and payloads, as a rank hands them to `record_events`."""


class RelayedPoll(TypedDict):
    """A rank's poll that waits at a relay."""

    sender: object
    revision: int
    unreceipted: Sequence[object]
    wait: float
    """Seconds that are left of the rank's own wait."""
    called_ago: float | None
    """Seconds since the rank called; None: the coordinator already knows."""


class RelayAnswer(TypedDict):
    """The coordinator's answer to a relay."""

    answers: Sequence[Mapping[str, object] | None]
    """One for each call, in their order; None: that poll waits on."""
    gather_seconds: float
    """How long calls must be collected."""


class RelayTarget(Protocol):
    """The coordinator, as a relay calls it; it raises `Unreachable` while that is away.

    It may answer `{"not_ready": reason, ...}` instead, which is then the answer to each call.
    """

    async def record_together(self, batches: Sequence[Batch]) -> RelayAnswer:
        """See `Intake.record_together`."""
        ...

    async def poll_together(self, polls: Sequence[RelayedPoll], wait: float) -> RelayAnswer:
        """See `Intake.poll_together`."""
        ...


class _WaitingBatch(NamedTuple):
    batch: Batch
    answer: asyncio.Future[Answer]


class _WaitingPoll:
    def __init__(
        self, sender: object, revision: int, unreceipted: Sequence[object], until: float
    ) -> None:
        self.call = (sender, revision, unreceipted)
        self.until = until
        self.called: float | None = time.monotonic()
        """When the rank called; None once the coordinator was told."""
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def wire(self, now: float) -> RelayedPoll:
        sender, revision, unreceipted = self.call
        return {
            "sender": sender,
            "revision": revision,
            "unreceipted": unreceipted,
            "wait": max(0.0, self.until - now),
            "called_ago": None if self.called is None else now - self.called,
        }


class Relay:
    """Collects the calls of ranks; used from one event loop.

    Args:
        target: the coordinator.
    """

    def __init__(self, target: RelayTarget) -> None:
        self._target = target
        self._gather_seconds = GATHER_SECONDS
        self._batches: list[_WaitingBatch] = []
        self._polls: list[_WaitingPoll] = []
        self._tasks = BackgroundTasks()
        self._sending: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None

    async def record(
        self, sender: object, events: Sequence[object], payloads: Mapping[int, object] | None
    ) -> Answer:
        """Hand a batch on; return the coordinator's answer, which follows its commit.

        Raises:
            StagescopeError: the call failed in the coordinator, as it would for this rank alone.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._batches.append(_WaitingBatch((sender, events, payloads), answer))
        if self._sending is None or self._sending.done():
            self._sending = self._tasks.start(self._send_batches())
        return _checked(await answer)

    async def poll(
        self, sender: object, revision: int, unreceipted: Sequence[object], wait: float
    ) -> Answer:
        """Hand a poll on; return the coordinator's answer.

        Raises:
            StagescopeError: as `record`.
        """
        poll = _WaitingPoll(sender, revision, unreceipted, time.monotonic() + wait)
        self._polls.append(poll)
        if self._polling is None or self._polling.done():
            self._polling = self._tasks.start(self._send_polls())
        return _checked(await poll.answer)

    # One call of each kind is under way at a time: calls that come meanwhile go with the next one.
    async def _send_batches(self) -> None:
        while self._batches:
            await asyncio.sleep(self._gather_seconds)
            sent, self._batches = self._batches, []
            batches = [each.batch for each in sent]
            answers = await self._answers(self._target.record_together(batches), len(sent))
            for each, answer in zip(sent, answers, strict=True):
                _settle(each.answer, answer or {"not_ready": "the coordinator gave no answer"})

    async def _send_polls(self) -> None:
        while self._polls:
            await asyncio.sleep(self._gather_seconds)
            sent, now = self._polls, time.monotonic()
            self._polls = []
            polls = [each.wire(now) for each in sent]
            call = self._target.poll_together(polls, POLL_SECONDS)
            answers = await self._answers(call, len(sent))
            for each, answer in zip(sent, answers, strict=True):
                each.called = None
                if answer is None:
                    self._polls.append(each)
                else:
                    _settle(each.answer, answer)

    async def _answers(
        self, call: Awaitable[RelayAnswer], expected: int
    ) -> Sequence[Answer | None]:
        """Return an answer to each of the calls that were made in one; raises nothing."""
        try:
            reply = await call
            if "not_ready" in reply:
                return [reply] * expected
            answers = reply["answers"]
            if len(answers) != expected:
                raise ValueError(f"{len(answers)} answers to {expected} calls")
            self._gather_seconds = reply["gather_seconds"]
        except Unreachable as error:
            return [{"not_ready": str(error)}] * expected
        except Exception as error:
            # Not `not_ready`: a rank that gets an error calls the coordinator itself, where one
            # that caused it is found.
            return [{"error": f"{type(error).__name__}: {error}"}] * expected
        return answers


def _settle(future: asyncio.Future[Answer], answer: Answer | None) -> None:
    if answer is not None and not future.done():  # done: its rank's call was cancelled
        future.set_result(answer)


def _checked(answer: Answer) -> Answer:
    if (reason := answer.get("error")) is not None:
        raise StagescopeError(str(reason))
    return answer
