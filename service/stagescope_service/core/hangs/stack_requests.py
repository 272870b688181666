"""Requests for the stacks of processes: handed out by polls, answered by events, in the catalogue.

A request is committed before it is handed out, so a restarted coordinator hands it out again. A
process answers each request once; an answer after the deadline is stored all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field
from typing_extensions import NotRequired

from stagescope_service.core.catalogue_rows import integer, text
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.findings import finding, of_process
from stagescope_service.core.instructions import AnswerPoll, Instruction, Put
from stagescope_service.fields import Row
from stagescope_wire.collectives.blocked import AXES, Member, place_of
from stagescope_wire.collectives.records import RankRecord
from stagescope_wire.errors import InvalidEvent, InvalidInput
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import STACKS, Work
from stagescope_wire.stacks import MAX_CHARACTERS, MAX_THREADS, PROBE, WATCHDOG

if TYPE_CHECKING:
    from stagescope_service.store.tables import StackRow, Thread

ASKED, ANSWERED, NOT_ANSWERED = "asked", "answered", "not answered"
ORDERED: Final = "ordered"
"""The reason of a request that a person made."""

MAX_ASKED: Final = 128
"""Processes of one request: the stacks of each are up to 256 kB."""


@dataclasses.dataclass(slots=True)
class _Asked:
    deadline: float
    only_training: bool = False
    handed: bool = False


def request_of(fields: JsonObject) -> str:
    """Return the id of the request that a STACKS event answers.

    Raises:
        InvalidEvent: there is no request_id.
    """
    request_id = text(fields.get("request_id"), 200)
    if not request_id:
        raise InvalidEvent("stacks without a request_id", expected="the request's")
    return request_id


class RankRequest(Row):
    """A request to a process."""

    what: Annotated[str, Field(examples=["stacks"])]
    """The request: `stacks`, or `finish` (send everything, then leave)."""
    request_id: str
    """Id of the request, which the answer names."""
    only_training: NotRequired[bool]
    """Whether the stacks of the training threads suffice."""


@dataclasses.dataclass(slots=True)
class Answers:
    """The collectives that came with the answers to a request, until the last one has come."""

    request_id: str
    attempt_id: int
    reason: str
    wall: float
    """When they were requested."""
    awaited: set[str] = dataclasses.field(default_factory=set)
    """Incarnations that have not answered."""
    members: dict[str, list[Member]] = dataclasses.field(default_factory=dict)
    """Role -> its ranks that sent a record."""


class StackRequests:
    """Pending requests for stacks, by process; only the state machine uses it."""

    def __init__(self) -> None:
        self._requested: dict[str, dict[str, _Asked]] = {}
        self._answers: dict[str, Answers] = {}

    def ask(
        self,
        process: Process,
        request_id: str,
        *,
        by: str,
        reason: str,
        wall: float,
        seconds: float,
        only_training: bool = False,
    ) -> list[Instruction]:
        """Request the stacks and collectives of a process, with `seconds` to answer."""
        deadline = wall + seconds
        requested = _Asked(deadline, only_training)
        self._requested.setdefault(process.incarnation, {})[request_id] = requested
        answers = Answers(request_id, process.attempt_id, reason, wall)
        self._answers.setdefault(request_id, answers).awaited.add(process.incarnation)
        row = {
            "incarnation": process.incarnation,
            "request_id": request_id,
            "attempt_id": process.attempt_id,
            "role": process.role,
            "rank": process.rank,
            "step": process.max_step,
            "source": PROBE,
            "state": ASKED,
            "reason": reason,
            "by": by,
            "wall": wall,
            "deadline_wall": deadline,
        }
        return [Put("stacks", row), AnswerPoll(process.incarnation)]

    def adopt(self, rows: Iterable[StackRow]) -> None:
        """Add the pending requests of an earlier coordinator."""
        for row in rows:
            requested = _Asked(row["deadline_wall"] or 0.0)
            self._requested.setdefault(row["incarnation"], {})[row["request_id"]] = requested

    def is_news(self, incarnation: str) -> bool:
        """Return whether a process has a request that no poll has returned yet."""
        found = self._requested.get(incarnation)
        return found is not None and any(not requested.handed for requested in found.values())

    def hand_out(self, incarnation: str) -> list[RankRequest]:
        """Return the requests for a poll's answer.

        A poll's answer can be lost, so every later answer repeats the pending requests.
        """
        found = self._requested.get(incarnation) or {}
        for requested in found.values():
            requested.handed = True
        out: list[RankRequest] = []
        for request_id, requested in found.items():
            out.append({"what": STACKS, "request_id": request_id})
            if requested.only_training:
                out[-1]["only_training"] = True
        return out

    def finished(self) -> list[Answers]:
        """Return, once, the requests that every process answered or whose deadline has passed."""
        found = [each for each in self._answers.values() if not each.awaited]
        for each in found:
            del self._answers[each.request_id]
        return found

    def answered(
        self, attempt: Attempt, process: Process, fields: JsonObject, work: Work, wall: float
    ) -> list[Instruction]:
        """Apply the stacks of a process: its answer, or its watchdog's file.

        Raises:
            InvalidEvent: there is no request_id.
        """
        request_id = request_of(fields)
        source = WATCHDOG if fields.get("source") == WATCHDOG else PROBE
        threads, truncated = _checked(fields.get("threads"))
        answers = self._answers.get(request_id)
        record = RankRecord.of_wire(fields.get("collectives"))
        if answers is not None and record is not None:
            member = _member(process, record, work.stage, threads)
            answers.members.setdefault(process.role, []).append(member)
        self._drop(process.incarnation, request_id)
        row = {
            "incarnation": process.incarnation,
            "request_id": request_id,
            "attempt_id": process.attempt_id,
            "role": process.role,
            "rank": process.rank,
            **work.fields(),
            "source": source,
            "state": ANSWERED,
            "answered_wall": wall,
            "threads": threads,
            "truncated": truncated or fields.get("truncated") is True,
        }
        if work.step is None:
            row["step"] = process.max_step
        if source == PROBE:
            return [Put("stacks", row)]
        row |= {"reason": "its watchdog went off", "wall": wall}
        return [Put("stacks", row), _stood_still(attempt, process, row, threads, wall)]

    def expire(self, wall: float) -> tuple[list[Instruction], list[str]]:
        """Drop the requests whose deadline has passed; return rows and processes."""
        out: list[Instruction] = []
        silent: list[str] = []
        for incarnation, found in [*self._requested.items()]:
            for request_id, requested in [*found.items()]:
                if requested.deadline > wall:
                    continue
                self._drop(incarnation, request_id)
                row = {"incarnation": incarnation, "request_id": request_id}
                out.append(Put("stacks", {**row, "state": NOT_ANSWERED}))
                silent.append(incarnation)
        return out, silent

    def _drop(self, incarnation: str, request_id: str) -> None:
        found = self._requested.get(incarnation)
        if found is not None:
            found.pop(request_id, None)
            if not found:
                del self._requested[incarnation]
        answers = self._answers.get(request_id)
        if answers is not None:
            answers.awaited.discard(incarnation)


def _member(
    process: Process, record: RankRecord, stage: str | None, threads: Sequence[Thread]
) -> Member:
    training = next((each for each in threads if each["is_training"]), None)
    main = next((each for each in threads if each["name"] == "MainThread"), None)
    thread = training or main
    layout = {
        axis: rank
        for axis in AXES
        if (integer(process.layout.get(f"{axis}_size")) or 0) > 1
        if (rank := integer(process.layout.get(f"{axis}_rank"))) is not None
    }
    place = None if thread is None else place_of(thread["stack"])
    return Member(process.rank, record, stage, place, layout)


def choose(
    attempt: Attempt, role: str | None, ranks: Collection[int] | None
) -> tuple[list[Process], list[dict[str, Json]]]:
    """Return the processes that can answer, and (role, rank, reason) of those that cannot.

    Args:
        attempt: the attempt of the processes.
        role: only of this role; None for every role.
        ranks: only these; None for all.

    Raises:
        InvalidInput: more than `MAX_ASKED` processes.
    """
    requested: list[Process] = []
    refused: list[dict[str, Json]] = []
    known: set[int] = set()
    for (its_role, rank), processes in sorted(attempt.by_rank.items()):
        if (
            role not in (None, its_role)
            or (ranks is not None and rank not in ranks)
            or not processes
        ):
            continue
        known.add(rank)
        process = max(processes, key=lambda each: (each.live, not each.raw, each.age))
        reason = _why_not(process)
        if reason is None:
            requested.append(process)
        else:
            refused.append({"role": its_role, "rank": rank, "reason": reason})
    refused += [
        {"role": role, "rank": rank, "reason": "it has never reported"}
        for rank in sorted(set(ranks or ()) - known)
    ]
    if len(requested) > MAX_ASKED:
        raise InvalidInput(
            f"the stacks of {len(requested)} processes",
            expected=f"at most {MAX_ASKED}: name ranks",
        )
    return requested, refused


def _why_not(process: Process) -> str | None:
    if process.finished:
        return "its process reported its end"
    if process.lapsed:
        return "its process stopped reporting"
    return "it reports by raw calls, which carry no requests" if process.raw else None


def _checked(value: object) -> tuple[list[Thread], bool]:
    """Return threads as the catalogue stores them, and whether some were left out."""
    reported_threads = value if isinstance(value, list | tuple) else []
    threads: list[Thread] = []
    left, truncated = MAX_CHARACTERS, len(reported_threads) > MAX_THREADS
    for thread in reported_threads[:MAX_THREADS]:
        if not isinstance(thread, Mapping):
            continue
        stack = text(thread.get("stack"), MAX_CHARACTERS) or ""
        truncated = truncated or len(stack) > left
        stack = stack[len(stack) - min(len(stack), left) :]
        left -= len(stack)
        threads.append(
            {
                "name": text(thread.get("name"), 200),
                "ident": integer(thread.get("ident")),
                "is_training": thread.get("is_training") is True,
                "stack": stack,
            }
        )
    return threads, truncated


def _stood_still(
    attempt: Attempt,
    process: Process,
    row: JsonObject,
    threads: Sequence[Thread],
    wall: float,
) -> Instruction:
    training = next((each for each in threads if each["is_training"]), None)
    frames = training["stack"].split("\n") if training else [""]
    where = f": {frames[-1].strip()}" if frames[-1].strip() else ""
    return finding(
        "interpreter_held",
        f"no thread of {process.role} rank {process.rank} could run Python{where}",
        **of_process(attempt, process, wall),
        severity="error",
        step=row["step"],
        stage=row["stage"],
        evidence={"request_id": row["request_id"]},
        advice="a call holds the interpreter lock, or the process was stopped",
        see=(Link.to_step("stacks", row["step"], shows="where every thread stood"),),
    )
