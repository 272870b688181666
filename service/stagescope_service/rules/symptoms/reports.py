"""Evidence from reports: samples, findings, losses, times, settings."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from stagescope_service.rules.document import DEFAULT_COOLDOWN
from stagescope_service.rules.evidence import (
    ENDED_AFTER,
    Evidence,
    beyond,
    listed,
    not_found,
    not_measured,
    of_rate,
    short,
)
from stagescope_service.rules.history import NEWEST, MissingRank, RunHistory
from stagescope_service.statistics.cell import Float64
from stagescope_service.store.queries.rollouts import RewardGroupsRow
from stagescope_service.store.tables import FindingRow, LossRow
from stagescope_wire.render import counted

TRIGGER: Final = "trigger_"
"""Prefix of the kinds of findings that triggers' rules make."""


def groups(
    history: RunHistory, *, kind: Literal["equal", "low", "high", "single"], share: float
) -> Evidence:
    """Return whether many groups of samples teach nothing.

    Args:
        history: of the run.
        kind: 'equal': all rewards of a group are equal, so its advantages are 0. 'low' or 'high':
            they equal the lowest or highest reward of the steps up to there. 'single': a group has
            one sample.
        share: share of the groups above which they are many.
    """
    every = history.groups
    if not every:
        return not_measured("samples have no group_id")
    single = kind == "single"
    rows = every if single else [row for row in every if row["rewarded"]]
    if not rows:
        return not_measured("samples have no rewards, or groups of one sample")
    marked = np.array([row[kind] for row in rows], np.float64)
    of = np.array([row["groups" if single else "rewarded"] for row in rows], np.float64)
    edge = ""
    if kind in ("low", "high"):
        lows, highs = _reward_edges(rows)
        if lows[-1] == highs[-1]:
            return not_measured(
                f"every reward is {short(lows[-1])}: whether it is the lowest or the highest is "
                "unknown"
            )
        edges = lows if kind == "low" else highs
        own = [row["lowest"] if kind == "low" else row["highest"] for row in rows]
        is_edge = np.array(own, np.float64) == edges
        marked = np.where(is_edge & (lows < highs), marked, 0.0)
        edge = f" ({short(edges[-1])})"
    what = {"equal": "have equal rewards", "low": "have the lowest reward alone",
            "high": "have the highest reward alone", "single": "have one sample"}[kind]  # fmt: skip
    count, total = int(marked[-NEWEST:].sum()), int(of[-NEWEST:].sum())
    text = f"{count} of {total} groups {what}"
    steps = np.array([row["step"] for row in rows], np.int64)
    return of_rate(steps, marked, of, share, NEWEST, text + edge)


def _reward_edges(rows: Sequence[RewardGroupsRow]) -> tuple[Float64, Float64]:
    """Return the lowest and highest reward of the `NEWEST` steps up to each step. If those have
    only one reward, all steps up to it count."""
    low = np.array([row["lowest"] for row in rows], np.float64)
    high = np.array([row["highest"] for row in rows], np.float64)
    begins = [max(0, at + 1 - NEWEST) for at in range(len(rows))]
    lows = np.array([np.fmin.reduce(low[begin : at + 1]) for at, begin in enumerate(begins)])
    highs = np.array([np.fmax.reduce(high[begin : at + 1]) for at, begin in enumerate(begins)])
    alone = lows == highs
    lows = np.where(alone, np.fmin.accumulate(low), lows)
    return lows, np.where(alone, np.fmax.accumulate(high), highs)


def truncated(history: RunHistory, *, names: Sequence[str], bound: float, share: float) -> Evidence:
    """Return whether many responses have the maximum length. The trainer's own scalar decides, else
    the share of samples that have exactly the largest number of tokens."""
    logged = history.scalars(names)
    if logged:
        return beyond(logged[0], bound, NEWEST, 0.5)
    lengths = [int(row["tokens"]) for row in history.samples if row["tokens"]]
    if len(lengths) < 32:
        return not_measured("neither such a scalar nor 32 samples with their token counts")
    longest = max(lengths)
    cut = sum(length == longest for length in lengths) / len(lengths)
    text = f"{cut:.0%} of {len(lengths)} samples have exactly {longest} tokens, the most"
    if cut < share:
        return not_found(text)
    return Evidence("found", cut, None, "", (text,))


def finding(history: RunHistory, *, kinds: Sequence[str], besides: Sequence[str] = ()) -> Evidence:
    """Return the findings of some kinds (patterns with `*`), without the kinds `besides`."""
    rows = [
        row
        for row in history.findings
        if any(fnmatch.fnmatchcase(row["kind"], kind) for kind in kinds)
        and row["kind"] not in besides
    ]
    if not rows:
        return not_found(f"no finding {' or '.join(kinds)}")
    return _found(history, rows, _messages(history, rows))


def stream_changes(history: RunHistory, *, kind: str) -> Evidence:
    """Note how the streams' payloads differ from those of earlier steps: it may be on purpose."""
    rows = [row for row in history.findings if row["kind"] == kind]
    if not rows:
        return not_found("no step says of its streams anything else than the step before")
    rows.sort(key=lambda row: (row["attempt_id"] or 0, row["step"] or 0, row["message"]))
    listed = "; ".join(f"{_of_earlier(history, row)}{row['message']}" for row in rows)
    return dataclasses.replace(not_found(listed), note=listed)


def hangs(history: RunHistory, *, kinds: Sequence[str]) -> Evidence:
    """Return the findings of some kinds that still hold in the newest attempt of the history.

    A rank that went on, or whose attempt ended, holds up no other rank any more.
    """
    rows = [row for row in history.every_finding if row["kind"] in kinds]
    held = [
        row
        for row in rows
        if row["over_wall"] is None and row["attempt_id"] == history.newest_attempt_id
    ]
    if held:
        return _found(history, held, _messages(history, held))
    if not rows:
        return not_found("no rank was silent for too long")
    last = max(rows, key=lambda row: row["first_wall"])
    return not_found(
        f"{counted(len(rows), 'rank')} held up others earlier, the last: {last['message']}"
    )


def _messages(history: RunHistory, rows: list[FindingRow]) -> list[str]:
    """Sort findings by step; return what the first ones say."""
    rows.sort(key=lambda row: (row["step"] is None, row["step"] or 0, row["first_wall"]))
    return _first([f"{_of_earlier(history, row)}{row['message']}" for row in rows], 3, "findings")


def _first(lines: Sequence[str], most: int, noun: str) -> list[str]:
    more = [f"and {len(lines) - most} more {noun}"] if len(lines) > most else []
    return [*lines[:most], *more]


def _found(
    history: RunHistory,
    rows: Sequence[Mapping[str, Any]],
    lines: Sequence[str],
    of: Sequence[Mapping[str, Any]] | None = None,
) -> Evidence:
    """Return the evidence of reported rows, ended where enough steps closed since the last one.

    A row without a step counts in the last step of its attempt. A trigger's rule is silent during
    its cooldown, whether its condition holds or not.

    Args:
        history: of the run.
        rows: the reported rows.
        lines: the texts of the rows.
        of: the rows whose ranks are named; None: all.
    """
    named = rows if of is None else of
    ranks = sorted({f"{row['role']} {row['rank']}" for row in named if row["rank"] is not None})
    since = min((row["step"] for row in rows if row["step"] is not None), default=None)
    evidence = Evidence("found", 1.0, since, listed(ranks), tuple(lines))
    steps = [_step_of(history, row) for row in rows]
    known = [step for step in steps if step is not None]
    if not known or len(known) < len(steps):
        return evidence
    silent = max(ENDED_AFTER, min(map(_silent_after, rows)))
    return evidence.ended_after([each.step for each in history.steps], max(known), silent)


def _silent_after(row: Mapping[str, Any]) -> int:
    if not str(row.get("kind")).startswith(TRIGGER):
        return 0
    steps = (row["evidence"] or {}).get("cooldown", DEFAULT_COOLDOWN)
    return steps if isinstance(steps, int) else DEFAULT_COOLDOWN


def _step_of(history: RunHistory, row: Mapping[str, Any]) -> int | None:
    """Return the step of a row; None: it belongs to none, and its attempt goes on."""
    if row["step"] is not None:
        return int(row["step"])
    number = history.number_of(row["attempt_id"])
    own = [step.step for step in history.steps if step.attempt <= number]
    goes_on = row["attempt_id"] == history.newest_attempt_id
    return None if goes_on or not own else own[-1]


def _of_earlier(history: RunHistory, row: FindingRow | LossRow) -> str:
    """Return the attempt of a row as a prefix; "" for the newest."""
    attempt_id = row["attempt_id"]
    if attempt_id is None or attempt_id == history.newest_attempt_id:
        return ""
    return f"attempt {history.number_of(attempt_id)}: "


def scalars_not_finite(history: RunHistory) -> Evidence:
    """Return the logged numbers that are NaN or infinite, their ranks, and the first place."""
    rows = history.non_finite_scalars
    if not history.scalar_names:
        return not_measured("no scalar is logged")
    if not rows:
        text = f"{len(history.scalar_names)} scalars are finite in every step"
        return not_found(text)
    first = rows[0]["step"]
    by_name: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        by_name[row["name"]].add(row["step"])
    lines = [
        f"{name} is not finite in {len(steps)} steps, first in {min(steps)}"
        for name, steps in sorted(by_name.items(), key=lambda item: min(item[1]))
    ]
    return _found(history, rows, lines[:6], [row for row in rows if row["step"] == first])


_UNENDED: Final = "stage"
"""Kind of the loss of a stage's end: its process is gone."""


def lost(history: RunHistory) -> Evidence:
    """Return the announced data that never arrived, except ends of stages."""
    rows = [row for row in history.losses if row["kind"] != _UNENDED]
    if not rows:
        return not_found("nothing was lost")
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds[row["kind"]] += int(row["count"] or 1)
    text = ", ".join(f"{count} of kind {kind}" for kind, count in kinds.most_common())
    newest = f"the newest: {_of_earlier(history, rows[0])}{rows[0]['reason']}"
    return _found(history, rows, [text, newest], of=())


def failed(history: RunHistory, *, kinds: Sequence[str]) -> Evidence:
    """Return the findings of some kinds, else the stages whose process was gone at their end."""
    reported = finding(history, kinds=kinds)
    unended = _unended(history, history.losses)
    if reported.verdict == "found":
        own = [row for row in history.findings if row["kind"] in kinds]
        supports = (*reported.supports, *_after(history, own))
        return dataclasses.replace(reported, supports=supports)
    if not unended:
        return reported
    unended.sort(key=lambda row: (row["step"] is None, row["step"] or 0))
    lines = Counter(
        f"{_of_earlier(history, row)}{row['stage']} of step {row['step']}: {row['reason']}"
        for row in unended
    )
    texts = [f"{text} ({counted(n, 'rank')})" for text, n in lines.most_common(3)]
    texts += _after(history, unended)
    return _found(history, unended, texts)


def _unended(history: RunHistory, losses: Sequence[LossRow]) -> list[LossRow]:
    """Return the stages that the end of a process cut off, without interrupted processes."""
    interrupted = {
        (row["attempt_id"], row["role"], row["rank"])
        for row in history.every_finding
        if row["kind"] == "process_interrupted"
    }
    return [
        row
        for row in losses
        if row["kind"] == _UNENDED
        and (row["attempt_id"], row["role"], row["rank"]) not in interrupted
    ]


def _after(history: RunHistory, rows: Sequence[FindingRow | LossRow]) -> list[str]:
    """Return that the attempt after the last of some rows began from a checkpoint, if one did."""
    ids = [row["attempt_id"] for row in rows if row["attempt_id"] is not None]
    number = max(map(history.number_of, ids), default=0)
    firsts = [row["first_step"] for row in history.attempts if row["first_step"] is not None]
    return [
        f"attempt {number + 1} began from the checkpoint of step {row['resumed_from_step']}"
        for row in history.attempts
        if row["number"] == number + 1 and row["first_step"] is not None
        if row["resumed_from_step"] is not None and row["resumed_from_step"] >= min(firsts)
    ]


def partial(history: RunHistory, *, share: float) -> Evidence:
    """Return whether steps close without some of their ranks, and which ranks those are."""
    series = history.partial()
    if not len(series):
        return not_measured("no step is closed")
    text = f"{int(series.values.sum())} of {len(series)} steps closed without some of their ranks"
    newest = series.newest(NEWEST)
    recent = f"{int(newest.values.sum())} of the newest {len(newest)}"
    evidence = of_rate(series.steps, series.values, None, share, NEWEST, text, recent)
    if evidence.verdict != "found":
        return evidence
    silent = [
        (role, rank, missing)
        for (role, rank), missing in history.missing().items()
        if evidence.since_step is None or missing.steps[-1] >= evidence.since_step
    ]
    silent.sort(key=lambda each: (-each[2].steps[-1], -len(each[2].steps), each[:2]))
    lines = _first([_missing_text(*each) for each in silent], _NAMED, "ranks")
    where = listed([f"{role} {rank}" for role, rank, _ in silent])
    return dataclasses.replace(evidence, where=where, supports=(*evidence.supports, *lines))


_NAMED: Final = 5
"""Maximum number of ranks for which a line lists the missing steps."""


def _missing_text(role: str, rank: int, missing: MissingRank) -> str:
    count, first, last = len(missing.steps), missing.steps[0], missing.steps[-1]
    span = f"step {first}" if count == 1 else f"{count} steps from {first} to {last}"
    return f"{role} rank {rank} is missing in {span}: {', '.join(missing.stages)}"


def unreported(history: RunHistory) -> Evidence:
    """Return the steps that are missing between the reported ones.

    The median of their distances is the usual distance of steps. An attempt that never reached the
    service trained the steps missing before another attempt's first step.
    """
    steps = history.steps
    if len(steps) < 3:
        return not_measured(f"{len(steps)} steps are closed")
    usual = float(np.median(np.diff([each.step for each in steps])))
    gaps = [
        (before, after) for before, after in pairwise(steps) if after.step - before.step > usual
    ]
    if not gaps:
        return not_found(f"the {len(steps)} steps from {steps[0].step} on follow each other")
    texts = []
    for before, after in gaps:
        first, last = before.step + 1, after.step - 1
        text = f"no step {first}" if first == last else f"no steps {first} to {last}"
        if after.attempt != before.attempt:
            text += f": attempt {after.attempt} begins with {after.step}, after {before.step} of "
            text += f"attempt {before.attempt}"
        texts.append(text)
    since = gaps[0][0].step + 1
    evidence = Evidence("found", 1.0, since, "", tuple(_first(texts, 6, "gaps")))
    return evidence.ended_after([each.step for each in steps], gaps[-1][1].step - 1)


_SLOWER: Final = 0.05
"""Seconds by which a rank must be slower than the others."""


def straggler(history: RunHistory, *, factor: float) -> Evidence:
    """Return the rank that takes `factor` times the others' median in a stage, step after step."""
    worst: Evidence | None = None
    examined = 0
    for (stage, role), by_step in history.stage_seconds().items():
        several = {step: ranks for step, ranks in by_step.items() if len(ranks) >= 3}
        if len(several) < 3:
            continue
        examined += 1
        slow: Counter[int] = Counter()
        since: dict[int, int] = {}
        ratios: dict[int, list[float]] = defaultdict(list)
        for step, ranks in sorted(several.items()):
            slowest = max(ranks, key=lambda rank: ranks[rank])
            others = [value for rank, value in ranks.items() if rank != slowest]
            usual = float(np.median(others))
            if ranks[slowest] > max(factor * usual, usual + _SLOWER):
                slow[slowest] += 1
                since.setdefault(slowest, step)
                ratios[slowest].append(ranks[slowest] / usual if usual else math.inf)
        if not slow:
            continue
        rank, count = slow.most_common(1)[0]
        sure = count / len(several)
        if sure >= 0.5 and (worst is None or sure > worst.sure):
            text = (
                f"{role} {rank} takes {np.median(ratios[rank]):.1f} times the others' median in "
                f"{stage}, in {count} of {len(several)} steps"
            )
            worst = Evidence("found", sure, since[rank], f"{role} rank {rank}, {stage}", (text,))
    if not examined:
        return not_measured("no stage has three ranks in three steps")
    return worst or not_found(f"no rank is slow step after step in {examined} stages")


def settings(history: RunHistory, *, table: str, values: Mapping[str, object]) -> Evidence:
    """Note the settings of a trainer that let two runs differ in their last bits.

    They harm no training, and a framework's defaults are among them, so they are no symptom.
    """
    recorded = history.settings(table)
    if not recorded:
        return not_measured(f"the run's settings hold no {table!r}")
    known = {name: value for name, value in values.items() if name in recorded}
    others = [name for name, value in known.items() if str(recorded[name]) != str(value)]
    if not others:
        return not_found(f"{len(known)} settings are as they have to be")
    listed = "; ".join(f"{name} is {recorded[name]}, not {values[name]}" for name in others)
    return dataclasses.replace(not_found(listed), note=listed)
