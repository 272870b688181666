"""Evidence from reports: findings, losses, times, settings."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from stagescope_service.rules.evidence import (
    Count,
    Evidence,
    listed,
    medians_of_others,
    not_found,
    not_measured,
    of_rate,
)
from stagescope_service.rules.history import NEWEST, RunHistory
from stagescope_service.rules.steps import CutOffStep, MissingRank
from stagescope_service.rules.symptoms.canary import of_canary
from stagescope_service.rules.symptoms.captured import of_captures
from stagescope_service.rules.symptoms.rows import (
    detail_of,
    first_of,
    found_in,
    messages,
    of_earlier,
)
from stagescope_service.rules.symptoms.silence import fell_silent
from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.tables import FindingRow, LossRow, ProcessColumns, UnfinishedRank
from stagescope_service.store.tables.training import INTERRUPTED
from stagescope_wire.render import counted, ranks_text
from stagescope_wire.schema import RankKey


def finding(
    history: RunHistory,
    *,
    kinds: Sequence[str],
    causes: Sequence[str] = (),
    looked: Literal["every step", "weights", "captures", "canary"] = "every step",
    pairs: Sequence[str] = (),
) -> Evidence:
    """Return the findings of some kinds (patterns with `*`).

    Args:
        history: of the run.
        kinds: the kinds.
        causes: codes in the evidence's field `cause`; empty: any, or none.
        looked: when the service looks for them: in every step, where weights were recorded, in
            captures, or in a canary's versions. Steps in which it did not look say nothing about
            whether they ended. Weights and versions that agree afterwards end them at once; see
            `of_captures` for captures. Where it never looked, the findings are not measured.
        pairs: of a canary's arms, one of which must be compared; empty: any canary will do.
    """
    every = history.findings_of(kinds)
    rows = [row for row in every if not causes or detail_of(row, "cause") in causes]
    lacking = "" if every else _never_looked(history, looked, pairs)
    if lacking:
        return not_measured(lacking)
    if not rows:
        named = f" of {' or '.join(causes)}" if causes else ""
        return not_found(f"no finding {' or '.join(kinds)}{named}")
    if looked == "canary":
        return of_canary(history, rows)
    found = found_in(history, rows, messages(history, rows))
    if looked == "every step":
        return found
    if looked == "captures":
        return of_captures(history, rows, found)
    last = max((row["step"] for row in rows if row["step"] is not None), default=None)
    after = () if last is None else history.compared_weights(last + 1)
    right = (row for row in after if not (row["differ"] or row["missing"]))
    agreed = next((row for row in right if row["agree"]), None)
    if agreed is None:
        return dataclasses.replace(found, last_step=None, against=())
    text = f"last seen in step {last}; the weights of version {agreed['version']} agree"
    return dataclasses.replace(found, last_step=last, against=(text,))


def _never_looked(history: RunHistory, looked: str, pairs: Sequence[str]) -> str:
    """Return what the service lacked to look for findings; "" if it looked."""
    if looked == "weights" and not history.has_compared_weights():
        return "no weights were recorded on both sides of a sync"
    if looked == "captures" and not history.has_operators():
        return "no operators of a step were captured"
    if looked == "canary" and not history.canaries:
        return "no canary was recorded"
    if pairs and not any(row.compared & {*pairs} for row in history.canaries):
        return f"no canary compared {' or '.join(pairs)}"
    return ""


def stream_changes(history: RunHistory, *, kind: str) -> Evidence:
    """Note how the streams' payloads differ from those of earlier steps: it may be on purpose."""
    rows = history.findings_of([kind])
    if not rows:
        return not_found("no step says of its streams anything else than the step before")
    rows.sort(key=lambda row: (row["attempt_id"] or 0, row["step"] or 0, row["message"]))
    listed = "; ".join(f"{of_earlier(history, row)}{row['message']}" for row in rows)
    return dataclasses.replace(not_found(listed), note=listed)


def hangs(history: RunHistory, *, kinds: Sequence[str]) -> Evidence:
    """Return the findings of some kinds that still hold in the newest attempt of the history.

    A rank that went on, or whose attempt ended, holds up no other rank any more.

    Args:
        history: of the run.
        kinds: of the findings; those of the first kind say why, and are listed first.
    """
    rows = [row for row in history.reports.every if row["kind"] in kinds]
    held = [
        row
        for row in rows
        if row["over_wall"] is None and row["attempt_id"] == history.newest_attempt_id
    ]
    if held:
        first = [row for row in held if row["kind"] == kinds[0]]
        others = [row for row in held if row["kind"] != kinds[0]]
        return found_in(history, held, [*messages(history, first), *messages(history, others)])
    if not rows:
        return not_found("no rank was silent for too long")
    last = max(rows, key=lambda row: row["first_wall"])
    return not_found(
        f"{counted(len(rows), 'rank')} held up others earlier, the last: {last['message']}"
    )


def scalars_not_finite(history: RunHistory) -> Evidence:
    """Return the logged numbers that are NaN or infinite, their ranks, and the first place."""
    rows = history.logged.non_finite
    if not history.logged.names:
        return not_measured("no scalar is logged")
    if not rows:
        text = f"{len(history.logged.names)} scalars are finite in every step"
        return not_found(text)
    first = rows[0]["step"]
    by_name: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        by_name[row["name"]].add(row["step"])
    lines = [
        f"{name} is not finite in {len(steps)} steps, first in {min(steps)}"
        for name, steps in sorted(by_name.items(), key=lambda item: min(item[1]))
    ]
    return found_in(history, rows, lines[:6], [row for row in rows if row["step"] == first])


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
    newest = f"the newest: {of_earlier(history, rows[0])}{rows[0]['reason']}"
    return found_in(history, rows, [text, newest], of=())


def failed(history: RunHistory, *, kinds: Sequence[str]) -> Evidence:
    """Return how processes failed last: findings of some kinds, else stages whose process was gone
    at their end, else attempts that ended between stages without a word."""
    each = (_reported(history, kinds), _cut_off(history), _ended_silently(history))
    found = [evidence for evidence in each if evidence is not None]
    # An old failure does not hide how the newest attempt ended.
    return max(found, key=_last_seen, default=not_found(f"no finding {' or '.join(kinds)}"))


def _last_seen(evidence: Evidence) -> float:
    return math.inf if evidence.last_step is None else evidence.last_step


def _reported(history: RunHistory, kinds: Sequence[str]) -> Evidence | None:
    """Return the findings of some kinds in the newest attempt that has some; None: none has."""
    every = history.findings_of(kinds)
    newest = max((row["attempt_id"] or 0 for row in every), default=0)
    rows = [row for row in every if (row["attempt_id"] or 0) == newest]
    if not rows:
        return None
    texts = messages(history, rows)
    if len(rows) < len(every):
        texts.append(f"and {counted(len(every) - len(rows), 'finding')} of earlier attempts")
    return found_in(history, rows, [*texts, *_after(history, rows)])


def _cut_off(history: RunHistory) -> Evidence | None:
    """Return the stages that the end of their process cut off; None: there are none."""
    unended = _unended(history, history.losses)
    if not unended:
        return None
    unended.sort(key=lambda row: (row["step"] is None, row["step"] or 0))
    together = _gone_together(history, unended)
    lines = Counter(
        f"{of_earlier(history, row)}{row['stage']} of step {row['step']}: {row['reason']}"
        for row in unended
    )
    texts = [f"{text} ({counted(n, 'rank')})" for text, n in lines.most_common(3)]
    if len(together) > 1:
        ranks = ranks_text(sorted((row["role"], row["rank"]) for row in together))
        texts.append(f"{ranks} stopped reporting; which of them died first is not known")
    texts += _after(history, unended)
    return found_in(history, unended, texts, [*unended, *together])


_TOGETHER: Final = 60.0
"""Seconds between the ends of the leases of processes that stopped at once: a poll, and slack."""


def _gone_together(history: RunHistory, rows: Sequence[LossRow]) -> list[ProcessColumns]:
    """Return the processes that stopped reporting in the newest attempt of some lost stages.

    When one rank dies, the others may be ended with it: between stages, they lose none.
    """
    newest = max((row["attempt_id"] for row in rows if row["attempt_id"] is not None), default=None)
    if newest is None:
        return []
    lost = max(row["wall"] for row in rows if row["attempt_id"] == newest)
    return [
        row
        for row in history.processes(newest)
        if row["lapsed_wall"] is not None and abs(row["lapsed_wall"] - lost) <= _TOGETHER
    ]


def _ended_silently(history: RunHistory) -> Evidence | None:
    """Return the newest attempt that ended without a word, and those before it; None: none did."""
    silent = fell_silent(history)[::-1]
    if not silent:
        return None
    cut_off = [history.cut_off_step(row["attempt_id"]) for row in silent]
    cut = cut_off[0]
    row = {**silent[0], "step": None if cut is None else cut.step, "role": None, "rank": None}
    lines = [_silent_text(*each) for each in zip(silent, cut_off, strict=True)]
    found = found_in(history, [row], first_of(lines, 3, "attempts"))
    place = "between stages" if cut is None else "within a step"
    headline = f"Processes stopped reporting {place}, and said nothing of an end"
    return dataclasses.replace(found, headline=headline)


def _silent_text(attempt: ListedAttempt, cut: CutOffStep | None) -> str:
    text = f"attempt {attempt['number']}: its processes stopped reporting "
    last = attempt["last_closed_step"]
    if cut is not None:
        text += f"in step {cut.step}, {_stages_text(cut.missing)}"
    elif last is None:
        text += "before a step closed"
    else:
        text += f"after the stages of step {last}"
    return f"{text}, and said nothing of an end"


def _stages_text(missing: Sequence[UnfinishedRank]) -> str:
    """Return the stages that ranks did not end, each with its ranks."""
    by_stage: dict[str, list[RankKey]] = {}
    for each in missing:
        by_stage.setdefault(each["stage"], []).append((each["role"], each["rank"]))
    texts = [f"{stage} of {ranks_text(sorted(ranks))}" for stage, ranks in by_stage.items()]
    return f"before the end of {', '.join(texts)}" if texts else "outside its stages"


def _unended(history: RunHistory, losses: Sequence[LossRow]) -> list[LossRow]:
    """Return the stages that the end of a process cut off, without interrupted processes."""
    stopped = {row["attempt_id"] for row in history.attempts if row["end_reason"] == INTERRUPTED}
    interrupted = {
        (row["attempt_id"], row["role"], row["rank"])
        for row in history.reports.every
        if row["kind"] == "process_interrupted"
    }
    return [
        row
        for row in losses
        if row["kind"] == _UNENDED
        and row["attempt_id"] not in stopped
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
    lines = first_of([_missing_text(*each) for each in silent], _NAMED, "ranks")
    where = listed((role, rank) for role, rank, _ in silent)
    supports = (*evidence.supports, *lines)
    ranks = frozenset((role, rank) for role, rank, _ in silent)
    return dataclasses.replace(evidence, where=where, ranks=ranks, supports=supports)


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
        return not_measured(f"{counted(len(steps), 'step')} closed, 3 are needed", waits=True)
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
    evidence = Evidence("found", 1.0, since, "", tuple(first_of(texts, 6, "gaps")))
    return evidence.ended_after([each.step for each in steps], gaps[-1][1].step - 1)


_SLOWER: Final = 0.1
"""Minimum seconds by which a straggler is slower than the other ranks."""
_OF_STEP: Final = 0.05
"""The same as a share of the seconds of its stages in the step."""
_STEP_AFTER_STEP: Final = 0.6
"""Minimum share of the steps: chance makes one of four ranks slow in half of ten short ones."""


_SEVERAL: Final = 3
"""Minimum ranks of a stage in a step, and minimum steps of a stage, to compare ranks."""


def straggler(history: RunHistory, *, factor: float) -> Evidence:
    """Return the ranks that take `factor` times the others' median in a stage, step after step.

    They must also be slower by `_SLOWER` seconds, and by `_OF_STEP` of all their stages in the
    step. The stage in which most steps show it is named.
    """
    stages = history.stage_seconds()
    whole: dict[tuple[str, int, int], float] = defaultdict(float)
    for (_, role), by_step in stages.items():
        for step, ranks in by_step.items():
            for rank, seconds in ranks.items():
                whole[role, step, rank] += seconds
    worst: Evidence | None = None
    examined = 0
    for (stage, role), by_step in stages.items():
        several = {step: own for step, own in sorted(by_step.items()) if len(own) >= _SEVERAL}
        if len(several) < _SEVERAL:
            continue
        examined += 1
        least = {
            (step, rank): max(_SLOWER, _OF_STEP * whole[role, step, rank])
            for step, own in several.items()
            for rank in own
        }
        ratios = _ratios(several, factor, least)
        found = _slow_in(stage, role, ratios, len(several))
        if found is not None and (worst is None or found.sure > worst.sure):
            worst = found
    if not examined:
        has_ranks = any(len(own) >= _SEVERAL for each in stages.values() for own in each.values())
        return not_measured("no stage has three ranks in three steps", waits=has_ranks)
    return worst or not_found(f"no rank is slow step after step in {examined} stages")


def _ratios(
    by_step: Mapping[int, Mapping[int, float]],
    factor: float,
    least: Mapping[tuple[int, int], float],
) -> dict[int, dict[int, float]]:
    """Return rank -> the steps in which it is slow -> its seconds over the others' median.

    Args:
        by_step: step -> rank -> seconds in a stage.
        factor: minimum of the ratio.
        least: (step, rank) -> minimum seconds over the median.
    """
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for step, ranks in by_step.items():
        usual_of = medians_of_others(np.array([*ranks.values()], np.float64)).tolist()
        for (rank, seconds), usual in zip(ranks.items(), usual_of, strict=True):
            if seconds > max(factor * usual, usual + least[step, rank]):
                found[rank][step] = seconds / usual if usual else math.inf
    return found


def _slow_in(
    stage: str, role: str, ratios: Mapping[int, Mapping[int, float]], steps: int
) -> Evidence | None:
    """Return the ranks that are slow in enough of a stage's steps; None: none is."""
    slow = sorted(rank for rank, own in ratios.items() if len(own) >= _STEP_AFTER_STEP * steps)
    if not slow:
        return None
    count = max(len(ratios[rank]) for rank in slow)
    texts = tuple(
        f"{role} {rank} takes {np.median([*ratios[rank].values()]):.1f} times the others' "
        f"median in {stage}, in {len(ratios[rank])} of {steps} steps"
        for rank in slow[:_NAMED]
    )
    keys = [(role, rank) for rank in slow]
    return Evidence(
        "found", count / steps, min(min(ratios[rank]) for rank in slow),
        f"{ranks_text(keys)}, {stage}", texts, count=Count(count, steps), ranks=frozenset(keys),
    )  # fmt: skip


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
