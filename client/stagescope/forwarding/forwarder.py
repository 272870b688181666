"""Decide which steps to write to each target, and remember them.

One file per run and target, `$STAGESCOPE_HOME/forward/RUN-HASH.json` (mode 0600), has the attempt
and checksums of each written step. It is saved after each write. After a restart nothing is written
twice, except the steps of a write that was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope.connection import Connection
from stagescope.forwarding import PREFIX
from stagescope.forwarding.records import ALL_STEPS, ClosedStep, RunRecords, StepRecord
from stagescope.forwarding.traces import Otlp
from stagescope.forwarding.trackers import MLflow, SwanLab, TensorBoard, Tracker, Trackio, Wandb
from stagescope.table import Table
from stagescope_wire import discovery
from stagescope_wire.atomic_file import atomic_file
from stagescope_wire.errors import Conflict, InvalidInput, StagescopeError, Unauthorized
from stagescope_wire.nonfinite import Json
from stagescope_wire.render import printable, ranges_text

TRACKERS: Final[Mapping[str, type[Tracker]]] = {
    "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb, "swanlab": SwanLab,
    "trackio": Trackio, "otlp": Otlp,
}  # fmt: skip
_PREFIX: Final = re.compile(r"[\w./ -]{0,100}")
_PASSWORD: Final = re.compile(r"//[^/@\s]*@")
_STEPS_A_WRITE: Final = 50
_RECENT_STEPS: Final = 100
"""Newest steps that are looked at in each round while a run is followed."""
_ALL_SECONDS: Final = 300.0
"""How often all of them are."""
_PENDING_SECONDS: Final = 60.0
"""How long a followed step may wait for its numbers before it is written without."""
_FIRST_BACKOFF: Final = 5.0
_LAST_BACKOFF: Final = 300.0

Report = Callable[[str], object]


@dataclasses.dataclass
class Cursor:
    """Record of the steps and findings that were written to one target."""

    path: Path
    steps: dict[str, list[Json]] = dataclasses.field(default_factory=dict)
    """Step (of traces: attempt:step) -> attempt, checksum of the row, checksum of the record."""
    findings: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def load(cls, path: Path) -> Cursor:
        """Return the cursor in a file, or an empty one if there is no file.

        Raises:
            InvalidInput: it cannot be read.
        """
        try:
            stored = json.loads(path.read_text("utf-8"))
            return cls(path, dict(stored["steps"]), set(stored["findings"]))
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f"{path}, which says what was forwarded, cannot be read ({error})",
                advice="remove it to forward everything again",
            ) from error

    def save(self, run: str, target: str) -> None:
        """Write the file, readable by this user alone."""
        content = {
            "run": run, "target": target, "steps": self.steps, "findings": sorted(self.findings),
        }  # fmt: skip
        with atomic_file(self.path) as file:
            file.write(json.dumps(content).encode())


class Delivery:
    """The forwarding of one run to one target."""

    def __init__(self, target: str, records: RunRecords, prefix: str, from_step: int) -> None:
        kind, colon, self._address = target.partition(":")
        self.target = _PASSWORD.sub("//...@", target)
        if not colon or kind not in TRACKERS:
            raise InvalidInput(
                f"{self.target!r} is not a target",
                expected=", ".join(f"{one}:..." for one in TRACKERS),
            )
        self._kind, self._prefix, self._from_step = TRACKERS[kind], prefix, from_step
        self._records = records
        self._tracker: Tracker | None = None
        digest = hashlib.sha256(f"{target} {prefix}".encode()).hexdigest()[:12]
        path = discovery.service_file().parent / "forward" / f"{records.run}-{digest}.json"
        self.path = path
        self.cursor = Cursor(path)
        self.written = self.again = self.alerted = 0
        self.waiting: set[int] = set()
        """Steps whose numbers are still being made."""
        self.problem = ""
        self._backoff = _FIRST_BACKOFF
        self._retry_at = 0.0
        self._pending_since: dict[str, float] = {}

    @contextlib.contextmanager
    def opened(self, *, anew: bool) -> Iterator[None]:
        """Open the target, load what was written, and keep other processes from forwarding to it.

        Raises:
            MissingExtra: the tracker's client is not installed.
            InvalidInput: the target names no run.
            Conflict: another process forwards to it.
        """
        self._open()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Conflict(
                    f"another process forwards {self._records.run} to {self.target}",
                    advice="end it first",
                ) from error
            self.cursor = Cursor(self.path) if anew else Cursor.load(self.path)
            if anew:  # a failed write must not leave the old state
                self._save()
            try:
                yield
            finally:
                self._close()

    @property
    def notice(self) -> str:
        """Note for the tracker's reader, shown once."""
        return self._tracker.notice if self._tracker is not None else ""

    def deliver(self, steps: Sequence[ClosedStep], report: Report, *, patient: bool) -> None:
        """Write what is new; if the tracker fails, report it and do nothing until the next try.

        Args:
            steps: closed steps.
            report: accepts a line about each problem, step that is written again, and finding.
            patient: follow the run: wait for steps whose numbers are not ready, and report each
                step that is written.
        """
        if time.monotonic() < self._retry_at:
            return
        had_problem = self.problem
        try:
            self._deliver(steps, report, patient)
            self._alert(report)
        except _TrackerFailed as error:
            self._retry_at = time.monotonic() + self._backoff
            self._backoff = min(2 * self._backoff, _LAST_BACKOFF)
            self.problem = str(error)
            if self.problem != had_problem:
                report(f"{self.target}: {self.problem}")
            self._close()
            return
        self._backoff, self._retry_at, self.problem = _FIRST_BACKOFF, 0.0, ""
        if had_problem:
            report(f"{self.target}: writes again")

    def _deliver(self, steps: Sequence[ClosedStep], report: Report, patient: bool) -> None:
        due = self._due(steps, patient)
        for first in range(0, len(due), _STEPS_A_WRITE):
            records, reasons = [], []
            for step in due[first : first + _STEPS_A_WRITE]:
                record = self._records.record(
                    step, metrics=not self._kind.of_stages, stages=self._kind.of_stages
                )
                reason = self._reason(step, record)
                if reason is None:  # what is written did not change
                    self._remember(step, record)
                else:
                    records.append((step, record))
                    reasons.append(reason)
            self._write([record for _, record in records])
            for (step, record), reason in zip(records, reasons, strict=True):
                self._remember(step, record)
                self.written += 1
                self.again += bool(reason)
                if reason or patient:
                    report(f"{self.target}: step {step.step}{reason}")
            self._save()

    def _due(self, steps: Sequence[ClosedStep], patient: bool) -> list[ClosedStep]:
        """Return the steps that are not as they were written."""
        wanted = self._selected(steps)
        due = [
            step for step in wanted if self._known(step)[:2] != [step.attempt, step.row_checksum]
        ]
        self.waiting = {step.step for step in due if self._is_waited_for(step, patient)}
        if self._kind.is_ordered and patient and self.waiting:
            # Later steps would have to be rewritten.
            due = [step for step in due if step.step < min(self.waiting)]
        due = [step for step in due if step.step not in self.waiting]
        if not self._kind.is_ordered or not due:
            return due
        first = min(step.step for step in due)
        if all(int(key) < first for key in self.cursor.steps):
            return due
        # Numbers that are as they were need no write, and those after them none again.
        changed = [s.step for s in due if self._reason(s, self._records.record(s)) is not None]
        if not changed:
            return due
        first = min(changed)
        later = [step for step in self._selected(self._records.steps()) if step.step >= first]
        for key in [key for key in self.cursor.steps if int(key) > first]:
            self.cursor.steps[key][1:] = [None, None]  # to be written after them
        found = [step for step in due if step.step < first] + later
        return [step for step in found if step.step not in self.waiting]

    def _selected(self, steps: Sequence[ClosedStep]) -> list[ClosedStep]:
        return [
            step
            for step in steps
            if step.step >= self._from_step and (self._kind.of_stages or not step.superseded)
        ]

    def _is_waited_for(self, step: ClosedStep, patient: bool) -> bool:
        key = self._key(step)
        if self._kind.of_stages or not step.is_pending:
            self._pending_since.pop(key, None)
            return False
        since = self._pending_since.setdefault(key, time.monotonic())
        return not patient or time.monotonic() - since < _PENDING_SECONDS

    def _reason(self, step: ClosedStep, record: StepRecord) -> str | None:
        """Return why a step is written again, as text; "": it is new; None: it is not."""
        attempt, _, checksum = self._known(step)
        if self._kind.of_stages and not record.stages:  # retention removed them
            return None
        if attempt is None:
            return ""
        if attempt != record.attempt:
            return f" again: attempt {record.attempt} began it again"
        if checksum is None:
            return " again: an earlier step was, and hides it"
        return " again: it is not as it was" if checksum != record.checksum else None

    def _known(self, step: ClosedStep) -> list[Json]:
        return self.cursor.steps.get(self._key(step)) or [None, None, None]

    def _remember(self, step: ClosedStep, record: StepRecord) -> None:
        self.cursor.steps[self._key(step)] = [step.attempt, step.row_checksum, record.checksum]

    def _key(self, step: ClosedStep) -> str:
        return f"{step.attempt}:{step.step}" if self._kind.of_stages else str(step.step)

    def _alert(self, report: Report) -> None:
        if self._kind.alert is Tracker.alert:
            return
        new = [
            each
            for each in self._records.findings()
            if each.finding_id not in self.cursor.findings
            and (each.step is None or each.step >= self._from_step)
        ]
        if not new:
            return
        with _failures_of_tracker():
            self._open().alert(new)
        self.cursor.findings |= {each.finding_id for each in new}
        self._save()
        self.alerted += len(new)
        for each in new:
            report(f"{self.target}: {each.severity} {each.title}")

    def _save(self) -> None:
        self.cursor.save(self._records.run, self.target)

    def _write(self, records: Sequence[StepRecord]) -> None:
        if records:
            with _failures_of_tracker():
                self._open().write(records)

    def _open(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._kind(self._address, self._prefix, self._records.page)
        return self._tracker

    def _close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception):  # whatever its client raises
                tracker.close()


class _TrackerFailed(Exception):
    """A tracker's client raised something; the text is one line without passwords."""


@contextlib.contextmanager
def _failures_of_tracker() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any client's own kind
        lines = [line.strip() for line in str(error).split("\n") if line.strip()]
        text = printable(_PASSWORD.sub("//...@", lines[0] if lines else ""))
        raise _TrackerFailed(f"{type(error).__name__}: {text:.300}".rstrip(": ")) from error


def forward(
    connection: Connection, run: str, targets: Sequence[str], *, prefix: str = PREFIX,
    from_step: int = 0, anew: bool = False, page_url: str | None = None, every: float | None = None,
    stopped: threading.Event | None = None, report: Report = lambda line: None,
) -> Table:  # fmt: skip
    """Write closed steps and findings to targets; return a row for each target.

    The arguments are those of `Session.forward`, but for two: `every` is None to write what exists,
    else the seconds between two requests, and `stopped` ends that loop.

    Raises:
        StagescopeError: as `Session.forward`; the service refused or, without `every`, cannot be
            reached.
    """
    if not _PREFIX.fullmatch(prefix):
        raise InvalidInput(f"{prefix!r} is not a valid prefix", expected="letters, digits, / . _ -")
    if not targets:
        raise InvalidInput("no target is given", expected=", ".join(f"{k}:..." for k in TRACKERS))
    records = RunRecords(connection, run, page_url or connection.url)
    deliveries = [Delivery(each, records, prefix, from_step) for each in dict.fromkeys(targets)]
    with contextlib.ExitStack() as stack:
        for delivery in deliveries:
            stack.enter_context(delivery.opened(anew=anew))
            if delivery.notice:
                report(f"{delivery.target}: {delivery.notice}")
        if every is None:
            steps = records.steps()
            for delivery in deliveries:
                delivery.deliver(steps, report, patient=False)
        else:
            _follow(records, deliveries, every, stopped or threading.Event(), report)
        return _outcome(run, deliveries)


def _follow(
    records: RunRecords, deliveries: Sequence[Delivery], every: float, stopped: threading.Event,
    report: Report,
) -> None:  # fmt: skip
    """Write what closes until `stopped` is set; a service that is away is waited for.

    One that refuses the access token is not: only a person changes that.
    """
    all_at, problem = 0.0, ""
    while not stopped.is_set():
        # Steps long closed can change too; and after a failure it is not known what was missed.
        is_whole = time.monotonic() >= all_at or any(each.problem for each in deliveries)
        try:
            steps = records.steps(ALL_STEPS if is_whole else _RECENT_STEPS)
            for delivery in deliveries:
                delivery.deliver(steps, report, patient=True)
            all_at = time.monotonic() + _ALL_SECONDS if is_whole else all_at
            problem = ""
        except Unauthorized:
            raise
        except StagescopeError as error:
            all_at = 0.0
            if error.wrong != problem:
                report(error.wrong)
            problem = error.wrong
        stopped.wait(every)


def _outcome(run: str, deliveries: Sequence[Delivery]) -> Table:
    rows = [
        {
            "target": each.target, "steps": each.written, "again": each.again,
            "findings": each.alerted,
            "waiting": ranges_text("step", sorted(each.waiting)) if each.waiting else None,
            "problem": each.problem or None,
        }
        for each in deliveries
    ]  # fmt: skip
    return Table.from_rows(rows, title="forwarded", about={"run": run})
