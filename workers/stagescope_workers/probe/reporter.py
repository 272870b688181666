"""The part of a probe that its stages use: the outbox, the plan, and the reporting of problems."""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Final

from stagescope_wire.errors import InvalidTensor, StagescopeError
from stagescope_wire.keep import is_selected, misspelt_selectors
from stagescope_wire.plan import CaptureRequest
from stagescope_wire.schema import REFUSED, Work
from stagescope_workers.capture.capture_estimate import CaptureReports, StageModels
from stagescope_workers.device import PinnedPool
from stagescope_workers.probe.draft import Draft
from stagescope_workers.probe.handshake import Handshake
from stagescope_workers.probe.options import ProbeOptions
from stagescope_workers.probe.rank_plan import PlanWatch
from stagescope_workers.probe.watchdog import StageTracker
from stagescope_workers.transport.outbox import Outbox
from stagescope_workers.transport.sender import EventSender

_log = logging.getLogger("stagescope.workers")


_VALUES: Final = re.compile(r"'[^']*'|\d[\d.e+-]*")
_MAX_LOGGED: Final = 50
"""Kinds of refusals that a process logs; the service gets each."""


class Reporter:
    """One rank's outbox, plan and options; it hides every problem from the training process."""

    def __init__(self, options: ProbeOptions) -> None:
        self.run = options.run
        self.role = options.role
        self.rank = options.rank
        self.is_inert = False
        """True after `close`, in a forked child, and where `init` was refused."""
        self.refused: collections.Counter[str] = collections.Counter()
        """The number of calls with bad input so far, by the call's name."""
        self.pool = PinnedPool(options.max_pinned_bytes)
        self._reported: set[tuple[str, str]] = set()
        self._logged: set[tuple[str, str]] = set()
        self._sender: EventSender | None = None
        self._begin_incarnation(options)

    def _begin_incarnation(self, options: ProbeOptions) -> None:
        self._options = options
        self.strict = options.strict
        self.device_events = options.device_events
        self.incarnation = secrets.token_hex(16)
        self.outbox = Outbox(
            max_bytes=options.max_pending_bytes,
            max_events=options.max_pending_events,
            on_put=self._wake,
        )
        self.stage_tracker = StageTracker(self.outbox, watchdog_seconds=options.watchdog)
        self._handshake = Handshake(options, self.incarnation, self.outbox, self.stage_tracker)
        self._capture_reports = CaptureReports(self.outbox)
        self.plan = self._watch_plan([])

    @property
    def attempt_key(self) -> str | None:
        """The attempt key: as given, else Ray's session and job; None where neither is known."""
        if self._handshake.attempt_key is None:
            with contextlib.suppress(Exception):
                self._handshake.find_ray()
        return self._handshake.attempt_key

    @property
    def dump_key(self) -> str:
        """The attempt's key in paths of dumps: the process's own, else what the service gave it.

        Without a service it has none, nor between a start and its first step where its attempt is
        not known yet. Then each process has a directory of its own.
        """
        given = None if self._sender is None else self._sender.attempt_key
        return self.attempt_key or given or self.incarnation

    @property
    def models(self) -> StageModels:
        """The model of each stage, and its number of tokens."""
        return self._capture_reports.models

    @property
    def data_root(self) -> str | None:
        """The directory of dumps whose capture names none."""
        return self._options.data_root or self.plan.data_dir

    @property
    def out_of_reach(self) -> str | None:
        """Why the operators of this process's stages cannot be captured; None where they can."""
        captures = self._options.captures
        return captures if isinstance(captures, str) else None

    @contextlib.contextmanager
    def guard(self, call: str, work: Work | None, *, quiet: bool = False) -> Iterator[None]:
        """Catch and report any exception, unless the probe is strict and not `quiet`."""
        try:
            yield
        except Exception as error:
            if not getattr(error, "_stagescope_refused", False):
                self._report_refusal(call, error, work)
            if self.strict and not quiet:
                raise

    def refuse(
        self,
        call: str,
        error: StagescopeError,
        work: Work | None,
        *,
        quiet: bool = False,
        is_error: bool = False,
    ) -> None:
        """Report bad input: log each kind of message once, count and send it; raise when strict.

        Args:
            call: the name of the call that was given the input.
            error: describes it.
            work: the stage or step, where there is one.
            quiet: whether not to raise even when strict.
            is_error: whether the service lacks numbers because of it.

        Raises:
            StagescopeError: `error`, when strict and not `quiet`.
        """
        self._report_refusal(call, error, work, is_error=is_error)
        if self.strict and not quiet:
            error._stagescope_refused = True  # type: ignore[attr-defined]
            raise error

    def new_misspellings(self, work: Work, draft: Draft) -> list[InvalidTensor]:
        """Return the errors of misspelt names: each once per stage, or each time when strict."""
        found = []
        for name, error in draft.misspelt():
            key = (f"name {name}", work.stage or "")
            if self.strict or key not in self._reported:
                self._reported.add(key)
                found.append(error)
        return found

    def is_kept(self, name: str, stage: str, step: int | None) -> bool:
        """Return whether a tensor of this name is kept of a stage; see `Stage.wants`.

        Raises:
            InvalidTensor: when the probe is strict: a misspelt name.
        """
        with self.guard("wants", None):
            if is_selected(self.plan.keep_selectors(step, stage), stage, name):
                return True
            self.plan.leave_out(step, stage, tensors=[name])
            self._check_spelling(name, Work(step, None, stage))
        return False

    def _check_spelling(self, name: str, work: Work) -> None:
        """Refuse a name that is no tensor's and no section's, but similar to one; once per stage.

        A name without a similar one may be a tensor of the training's own.
        """
        key = (f"wants {name}", work.stage or "")
        if key in self._reported:
            return
        if not self.strict:
            self._reported.add(key)
        for _, intended in misspelt_selectors([name]):
            error = InvalidTensor(
                f"wants({name!r:.100}): no tensor and no section has this name",
                expected=f"{intended}, which is the closest",
                advice="rename it there: until then the answer is False",
            )
            self.refuse("wants", error, work)

    def _report_refusal(
        self, call: str, error: Exception, work: Work | None, *, is_error: bool = False
    ) -> None:
        self.refused[call] += 1
        # Messages that differ only in numbers and quoted values are logged once.
        kind = (call, _VALUES.sub("_", f"{type(error).__name__} {error!s:.200}"))
        if kind not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(kind)
            expected = isinstance(error, StagescopeError)
            message = error if expected else repr(error)
            where = f"run {self.run}, {self.role} {self.rank}"
            if work is not None and work.stage is not None:
                where += f", stage {work.stage}"
            if work is not None and work.step is not None:
                where += f", step {work.step}"
            _log.warning("%s: %s: %s", where, call, message, exc_info=not expected)
        fields = {} if work is None else work.fields()
        if is_error:
            fields["severity"] = "error"
        self.outbox.put(REFUSED, {**fields, "what": call, "message": str(error)[:2000]})

    def _wake(self) -> None:
        if self._sender is not None:
            self._sender.wake_if_sendable()

    def _watch_plan(self, local: Sequence[CaptureRequest]) -> PlanWatch:
        return PlanWatch(
            self._options,
            local=local,
            on_missed=self._capture_reports.report_missed,
            on_estimate_requested=lambda capture: self._capture_reports.report_estimate(
                capture, self.plan.data_dir
            ),
        )
