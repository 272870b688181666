"""A training process's way to tell what it does: the Probe, which never waits and never raises."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from stagescope.errors import InvalidInput, StagescopeError
from stagescope.keeping import is_wanted
from stagescope.schema import (
    DUMP,
    END_STEP,
    FINISH,
    HELLO,
    PART_FIELDS,
    REFUSED,
    Part,
    Sender,
    Work,
)
from stagescope_workers import identity
from stagescope_workers.capture import reckoning
from stagescope_workers.clock import Clock
from stagescope_workers.courier import Courier
from stagescope_workers.decorator import as_stage
from stagescope_workers.device import PinnedPool
from stagescope_workers.draft import plain
from stagescope_workers.link import Link, RayPlace, find_link, ray_place
from stagescope_workers.options import ProbeOptions, index
from stagescope_workers.outbox import Entry, Outbox
from stagescope_workers.plan import PlanWatch, read_plan
from stagescope_workers.stage import Stage, log_scalars
from stagescope_workers.standing import Standing
from stagescope_workers.weights import NamedTensors, Names, record_weights

_log = logging.getLogger("stagescope.workers")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SEARCH_SECONDS: Final = 2.0  # for a service, before `close` gives up on there being one
_COUNTED_STEPS: Final = 64  # steps whose occurrences are remembered


class Probe:
    """Reports stages, tensors and scalars of one rank; made by `stagescope_workers.init`.

    Every method returns at once. None raises, unless `strict`; what was wrong with a call is
    logged once a kind, counted, and sent as a REFUSED event. In a forked child every method does
    nothing: the threads and connections are the parent's.
    """

    def __init__(self, options: ProbeOptions) -> None:
        self.run = options.run
        self.role = options.role
        self.rank = options.rank
        self.strict = options.strict
        self.device_events = options.device_events
        self.incarnation = secrets.token_hex(16)
        self.is_inert = False
        """True after `close`, in a forked child, and where `init` was refused."""
        self.refused: collections.Counter[str] = collections.Counter()
        """Calls with bad input so far, by what was called."""
        self.pool = PinnedPool(options.max_pinned_bytes)
        self.outbox = Outbox(
            max_bytes=options.max_pending_bytes,
            max_events=options.max_pending_events,
            on_put=self._wake,
        )
        self.standing = Standing(self.outbox, watchdog_seconds=options.watchdog)
        self._options = options
        self._place: RayPlace | None = None
        self._attempt_key = options.attempt_key
        self._said: set[tuple[str, str]] = set()
        self._occurrences: collections.OrderedDict[object, collections.Counter[Any]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()
        self._made = time.monotonic()
        self._courier: Courier | None = None
        self._arrived = False
        self._hello: Entry = self.outbox.put(HELLO, {})
        self._models = reckoning.Models()
        self.plan = self._watch([])

    def start(self) -> None:
        """Read the local plan and begin the background thread.

        Raises:
            InvalidInput: only when strict; the run's name, the rank or the plan is wrong.
        """
        options = self._options
        with self.guard("init", None):
            if options.plan is not None:
                self.plan = self._watch(read_plan(options.plan))
        self._courier = Courier(
            self.outbox,
            connect=self._connect,
            sender=self._sender,
            prepare=self._say_hello,
            plan=self.plan,
            pool=self.pool,
            asked=self.standing.answer,
            alive=self.standing.feed,
        )
        self._courier.start()

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
            name: one of `stagescope.schema.STAGES`, or a name of your own.
            step: the trainer's global step; None where only a policy version is known.
            model: the module that runs, for captures with msprobe.
            policy_version: of the weights that work here.
            part: occurrence, epoch, minibatch, microbatch; an occurrence that is not given is
                numbered in order of entry among those with the same step, name and other parts.
        """
        work: Work | None = None
        with self.guard("stage", None):
            if model is not None:
                self._models.note(name, model)
            if not self.is_inert:
                work = self._work(name, step, policy_version, part)
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

        See `stagescope_workers.decorator.as_stage`: the step is found in the arguments.
        """
        return as_stage(name, model=model, step=step, probe=lambda: self)

    def log(
        self, *, step: int | None = None, policy_version: int | None = None, **scalars: object
    ) -> None:
        """Hand over named numbers of a step, outside any stage."""
        if self.is_inert:
            return
        with self.guard("log", None):
            work = Work(index("step", step), index("policy_version", policy_version), None)
            log_scalars(self, work, scalars)

    def wants(self, name: str, *, stage: str, step: int | None = None) -> bool:
        """Say, cheaply, whether a tensor of this name is kept where this stage hands it over.

        `Stage.wants` asks the same inside a stage.

        Args:
            name: of a tensor or a scalar, or a section (`stagescope.keeping.SECTIONS`).
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
            self.outbox.put(END_STEP, {"step": index("step", step)})

    def close(self, timeout: float = 5.0) -> bool:
        """Take leave: wait, `timeout` seconds at most, until everything was acknowledged.

        The only method that waits. It waits for nothing where no service was ever reached.

        Returns:
            Whether everything arrived, payloads included.
        """
        courier = self._courier
        if self.is_inert or courier is None:
            return self._arrived
        self.outbox.put(FINISH, {})
        self.is_inert = True
        courier.search_anew()
        courier.wait_until(self._is_over, max(0.0, timeout))
        courier.stop()
        self.standing.close()
        self._arrived = self.outbox.is_empty
        if not self._arrived:
            _log.warning(
                "closed with %d events and %d payloads of run %s that were not acknowledged",
                self.outbox.waiting,
                len(self.outbox.unreceipted()),
                self.run,
            )
        return self._arrived

    def _is_over(self) -> bool:
        """Say whether there is nothing more to wait for."""
        if self.outbox.is_empty:
            return not self.outbox.has_drops
        courier = self._courier
        # On a busy machine what comes before the first look (the fingerprint) takes seconds.
        nobody = courier is not None and courier.has_looked and courier.link is None
        return nobody and time.monotonic() - self._made > _SEARCH_SECONDS

    def forget(self) -> None:
        """Do nothing from now on: what waits, and the locks around it, are another process's."""
        self.is_inert = True
        self._courier = None
        self.outbox = Outbox()

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker that holds a probe may be copied or shipped: its copy must not report as it.
        return (Probe.inert, ())

    def status(self) -> dict[str, Any]:
        """Return how this probe stands with the service: what waits, what was dropped, refused."""
        courier = self._courier
        return {
            "connected": courier is not None and courier.is_connected,
            "coordinator": None if courier is None else courier.coordinator,
            "attempt_key": self._attempt_key,
            "plan_revision": self.plan.revision,
            "waiting_events": self.outbox.waiting,
            "waiting_payloads": len(self.outbox.unreceipted()),
            "pending_bytes": self.outbox.bytes,
            "dropped": dict(self.outbox.dropped),
            "refused": dict(self.refused),
            "blocking_copies": self.pool.blocking_copies,
        }

    # --- what stages call -----------------------------------------------------------------

    @property
    def attempt_key(self) -> str | None:
        """The attempt key: as given, else Ray's session and job; None where neither is known."""
        if self._attempt_key is None:
            with contextlib.suppress(Exception):
                self._locate()
        return self._attempt_key

    @property
    def service(self) -> Link | None:
        """The way to the service that is open now; None while none was found."""
        return None if self._courier is None else self._courier.link

    @property
    def data_root(self) -> str | None:
        """Where dumps go that name no directory."""
        return self._options.data_root or self.plan.data_dir

    @property
    def out_of_reach(self) -> str | None:
        """Why no operator of this process's stages can be captured in it; None where they can."""
        said = self._options.captures
        return said if isinstance(said, str) else None

    @contextlib.contextmanager
    def guard(self, what: str, work: Work | None, *, quiet: bool = False) -> Iterator[None]:
        """Keep any mistake of ours, and any refused input, from the training process."""
        try:
            yield
        except Exception as error:
            if not getattr(error, "_stagescope_refused", False):
                self._note(what, error, work)
            if self.strict and not quiet:
                raise

    def refuse(
        self, what: str, error: StagescopeError, work: Work | None, *, quiet: bool = False
    ) -> None:
        """Report bad input: logged once a kind, counted, sent; raised when strict.

        Raises:
            StagescopeError: `error`, when strict and not `quiet`.
        """
        self._note(what, error, work)
        if self.strict and not quiet:
            error._stagescope_refused = True  # type: ignore[attr-defined]
            raise error

    def _note(self, what: str, error: Exception, work: Work | None) -> None:
        self.refused[what] += 1
        kind = (what, type(error).__name__)
        if kind not in self._said:
            self._said.add(kind)
            known = isinstance(error, StagescopeError)
            _log.warning("%s: %s", what, error if known else repr(error), exc_info=not known)
        fields = {} if work is None else work.fields()
        self.outbox.put(REFUSED, {**fields, "what": what, "message": str(error)[:2000]})

    def _work(
        self, name: object, step: object, version: object, given: Mapping[str, int | None]
    ) -> Work:
        unknown = sorted(set(given) - set(PART_FIELDS))
        if unknown:
            raise InvalidInput(f"a stage has no {', '.join(unknown)}", expected=str(PART_FIELDS))
        if not (isinstance(name, str) and 0 < len(name) <= 200):
            raise InvalidInput(f"stage is {name!r:.200}", expected="a name of 1 to 200 characters")
        part = {field: index(field, given.get(field)) for field in PART_FIELDS}
        clock = (index("step", step), index("policy_version", version))
        occurrence = part.pop("occurrence")
        if occurrence is None:
            occurrence = self._next_occurrence(clock, (name, *part.values()))
        return Work(*clock, name, Part(occurrence, *(number or 0 for number in part.values())))

    def _next_occurrence(self, clock: tuple[int | None, int | None], piece: object) -> int:
        key = clock if clock[0] is None else clock[0]
        with self._lock:
            counts = self._occurrences.setdefault(key, collections.Counter())
            self._occurrences.move_to_end(key)
            while len(self._occurrences) > _COUNTED_STEPS:
                self._occurrences.popitem(last=False)
            counts[piece] += 1
            return counts[piece] - 1

    # --- what the background thread calls ---------------------------------------------------

    def _wake(self) -> None:
        if self._courier is not None:
            self._courier.notice()

    def _locate(self) -> None:
        if self._place is None:
            self._place = ray_place()
        if self._attempt_key is None and self._place is not None:
            self._attempt_key = self._place.attempt_key

    def _connect(self) -> Link | None:
        options = self._options
        link = find_link(
            options.url or os.environ.get("STAGESCOPE_URL"),
            options.token,
            options.namespace,
            url_only=options.url is not None,
            # Who takes leave joins no cluster any more.
            waited=math.inf if self.is_inert else time.monotonic() - self._made,
        )
        if link is not None:
            self._locate()
            node = None if self._place is None else self._place.node_id
            self._hello.fields["watchdog"] = self.standing.watch()
            self._hello.fields["layout"] = plain(identity.detect_layout(options.layout, node=node))
        return link

    def _sender(self, clock: Clock) -> tuple[Any, ...]:
        best = clock.best(time.monotonic())
        return Sender(
            incarnation=self.incarnation,
            run=self.run,
            attempt_key=self._attempt_key,
            role=self.role,
            rank=self.rank,
            node_id=None if self._place is None else self._place.node_id,
            clock_offset=None if best is None else best.offset,
            clock_error=None if best is None else best.error,
        ).wire()

    def _say_hello(self) -> None:
        options = self._options
        fingerprint = identity.fingerprint(options.settings)
        self._say_versions(fingerprint.get("versions") or {})
        said = {
            "world_size": options.world_size,
            "data_rank": options.data_rank,
            "layout": plain(identity.detect_layout(options.layout, node=None)),
            "fingerprint": plain(fingerprint),
            "settings": plain(options.settings),
            "resumed_from_step": options.resumed_from_step,
            "pid": os.getpid(),
            "captures": False if options.captures is False else None,
        }
        self._hello.fields.update({k: v for k, v in said.items() if v is not None})

    def _say_versions(self, versions: Mapping[str, Sequence[str]]) -> None:
        """Log which packages may not work; every rank finds the same, the first says it."""
        if self.rank == 0:
            for line in versions.get("unsupported", ()):
                _log.warning("%s", line)
            for line in versions.get("untried", ()):
                _log.info("%s", line)

    def _watch(self, local: list[dict[str, Any]]) -> PlanWatch:
        return PlanWatch(
            run=self.run,
            role=self.role,
            rank=self.rank,
            local=local,
            keep=self._options.keep,
            is_carried_out=self._options.captures is not False,
            on_missed=self._report_missed,
            on_asked=self._report_estimate,
        )

    def _report_missed(self, capture: Mapping[str, Any], step: int, stage: str) -> None:
        fields = Work(step, None, stage).fields()
        error = "the capture arrived after this stage had begun here"
        fields |= {"capture_id": capture["capture_id"], "state": "missed", "error": error}
        self.outbox.put(DUMP, fields)

    def _report_estimate(self, capture: Mapping[str, Any]) -> None:
        """Say what an order would take here; in the background thread."""
        try:
            said = reckoning.reckon(capture, self._models, self.plan.data_dir)
            error = None
        except Exception as failure:  # the order may be what cannot be carried out
            said = [(str(capture["stages"][0]), {"basis": "unknown"})]
            error = f"{type(failure).__name__}: {failure}"[:2000]
        for stage, estimate in said:
            fields = Work(None, None, stage).fields()
            fields |= {"capture_id": capture["capture_id"], "state": "estimated"}
            self.outbox.put(DUMP, {**fields, "estimate": estimate, "error": error})
