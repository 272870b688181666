"""What the state machine remembers of a live run: attempts, processes, steps and spans of work.

Only what is live or was closed lately is kept here; the catalogue holds everything.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Final

from stagescope.schema import Work
from stagescope_service.engine.instructions import PayloadKey

RECENT_STEPS: Final = 8
"""Closed steps of an attempt that stay in memory, for events that arrive late."""

SETTLED_REMEMBERED: Final = 4096

OPEN, OK, FAILED, UNFINISHED = "open", "ok", "failed", "unfinished"
ANNOUNCED, INGESTED, LOST, DROPPED, REFUSED = (
    "announced",
    "ingested",
    "lost",
    "dropped",
    "refused",
)


@dataclasses.dataclass(slots=True)
class Span:
    """One part of a stage as one process worked on it."""

    incarnation: str
    role: str
    rank: int
    work: Work
    revision: int = 0
    status: str = OPEN
    begin_seq: int | None = None
    end_seq: int | None = None
    superseded: bool = False


@dataclasses.dataclass(slots=True)
class Payload:
    """A payload that was announced and is not settled."""

    key: PayloadKey
    attempt_id: int
    work: Work
    #: An ingestor is reading it: what becomes of it is that ingestor's word.
    in_flight: bool = False


@dataclasses.dataclass(slots=True)
class Process:
    """One incarnation of a rank (or of a raw caller)."""

    incarnation: str
    attempt_id: int
    role: str
    rank: int
    started: float
    raw: bool = False
    world_size: int | None = None
    data_rank: int | None = None
    node_id: str | None = None
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    lease_until: float = 0.0
    #: Highest step begun; None until it begins one, and until then it holds no step open.
    max_step: int | None = None
    finished: bool = False
    lapsed: bool = False
    #: A newer incarnation of the same (role, rank) took over in the same attempt.
    replaced: bool = False
    #: A step was begun: the attempt of this process no longer changes.
    bound: bool = False
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    open_spans: set[tuple[int | None, str, int]] = dataclasses.field(default_factory=set)
    payloads: dict[PayloadKey, Payload] = dataclasses.field(default_factory=dict)
    #: How its latest payloads ended, so that a repeated announcement is answered, not read again.
    settled: dict[int, str] = dataclasses.field(default_factory=dict)

    def settle(self, seq: int, state: str) -> None:
        """Remember how a payload ended."""
        self.settled[seq] = state
        if len(self.settled) > SETTLED_REMEMBERED:
            del self.settled[next(iter(self.settled))]

    @property
    def live(self) -> bool:
        """Whether its word still counts for when a step closes."""
        return not (self.finished or self.lapsed or self.replaced)


@dataclasses.dataclass(slots=True)
class Step:
    """A step of an attempt, open or closed lately."""

    step: int
    opened_wall: float
    closed_wall: float | None = None
    close_reason: str | None = None
    #: Rebuilt from an event that came after the step had left memory: completeness stays as stored.
    ghost: bool = False
    #: Every process's spans by work key; the last of a list is its newest revision.
    spans: dict[tuple[str, str], list[Span]] = dataclasses.field(default_factory=dict)
    #: Who worked on the same thing: (role, rank, work key) -> incarnations.
    holders: dict[tuple[str, int, str], list[str]] = dataclasses.field(default_factory=dict)
    pending: set[PayloadKey] = dataclasses.field(default_factory=set)


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
    first_step: int | None = None
    resumed_from_step: int | None = None
    last_closed_step: int | None = None
    #: Who took part in the last closed step: (role, stage) -> ranks.
    last_closed_ranks: dict[tuple[str, str], set[int]] = dataclasses.field(default_factory=dict)
    has_fingerprint: bool = False
    processes: dict[str, Process] = dataclasses.field(default_factory=dict)
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    #: Work without a step (a rollout job whose clock is the policy version).
    loose: Step = dataclasses.field(default_factory=lambda: Step(step=-1, opened_wall=0.0))
    #: How many live processes stand at which step: the lowest key holds its step open.
    clock: Counter[int] = dataclasses.field(default_factory=Counter)

    def world_size(self, role: str) -> int | None:
        """Return the largest world_size that a process of `role` told."""
        sizes = [
            process.world_size
            for process in self.processes.values()
            if process.role == role and process.world_size
        ]
        return max(sizes, default=None)
