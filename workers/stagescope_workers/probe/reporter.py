"""What a probe shares with its stages: where they report to, and how a problem is reported."""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
from collections.abc import Iterator
from typing import Any

from stagescope.wire.errors import InvalidTensor, StagescopeError
from stagescope.wire.schema import REFUSED, Work
from stagescope_workers.capture.reckoning import Models, RequestAnswers
from stagescope_workers.device import PinnedPool
from stagescope_workers.probe.draft import Draft
from stagescope_workers.probe.options import ProbeOptions
from stagescope_workers.probe.plan import PlanWatch
from stagescope_workers.probe.stage_tracker import StageTracker
from stagescope_workers.transport.handshake import Handshake
from stagescope_workers.transport.outbox import Outbox
from stagescope_workers.transport.sender import EventSender

_log = logging.getLogger("stagescope.workers")


class Reporter:
    """One rank's outbox, plan and options; it keeps every problem from the training process."""

    def __init__(self, options: ProbeOptions) -> None:
        self.run = options.run
        self.role = options.role
        self.rank = options.rank
        self.is_inert = False
        """True after `close`, in a forked child, and where `init` was refused."""
        self.refused: collections.Counter[str] = collections.Counter()
        """Calls with bad input so far, by what was called."""
        self.pool = PinnedPool(options.max_pinned_bytes)
        self._said: set[tuple[str, str]] = set()
        self._sender: EventSender | None = None
        self._begin_incarnation(options)

    def _begin_incarnation(self, options: ProbeOptions) -> None:
        """Make what belongs to one incarnation."""
        self._options = options
        self.strict = options.strict
        self.device_events = options.device_events
        self.incarnation = secrets.token_hex(16)
        self.outbox = Outbox(
            max_bytes=options.max_pending_bytes,
            max_events=options.max_pending_events,
            on_put=self._wake,
        )
        self.standing = StageTracker(self.outbox, watchdog_seconds=options.watchdog)
        self._introduction = Handshake(options, self.incarnation, self.outbox, self.standing)
        self._answers = RequestAnswers(self.outbox)
        self.plan = self._watch([])

    @property
    def attempt_key(self) -> str | None:
        """The attempt key: as given, else Ray's session and job; None where neither is known."""
        if self._introduction.attempt_key is None:
            with contextlib.suppress(Exception):
                self._introduction.locate()
        return self._introduction.attempt_key

    @property
    def models(self) -> Models:
        """Which model ran in which stage, and how many tokens it had."""
        return self._answers.models

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
        self,
        what: str,
        error: StagescopeError,
        work: Work | None,
        *,
        quiet: bool = False,
        is_error: bool = False,
    ) -> None:
        """Report bad input (`is_error`: numbers are missing for it): logged once a kind, counted,
        sent; raised when strict.

        Raises:
            StagescopeError: `error`, when strict and not `quiet`.
        """
        self._note(what, error, work, **({"severity": "error"} if is_error else {}))
        if self.strict and not quiet:
            error._stagescope_refused = True  # type: ignore[attr-defined]
            raise error

    def new_misspellings(self, work: Work, draft: Draft) -> list[InvalidTensor]:
        """Return what is wrong with names that a stage recorded: once a stage's name and name.

        Strict says it each time.
        """
        found = []
        for name, error in draft.misspelt():
            known = (f"name {name}", work.stage or "")
            if self.strict or known not in self._said:
                self._said.add(known)
                found.append(error)
        return found

    def _note(self, what: str, error: Exception, work: Work | None, **also: str) -> None:
        self.refused[what] += 1
        kind = (what, type(error).__name__)
        if kind not in self._said:
            self._said.add(kind)
            known = isinstance(error, StagescopeError)
            _log.warning("%s: %s", what, error if known else repr(error), exc_info=not known)
        fields = {} if work is None else work.fields()
        self.outbox.put(REFUSED, {**fields, **also, "what": what, "message": str(error)[:2000]})

    def _wake(self) -> None:
        if self._sender is not None:
            self._sender.notice()

    def _watch(self, local: list[dict[str, Any]]) -> PlanWatch:
        return PlanWatch(
            run=self.run,
            role=self.role,
            rank=self.rank,
            local=local,
            keep=self._options.keep,
            is_carried_out=self._options.captures is not False,
            on_missed=self._answers.missed,
            on_asked=lambda capture: self._answers.estimate(capture, self.plan.data_dir),
        )
