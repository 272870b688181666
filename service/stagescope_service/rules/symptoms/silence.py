"""Evidence of silence: ranks that record nothing any more, all of them, or the whole training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final

from stagescope_service.rules.evidence import Count, Evidence, not_found, not_measured
from stagescope_service.rules.history import NEWEST, RunHistory
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.rules.symptoms.rows import detail_of, found_in, messages
from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.tables.training import SILENT
from stagescope_wire.render import counted, ranks_text
from stagescope_wire.schema import RankKey

_NAMED: Final = 20
"""Maximum number of ranks of which a line tells when they stopped."""


def stopped(history: RunHistory, *, least: int) -> Evidence:
    """Return the ranks whose log-probs are missing since a step: all ranks, or those that still run
    their stages.

    A rank is compared with what it recorded itself before in this attempt. Its own longest pause
    says how long it may pause.

    Args:
        history: of the run.
        least: minimum number of the newest steps with numbers that lack the rank.
    """
    every = _all_stopped(history, least)
    if every is not None:
        return every
    own = [step for step in history.measured if step.attempt == history.measured[-1].attempt]
    if len(own) <= least:
        return not_measured(f"it needs {least + 1} steps with both streams", waits=True)
    early, late = (_recorded(history, part) for part in (own[:NEWEST], own[-NEWEST:]))
    # A long run is read as a whole only if some rank has stopped.
    seen = set().union(*early, *late)
    if not seen - set().union(*late[-least:]):
        return not_found(f"{counted(len(seen), 'rank')} recorded log-probs, and all still do")
    recorded = _recorded(history, own)
    running = {(role, rank) for _, role, rank in history.facts(own[-1]).seconds}
    found: dict[RankKey, int] = {}
    for rank in sorted(set().union(*recorded) & running):
        at = [index for index, ranks in enumerate(recorded) if rank in ranks]
        silent = len(own) - 1 - at[-1]
        pause = max((after - before - 1 for before, after in itertools.pairwise(at)), default=0)
        others = recorded[at[-1]].intersection(*recorded[at[-1] + 1 :])
        if silent >= _too_long(pause, least) and others:
            found[rank] = at[-1] + 1
    if not found:
        return not_found("the ranks without log-probs pause, or do not run their stages any more")
    lines = [
        f"{role} rank {rank} has log-probs in step {own[begin - 1].step}, and in none of the "
        f"{counted(len(own) - begin, 'step')} from {own[begin].step} to {own[-1].step}; it still "
        f"runs its stages, and {counted(len(recorded[-1]), 'other rank')} still record"
        for (role, rank), begin in [*found.items()][:_NAMED]
    ]
    begin = min(found.values())
    silent = len(own) - begin
    return Evidence(
        "found", 1.0, own[begin].step, ranks_text([*found]), tuple(lines),
        count=Count(silent, silent), ranks=frozenset(found),
    )  # fmt: skip


def _too_long(pause: int, least: int) -> int:
    """Return the steps without log-probs that are no pause: more than twice the longest before."""
    return max(least, 2 * pause + 1)


def _all_stopped(history: RunHistory, least: int) -> Evidence | None:
    """Return that no rank recorded log-probs in the newest steps, after it did in several."""
    steps, measured = history.steps, history.measured
    if len(measured) < least:
        return None
    at = [index for index, step in enumerate(steps) if step.verdict is not None]
    pause = max((after - before - 1 for before, after in itertools.pairwise(at)), default=0)
    after = steps[at[-1] + 1 :]
    if len(after) < _too_long(pause, least) or not all(map(history.has_no_streams, after)):
        return None
    last, newest = measured[-1], after[-1]
    ranks = _recorded(history, [last])[0]
    running = ranks & {(role, rank) for _, role, rank in history.facts(newest).seconds}
    named = ranks_text(sorted(ranks))
    text = (
        f"{named} recorded log-probs in step {last.step}, and no rank did in the "
        f"{counted(len(after), 'step')} from {after[0].step} to {newest.step}"
    )
    if running:
        headline = "No rank records log-probs any more"
        text += f"; {len(running)} of these {len(ranks)} ranks still run stages"
    else:
        headline = f"{named} stopped reporting, and other ranks go on"
        text += "; none of these ranks runs a stage any more, and the steps close without them"
    return Evidence(
        "found", 1.0, after[0].step, named, (text,), count=Count(len(after), len(after)),
        ranks=frozenset(ranks), headline=headline[0].upper() + headline[1:],
    )  # fmt: skip


def _recorded(history: RunHistory, steps: Sequence[CurrentStep]) -> list[set[RankKey]]:
    """Return the ranks of each step that handed over both streams."""
    found = dict(history.slices("rank", "counts/tokens", steps))
    return [
        {(role, rank) for role, rank in found.get(step, ()) if role is not None} for step in steps
    ]


def quiet(history: RunHistory, *, kinds: Sequence[str]) -> Evidence:
    """Return whether no step closes any more, though processes of the newest attempt live.

    Args:
        history: of the run.
        kinds: of the findings that say so while it is so.
    """
    newest = history.attempts[-1] if history.attempts else None
    if newest is None or not newest["live"]:
        return not_measured("no process of the run lives", waits=True)
    rows = [
        row
        for row in history.findings_of(kinds)
        if row["over_wall"] is None and row["attempt_id"] == newest["attempt_id"]
    ]
    if not rows:
        return not_found("no step is much later than the steps before")
    behind = frozenset((role, rank) for role, rank in detail_of(rows[0], "behind") or ())
    found = found_in(history, rows, messages(history, rows))
    return dataclasses.replace(found, where=ranks_text(sorted(behind)), ranks=behind)


def fell_silent(history: RunHistory) -> list[ListedAttempt]:
    """Return the attempts whose processes stopped reporting, and said nothing of an end.

    Raw calls never say it. Attempts whose steps were all repeated do not count.
    """
    current = {step.attempt_id for step in history.steps} | {history.newest_attempt_id}
    silent = [
        row
        for row in history.attempts
        if row["end_reason"] == SILENT and row["attempt_id"] in current
    ]
    return [
        row
        for row in silent
        if history.reports.is_last_of(row["attempt_id"])
        if any(not process["raw"] for process in history.processes(row["attempt_id"]))
    ]
