"""The agreement of ranks on the step at which a capture starts. Pure.

A capture request is *asked* first: it is sent to the ranks under a revision of the plan and matches
no step. A rank acknowledges it by a poll with that revision or a later one. Once all ranks have
acknowledged, or the request's rule for absent ranks applies, the start step is fixed and the
request is sent again, *agreed*.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, NamedTuple

from typing_extensions import NotRequired

from stagescope_service.core.catalogue_rows import one_line
from stagescope_service.fields import (
    Described,
    Rank,
    Role,
    RoleRank,
    Row,
    Stage,
    Step,
    described_by,
)
from stagescope_service.store.tables.service import CaptureState
from stagescope_wire.captures import matches_rank
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.plan import CaptureRanks, CaptureSpec, CaptureSteps

ASKED: Final = "asked"
AGREED: Final = "agreed"
GIVEN_UP: Final = "given up"
TOO_LATE: Final = "too late"
REFUSED: Final = "refused"
DONE: Final = "done"
WITHDRAWN: Final = "withdrawn"
OPEN_PHASES: Final = (ASKED, AGREED)

MIN_ROUND_TRIP: Final = 0.25
"""Seconds; the BEGIN of a step may arrive this late."""

MAX_ROUND_TRIP: Final = 5.0
"""Seconds; a rank that took longer was stopped or away, and does not measure the round trip."""

_ESTIMATES_STORED: Final = 64


class Gap(RoleRank):
    """A rank that learned late, or failed."""

    step: Step | None
    """The trainer's step; null: not known."""
    stage: Stage | None
    """The stage's name; null: not known."""
    state: str
    """State of its dump: `missed`, `failed` or `truncated`."""


class Estimate(Row):
    """A rank's estimate of a capture's cost; unknown values are absent or null."""

    role: Role | None
    """The role; null: not known."""
    rank: Rank | None
    """The rank in its role, from 0; null: not known."""
    step: Step | None
    """Always null: an estimate is of any one step."""
    stage: Stage | None
    """The stage that the estimate is of; null: not known."""
    node_id: str | None
    """Ray's id of the rank's node; null: unknown."""
    error: str | None
    """Why it cannot estimate."""
    bytes: NotRequired[int | None]
    """Size in bytes of the dump of one step; 0 where `basis` is `unknown`."""
    seconds: NotRequired[float | None]
    """Seconds that one step takes longer; 0 where `basis` is `unknown`."""
    basis: NotRequired[str]
    """`measured` (earlier dumps), `model` (its size) or `unknown`."""
    tokens: NotRequired[int | None]
    """Number of tokens in the stage for which it is estimated; null: not needed."""
    assumed: NotRequired[bool]
    """Whether the number of tokens is assumed, because the rank did not report it."""
    free_bytes: NotRequired[int | None]
    """Free bytes on the rank's disk, without the reserve; null: unknown."""
    reserve_bytes: NotRequired[int | None]
    """Bytes that stay free on that disk."""
    collective_timeout: NotRequired[float | None]
    """Seconds after which the ranks that wait give up; null: not known."""


class Member(NamedTuple):
    """A rank that a capture requests."""

    role: str
    rank: int
    incarnation: str | None = None
    """None: no process of that rank is live."""
    revision: int | None = None
    """The revision of the plan that it has applied."""

    @property
    def name(self) -> RoleRank:
        """Its form in answers."""
        return {"role": self.role, "rank": self.rank}


class CaptureParticipants(NamedTuple):
    """The requested ranks, and their progress."""

    run: str | None
    attempt_id: int | None
    members: tuple[Member, ...]
    top_step: int | None = None
    """The highest step that any rank has begun."""
    closed_step: int | None = None
    """The highest step that is closed."""
    step_seconds: float | None = None
    """Duration of a step."""

    def late(self, revision: int) -> list[Member]:
        """Return the ranks that have not acknowledged a revision."""
        return [each for each in self.members if (each.revision or 0) < revision]


@dataclasses.dataclass
class Agreement(Described):
    """The agreement of ranks on a capture."""

    phase: CaptureState = ASKED
    number: int = 1
    """Number of times that it was requested: a step that some rank missed may be agreed again."""
    revision: int = 0
    """A rank that acknowledges this revision of the plan knows the capture."""
    attempt_id: int | None = None
    """The catalogue's id of the attempt whose ranks were requested; null: not agreed on yet."""
    asked_wall: float = 0.0
    """Unix seconds of the request."""
    agreed_wall: float | None = None
    """Unix seconds of the agreement; null: there is none."""
    start: Step | None = None
    """The first of the trainer's steps in which every rank knows it; null: not fixed."""
    round_trip: float | None = None
    """Seconds from the request to the last acknowledgement."""
    step_seconds: float | None = None
    """Median seconds between the begins of successive steps; null: not known."""
    steps: Annotated[CaptureSteps | None, described_by(object)] = None
    """The steps that are captured: their numbers, or `{every, start, count}`; null: not fixed."""
    missed_steps: list[int] = dataclasses.field(default_factory=list)
    """Requested steps that had begun already, and are not captured."""
    members: list[RoleRank] = dataclasses.field(default_factory=list)
    """The requested ranks."""
    without: list[RoleRank] = dataclasses.field(default_factory=list)
    """Ranks that had not acknowledged when it was agreed on or given up."""
    missed: list[Gap] = dataclasses.field(default_factory=list)
    """Ranks that learned late, or failed, since."""
    again_left: int = 0
    """Number of times that it may still be agreed again."""
    reason: str | None = None
    """Why it ended."""
    estimates: list[Estimate] = dataclasses.field(default_factory=list)
    """The ranks' estimates of its cost, by rank and stage; at most the 64 largest."""

    @classmethod
    def from_json(cls, stored: JsonObject) -> Agreement:
        """Read the result of `fields`; unknown fields of a later version are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in stored.items() if name in known})

    def fields(self) -> dict[str, Json]:
        """Return plain values."""
        return dataclasses.asdict(self)

    @property
    def is_open(self) -> bool:
        """Whether the request may still capture something."""
        return self.phase in OPEN_PHASES


def is_relative(steps: CaptureSteps) -> bool:
    """Return whether a request's steps count from the training's present step."""
    return isinstance(steps, Mapping) and ("next" in steps or steps["start"] is None)


def start_step(top_step: int, round_trip: float, step_seconds: float | None) -> int:
    """Return the first step that every rank knows of before it begins it.

    The highest step begun + 1 + the steps that fit into two round trips: one until the request
    arrives, and one because events of the ranks arrive as late.
    """
    trip = max(round_trip, MIN_ROUND_TRIP)
    fit = 0 if not step_seconds or step_seconds <= 0 else math.floor(2 * trip / step_seconds)
    return top_step + 1 + min(fit, 1_000_000)


def resolve(steps: CaptureSteps, start: int) -> tuple[CaptureSteps, list[int]]:
    """Return the steps of a request from `start` on, and the requested steps before `start`."""
    if isinstance(steps, str):  # all
        return {"every": 1, "start": start, "count": None}, []
    if isinstance(steps, list):
        return [step for step in steps if step >= start], [step for step in steps if step < start]
    if "next" in steps:
        return [*range(start, start + steps["next"])], []
    first, every, count = steps["start"], steps["every"], steps.get("count")
    if first is None or first >= start:
        return {"every": every, "start": start if first is None else first, "count": count}, []
    passed = math.ceil((start - first) / every)
    return {"every": every, "start": first + passed * every, "count": count}, []


def last_step(steps: CaptureSteps | None) -> int | None:
    """Return the last step of an agreed request; None if it has no end."""
    if isinstance(steps, list):
        return max(steps, default=None)
    if steps is None or isinstance(steps, str) or "next" in steps:
        return None
    count = steps.get("count")
    return None if count is None else (steps["start"] or 0) + (count - 1) * steps["every"]


def count_of(steps: CaptureSteps) -> int | None:
    """Return the number of steps of a request; None if it has no end."""
    if isinstance(steps, list):
        return len(steps)
    if isinstance(steps, str):  # all
        return None
    return steps["next"] if "next" in steps else steps.get("count")


def members_of(
    ranks: CaptureRanks,
    roles: Iterable[str],
    sizes: Mapping[str, int | None],
    live: Mapping[tuple[str, int], tuple[str, int | None]],
) -> tuple[Member, ...]:
    """Return the requested ranks of each role.

    Args:
        ranks: the ranks that the request names.
        roles: the roles that run its stages.
        sizes: role -> world_size; None if it is unknown: then the live ranks.
        live: (role, rank) -> (incarnation, applied revision).
    """
    found: list[Member] = []
    for role in sorted(set(roles)):
        size = sizes.get(role)
        there = {rank for name, rank in live if name == role}
        known = there if size is None else there | set(range(size))
        found += (
            Member(role, rank, *live.get((role, rank), (None, None)))
            for rank in sorted(known)
            if matches_rank(ranks, rank)
        )
    return tuple(found)


def check(
    pending: Agreement,
    request: CaptureSpec,
    participants: CaptureParticipants,
    *,
    elapsed: float,
    round_trip: float,
    wall: float,
) -> Agreement | None:
    """Return the next state of an asked request; None if it continues to wait.

    Args:
        pending: in phase ASKED.
        request: the capture as it was requested.
        participants: the requested ranks with their present state.
        elapsed: seconds since it was asked, by the clock that measures `timeout`.
        round_trip: seconds until the last acknowledgement.
        wall: Unix seconds, now.
    """
    late = participants.late(pending.revision)
    if not participants.members or participants.top_step is None:
        late = late or [Member("", -1)]  # wait until a rank is live and has begun a step
    named = [each.name for each in late if each.rank >= 0]
    if late:
        over = elapsed >= request["timeout"]
        if over and request["late"] == "give_up":
            reason = f"not every rank acknowledged within {request['timeout']:g} s"
            return dataclasses.replace(pending, phase=GIVEN_UP, without=named, reason=reason)
        any_acknowledged = len(participants.members) > len(named)
        if not (
            over
            and request["late"] == "go_on"
            and any_acknowledged
            and participants.top_step is not None
        ):
            return None
    assert participants.top_step is not None
    start = start_step(participants.top_step, round_trip, participants.step_seconds)
    steps, passed = resolve(request["steps"], start)
    if pending.number > 1 and isinstance(steps, list):
        # Asked again for a rank that missed a step: one step in its place, and the remaining ones.
        steps, passed = sorted({start, *steps}), []
    agreed = dataclasses.replace(
        pending,
        phase=AGREED,
        attempt_id=participants.attempt_id,
        agreed_wall=wall,
        start=start,
        steps=steps,
        missed_steps=[*pending.missed_steps, *passed],
        members=[each.name for each in participants.members],
        without=named,
        round_trip=round(round_trip, 6),
        step_seconds=participants.step_seconds,
        reason=None,
    )
    if steps != []:
        return agreed
    if pending.again_left:
        return dataclasses.replace(agreed, steps=[start], again_left=pending.again_left - 1)
    reason = (
        f"its steps had already begun; the first step that all ranks could know in time is {start}"
    )
    return dataclasses.replace(agreed, phase=TOO_LATE, reason=reason)


def largest(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return the estimates to store, by rank: only the largest if there are very many."""
    most = sorted(estimates, key=lambda each: -(each.get("bytes") or 0))[:_ESTIMATES_STORED]
    return sorted(most, key=lambda each: (each["role"], each["rank"], str(each["stage"])))


def refusal(request: CaptureSpec, estimates: Iterable[Estimate]) -> str | None:
    """Return why a request exceeds a limit: a disk's free space, or half of a time limit.

    Ranks wait for each other in collectives: a rank that is slower than their timeout ends the
    training. The bytes of ranks on one node add up.
    """
    estimates = [*estimates]
    for each in estimates:
        if error := each.get("error"):
            return f"{each['role']} rank {each['rank']} cannot carry it out: {one_line(error)}"
    if request["force"]:
        return None
    limit = count_of(request["steps"]) or 1
    nodes: dict[str, tuple[int, int]] = {}
    for each in estimates:
        seconds, timeout = each.get("seconds"), each.get("collective_timeout")
        if seconds and timeout and seconds > timeout / 2:
            return (
                f"{each['role']} rank {each['rank']} estimates {seconds:.0f} s in {each['stage']}, "
                f"more than half of the collectives' time limit of {timeout:.0f} s"
            )
        size, free = each.get("bytes"), each.get("free_bytes")
        if size and free is not None:
            node = str(each.get("node_id"))
            total, least = nodes.get(node, (0, free))
            nodes[node] = (total + size * limit, min(least, free))
    for node, (total, free) in nodes.items():
        if total > free:
            return (
                f"the ranks of node {node[:12]} estimate {total / 1e9:.1f} GB for {limit} steps, "
                f"and {free / 1e9:.1f} GB are free there"
            )
    return None
