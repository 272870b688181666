"""Whole trainings, generated; what may depend on the order in which they arrive, and what not."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Final

from hypothesis import strategies as st
from tests.support.trainings import Delivery, Rank, Rows

ORDER_DEPENDENT: Final[dict[str, frozenset[str]]] = {
    # When and why a step closed, is told by the events that had arrived then; marks only grow.
    "steps": frozenset({"closed_wall", "close_reason", "parts_mark"}),
    # When a process was heard last is refreshed now and then.
    "processes": frozenset({"last_wall", "clock_offset", "clock_error"}),
    # When a finding was made.
    "findings": frozenset({"first_wall", "last_wall"}),
}
"""Columns that may depend on the order of arrival (see also `Training.openers`). Every other
column is the same for any order and repetition."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What the ranks of a run said, in the order in which it happened."""

    said: list[Delivery]
    openers: list[Delivery]
    """The first event of each process, which says no more than that it is there: attempts are
    numbered by their arrival, and one in which everyone known has left is over."""
    sizes: dict[str, int | None]


@st.composite
def trainings(
    draw: st.DrawFn,
    *,
    most_attempts: int = 2,
    most_steps: int = 5,
    again: bool = True,
    stepless: bool = True,
) -> Training:
    """Draw a run of one or two attempts.

    Args:
        draw: hypothesis's.
        most_attempts: of the run.
        most_steps: of each attempt.
        again: let processes do parts of a step twice, and rollouts be replaced.
        stepless: let rollouts do work without a step.
    """
    said: list[Delivery] = []
    openers: list[Delivery] = []
    sizes: dict[str, int | None] = {}
    first = 1
    for number in range(draw(st.integers(1, most_attempts))):
        wall = 1000.0 * (number + 1)
        roles = draw(st.sampled_from([("actor",), ("actor", "critic"), ("actor", "rollout")]))
        ranks: list[Rank] = []
        for role in roles:
            count = draw(st.integers(1, 3))
            sizes[role] = draw(st.sampled_from([None, count, count + 1]))
            ranks += [
                Rank(rank, role, key=f"job-{number}", started=wall + rank) for rank in range(count)
            ]
        openers += [rank.log(None) for rank in ranks]
        # All ranks of a start or none: what a rank says that never began a step may not count.
        resumed = bool(number) and draw(st.booleans())
        said += [_hello(rank, sizes[rank.sender.role], number, resumed) for rank in ranks]
        steps = draw(st.integers(1, most_steps))
        for step in range(first, first + steps):
            for rank in list(ranks):
                said += _step(draw, rank, step, stepless)
            if draw(st.integers(0, 9)) == 0:
                said.append(ranks[0].end_step(step))
            if again and "rollout" in roles and draw(st.integers(0, 4)) == 0:
                old = next(rank for rank in ranks if rank.sender.role == "rollout")
                new = Rank(
                    old.sender.rank, "rollout", key=f"job-{number}", started=old.wall + 100.0
                )
                ranks[ranks.index(old)] = new
                openers.append(new.log(None))
                said += _step(draw, new, step, stepless)
        if again and draw(st.booleans()):
            said += _step(draw, ranks[0], draw(st.integers(first, first + steps - 1)), stepless)
        for rank in ranks:
            if draw(st.integers(0, 3)):
                said.append(rank.finish())
        first += draw(st.integers(1, steps))
    return Training(said, openers, sizes)


def _hello(rank: Rank, size: int | None, number: int, resumed: bool) -> Delivery:
    fields: dict[str, object] = {
        "layout": {"tp_rank": 0, "host": "h", "pod": "p"},
        "fingerprint": {"git": "abc"},
        "settings": {"threshold": 2.0 + number},
        "pid": 7,
    }
    if size is not None:
        fields["world_size"] = size
    if resumed:
        fields["resumed_from_step"] = 3
    return rank.hello(**fields)


def _step(draw: st.DrawFn, rank: Rank, step: int, stepless: bool) -> list[Delivery]:
    said: list[Delivery] = []
    if draw(st.integers(0, 9)) == 0:
        return said  # this rank has no part in this step
    for stage in draw(st.sampled_from([("gen",), ("logp", "update"), ("update",)])):
        clock: int | None = step
        fields: dict[str, object] = {}
        if stepless and rank.sender.role == "rollout" and draw(st.booleans()):
            clock, fields["policy_version"] = None, step
        begun = []
        for part in range(draw(st.integers(1, 2))):
            begun.append(rank.begin(clock, stage, microbatch=part, **fields))
            if draw(st.booleans()):
                said.append(begun[-1])
                said.append(_end(draw, rank, begun.pop()))
            else:
                said.append(begun[-1])  # the parts overlap
        said += [_end(draw, rank, each) for each in begun if draw(st.integers(0, 9))]
    extra = draw(st.integers(0, 9))
    seq = rank.seq + 1
    if extra == 0:
        said.append(rank.log(step, None, **{f"loss-{seq}": float("nan")}))
    elif extra == 1:
        said.append(rank.dropped("payload", 2, step=step, stage="update", bytes=10))
    elif extra == 2:
        said.append(rank.refused(f"tensor-{seq}", step=step, stage="update"))
    elif extra == 3:
        said.append(rank.dump(step, f"dumped-{seq}", "armed", estimate={"bytes": 1}))
        state = draw(st.sampled_from(["complete", "failed"]))
        said.append(rank.dump(step, f"dumped-{seq}", state, path="/d", bytes=3))
    return said


def _end(draw: st.DrawFn, rank: Rank, begun: Delivery) -> Delivery:
    return rank.end(
        begun,
        payload=draw(st.integers(0, 2)) == 0,
        status=draw(st.sampled_from(["ok", "ok", "ok", "failed"])),
        scalars={f"loss-{rank.seq + 1}": 1.5},
    )


def differences(got: Rows, wanted: Rows) -> list[str]:
    """Return every cell that differs where it must not."""
    found: list[str] = []
    for table in sorted({*got.tables, *wanted.tables}):
        ignored = ORDER_DEPENDENT.get(table, frozenset())
        keys = sorted({*got.tables[table], *wanted.tables[table]}, key=repr)
        for key in keys:
            mine, its = got.tables[table].get(key), wanted.tables[table].get(key)
            if table == "findings" and (mine or its or {}).get("kind") == "absent_ranks":
                continue  # says who was absent when a step closed, which another order changes
            if mine is None or its is None:
                found.append(f"{table} {key}: {'missing' if mine is None else 'too much'}")
                continue
            found += [
                f"{table} {key} {name}: {mine.get(name)!r} and not {its.get(name)!r}"
                for name in sorted({*mine, *its} - ignored)
                if not _same(mine.get(name), its.get(name))
            ]
    return found


def _same(one: object, other: object) -> bool:
    return bool(one == other or (one != one and other != other))


def completed_without_ends(rows: Rows, training: Training, got: list[Delivery]) -> list[str]:
    """Return the claims of completeness that what arrived does not bear out."""
    wrong: list[str] = []
    keys = {row["attempt_id"]: row["key"] for row in rows.of("attempts")}
    worlds: dict[tuple[str, str], int] = {}
    for each in got:
        size = each.event.fields.get("world_size")
        if each.event.kind == "hello" and size:
            worlds[(each.sender.attempt_key or "", each.sender.role)] = size
    begun: dict[tuple[str, int, str, str], set[tuple[int, object]]] = defaultdict(set)
    ended: dict[tuple[str, int, str, str], set[tuple[int, object]]] = defaultdict(set)
    for each in got:
        if each.event.kind not in ("begin", "end"):
            continue
        fields = each.event.fields
        location = (
            each.sender.attempt_key or "",
            fields["step"],
            each.sender.role,
            fields["stage"],
        )
        part = (each.sender.rank, fields.get("microbatch"))
        (begun if each.event.kind == "begin" else ended)[location].add(part)
    for row in rows.of("steps", completeness="complete"):
        for location in {*begun, *ended}:
            key, step, role, _ = location
            if (key, step) != (keys[row["attempt_id"]], row["step"]):
                continue
            if begun[location] - ended[location]:
                wrong.append(
                    f"{location}: {begun[location] - ended[location]} began and never ended"
                )
            size = worlds.get((key, role))
            there = {rank for rank, _ in ended[location]}
            if size is not None and not there >= set(range(size)):
                wrong.append(f"{location}: only {there} of {size} ranks ended")
    return wrong
