"""A run as a screen of text: its steps, which ranks wait, findings and captures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from stagescope.connection import segment
from stagescope.session import Session
from stagescope_wire import nonfinite, render
from stagescope_wire.errors import NotFound, StagescopeError
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import Line, clip, printable, ranges_text
from stagescope_wire.schema import STAGES, RankKey

MIN_WIDTH: Final = 40
MIN_HEIGHT: Final = 8
_STEPS: Final = 8
"""Newest steps that are requested; a high screen shows all of them."""
_FINDINGS: Final = 8
_CAPTURES: Final = 4
_GONE_RANKS: Final = 1000
"""Ranks whose process is gone that are requested."""
_METRICS: Final = {"k3_kl": "rollout_corr/k3_kl", "mean |d|": "logprob_abs_diff/mean"}
_DONE, _INSIDE, _ABSENT, _GONE = "#", ">", ".", "!"
_MARKS: Final[Mapping[str, str]] = {"not begun": _ABSENT, "unfinished": _GONE}
"""Status of a missing rank -> its mark; others are inside the stage."""
_WORST: Final = (_GONE, _ABSENT, _INSIDE, _DONE)
"""The mark of several ranks is the first of these that one of them has."""
_LEGEND: Final = f"{_DONE} done  {_INSIDE} inside  {_ABSENT} not begun  {_GONE} gone"
_GOOD: Final = ("comparable", "exact")
_UNDECIDED: Final = ("", "no numbers", "unknown")


@dataclasses.dataclass(frozen=True)
class RunSnapshot:
    """The service's answers about a run at one time; parts that it could not answer are empty."""

    run: str
    """As people see it."""
    attempt: JsonObject
    steps: Sequence[JsonObject]
    verdicts: Mapping[int, str]
    """Step -> verdict on its streams."""
    nonfinite: Mapping[int, int]
    """Step -> its tokens that are not finite, where there are some."""
    numbers: Mapping[str, Mapping[int, Json]]
    """Title of a column -> step -> value."""
    progress: JsonObject
    """The answer of `/steps/latest/stages`."""
    rounds: Sequence[JsonObject]
    measured: int | None
    """The step that `rounds` is of."""
    findings: Sequence[JsonObject]
    captures: Sequence[JsonObject]
    wall: float
    gone: Collection[RankKey] = ()
    """Ranks whose process is gone while others of the attempt live."""


class RunReader:
    """Reads snapshots of a run; rounds are requested again only where their step is another."""

    def __init__(self, session: Session, run: str) -> None:
        self._session = session
        self._run = run
        self._rounds: tuple[object, Sequence[JsonObject]] = (None, ())

    def read(self) -> RunSnapshot:
        """Return the service's current answers.

        Raises:
            StagescopeError: it cannot be reached, or there is no such run.
        """
        run = self._run
        ask = self._session.get
        answer = ask(f"/runs/{segment(run, 'run')}/attempts", limit=1)
        attempts = answer["rows"]
        # The current steps come first: superseded ones would show the attempt that died.
        listed = ask("/steps", run=run, limit=_STEPS)["rows"]
        steps = [row for row in listed if row["superseded_by"] is None]
        numbers: dict[str, dict[int, Json]] = {}
        verdicts: dict[int, str] = {}
        nonfinite_tokens: dict[int, int] = {}
        for title, metric in _METRICS.items():
            try:
                found = ask("/series", metric=metric, run=run, limit=_STEPS + 2)
            except NotFound:  # no step has numbers yet
                continue
            pairs = zip(found["steps"], found["comparable"], strict=True)
            verdicts |= {step: verdict for step, verdict in pairs if verdict is not None}
            counts = zip(found["steps"], found.get("nonfinite") or (), strict=False)
            nonfinite_tokens |= {step: tokens for step, tokens in counts if tokens}
            values = found["series"][0]["values"] if found["series"] else []
            numbers[title] = dict(zip(found["steps"], nonfinite.numbers(values), strict=False))
        measured = next((row for row in steps if row["measured"]), None)
        progress = ask("/steps/latest/stages", run=run, limit=1) if steps else {}
        return RunSnapshot(
            str(answer.get("display_name") or run), attempts[0] if attempts else {}, steps,
            verdicts, nonfinite_tokens, numbers, progress,
            rounds=() if measured is None else self._rounds_of(measured),
            measured=None if measured is None else measured["step"],
            findings=ask("/findings", run=run, limit=_FINDINGS)["rows"],
            captures=ask("/captures", run=run, limit=_CAPTURES)["rows"], wall=time.time(),
            gone=self._gone_from(progress) if progress.get("missing") else (),
        )  # fmt: skip

    def _gone_from(self, progress: JsonObject) -> Collection[RankKey]:
        answer = self._session.get(
            f"/steps/{progress['step']}/stuck",
            run=self._run, attempt=progress["attempt"], limit=_GONE_RANKS,
        )  # fmt: skip
        return {(row["role"], row["rank"]) for row in answer["rows"] if row["process"] == "gone"}

    def _rounds_of(self, row: JsonObject) -> Sequence[JsonObject]:
        key = (row["attempt"], row["step"], row["closed_wall"])
        if self._rounds[0] != key:
            try:
                answer = self._session.get(
                    f"/steps/{row['step']}/rounds",
                    run=self._run, attempt=row["attempt"], limit=500,
                )  # fmt: skip
            except StagescopeError:
                return ()
            self._rounds = (key, answer["rows"])
        return self._rounds[1]


def screen(snapshot: RunSnapshot, *, width: int, height: int, problem: str = "") -> list[Line]:
    """Return at most `height` lines of at most `width` columns.

    Args:
        snapshot: the newest one.
        width, height: of the screen.
        problem: why the newest request was not answered; empty: it was.
    """
    width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
    ranks = _RankRows.of(snapshot, width)
    parts = [
        _step_lines(snapshot), ranks.lines(), _round_lines(snapshot), _finding_lines(snapshot),
        _capture_lines(snapshot),
    ]  # fmt: skip
    head = [_title(snapshot)]
    if problem:
        said = render.wrapped("", f"no answer: {problem}", width)
        head += [Line(line, "bad") for line in said[:2]]
    foot = Line("q quits", "dim")
    room = height - len(head) - 1
    # The title of each part and its first row come before further rows of any.
    given = _shared([len(part) for part in parts], room)
    parts[1] = ranks.lines(given[1])
    shown = [line for part, most in zip(parts, given, strict=True) for line in part[:most]]
    lines = [*head, *shown, foot][:height]
    return [Line(clip(printable(line.text.rstrip()), width), line.tone) for line in lines]


def _shared(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many lines each part gets; where room lacks, each gets some."""
    given = [0] * len(lengths)
    while room > 0 and any(each < length for each, length in zip(given, lengths, strict=True)):
        for at, length in enumerate(lengths):
            if room > 0 and given[at] < length:
                given[at] += 1
                room -= 1
    return given


def _title(snapshot: RunSnapshot) -> Line:
    attempt = snapshot.attempt
    state = str(attempt.get("state", "no attempt"))
    if state == "ended":
        state = f"ended ({attempt.get('end_reason') or 'no reason known'})"
    number = attempt.get("attempt")
    processes = attempt.get("processes")
    which = "" if number is None else f"  attempt {number}, {state}"
    several = "" if processes is None else f", {render.counted(processes, 'process', 'processes')}"
    clock = time.strftime("%H:%M:%SZ", time.gmtime(snapshot.wall))
    return Line(f"{clock}  {snapshot.run}{which}{several}", "title")


def _step_lines(snapshot: RunSnapshot) -> list[Line]:
    head = f"{'STEP':>8}  {'verdict':<13}{'complete':<10}"
    head += "".join(f"{title:>11}" for title in _METRICS)
    lines = [Line(f"{head}  lacks", "title")]
    for row in snapshot.steps:
        step = int(row["step"])
        has_none = not row["measured"] and row["complete"] != "open"  # an open step may get some
        verdict = snapshot.verdicts.get(step) or ("no numbers" if has_none else "")
        text = f"{step:>8}  {verdict:<13}{row['complete']:<10}"
        for title in _METRICS:
            value = snapshot.numbers.get(title, {}).get(step)
            text += f"{'' if value is None else f'{value:.4g}':>11}"
        is_earlier = _is_earlier(row, snapshot.attempt.get("attempt"))
        broken = snapshot.nonfinite.get(step)
        not_finite = f"{render.counted(broken, 'token')} not finite" if broken else ""
        lacks = not_finite or row["gap"] or (f"of attempt {row['attempt']}" if is_earlier else "")
        tone = "good" if verdict in _GOOD else "" if verdict in _UNDECIDED else "bad"
        tone = "bad" if row["complete"] == "partial" or broken else tone
        lines.append(Line(f"{text}  {lacks}", tone))
    if not snapshot.steps:
        lines.append(Line("          no step yet"))
    return lines


@dataclasses.dataclass(frozen=True)
class _RankRows:
    """A line for each role and stage: its ranks as marks, and the ranks that others wait for.

    Attributes:
        title: the subject of the rows; empty: there are none.
        rows: role, how many ranks are gone and late, and the line, in the order of the stages.
    """

    title: str
    rows: Sequence[tuple[str, tuple[int, int], Line]]

    @classmethod
    def of(cls, snapshot: RunSnapshot, width: int) -> _RankRows:
        """Return the rows of the newest step."""
        progress = snapshot.progress
        expected = progress.get("expected") or {}
        missing: dict[tuple[str, str], dict[int, JsonObject]] = {}
        for each in progress.get("missing") or ():
            missing.setdefault((each["role"], each["stage"]), {})[each["rank"]] = each
        rows = []
        room = max(width // 4, 10)
        for role, stages in expected.items():
            for stage, ranks in sorted(stages.items(), key=lambda each: _place(each[0])):
                late = missing.get((role, stage), {})
                marks = "".join(
                    _DONE
                    if rank not in late
                    else _GONE
                    if (role, rank) in snapshot.gone
                    else _MARKS.get(late[rank]["status"], _INSIDE)
                    for rank in ranks
                )
                done = len(ranks) - len(late)
                text = f"{clip(stage, 22):<23}{_folded(marks, room):<{room}} {done}/{len(ranks)}"
                text += f"  {_waited(role, late, progress.get('wall'))}" if late else f"  {role}"
                line = Line(text, "bad" if _GONE in marks else "")
                rows.append((role, (marks.count(_GONE), len(late)), line))
        title = f"RANKS in step {progress['step']}, {progress['complete']}" if rows else ""
        return cls(title, rows)

    def lines(self, most: int | None = None) -> list[Line]:
        """Return the title and the rows in at most so many lines; the title counts the others.

        The worst row of each role comes before any other: a row whose ranks are gone, then the row
        that most ranks have not ended.
        """
        if not self.rows or most == 0:
            return []
        shown = len(self.rows) if most is None else min(most - 1, len(self.rows))
        worst_first = sorted(range(len(self.rows)), key=lambda at: self.rows[at][1], reverse=True)
        first_of: dict[str, int] = {}
        for at in worst_first:
            first_of.setdefault(self.rows[at][0], at)
        kept = list(dict.fromkeys([*first_of.values(), *worst_first]))[:shown]
        lacking = len(self.rows) - shown
        more = f", {lacking} more" if lacking else ""
        title = Line(f"{self.title}{more}   {_LEGEND}", "title")
        return [title, *(self.rows[at][2] for at in sorted(kept))]


def _place(stage: str) -> tuple[int, str]:
    """Return a sort key: stages in the order in which trainers go through them."""
    return (STAGES.index(stage) if stage in STAGES else len(STAGES)), stage


def _folded(marks: str, room: int) -> str:
    """Return marks in at most `room` characters: each is the worst of some ranks."""
    if len(marks) <= room:
        return marks
    found = ""
    for at in range(room):
        part = marks[at * len(marks) // room : (at + 1) * len(marks) // room]
        found += next(mark for mark in _WORST if mark in part)
    return found


def _waited(role: str, late: Mapping[int, JsonObject], now: Json) -> str:
    """Return who is waited for, and since when."""
    since = [each["since"] for each in late.values() if each.get("since") is not None]
    text = f"{role} {ranges_text('rank', sorted(late)).partition(' ')[2]}"
    if since and now is not None:
        text += f", {max(now - min(since), 0.0):.0f} s"
    return text


def _round_lines(snapshot: RunSnapshot) -> list[Line]:
    rows = [row for row in snapshot.rounds if _number(row["abs_diff_mean"]) is not None]
    if not rows:
        return []
    worst = max(rows, key=lambda row: _number(row["abs_diff_mean"]) or 0.0)
    few = ", too few to judge" if worst.get("comparable") == "unknown" else ""
    mean, most = (_number(worst[name]) for name in ("abs_diff_mean", "abs_diff_max"))
    text = (
        f"WORST of {len(snapshot.rounds)} ROUNDS of step {snapshot.measured}: {worst['round']}, "
        f"{render.counted(worst['tokens'], 'token')}{few}, mean |d| {mean:.4g}, max {most:.4g} nat"
    )
    return [Line(text, "title")]


def _number(value: Json) -> float | None:
    """Return a number that is finite; None for others."""
    return float(value) if isinstance(value, int | float) else None


def _finding_lines(snapshot: RunSnapshot) -> list[Line]:
    lines = [Line("FINDINGS, the last seen first", "title")]
    current = snapshot.attempt.get("attempt")
    # Those of the current attempt come first.
    for row in sorted(snapshot.findings, key=lambda row: _is_earlier(row, current)):
        step = "" if row["step"] is None else f"step {row['step']} "
        step += f"of attempt {row['attempt']} " if _is_earlier(row, current) else ""
        over = " (over)" if row.get("over_wall") is not None else ""
        text = f"{row['severity']:<8}{step:<11}{row['message']}{over}"
        lines.append(Line(text, "bad" if row["severity"] == "error" and not over else ""))
    if not snapshot.findings:
        lines.append(Line("none", "good"))
    return lines


def _is_earlier(row: JsonObject, current: Json) -> bool:
    """Return whether a row is of an attempt before the current one."""
    return current is not None and row.get("attempt") not in (None, current)


def _capture_lines(snapshot: RunSnapshot) -> list[Line]:
    if not snapshot.captures:
        return []
    lines = [Line("CAPTURES", "title")]
    for row in snapshot.captures:
        spec = row.get("spec") or {}
        stages = spec.get("stages") or ()
        text = "all stages" if stages == "all" else ", ".join(stages)
        lines.append(Line(f"{row['capture_id']}  {row['state']:<10}{text}"))
    return lines
