"""A process's reports beside its spans: scalars, drops, refusals, dumps.

Every function changes only its arguments and returns the instructions that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from stagescope_service.core import operators as operator_tables
from stagescope_service.core import steps
from stagescope_service.core.catalogue_rows import (
    amount,
    integer,
    loss_row,
    number,
    plain,
    process_row,
    row_id,
    said,
    scalar_rows,
    text,
)
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.findings import (
    BEGUN_AGAIN,
    NON_FINITE_SCALARS,
    by_message,
    finding,
    moved,
    of_attempt,
    of_process,
    of_work,
)
from stagescope_service.core.instructions import (
    Delete,
    DumpReported,
    Instruction,
    NonFiniteScalars,
    Put,
)
from stagescope_wire.links import Link
from stagescope_wire.names import closest_stage
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import MAX_SCALAR_NAME, STAGES, Event, Work

DUMPS_REMEMBERED: Final = 1024

UNBOUND_REMEMBERED: Final = 1000
"""Rows of a process before its first step that go with it to another attempt."""

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "findings": ("finding_id",),
    "losses": ("loss_id",),
    "scalars": ("incarnation", "work_key", "name"),
}

NAMES_JUDGED: Final = 1000
"""Number of stages of an attempt whose names are judged; further ones are no names."""

_DUMP_COLUMNS: Final[Mapping[str, Callable[[object], Json]]] = {
    **dict.fromkeys(("path", "state", "task", "level", "error"), text),
    **dict.fromkeys(("bytes", "files"), integer),
    "seconds": number,
    **dict.fromkeys(("overrides", "estimate"), plain),
}


def scalars(attempt: Attempt, process: Process, event: Event, work: Work) -> list[Instruction]:
    """Return the rows of an event's scalars; a value that is not a number makes a finding.

    Rules are evaluated when a step closes: a non-finite number that arrives later has the step
    evaluated again, and `NonFiniteScalars` reports one of an open step at once. Work without a
    step never closes: there it makes a finding at once.
    """
    named = event.fields.get("scalars")
    if named is None or (not named and isinstance(named, Mapping)):
        return []
    if type(named) is dict or isinstance(named, Mapping):
        rows, bad, wrong = scalar_rows(process, work, named, event.wall)
    else:
        rows, bad = [], []
        wrong = [f"scalars ({type(named).__name__}, not a dict of names to numbers)"]
    out: list[Instruction] = [*rows]
    if bad and work.step is None:
        out.append(_non_finite_scalars(attempt, process, event, work, bad))
    elif bad and work.step is not None and work.step not in attempt.open:
        out += steps.aggregate(attempt, work.step, event.wall)
    elif bad:
        found = _non_finite_scalars(attempt, process, event, work, bad)
        out.append(NonFiniteScalars(attempt.attempt_id, frozenset(bad), found))
    if wrong:
        found = finding(
            "refused_scalar",
            f"not numbers: {', '.join(sorted(wrong))[:1000]}",
            **of_work(attempt, process, work, event.wall),
            advice="a scalar is an int or a float within the range of float64, with a name of at "
            f"most {MAX_SCALAR_NAME} characters; those of the same call that are were taken",
        )
        out.append(by_message(found))
    return out


_REFUSED_IN_PART: Final = frozenset({"refused_scalar", "refused_world_size", "unknown_fields"})


def refused_in_part(instructions: Iterable[Instruction]) -> str | None:
    """Return the part of an accepted event that was refused, for the answer to its sender."""
    messages: list[str] = []
    for each in instructions:
        if type(each) is Put and each.table == "findings" and each.row["kind"] in _REFUSED_IN_PART:
            messages.append(f"{each.row['message']} ({each.row['advice']})")  # noqa: PERF401
    return "; ".join(messages) if messages else None


def _non_finite_scalars(
    attempt: Attempt, process: Process, event: Event, work: Work, names: list[str]
) -> Put:
    where = "outside any step" if work.step is None else f"in step {work.step}, before it closed"
    stage = f", stage {work.stage}" if work.stage else ""
    return finding(
        NON_FINITE_SCALARS,
        f"{', '.join(sorted(names))[:1000]} not finite {where}{stage}, {process.role} rank "
        f"{process.rank}",
        **of_work(attempt, process, work, event.wall),
        severity="error",
        evidence={"scalars": sorted(names)[:20], "policy_version": work.policy_version},
        advice="a capture of that stage on that rank (msprobe L1, statistics) names the operator",
        see=() if work.step is None else (Link.to_step("scalars", work.step),),
    )


def dropped(attempt: Attempt, process: Process, event: Event, work: Work) -> list[Instruction]:
    """Count what the process dropped; each such event is a loss."""
    fields = event.fields
    what = text(fields.get("what"), 100) or "event"
    count = amount(fields.get("count", 1)) or 0
    size = amount(fields.get("bytes")) or 0
    columns = {"count": count, "bytes": size, "wall": event.wall}
    reason = text(fields.get("reason"), 1000) or "the process dropped it"
    out: list[Instruction] = [
        loss_row(attempt, process, work, what, reason, identity=event.seq, **columns)
    ]
    drops = process.drops
    if drops.add(event.seq, what, count, size):
        totals = {
            "dropped_events": drops.events,
            "dropped_payloads": drops.payloads,
            "dropped_bytes": drops.bytes,
            "dropped_seqs": [*drops.seqs],
        }
        out.append(process_row(process, **totals))
    return out


def remember_unbound(
    process: Process, rows: Iterable[Instruction], known: Collection[str] | None
) -> None:
    """Remember the rows of a process that may turn out to belong to a later attempt.

    Args:
        process: has not begun a step yet.
        rows: its reports.
        known: ids of the findings that existed before; None if they are not all known.
    """
    for put in rows:
        if isinstance(put, Put) and put.table in _KEYS:
            key = (put.table, *(str(put.row[name]) for name in _KEYS[put.table]))
            is_news = known is not None and key[1] not in known
            if key in process.unbound_rows:
                is_news = process.unbound_rows[key][1]
            elif len(process.unbound_rows) >= UNBOUND_REMEMBERED:
                continue
            process.unbound_rows[key] = (put, is_news)


def follow(attempt: Attempt, process: Process, step: int) -> list[Instruction]:
    """Move what a process reported before its first step to the attempt that begins with it.

    Reports of steps before `step` stay: the new start goes on from `step`.
    """
    out: list[Instruction] = []
    for put, is_news in process.unbound_rows.values():
        if put.row["step"] is not None and put.row["step"] < step:
            continue
        if put.table == "findings":
            out.append(moved(put, attempt.attempt_id))
            out += [Delete("findings", {"finding_id": put.row["finding_id"]})] if is_news else []
        else:
            out.append(Put(put.table, {**put.row, "attempt_id": attempt.attempt_id}))
    process.unbound_rows.clear()
    return out


def stage_name(
    attempt: Attempt, process: Process, stage: str | None, wall: float
) -> list[Instruction]:
    """Return a finding of a stage name that looks misspelt; checked once for each attempt and role.

    A stage may have any name. A known name with another word before or after it
    (`actor_update_2`) is not misspelt.
    """
    named = (process.role, stage or "")
    if not stage or named in attempt.stage_names or len(attempt.stage_names) >= NAMES_JUDGED:
        return []
    attempt.stage_names.add(named)
    meant = closest_stage(stage, STAGES)
    written = stage.lower().replace("-", "_")
    if meant is None or written.startswith(f"{meant}_") or written.endswith(f"_{meant}"):
        return []
    return [
        finding(
            "misspelt_stage",
            f"{process.role} reports stage {stage!r}, which is none of the known stages: did you "
            f"mean {meant}?",
            **of_attempt(attempt, wall),
            stage=stage,
            role=process.role,
            evidence={"meant": meant},
            advice=f"captures, rules and the step summary of {meant} ignore it. Name it {meant} "
            "where the training begins it. If it is a stage of your own, it may keep its name",
        )
    ]


def stepless(attempt: Attempt, process: Process, event: Event, work: Work) -> list[Instruction]:
    """Return a finding of an END without a step that hands values over where one is expected.

    One for each attempt, role and stage. Rollout work may have no step: its clock is the policy
    version. A stage of the training's own name with a policy version counts as such.
    """
    stage = work.stage
    if stage in (None, "rollout_generate") or process.role == "rollout":
        return []
    payload = event.fields.get("payload") or event.fields.get("payload_dropped")
    tensors = payload.get("tensors") if isinstance(payload, Mapping) else None
    names = sorted(map(str, tensors)) if isinstance(tensors, Mapping) else []
    scalars = event.fields.get("scalars")
    if stage in STAGES:
        names += sorted(map(str, scalars)) if isinstance(scalars, Mapping) else []
    elif work.policy_version is not None:
        return []
    known, named = attempt.stepless_stages, (process.role, stage or "")
    if not names or named in known or len(known) >= NAMES_JUDGED:
        return []
    known.add(named)
    return [
        finding(
            "stepless_values",
            f"{process.role} records values in {stage} without a step: they belong to no step, "
            "and no step's numbers include them",
            **of_attempt(attempt, event.wall),
            stage=stage,
            role=process.role,
            evidence={"names": names[:20], "policy_version": work.policy_version},
            advice="give the stage its step: probe.stage(name, step=...), or step= in a raw call. "
            "If the policy version is the clock of these rollouts, use role rollout or stage "
            "rollout_generate",
        )
    ]


def unknown_fields(
    attempt: Attempt, role: str, call: str, names: Iterable[str], wall: float
) -> Instruction:
    """Return a finding of unknown fields in a raw call; one for each set of names."""
    return by_message(
        finding(
            "unknown_fields",
            f"{call} of {role} has no field {', '.join(names):.1000}: not taken",
            **of_attempt(attempt, wall),
            role=role,
            advice="the rest of the call was taken; docs/raw-calls.md lists the fields",
        )
    )


def refused(attempt: Attempt, process: Process, event: Event, work: Work) -> Instruction:
    """Return a finding of bad input to a call in the training process.

    Several problems of one stage are separate findings.
    """
    what = text(event.fields.get("what"), 200) or "input"
    message = text(event.fields.get("message"), 2000) or ""
    is_error = event.fields.get("severity") == "error"
    advice = text(event.fields.get("advice"), 2000)
    found = finding(
        what if what == BEGUN_AGAIN else f"refused_{what}",
        message,
        **of_work(attempt, process, work, event.wall),
        severity="error" if is_error else "warning",
        advice=advice
        or "the call in the training process had bad input; training went on"
        + ("; the numbers that need this tensor are missing" if is_error else ""),
    )
    return by_message(found)


def dump(attempt: Attempt, process: Process, event: Event, work: Work) -> list[Instruction]:
    """Update the state of a dump; if two events report a column, the later one counts.

    A dump that ended is announced for its operator table.
    """
    fields = event.fields
    capture_id = text(fields.get("capture_id"), 200) or "local"
    reported: dict[str, Json] = {
        name: take(fields[name]) for name, take in _DUMP_COLUMNS.items() if name in fields
    }
    known = process.dumps.setdefault((work.key, capture_id), {})
    if len(process.dumps) > DUMPS_REMEMBERED:
        del process.dumps[next(iter(process.dumps))]
    newest = event.seq >= max(known.values(), default=0)
    reported = {
        name: value
        for name, value in reported.items()
        if value is not None and event.seq >= known.get(name, 0)
    }
    known.update(dict.fromkeys(reported, event.seq))
    row = {
        "incarnation": process.incarnation,
        "work_key": work.key,
        "capture_id": capture_id,
        "attempt_id": process.attempt_id,
        "role": process.role,
        "rank": process.rank,
        **work.fields(),
        "node_id": process.node_id,
        **({"wall": event.wall} if newest else {}),
        **reported,
    }
    out: list[Instruction] = [Put("dumps", row), DumpReported(row)]
    state = reported.get("state")
    if state in ("failed", "missed", "truncated"):
        reason = f"dump {state}: {said(fields.get('error'), 900) or 'no reason given'}"
        columns = {"identity": capture_id, "count": 1, "wall": event.wall}
        out.append(loss_row(attempt, process, work, "dump", reason, **columns))
    elif state in ("complete", "empty"):
        lost = row_id(process.incarnation, work.key, "dump", capture_id)
        out.append(Delete("losses", {"loss_id": lost}))
    return out + operator_tables.follow(attempt, process, event, work, row, reported.get("state"))


def failed_stage(attempt: Attempt, process: Process, event: Event, work: Work) -> Put:
    """Return the finding of a stage that an exception ended."""
    where = "" if work.step is None else f" of step {work.step}"
    error, interrupted = _error(event.fields), is_interruption(event.fields)
    return finding(
        "stage_interrupted" if interrupted else "stage_failed",
        f"{work.stage}{where} {'was interrupted' if interrupted else 'failed'} on {process.role} "
        f"rank {process.rank}: {error}",
        **of_work(attempt, process, work, event.wall),
        severity="info" if interrupted else "error",
        advice=_STOPPED
        if interrupted
        else "the first rank that failed is the likeliest cause, because other ranks fail as a "
        "result. Its log holds the traceback",
    )


def crash(attempt: Attempt, process: Process, event: Event) -> list[Instruction]:
    """Return the finding of a process that an exception ended, and mark its attempt."""
    if not event.fields.get("error_type"):
        return []
    interrupted = is_interruption(event.fields)
    if interrupted:
        attempt.interrupted = True
    else:
        attempt.crashed = True
    reached = "before any step" if process.max_step is None else f"in step {process.max_step}"
    ended = f"was interrupted {reached}" if interrupted else f"ended {reached} by an exception"
    return [
        finding(
            "process_interrupted" if interrupted else "process_crashed",
            f"the process of {process.role} rank {process.rank} {ended}: {_error(event.fields)}",
            **of_process(attempt, process, event.wall),
            severity="info" if interrupted else "error",
            step=process.max_step,
            advice=_STOPPED if interrupted else "its log holds the traceback",
        )
    ]


def driver_end(attempt: Attempt, fields: JsonObject, wall: float) -> Put:
    """Return the finding of a driver that an exception ended, and mark its attempt."""
    interrupted = is_interruption(fields)
    attempt.driver_ended = wall
    if interrupted:
        attempt.interrupted = True
    else:
        attempt.crashed = True
    step = attempt.top_step
    reached = "before any step" if step is None else f"in step {step}"
    ended = f"was interrupted {reached}" if interrupted else f"ended {reached} by an exception"
    return finding(
        "process_interrupted" if interrupted else "process_crashed",
        f"the driver of the training {ended}: {_error(fields)}. Ray ends the ranks with it",
        **of_attempt(attempt, wall),
        severity="info" if interrupted else "error",
        step=step,
        advice=_STOPPED if interrupted else "the driver's log holds the traceback",
    )


_STOPPED: Final = "the training was stopped (for example with Ctrl-C): nothing failed"
_INTERRUPTIONS: Final = ("KeyboardInterrupt", "CancelledError")
"""Exceptions that mean an interruption; raw callers report nothing else about it."""


def is_interruption(fields: JsonObject) -> bool:
    """Return whether the exception in an event's fields means that someone stopped the work."""
    return fields.get("interrupted") is True or fields.get("error_type") in _INTERRUPTIONS


def _error(fields: JsonObject) -> str:
    kind = text(fields.get("error_type"), 200) or "an exception"
    message = (said(fields.get("error_message"), 500) or "").strip()
    return f"{kind}: {message!r}" if message else kind  # on one line, and not as our own words


def began_alone(attempt: Attempt, left: Attempt, process: Process, wall: float) -> Put:
    """Return the finding of a rank that opened an attempt without having been in one before."""
    return finding(
        "began_alone",
        f"{process.role} rank {process.rank} reported nothing in attempt {left.number}, and began "
        "after its ranks had left. Without an attempt key it starts a new attempt",
        **of_process(attempt, process, wall),
        advice="if the ranks of one training run one after the other, give each of them the same "
        "attempt_key= or STAGESCOPE_ATTEMPT",
    )


def started_again(attempt: Attempt, process: Process, wall: float) -> Put:
    """Return the finding of a rank that restarted without an attempt key."""
    return by_message(
        finding(
            "started_again",
            f"a rank of {process.role} started again within the attempt, and others went on or "
            "were heard lately: without an attempt key it is unknown whether all ranks did",
            **of_attempt(attempt, wall),
            role=process.role,
            advice="where all of the training started again, the numbers of two starts stand in "
            "one attempt: give each start an attempt_key= or STAGESCOPE_ATTEMPT",
        )
    )
