"""The state machine's objects of a live run: attempts, processes, steps and spans of work.

Only what is live or recently closed is in memory; the catalogue holds everything.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final, NamedTuple

from stagescope_service.core.instructions import (
    PayloadKey,
    Put,
)
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import Part, Sender, Work

RECENT_STEPS: Final = 8
"""Closed steps of an attempt that stay in memory, for events that arrive late."""

OPEN_STEPS: Final = 64
"""Steps that one slow (role, rank) may hold open; beyond, the lowest close without it."""

SETTLED_REMEMBERED: Final = 1024
"""Outcomes of payloads that a process may still ask for."""

SPANS_REMEMBERED: Final = 1024
"""Spans that a process began and never ended, and ended ones of work without a step."""

OPEN, OK, FAILED, UNFINISHED = "open", "ok", "failed", "unfinished"
ANNOUNCED, INGESTED, LOST, DROPPED, REFUSED = (
    "announced",
    "ingested",
    "lost",
    "dropped",
    "refused",
)


RankAge = tuple[str, int, tuple[float, str]]
"""(role, rank, age) of a process."""

Participants = dict[tuple[str, str], set[int]]
"""(role, stage) -> ranks."""


def leaves(settings: JsonObject) -> int:
    """Return the number of values in settings; a mapping counts its own values."""
    return sum(len(value) if isinstance(value, Mapping) else 1 for value in settings.values())


@dataclasses.dataclass(slots=True)
class Span:
    """One part of a stage as one process worked on it."""

    incarnation: str
    role: str
    rank: int
    work: Work
    #: If two spans of a process have one identity, the higher revision counts; see `spans`.
    revision: int = 0
    status: str = OPEN
    begin_seq: int | None = None
    end_seq: int | None = None
    #: None if unknown.
    superseded: bool | None = False
    #: When it began, by the service's clock.
    begun: float | None = None
    #: Times of its part in its role; None until its BEGIN.
    timing: StageTiming | None = None


@dataclasses.dataclass(slots=True)
class PendingPayload:
    """A payload that was announced and is not settled."""

    key: PayloadKey
    attempt_id: int
    work: Work
    #: An ingestor is reading it, and reports the outcome.
    in_flight: bool = False


@dataclasses.dataclass(slots=True)
class Drops:
    """Counts of the items that a process dropped; each of its reports counts once."""

    events: int = 0
    payloads: int = 0
    bytes: int = 0
    #: Seqs of the latest counted reports; with a full list, all older ones were counted as well.
    seqs: list[int] = dataclasses.field(default_factory=list)

    REMEMBERED: ClassVar[int] = 256

    def add(self, seq: int, what: str, count: int, size: int) -> bool:
        """Count a report; return False if it was counted before."""
        full = len(self.seqs) >= self.REMEMBERED
        if seq in self.seqs or (full and seq < self.seqs[0]):
            return False
        bisect.insort(self.seqs, seq)
        del self.seqs[: -self.REMEMBERED]
        self.events += count if what == "event" else 0
        self.payloads += count if what == "payload" else 0
        self.bytes += size
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Handshake:
    """A process's report about its start (HELLO); the attempt reads it from here."""

    wall: float
    fingerprint: JsonObject | None = None
    #: All settings; None if it reported none.
    settings: JsonObject | None = None
    resumed_from_step: int | None = None
    #: As reported, whether accepted or refused.
    world_size: int | None = None


@dataclasses.dataclass(slots=True)
class Process:
    """One incarnation of a rank (or of a raw caller)."""

    incarnation: str
    attempt_id: int
    role: str
    rank: int
    #: When it started, by the service's clock as far as its offset was known then.
    started: float
    raw: bool = False
    unkeyed: bool = False
    #: Its launcher's text about this start; a later start has another one.
    launch: str | None = None
    #: It knows of no other rank of its role.
    is_single: bool = False
    world_size: int | None = None
    data_rank: int | None = None
    node_id: str | None = None
    layout: dict[str, Json] = dataclasses.field(default_factory=dict)
    #: Whether this process carries out captures.
    captures: bool = True
    #: Roles whose ranks report beside it, as its HELLO lists them.
    expected_roles: frozenset[str] = frozenset()
    #: Path of its watchdog's file, on its node.
    watchdog: str | None = None
    #: The run's settings that it reported (rollout_is and its threshold shape the statistics).
    settings: dict[str, Json] = dataclasses.field(default_factory=dict)
    #: Its HELLO; moves with it to another attempt.
    handshake: Handshake | None = None
    lease_until: float = 0.0
    last_wall: float = 0.0
    #: Time of its last event or poll, by the service's clock.
    last_contact: float = 0.0
    #: Time of its last poll, by the service's clock; 0: none came to this coordinator.
    last_poll: float = 0.0
    #: Time of its last BEGIN or END, by the service's clock.
    last_event: float = 0.0
    #: Its last BEGIN: time, key of the work, timing of its role in that part.
    reached: tuple[float, str, StageTiming] | None = None
    clock: tuple[float | None, float | None] = (None, None)
    #: The sender of its last event, from which `clock` and `node_id` are taken.
    sender: Sender | None = None
    #: Highest step begun; None until it begins one: until then it holds no step open.
    max_step: int | None = None
    #: Highest revision of its spans.
    newest_revision: int = 0
    #: It went back to an earlier step, and may begin steps again up to the highest it had reached.
    went_back: bool = False
    finished: bool = False
    #: Seq of its FINISH, and of its newest BEGIN.
    finish_seq: int | None = None
    begun_seq: int = 0
    lapsed: bool = False
    left_wall: float | None = None
    #: A newer incarnation of the same (role, rank) has replaced it in the same attempt.
    replaced: bool = False
    #: Revision of the plan that it has applied.
    plan_revision: int | None = None
    #: It was removed from memory and reported again: its open spans are not known.
    returned: bool = False
    #: It has begun a step: its attempt no longer changes.
    bound: bool = False
    #: When it began that step; minus infinity: before this coordinator.
    bound_wall: float = -math.inf
    #: Rows that it reported before, by table and key, and whether they are new in its attempt: they
    #: move with the process to another attempt.
    unbound_rows: dict[tuple[str, ...], tuple[Put, bool]] = dataclasses.field(default_factory=dict)
    #: It has reported work of its own in its attempt.
    worked: bool = False
    #: Counted DROPPED events, and their totals.
    drops: Drops = dataclasses.field(default_factory=Drops)
    #: Spans that it began and has not ended, by (work key, revision).
    open_spans: dict[tuple[str, int], Span] = dataclasses.field(default_factory=dict)
    #: Spans that were marked as unfinished when it lapsed or finished.
    unfinished: dict[tuple[str, int], Span] = dataclasses.field(default_factory=dict)
    payloads: dict[PayloadKey, PendingPayload] = dataclasses.field(default_factory=dict)
    #: Final states of its latest payloads, so that a repeated announcement gets its answer at once.
    settled: dict[int, str] = dataclasses.field(default_factory=dict)
    #: The highest seq of its payloads, or -1: later ones are new. A raw caller, whose seqs have no
    #: order, has -1 if all its payloads came to this coordinator. None: only the catalogue knows.
    payloads_through: int | None = None
    #: Reasons for which payloads of a raw caller were refused, for the answer to its call.
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    #: (work key, capture) -> column -> seq of the DUMP event that set it last.
    dumps: dict[tuple[str, str], dict[str, int]] = dataclasses.field(default_factory=dict)
    #: Dumps that it began and has not ended: (work key, capture) -> work and row.
    armed: dict[tuple[str, str], tuple[Work, dict[str, Json]]] = dataclasses.field(
        default_factory=dict
    )

    def settle(self, seq: int, state: str, reason: str | None = None) -> None:
        """Record the final state of a payload, with the reason."""
        self.settled[seq] = state
        if self.raw and reason is not None:
            self.reasons[seq] = reason
        if len(self.settled) > SETTLED_REMEMBERED:
            oldest = next(iter(self.settled))
            del self.settled[oldest]
            self.reasons.pop(oldest, None)

    @property
    def live(self) -> bool:
        """Whether steps wait for this process before they close."""
        return not (self.finished or self.lapsed or self.replaced)

    @property
    def age(self) -> tuple[float, str]:
        """Sort key of the incarnations of one rank: the highest is the newest."""
        return (self.started, self.incarnation)


@dataclasses.dataclass(slots=True)
class Step:
    """A step of an attempt, open or recently closed."""

    step: int
    opened_wall: float
    closed_wall: float | None = None
    close_reason: str | None = None
    #: Created for an event that arrived after the step had left memory: the stored verdict stays.
    evicted: bool = False
    #: Spans by process and work key, in order of revision: the last of a list counts.
    spans: dict[tuple[str, str], list[Span]] = dataclasses.field(default_factory=dict)
    #: The incarnations that worked on a rank's stage, with the lowest part that each began:
    #: (role, rank, work key without the part) -> incarnation -> part.
    holders: dict[tuple[str, int, str], dict[str, Part]] = dataclasses.field(default_factory=dict)
    #: (role, stage) -> rank -> its spans.
    ranks: dict[tuple[str, str], dict[int, list[Span]]] = dataclasses.field(default_factory=dict)
    #: role -> work key -> times of its ranks.
    timings: dict[str, dict[str, StageTiming]] = dataclasses.field(default_factory=dict)
    #: Participants of the closed step before, kept when that step leaves memory.
    before: Participants | None = None
    #: The last verdict: (role, stage) -> expected ranks, and the missing ones of them.
    expected: Participants = dataclasses.field(default_factory=dict)
    missing: dict[tuple[str, str, int], str] = dataclasses.field(default_factory=dict)
    unknown: bool = True
    #: The verdict has changed since it was written.
    stale: bool = False


OUTLIVED_SECONDS: Final = 30.0
"""A process that is heard so long after the end of a driver did not end with it."""


@dataclasses.dataclass(slots=True)
class Attempt:
    """One start of the training of a run."""

    attempt_id: int
    run: str
    number: int
    key: str
    unkeyed: bool = False
    opened_wall: float = 0.0
    ended_wall: float | None = None
    end_reason: str | None = None
    first_step: int | None = None
    resumed_from_step: int | None = None
    #: A process reported `resumed_from_step`; otherwise it is derived from the first step.
    resume_reported: bool = False
    #: The reported `resumed_from_step` as it was stored before the service restarted.
    resumed_restored: int | None = None
    last_closed_step: int | None = None
    #: Time at which its first step closed, and the last one.
    first_closed_wall: float | None = None
    last_closed_wall: float | None = None
    #: Number of steps that closed, and the most seconds between two of them.
    closes: int = 0
    longest_wait: float = 0.0
    #: (role, rank, age) of the process whose fingerprint it has: the lowest of all, so that the
    #: fingerprints of two attempts come from corresponding processes.
    fingerprint_of: RankAge | None = None
    fingerprint: dict[str, Json] = dataclasses.field(default_factory=dict)
    #: The largest configuration that one of its processes reported, and which process that is.
    config: Json = None
    config_of: tuple[int, RankAge] | None = None
    #: Number of values in the settings that the run is shown with.
    settings_size: int = 0
    #: Some of its processes may be only in the catalogue: they came before this coordinator.
    has_past: bool = False
    processes: dict[str, Process] = dataclasses.field(default_factory=dict)
    by_rank: dict[tuple[str, int], list[Process]] = dataclasses.field(default_factory=dict)
    #: role -> (age of the process that reported it, world_size): the newest counts.
    sizes: dict[str, tuple[tuple[float, str], int]] = dataclasses.field(default_factory=dict)
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    #: Steps that are not closed.
    open: set[int] = dataclasses.field(default_factory=set)
    #: The highest step opened so far.
    top_step: int | None = None
    #: The highest step of an END_STEP.
    ended_through: int | None = None
    #: The highest step that may have left memory: the stored rows of those steps stay.
    forgotten_through: int | None = None
    #: Payloads that were announced and are not settled, by step.
    pending: dict[int | None, set[PayloadKey]] = dataclasses.field(default_factory=dict)
    #: The last mark of a step to aggregate; each is greater than the one before.
    last_mark: int = 0
    #: Work without a step (a rollout job whose clock is the policy version).
    stepless: Step = dataclasses.field(default_factory=lambda: Step(step=-1, opened_wall=0.0))
    #: step -> number of live processes whose highest step it is: the lowest holds its step open.
    clock: Counter[int] = dataclasses.field(default_factory=Counter)
    #: Roles that a process (a trainer's driver) expects to report, and roles of which a rank has
    #: reported.
    expected_roles: set[str] = dataclasses.field(default_factory=set)
    reporting_roles: set[str] = dataclasses.field(default_factory=set)
    #: (role, stage) whose names were checked.
    stage_names: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    #: (role, stage) that were found to hand over values without a step.
    stepless_stages: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    #: Role -> the open finding that none of its ranks has reported.
    silent_roles: dict[str, dict[str, Json]] = dataclasses.field(default_factory=dict)
    #: Role -> ranks that the open finding says no process reports for, and its row.
    absent_ranks: dict[str, tuple[frozenset[int], dict[str, Json]]] = dataclasses.field(
        default_factory=dict
    )
    #: Incarnation of the last rank that started again and stayed in this attempt.
    stayed: str | None = None
    #: One of its processes said that an exception ended it.
    crashed: bool = False
    #: One of its processes said that it was interrupted.
    interrupted: bool = False
    #: When its driver said that an exception or an interruption ended it, by the service's clock.
    driver_ended: float | None = None

    def add(self, process: Process) -> None:
        """Add a process."""
        self.processes[process.incarnation] = process
        self.by_rank.setdefault((process.role, process.rank), []).append(process)
        self.reporting_roles.add(process.role)
        self.expected_roles |= process.expected_roles
        self.believe(process)

    def remove(self, processes: Iterable[Process]) -> None:
        """Remove processes that have done no work in this attempt."""
        for process in processes:
            del self.processes[process.incarnation]
            self.by_rank[(process.role, process.rank)].remove(process)
            self.sizes.pop(process.role, None)
        self.expected_roles, self.reporting_roles = set(), set()
        for other in self.processes.values():
            self.expected_roles |= other.expected_roles
            self.reporting_roles.add(other.role)
            self.believe(other)

    def believe(self, process: Process) -> bool:
        """Update the size of a role from what a process reports; return whether it changed."""
        if process.world_size is None:
            return False
        known = self.sizes.get(process.role)
        if known is not None and known[0] > process.age:
            return False
        self.sizes[process.role] = (process.age, process.world_size)
        return known is None or known[1] != process.world_size

    def forget_steps(self) -> None:
        """Remove all steps from memory; their stored rows stay."""
        if self.top_step is not None:
            self.forgotten_through = self.top_step
        without = self.stepless
        for mapping in (self.steps, without.spans, without.holders, without.ranks):
            mapping.clear()

    def note_closed(self, wall: float) -> None:
        """Record when a step closed."""
        first, last = self.first_closed_wall, self.last_closed_wall
        self.first_closed_wall = wall if first is None else min(first, wall)
        self.last_closed_wall = wall if last is None else max(last, wall)
        self.longest_wait = max(self.longest_wait, 0.0 if last is None else wall - last)
        self.closes += 1

    def world_size(self, role: str) -> int | None:
        """Return the number of ranks of a role, as its newest process reported it."""
        known = self.sizes.get(role)
        return None if known is None else known[1]

    def missing(self) -> Iterator[tuple[str, int, bool]]:
        """Yield (role, rank, whether it ever reported) of ranks that never reported or lapsed."""
        if not self.processes:  # unknown for an attempt that left memory
            return
        for role, (_, size) in self.sizes.items():
            for rank in range(size):
                if not self.by_rank.get((role, rank)):
                    yield role, rank, False
        for (role, rank), processes in self.by_rank.items():
            if processes and max(processes, key=lambda each: each.age).lapsed:
                yield role, rank, True

    def is_fullest(self, settings: JsonObject) -> bool:
        """Return whether no other process has reported more of the run's settings."""
        size = leaves(settings)
        self.settings_size, before = max(size, self.settings_size), self.settings_size
        return size >= before

    @property
    def unheard_roles(self) -> set[str]:
        """Return the expected roles without a rank that has reported."""
        return self.expected_roles - self.reporting_roles

    @property
    def cut_off(self) -> bool:
        """Whether its driver was ended, and its processes with it.

        Those of another job that has the same key go on.
        """
        ended = self.driver_ended
        return ended is not None and all(
            process.last_contact <= ended + OUTLIVED_SECONDS for process in self.processes.values()
        )

    @property
    def over(self) -> bool:
        """Whether no process is left."""
        return self.ended_wall is not None


class StageKey(NamedTuple):
    """One part of a stage of a step, in one role."""

    step: int | None
    stage: str
    part: Part


@dataclasses.dataclass(slots=True)
class StageTiming:
    """Times of a role's ranks in a part of a stage; merged by minimum and maximum."""

    key: StageKey
    first: float = math.inf
    """When the first rank began it."""
    last: float = -math.inf
    """When the last rank that began it did so."""
    longest: float | None = None
    """Seconds that the slowest rank took to end it; None: no rank has ended it."""

    def begun(self, at: float) -> None:
        """Add the time at which a rank began."""
        if at < self.first:
            self.first = at
        if at > self.last:
            self.last = at

    def took(self, seconds: float) -> None:
        """Add the duration of a rank that ended."""
        self.longest = self.longest or 0.0
        if seconds > self.longest:
            self.longest = seconds


WENT_ON: Final = "everyone went on"


SAID: Final = "end_step"


LEFT_BEHIND: Final = "left behind"
"""Closed with processes still in it: the others are too many steps ahead."""


FINISHED: Final = "finished"


CRASHED: Final = "an exception ended one of its processes"
