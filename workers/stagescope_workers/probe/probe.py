"""A training process's way to tell what it does: the Probe, which never waits and never raises."""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from stagescope.wire.keep import is_wanted
from stagescope.wire.schema import (
    END_STEP,
    FINISH,
    REFUSED,
    Work,
)
from stagescope_workers.probe.decorator import as_stage
from stagescope_workers.probe.numbering import (
    BEGUN_AGAIN,
    BEGUN_AGAIN_ADVICE,
    Numbering,
    Start,
    StepOrder,
    why_not,
)
from stagescope_workers.probe.options import ProbeOptions, index, step_index
from stagescope_workers.probe.plan import read_plan
from stagescope_workers.probe.reporter import Reporter
from stagescope_workers.probe.stage import Stage, log_scalars
from stagescope_workers.probe.weights import NamedTensors, Names, record_weights
from stagescope_workers.transport.link import Link
from stagescope_workers.transport.outbox import Outbox
from stagescope_workers.transport.sender import EventSender

_log = logging.getLogger("stagescope.workers")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SEARCH_SECONDS: Final = 2.0  # for a service, before `close` gives up on there being one


class Probe(Reporter):
    """Reports stages, tensors and scalars of one rank; made by `stagescope_workers.init`.

    Every method returns at once. None raises, unless `strict`; what was wrong with a call is
    logged once a kind, counted, and sent as a REFUSED event. In a forked child every method does
    nothing: the threads and connections are the parent's.
    """

    def __init__(self, options: ProbeOptions) -> None:
        self._arrived = False
        self._users = 1
        self._earlier: list[Start] = []
        self._starting = threading.Lock()
        super().__init__(options)

    def _begin_incarnation(self, options: ProbeOptions) -> None:
        super()._begin_incarnation(options)
        self._numbering = Numbering()
        self._order = StepOrder(options.role)
        self._again: tuple[ProbeOptions, list[dict[str, Any]]] | None = None

    def start(self) -> None:
        """Read the local plan and begin the background thread.

        Raises:
            InvalidInput: only when strict; the run's name, the rank or the plan is wrong.
        """
        self._launch(self._local_plan(self._options), after=None)

    def _local_plan(self, options: ProbeOptions) -> list[dict[str, Any]]:
        """Return the captures that `init` was given, and report what is wrong with its options."""
        with self.guard("init", None):
            if options.problem is not None:
                raise options.problem
        with self.guard("init", None):
            if options.plan is not None:
                return read_plan(options.plan)
        return []

    def _launch(self, local: list[dict[str, Any]], after: EventSender | None) -> EventSender:
        """Begin the background thread of a start; what was said `after` which it sends."""
        if local:
            self.plan = self._watch(local)
        self._sender = EventSender(
            self.outbox,
            connect=self._introduction.connect,
            sender=self._introduction.sender,
            prepare=self._introduction.say_hello,
            plan=self.plan,
            pool=self.pool,
            asked=self.standing.answer,
            alive=self.standing.feed,
            unconnected=self._introduction.warn_unconnected,
            after=after,
        )
        self._sender.start()
        return self._sender

    def init_again(self, options: ProbeOptions) -> None:
        """Go on where `init` was called again for this open probe.

        A function that calls `init` each time goes on; a cell of a notebook that is run again
        comes back to an earlier step, and the next stage's is then of a new start, with `options`.
        """
        self._users += 1
        self._again = (options, self._local_plan(options))
        self._order.init_called_again()
        names = [field.name for field in dataclasses.fields(options) if field.name != "problem"]
        differs = [n for n in names if getattr(options, n) != getattr(self._options, n)]
        level = logging.DEBUG if ("init", "again") in self._said else logging.WARNING
        self._said.add(("init", "again"))
        _log.log(
            level,
            "init was called again for run %s, %s %d, whose probe is open: it goes on. A next "
            "stage of an earlier step than it has reached begins a new attempt%s; probe.close() "
            "before init always begins anew",
            *(self.run, self.role, self.rank),
            f", with the new {', '.join(differs)}" if differs else "",
        )

    def _go_on(self, step: int) -> None:
        """Begin a new start where the first stage after `init_again` is of an earlier step."""
        with self._starting:
            again, self._again = self._again, None
            reached = self._order.reached
            if again is None or self._sender is None or not self._order.goes_back(step):
                return
            self._earlier = [each for each in self._earlier if not each.event_sender.has_left]
            why = why_not(self._earlier, self._options.max_pending_bytes, self.standing)
            if why is None:
                self._start_again(*again)
            _log.warning(
                "run %s, %s %d: step %d comes after step %s and another call of init: %s",
                *(self.run, self.role, self.rank, step, reached),
                "a new attempt begins" if why is None else f"no new attempt begins, since {why}",
            )

    def _say_begun_again(self, work: Work) -> None:
        """Report that a stage seems to be that of another go of its step."""
        self.refused[BEGUN_AGAIN] += 1
        message = (
            f"{self.role} rank {self.rank} began {work.stage} of step {work.step} again after "
            f"another call of init: both goes count in step {work.step}, as passes of one step"
        )
        _log.warning("run %s: %s; %s", self.run, message, BEGUN_AGAIN_ADVICE)
        fields = {**work.fields(), "what": BEGUN_AGAIN, "severity": "error"}
        self.outbox.put(REFUSED, {**fields, "message": message, "advice": BEGUN_AGAIN_ADVICE})

    def _start_again(self, options: ProbeOptions, local: list[dict[str, Any]]) -> None:
        """Take leave without waiting, and go on as a new incarnation that sends after the old."""
        event_sender = self._sender
        assert event_sender is not None
        self.outbox.put(FINISH, {})
        self.standing.close()
        self._earlier = [*self._earlier, Start(event_sender, self.outbox, self._introduction)]
        self._begin_incarnation(options)
        event_sender.leave(self._launch(local, after=event_sender))

    @classmethod
    def inert(cls) -> Probe:
        """Return a probe that does nothing, for a call to `init` that was refused."""
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

    # --- what training calls --------------------------------------------------------------

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
            name: one of `stagescope.wire.schema.STAGES`, or a name of your own.
            step: the trainer's global step; None where only a policy version is known.
            model: the module that runs, for captures with msprobe.
            policy_version: of the weights that work here.
            part: occurrence, epoch, minibatch, microbatch; an occurrence that is not given is
                numbered in order of entry among those with the same step, name and other parts.
        """
        work: Work | None = None
        with self.guard("stage", None):
            if model is not None:
                self._answers.models.note(name, model)
            if not self.is_inert:
                number = step_index(step)
                if self._again is not None and number is not None:
                    self._go_on(number)
                noted = self._numbering.work(name, step, policy_version, part)
                if self._order.note(noted, is_numbered=part.get("occurrence") is not None):
                    self._say_begun_again(noted)
                work = noted
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
        stage.end(error)

    def as_stage(
        self, name: str, *, model: object = None, step: int | None = None
    ) -> Callable[[_Function], _Function]:
        """Return a decorator that runs a function, also an async one, as a stage.

        See `stagescope_workers.probe.decorator.as_stage`: the step is found in the arguments.
        """
        return as_stage(name, model=model, step=step, probe=lambda: self)

    def log(
        self, *, step: int | None = None, policy_version: int | None = None, **scalars: object
    ) -> None:
        """Hand over named numbers of a step, outside any stage."""
        if self.is_inert:
            return
        with self.guard("log", None):
            work = Work(step_index(step), index("policy_version", policy_version), None)
            log_scalars(self, work, scalars)

    def wants(self, name: str, *, stage: str, step: int | None = None) -> bool:
        """Say, cheaply, whether a tensor of this name is kept where this stage hands it over.

        `Stage.wants` asks the same inside a stage.

        Args:
            name: of a tensor or a scalar, or a section (`stagescope.wire.keep.SECTIONS`).
            stage: the stage that would record it.
            step: its step.
        """
        if self.is_inert:
            return False
        return is_wanted(self.plan.wanted(step, stage), stage, name)

    def record_weights(
        self,
        named_tensors: NamedTensors,
        *,
        version: int,
        side: str,
        step: int | None = None,
        kind: str = "exchanged",
        names: Names = None,
        replicated: Sequence[str] | bool = (),
    ) -> None:
        """Hand over a bit-exact checksum of each weight, to be held against other ranks'.

        Sums are formed here, in the calling thread (on a device: queued on its current stream),
        so that they are of the weights as they are now; nothing else of a tensor is kept.

        Args:
            named_tensors: name -> tensor, or pairs, which may come from a generator one by one:
                torch tensors (of a DTensor the local shard) or numpy arrays, of any dtype and
                strides.
            version: the policy version of these weights: what both sides are joined by.
            side: "trainer" or "rollout".
            step: the trainer's step, where it is known.
            kind: "exchanged", as they were sent or received, before an engine fuses or quantises
                them; "held", as they lie in the process. Sides are compared within a kind.
            names: what the weights are to be called: {pattern: replacement} (regular expressions,
                one after the other), or a function.
            replicated: patterns of (the new) names of which every rank of this side holds a copy,
                or True for all. Of DTensors and of Megatron-LM's parameters this is known; other
                tensors are held only against ranks that differ in `dp_rank` alone.
        """
        if self.is_inert:
            return
        with self.guard("record_weights", None):
            record_weights(
                self,
                named_tensors,
                version=version,
                side=side,
                step=step,
                kind=kind,
                names=names,
                replicated=replicated,
            )

    def end_step(self, step: int) -> None:
        """Say that this step is over, so that it closes without waiting for the next."""
        if self.is_inert:
            return
        with self.guard("end_step", None):
            self.outbox.put(END_STEP, {"step": step_index(step)})

    def close(self, timeout: float = 5.0) -> bool:
        """Take leave: wait, `timeout` seconds at most, until everything was acknowledged.

        The only method that waits. It waits for nothing where no service was ever reached.

        Returns:
            Whether everything arrived, payloads included.
        """
        event_sender = self._sender
        if self.is_inert or event_sender is None:
            return self._arrived
        self.outbox.put(FINISH, {})
        self.is_inert = True
        starts = self._starts(event_sender)
        for each in starts:
            each.own_handshake.is_leaving = True
            each.event_sender.search_anew()
        event_sender.wait_until(self._is_over, max(0.0, timeout))
        for each in starts:
            each.event_sender.stop()
        self.standing.close()
        self._arrived = all(each.outbox.is_empty for each in starts)
        if not self._arrived and not event_sender.answers:
            self._introduction.warn_unconnected(event_sender.problem)
        if not self._arrived:
            _log.warning(
                "closed with %d events and %d payloads of run %s that were not acknowledged",
                sum(each.outbox.waiting for each in starts),
                sum(each.outbox.payloads for each in starts),
                self.run,
            )
        return self._arrived

    def _starts(self, event_sender: EventSender) -> list[Start]:
        """Return what still has to be sent, in order."""
        return [*self._earlier, Start(event_sender, self.outbox, self._introduction)]

    def _is_over(self) -> bool:
        """Say whether there is nothing more to wait for."""
        starts = [] if self._sender is None else self._starts(self._sender)
        unsent = [each.event_sender for each in starts if not each.outbox.is_empty]
        if not unsent:
            return not any(each.outbox.has_drops for each in starts)
        # On a busy machine what comes before the first look (the fingerprint) takes seconds.
        reached = any(each.event_sender.answers for each in starts)  # one that died may come back
        nobody = unsent[0].has_looked and unsent[0].link is None and not reached
        may_join = "ray" in sys.modules  # one that is about to join a cluster has time for that
        return nobody and not (
            may_join and time.monotonic() - self._introduction.made < _SEARCH_SECONDS
        )

    def forget(self) -> None:
        """Do nothing from now on: what waits, and the locks around it, are another process's."""
        self.is_inert = True
        self._sender = None
        self._earlier = []
        self.outbox = Outbox()

    def __repr__(self) -> str:
        """Say whose probe it is, and whether a service answers, at which address."""
        return f"<Probe of run {self.run}, {self.role} {self.rank}: {self._connection()}>"

    def _connection(self) -> str:
        if self._sender is None:
            return "inert"
        state = self._sender.describe(closed=self.is_inert)
        return f"closed, was {state}" if self.is_inert else state

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker that holds a probe may be copied or shipped: its copy must not report as it.
        return (Probe.inert, ())

    def status(self) -> dict[str, Any]:
        """Return how this probe stands with the service: what waits, what was dropped, refused."""
        event_sender = self._sender
        outboxes = [*(each.outbox for each in self._earlier), self.outbox]
        return {
            # What is new waits for what an earlier start has still to send.
            "connected": event_sender is not None
            and any(each.event_sender.is_connected for each in self._starts(event_sender)),
            "coordinator": None if event_sender is None else event_sender.coordinator,
            "attempt_key": self._introduction.attempt_key,
            "plan_revision": self.plan.revision,
            "waiting_events": sum(outbox.waiting for outbox in outboxes),
            "waiting_payloads": sum(len(outbox.unreceipted()) for outbox in outboxes),
            "pending_bytes": sum(outbox.bytes for outbox in outboxes),
            "dropped": dict(sum((outbox.dropped for outbox in outboxes), collections.Counter())),
            "refused": dict(self.refused),
            "blocking_copies": self.pool.blocking_copies,
        }

    @property
    def service(self) -> Link | None:
        """The way to the service that is open now; None while none was found."""
        return None if self._sender is None else self._sender.link

    @property
    def has_arrived(self) -> bool:
        """Say whether the probe was closed and everything of it was received."""
        return self._arrived

    @property
    def options(self) -> ProbeOptions:
        """What `init` was told."""
        return self._options
