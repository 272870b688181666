"""The Probe, through which a training process reports its stages; it never waits or raises."""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeVar

from stagescope_wire.errors import InvalidInput
from stagescope_wire.plan import CaptureRequest
from stagescope_wire.schema import END_STEP, FINISH, REFUSED, Work
from stagescope_workers.probe.decorator import as_stage
from stagescope_workers.probe.numbering import (
    STEP_REPEATED,
    STEP_REPEATED_ADVICE,
    Numbering,
    Start,
    StepOrder,
    reason_against_new_start,
)
from stagescope_workers.probe.options import ProbeOptions, index, step_index
from stagescope_workers.probe.rank_plan import read_plan
from stagescope_workers.probe.stage import Stage, error_fields, log_scalars
from stagescope_workers.probe.weight_reports import WeightReporter
from stagescope_workers.transport.calls import SenderHooks, ServiceLink
from stagescope_workers.transport.outbox import Outbox
from stagescope_workers.transport.sender import EventSender

_log = logging.getLogger("stagescope.workers")

_Function = TypeVar("_Function", bound=Callable[..., object])
_SEARCH_SECONDS: Final = 2.0
"""How long `close` waits for a process to join its Ray cluster and find a service there."""
RESTART_SECONDS: Final = 60.0
"""Time for a restarted API to answer again. Ray needs 1 to 4 s, and 30 to 40 s on a machine with
twenty times more to do than it has cores."""


class Probe(WeightReporter):
    """Reports stages, tensors and scalars of one rank; made by `stagescope_workers.init`.

    Every method returns at once. None raises, unless `strict`; an invalid call is logged once for
    each kind, counted, and sent as a REFUSED event. In a forked child every method does nothing:
    the threads and connections are the parent's.
    """

    def __init__(self, options: ProbeOptions) -> None:
        self._arrived = False
        self._users = 1
        self._handled_before = sys.exc_info()[1]
        self._earlier_starts: list[Start] = []
        self._starting = threading.Lock()
        super().__init__(options)

    def _begin_incarnation(self, options: ProbeOptions) -> None:
        super()._begin_incarnation(options)
        self._numbering = Numbering()
        self._step_order = StepOrder(options.role)
        self._pending_init: tuple[ProbeOptions, list[CaptureRequest]] | None = None

    def start(self) -> None:
        """Read the local plan and begin the background thread.

        Raises:
            InvalidInput: only when strict; the run's name, the rank or the plan is wrong.
        """
        self._launch(self._local_plan(self._options), after=None)

    def _local_plan(self, options: ProbeOptions) -> list[CaptureRequest]:
        for problem in options.problems:
            with self.guard("init", None):
                raise problem
        with self.guard("init", None):
            if options.plan is not None:
                return read_plan(options.plan)
        return []

    def _launch(self, local: list[CaptureRequest], after: EventSender | None) -> EventSender:
        if local:
            self.plan = self._watch_plan(local)
        self._sender = EventSender(
            self.outbox,
            SenderHooks(
                connect=self._handshake.connect,
                sender=self._handshake.sender,
                prepare=self._handshake.fill_hello,
                on_requests=self.stage_tracker.answer_requests,
                feed_watchdog=self.stage_tracker.feed_watchdog,
                on_connected=self._handshake.announce,
                on_unconnected=self._handshake.warn_unconnected,
            ),
            plan=self.plan,
            pool=self.pool,
            after=after,
        )
        self._sender.start()
        return self._sender

    def init_again(self, options: ProbeOptions) -> None:
        """Continue where `init` is called again for this open probe.

        A function that calls `init` each time continues its start. A notebook cell that is run
        again returns to an earlier step: its first stage begins a new start, with `options`.
        Whether the probe is strict is what the last call says, at once.

        Raises:
            InvalidInput, InvalidPlan: only when strict: `options` has a problem.
        """
        self._users += 1
        self.strict = options.strict
        self._pending_init = (options, self._local_plan(options))
        self._step_order.init_called_again()
        names = [field.name for field in dataclasses.fields(options) if field.name != "problems"]
        differs = [n for n in names if getattr(options, n) != getattr(self._options, n)]
        level = logging.DEBUG if ("init", "again") in self._reported else logging.WARNING
        self._reported.add(("init", "again"))
        _log.log(
            level,
            "init was called again for run %s, %s %d, whose probe is open: it continues. A next "
            "stage of an earlier step than it has reached begins a new attempt%s; probe.close() "
            "before init always begins a new one",
            *(self.run, self.role, self.rank),
            f", with the new {', '.join(differs)}" if differs else "",
        )

    def _restart_for_earlier_step(self, step: int) -> None:
        """Begin a new start where the first stage after `init_again` is of an earlier step."""
        with self._starting:
            pending, self._pending_init = self._pending_init, None
            reached = self._step_order.reached
            if pending is None or self._sender is None or not self._step_order.is_earlier(step):
                return
            unsent = [each for each in self._earlier_starts if not each.event_sender.has_left]
            self._earlier_starts = unsent
            reason = reason_against_new_start(
                unsent, self._options.max_pending_bytes, self.stage_tracker
            )
            if reason is None:
                self._begin_new_start(*pending)
            _log.warning(
                "run %s, %s %d: step %d comes after step %s and another call of init: %s",
                *(self.run, self.role, self.rank, step, reached),
                "a new attempt begins"
                if reason is None
                else f"no new attempt begins, since {reason}",
            )

    def _report_repeated_step(self, work: Work) -> None:
        self.refused[STEP_REPEATED] += 1
        message = (
            f"{self.role} rank {self.rank} began {work.stage} of step {work.step} again after "
            f"another call of init: both count in step {work.step}, as passes of one step"
        )
        _log.warning("run %s: %s; %s", self.run, message, STEP_REPEATED_ADVICE)
        fields = {**work.fields(), "what": STEP_REPEATED, "severity": "error"}
        self.outbox.put(REFUSED, {**fields, "message": message, "advice": STEP_REPEATED_ADVICE})

    def _begin_new_start(self, options: ProbeOptions, local: list[CaptureRequest]) -> None:
        """Continue as a new incarnation, which sends after the old one; waits for nothing."""
        event_sender = self._sender
        assert event_sender is not None
        self.outbox.put(FINISH, {})
        self.stage_tracker.close()
        old = Start(event_sender, self.outbox, self._handshake)
        self._earlier_starts = [*self._earlier_starts, old]
        self._begin_incarnation(options)
        event_sender.leave(self._launch(local, after=event_sender))

    @classmethod
    def inert(cls) -> Probe:
        """Return a probe that does nothing, for a refused call of `init`."""
        probe = cls(ProbeOptions(run="refused"))
        probe.is_inert = True
        return probe

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._users -= 1
        if self._users <= 0:
            self.close()

    # --- called by the training ----------------------------------------------------------

    def stage(
        self,
        name: str,
        *,
        step: int | None = None,
        model: object = None,
        policy_version: int | None = None,
        **part: int | None,
    ) -> Stage:
        """Return a stage for `with`.

        Args:
            name: one of `stagescope_wire.schema.STAGES`, or a name of your own.
            step: the trainer's global step; None where only a policy version is known.
            model: the module that runs, for captures with msprobe.
            policy_version: version of the weights in use.
            part: occurrence, epoch, minibatch, microbatch; where no occurrence is given, stages of
                one step, name and other parts are numbered in order of entry.
        """
        work: Work | None = None
        with self.guard("stage", None):
            if model is not None:
                self.models.note_model(name, model)
            if not self.is_inert:
                number = step_index(step)
                if self._pending_init is not None and number is not None:
                    self._restart_for_earlier_step(number)
                numbered = self._numbering.work(name, step, policy_version, part)
                has_occurrence = part.get("occurrence") is not None
                if self._step_order.note(numbered, is_numbered=has_occurrence):
                    self._report_repeated_step(numbered)
                work = numbered
        return Stage(self, work, model)

    def begin(
        self,
        name: str,
        *,
        step: int | None = None,
        model: object = None,
        policy_version: int | None = None,
        **part: int | None,
    ) -> Stage:
        """Begin a stage now, for callers that cannot nest; `end` ends it. Arguments as `stage`."""
        stage = self.stage(name, step=step, model=model, policy_version=policy_version, **part)
        stage.begin()
        return stage

    def end(self, stage: Stage, error: BaseException | None = None) -> None:
        """End a stage that `begin` returned; `error` is what it raised, or None."""
        if isinstance(stage, Stage):
            stage.end(error)
            return
        with self.guard("end", None):
            raise InvalidInput(
                f"end is given {type(stage).__name__}", expected="the stage that begin returned"
            )

    def as_stage(
        self, name: str, *, model: object = None, step: int | None = None
    ) -> Callable[[_Function], _Function]:
        """Return a decorator that runs a function, sync or async, as a stage.

        The step is found in the function's arguments; see `decorator.as_stage`.
        """
        return as_stage(name, model=model, step=step, probe=lambda: self)

    def log(
        self, *, step: int | None = None, policy_version: int | None = None, **scalars: object
    ) -> None:
        """Report named numbers of a step, outside any stage."""
        if self.is_inert:
            return
        with self.guard("log", None):
            work = Work(step_index(step), index("policy_version", policy_version), None)
            log_scalars(self, work, scalars)

    def wants(self, name: str, *, stage: str, step: int | None = None) -> bool:
        """Return, cheaply, whether a tensor of this name is kept when this stage records it.

        Inside a stage, use `Stage.wants`.

        Args:
            name: name of a tensor or a scalar, or a section (`stagescope_wire.keep.SECTIONS`).
            stage: the stage that would record it.
            step: its step.

        Raises:
            InvalidTensor: only when the probe is strict: a misspelt name.
        """
        return not self.is_inert and self.is_kept(name, stage, step)

    def end_step(self, step: int) -> None:
        """Report that this step is over, so that it closes without waiting for the next."""
        if self.is_inert:
            return
        with self.guard("end_step", None):
            self.outbox.put(END_STEP, {"step": step_index(step)})

    def close(self, timeout: float = 5.0, *, crash: BaseException | None = None) -> bool:
        """End the probe: wait, `timeout` seconds at most, until everything is acknowledged.

        The only method that waits. It does not wait if no service is known, or if the known one
        refuses the access token. It does not wait for a service that has not answered in the first
        seconds of this probe.

        Args:
            timeout: seconds.
            crash: the exception that ends this process; by default the one that is being handled
                (`finish` in `finally`), unless it was handled already when the probe was made.

        Returns:
            Whether the service has everything: False where something is on its way, was dropped
            here, was refused, or is lost.
        """
        event_sender = self._sender
        if self.is_inert or event_sender is None:
            return self._arrived
        crash = self._handled_exception() if crash is None else crash
        self.outbox.put(FINISH, {} if crash is None else error_fields(crash))
        self.is_inert = True
        self._handled_before = None  # it holds its traceback's frames
        starts = self._starts(event_sender)
        for each in starts:
            each.handshake.is_leaving = True
            each.event_sender.restart_search()
        event_sender.wait_until(self._can_stop_waiting, max(0.0, timeout))
        for each in starts:
            each.event_sender.stop()
        self.stage_tracker.close()
        is_received = all(each.outbox.is_empty for each in starts)
        missing = sum((each.outbox.not_arrived for each in starts), collections.Counter[str]())
        self._arrived = is_received and not missing
        if missing:
            _log.warning(
                "not everything of run %s arrived (%s): `stagescope lost --run %s` and "
                "`stagescope findings --run %s` say why",
                self.run,
                ", ".join(f"{what}: {number}" for what, number in sorted(missing.items())),
                self.run,
                self.run,
            )
        if not is_received and not event_sender.answers:
            self._handshake.warn_unconnected(event_sender.problem)
        if not is_received:
            waiting = sum(each.outbox.waiting for each in starts)
            _log.warning(
                "closed with %d events and %d payloads of run %s that were not acknowledged%s",
                waiting,
                sum(each.outbox.payloads for each in starts),
                self.run,
                ""
                if waiting
                else ": the service has them, and is still reading them (a new "
                "installation compiles for up to a minute first)",
            )
        return self._arrived

    def _handled_exception(self) -> BaseException | None:
        """Return the exception that the caller is handling, where it ends the training."""
        error = sys.exc_info()[1]
        if error is self._handled_before or isinstance(error, (StopIteration, StopAsyncIteration)):
            return None
        return error if isinstance(error, (Exception, KeyboardInterrupt)) else None

    def _starts(self, event_sender: EventSender) -> list[Start]:
        return [*self._earlier_starts, Start(event_sender, self.outbox, self._handshake)]

    def _can_stop_waiting(self) -> bool:
        """Return whether everything was sent, or no service can be expected to answer."""
        starts = [] if self._sender is None else self._starts(self._sender)
        unsent = [each.event_sender for each in starts if not each.outbox.is_empty]
        if not unsent:
            return not any(each.outbox.has_drops for each in starts)
        if unsent[0].is_unauthorized:
            return True
        # The first search comes after the fingerprint, which takes seconds on a busy machine.
        reached = any(each.event_sender.answers for each in starts)  # a dead one may come back
        no_service = unsent[0].has_searched and unsent[0].link is None and not reached
        return no_service and time.monotonic() > self.answer_expected_until

    @property
    def answer_expected_until(self) -> float:
        """The monotonic time until which a service that has never answered may still do so."""
        if self._sender is not None and self._sender.has_address:
            patience = RESTART_SECONDS
        else:  # a process that imported ray gets time to join a cluster
            patience = _SEARCH_SECONDS if "ray" in sys.modules else 0.0
        return self._handshake.created + patience

    def forget(self) -> None:
        """Become inert in a forked child: the queue and its locks belong to the parent."""
        self.is_inert = True
        self._sender = None
        self._earlier_starts = []
        self.outbox = Outbox()

    def __repr__(self) -> str:
        """Name the run, role and rank, and whether a service answers, at which address."""
        return f"<Probe of run {self.run}, {self.role} {self.rank}: {self._connection()}>"

    def _connection(self) -> str:
        if self._sender is None:
            return "inert"
        state = self._sender.describe(closed=self.is_inert)
        return f"closed, was {state}" if self.is_inert else state

    def __reduce__(self) -> tuple[Callable[[], Probe], tuple[()]]:
        # A worker that holds a probe may be copied or pickled: the copy must not report.
        return (Probe.inert, ())

    def status(self) -> dict[str, Any]:
        """Return the state of this probe: the connection, and what waits, was dropped or refused.

        Counts of waiting events and payloads include those of earlier starts.
        """
        event_sender = self._sender
        outboxes = [*(each.outbox for each in self._earlier_starts), self.outbox]
        return {
            # A new start sends only after an earlier one has sent everything.
            "connected": event_sender is not None
            and any(each.event_sender.is_connected for each in self._starts(event_sender)),
            "coordinator": None if event_sender is None else event_sender.coordinator,
            "attempt_key": self._handshake.attempt_key,
            "plan_revision": self.plan.revision,
            "waiting_events": sum(outbox.waiting for outbox in outboxes),
            "waiting_payloads": sum(len(outbox.unreceipted()) for outbox in outboxes),
            "pending_bytes": sum(outbox.bytes for outbox in outboxes),
            "dropped": dict(sum((outbox.dropped for outbox in outboxes), collections.Counter())),
            "refused": dict(self.refused),
            "blocking_copies": self.pool.blocking_copies,
        }

    @property
    def service(self) -> ServiceLink | None:
        """The open link to the service; None while there is none."""
        return None if self._sender is None else self._sender.link

    @property
    def has_arrived(self) -> bool:
        """Whether the probe is closed and everything of it was received."""
        return self._arrived

    @property
    def options(self) -> ProbeOptions:
        """The options of the last start."""
        return self._options
