"""The ranks that a capture requests, and notes for its author, from the state machine's memory."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from stagescope_service.core.captures import agreement as agreement_rules
from stagescope_service.core.captures.active_plan import CaptureEntry
from stagescope_service.core.captures.agreement import CaptureParticipants
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.registry import Registry
from stagescope_service.fields import RoleRank
from stagescope_wire.captures import needs_ranks, unmatched_ranks
from stagescope_wire.errors import Conflict
from stagescope_wire.keep import ALIASES, SECTIONS, is_loss, misspelt_selectors
from stagescope_wire.names import KNOWN, closest_by_words, closest_field, closest_stage
from stagescope_wire.plan import CaptureSpec
from stagescope_wire.schema import STAGES

_RUNS_NAMED: Final = 20
_RANKS_NAMED: Final = 20


def participants_of(registry: Registry, request: CaptureSpec) -> CaptureParticipants:
    """Return the requested ranks: those that run its stages in the run's newest attempt."""
    attempt = attempt_of(registry, request)
    if attempt is None or attempt.over:
        return CaptureParticipants(request["run"], None, ())
    live = {
        (process.role, process.rank): (process.incarnation, process.plan_revision)
        for process in attempt.processes.values()
        if process.live and _captures(process)
    }
    roles = {role for role, _ in live}
    named = set(request["roles"] or roles) & roles
    doing = {role for role in named if _does(attempt, role, request["stages"])}
    members = agreement_rules.members_of(
        request["ranks"],
        doing or named,
        {role: attempt.world_size(role) for role in named},
        live,
    )
    return CaptureParticipants(
        request["run"],
        attempt.attempt_id,
        members,
        attempt.top_step,
        attempt.last_closed_step,
        step_seconds(attempt),
    )


def attempt_of(registry: Registry, request: CaptureSpec) -> Attempt | None:
    """Return the newest attempt of a request's run."""
    return None if request["run"] is None else registry.newest(request["run"])


def is_early(registry: Registry, request: CaptureSpec) -> bool:
    """Return whether a request names steps by number, and no rank is live yet."""
    if agreement_rules.is_relative(request["steps"]):
        return False
    attempt = attempt_of(registry, request)
    return attempt is None or attempt.over or attempt.top_step is None


def check_to_come(registry: Registry, run: str | None, last: int) -> None:
    """Refuse steps that closed before, while no attempt of their run is live.

    Args:
        registry: the attempts.
        run: the requested run; None: any.
        last: the last requested step.

    Raises:
        Conflict: it closed; the next attempt repeats it only from an earlier checkpoint.
    """
    newest = None if run is None else registry.newest(run)
    if newest is None or not newest.over:
        return
    attempts = [each for each in registry.attempts.values() if each.run == run]
    for attempt in sorted(attempts, key=lambda each: each.number, reverse=True):
        closed = attempt.last_closed_step
        if closed is None:
            continue
        if last <= closed:
            raise Conflict(
                f"step {last} has closed: attempt {attempt.number} closed step {closed}, and no "
                "attempt is live",
                expected="a later step, or 'next'",
                advice="request the first steps of the next attempt with `--steps next:K`, or "
                "this step with `--force` if the next attempt repeats it",
            )
        return


def run_of(registry: Registry, capture: CaptureSpec) -> str | None:
    """Return the run of a request: the live one if it names none.

    Raises:
        Conflict: its steps count from the training's present step, and several runs are live.
    """
    if capture["run"] is not None:
        return capture["run"]
    live = {attempt.run for attempt in registry.attempts.values() if _is_live(attempt)}
    if len(live) == 1:
        return live.pop()
    if agreement_rules.is_relative(capture["steps"]):
        raise Conflict(
            f"{len(live)} runs are live, and the request names none",
            expected=f"run: one of {', '.join(sorted(live)[:20]) or '(none is live)'}",
        )
    return None


def _runs(registry: Registry) -> list[str]:
    """Return the known runs, the one with the newest attempt first."""
    attempts = sorted(
        registry.attempts.values(),
        key=lambda each: (each.opened_wall, each.attempt_id),
        reverse=True,
    )
    return [*dict.fromkeys(each.run for each in attempts)]


def _besides(runs: Iterable[str], named: str | None) -> list[str]:
    return [run for run in runs if run != named][:_RUNS_NAMED]


def _run_note(registry: Registry, run: str) -> str:
    """Return a note on a requested run that has not reported."""
    known = _runs(registry)
    meant = closest_by_words(run, known)
    suggestion = "" if meant is None else f" (did you mean {meant}?)"
    there = _besides(known, meant)
    newest = f"; known, the newest first: {', '.join(there)}" if there else ""
    return f"no run {run!r} is known (yet){suggestion}: it waits for one of that name{newest}"


def _rank_notes(
    attempt: Attempt, request: CaptureSpec, participants: CaptureParticipants
) -> list[str]:
    """Return notes on requested ranks and roles that do not exist."""
    fields = []
    there = {role for role, _ in attempt.by_rank}
    if strange := sorted({*(request["roles"] or ())} - there):
        known = ", ".join(sorted(there)) or "(none yet)"
        meant = [*filter(None, (closest_field(role, sorted(there)) for role in strange))]
        suggestion = f" (did you mean {', '.join(meant)}?)" if meant else ""
        fields.append(
            f"no process has the role {', '.join(strange)}{suggestion}; the roles are {known}"
        )
    members = {(each.role, each.rank) for each in participants.members}
    if not needs_ranks(request):  # the service alone carries it out, for raw callers, too
        members |= {each for each in attempt.by_rank if each[0] in (request["roles"] or there)}
    unknown = unmatched_ranks(request["ranks"], (rank for _, rank in members))
    if unknown and members:
        sizes = {role: attempt.world_size(role) for role in sorted({role for role, _ in members})}
        sizes_by_role = [
            f"{role} has {size} ranks" for role, size in sizes.items() if size is not None
        ]
        named = ", ".join(map(str, unknown[:_RANKS_NAMED]))
        fields.append(
            f"rank {named} has not reported: nothing is collected there until it does"
            + (f" ({', '.join(sizes_by_role)})" if sizes_by_role else "")
        )
    return fields


def check_stages(attempt: Attempt | None, request: CaptureSpec) -> None:
    """Check that no stage of a request is a misspelling of one that the run has.

    A stage may have any name: one that resembles no other only makes a note.

    Raises:
        Conflict: names the stage that is probably meant.
    """
    if attempt is None or attempt.last_closed_step is None or request["force"]:
        return
    if request["stages"] == "all":
        return
    done = _done(attempt)
    # A stage of the schema is not misspelt, whether the run has it or not.
    others = [stage for stage in request["stages"] if stage not in STAGES]
    wrong = {stage: meant for stage in others if (meant := closest_stage(stage, done))}
    if wrong:
        named = ", ".join(map(repr, wrong))
        raise Conflict(
            f"no rank of run {attempt.run} has done {named} lately",
            expected=f"a stage of the run: {', '.join(sorted(done))}",
            advice=f"did you mean {', '.join(wrong.values())}? With force (--force) it is "
            "requested all the same",
        )


def _done(attempt: Attempt) -> set[str]:
    """Return the stages of the steps in memory."""
    return {stage for step in attempt.steps.values() for _, stage in step.ranks}


def _stage_notes(stages: str | list[str], done: set[str]) -> list[str]:
    """Return a note on requested stages that no rank ran, or that look misspelt."""
    if stages == "all":
        return []
    close = {stage: closest_stage(stage, {*done, *STAGES}) for stage in sorted({*stages} - done)}
    named = ", ".join(
        stage if meant is None else f"{stage} (did you mean {meant}?)"
        for stage, meant in close.items()
        if done or meant is not None
    )
    if not named:
        return []
    there = f"; stages of the run: {', '.join(sorted(done))}" if done else ""
    return [f"no rank has done {named} lately: nothing is captured until one does{there}"]


def _keep_notes(request: CaptureSpec) -> list[str]:
    """Return notes on names to keep that are not of the schema, and may be misspelt."""
    misspelt = dict(misspelt_selectors(request["keep"]))
    known = {*KNOWN, *SECTIONS, *ALIASES, "all"}
    return [
        f"{word} is no section and no known tensor"
        + (f" (did you mean {misspelt[word]}?)" if word in misspelt else "")
        + ": it is kept where something of that name is recorded"
        for word in request["keep"]
        if word in misspelt or not (word in known or is_loss(word) or "/" in word)
    ]


def _config_notes(request: CaptureSpec, known: Collection[int]) -> list[str]:
    """Return notes on filters of msprobe's config that the request replaces.

    Args:
        request: the request.
        known: the ranks that it could ask.
    """
    config, fields = request["config"] or {}, list[str]()
    ranks, steps = config.get("rank"), config.get("step")
    if ranks and ranks != request["ranks"]:
        absent = sorted({*_numbers_in(ranks)} - {*known}) if known else []
        named = ", ".join(map(str, absent[:_RANKS_NAMED]))
        fields.append(
            f"the config's rank {ranks!r:.200} is not used: the request's ranks are "
            f"{request['ranks']!s:.100} (--ranks)"
            + (f"; the run has no rank {named}" if absent else "")
        )
    if steps and steps != request["steps"]:
        fields.append(
            f"the config's step {steps!r:.200} is not used: the request's steps are "
            f"{request['steps']!s:.100} (--steps)"
        )
    return fields


def _numbers_in(ranks: object) -> Iterator[int]:
    """Yield the ranks of a config: numbers, and texts such as `4-6`."""
    for each in ranks if isinstance(ranks, list) else [ranks]:
        first, _, last = str(each).partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield from itertools.islice(range(int(first), int(last or first) + 1), _RANKS_NAMED)


def warnings(registry: Registry, entry: CaptureEntry) -> list[str]:
    """Return notes on names of a request that nothing has (yet): they may be misspelt."""
    request, run = entry.request, entry.request["run"]
    attempt = None if run is None else registry.newest(run)
    unknown_run = [_run_note(registry, run)] if run is not None and attempt is None else []
    done = set() if attempt is None else _done(attempt)
    return [*unknown_run, *_stage_notes(request["stages"], done), *_keep_notes(request)]


def notes(registry: Registry, entry: CaptureEntry) -> list[str]:
    """Return notes for the author of a request, which may wait for something that never comes.

    The first are its `warnings`.
    """
    request = entry.request
    fields = warnings(registry, entry)
    attempt = None if request["run"] is None else registry.newest(request["run"])
    if attempt is None:
        if request["run"] is None:
            fields.append("it is for every run: none is live whose ranks could be asked")
        return [*fields, *_config_notes(request, ())]
    fields += _config_notes(request, {rank for _, rank in attempt.by_rank})
    if attempt.over:
        fields.append(
            f"attempt {attempt.number} of the run is over: the capture waits for the next"
        )
    participants = participants_of(registry, request)
    if needs_ranks(request) and not attempt.over and not participants.members:
        ranks = sorted({(each.role, each.rank) for each in attempt.processes.values()})
        named = ", ".join(f"{role} {rank}" for role, rank in ranks[:20])
        fields.append(f"no requested rank is connected; these are: {named or '(none yet)'}")
    else:
        fields += _rank_notes(attempt, request, participants)
    late = participants.late(entry.agreement.revision)
    if needs_ranks(request) and late and entry.agreement.phase == agreement_rules.ASKED:
        fields.append(f"waiting for {names([each.name for each in late])}")
    return fields


def step_seconds(attempt: Attempt) -> float | None:
    """Return the duration of a step of an attempt: the median of the last ones, by their begins."""
    steps = sorted(attempt.steps)
    gaps = [
        attempt.steps[later].opened_wall - attempt.steps[earlier].opened_wall
        for earlier, later in itertools.pairwise(steps)
        if later == earlier + 1
    ]
    found = [gap for gap in gaps if 0 < gap < float("inf")]
    return statistics.median(found) if found else None


def names(ranks: Iterable[RoleRank]) -> str:
    """Return ranks as text."""
    return ", ".join(f"{each['role']} rank {each['rank']}" for each in [*ranks][:20])


def _captures(process: Process) -> bool:
    return process.captures and not process.raw


def _is_live(attempt: Attempt) -> bool:
    return not attempt.over and any(process.live for process in attempt.processes.values())


def _does(attempt: Attempt, role: str, stages: str | list[str]) -> bool:
    return any(
        name == role and (stages == "all" or stage in stages)
        for step in attempt.steps.values()
        for name, stage in step.ranks
    )
