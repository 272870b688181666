"""The doctor's answer: its rules compared with a run's history."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Final, TypeAlias
from urllib.parse import quote

from stagescope_service.dumps.joining.join import Selection
from stagescope_service.rules.causes import Diagnosis
from stagescope_service.rules.doctor import add_earlier, diagnose, unexplained
from stagescope_service.rules.evidence import Evidence
from stagescope_service.rules.history import NEWEST, RunHistory
from stagescope_service.rules.missing import StepKey
from stagescope_service.rules.parts import mismatch_parts
from stagescope_service.rules.steps import CurrentStep, LossOfStep
from stagescope_service.statistics.loss_fate import NAMES
from stagescope_service.store.tables import ArtifactRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.kept import payload_artifacts
from stagescope_service.views.reading.answers import Key
from stagescope_service.views.reading.changes import change_key
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.samples.batches import batch_of
from stagescope_service.views.samples.listing import RECORD, kept_loss
from stagescope_service.views.samples.tokens import fields_in
from stagescope_wire.batch import Batch
from stagescope_wire.errors import NotFound
from stagescope_wire.render import counted
from stagescope_wire.tensors import RECENT_TENSORS

OF_AN_ATTEMPT: Final = frozenset({
    "anatomy", "batch", "canary", "exact", "findings", "gradient", "loss", "losses", "lost",
    "metrics", "non-finite", "operators", "ranks", "rounds", "routing", "sample", "samples",
    "scalars", "series", "stacks", "stages", "steps", "stuck", "tokens", "weights",
})  # fmt: skip
"""Commands with an option `--attempt`, by their earlier names, too."""

_MAX_BYTES: Final = 256 << 20
"""Most bytes of a step's payload files that a diagnosis reads."""

_STEPS_READ: Final = 64
"""Steps of which a diagnosis remembers what is kept."""

_RECORD_WEIGHTS: Final = (
    "record the weights on both sides of a sync, which would say whether they arrive: "
    "probe.record_weights(..., step=...), docs/weights.md"
)

_RECORD_STREAMS: Final = (
    "record rollout_log_probs and old_log_probs with response_mask in actor_compute_log_prob"
)
_RECORD_TOKENS: Final = (
    "record prompts and responses (token ids) beside the log-probs: then `stagescope bisect` says "
    "at which swap of one component the mismatch disappears, docs/bisect.md"
)
_GIVE_IDS: Final = "give sample_ids"
"""Begin of an advice that rows with sample ids do not need."""

_COMMAND: Final = "stagescope "

_EARLIER: Final = 3
"""Earlier attempts whose symptoms are added to the answer."""


Found: TypeAlias = tuple[JsonObject, list[JsonObject]]
"""The fields of the answer, and its rows."""


def start_diagnosis(
    deps: Dependencies, run: str, attempt: int | None, step: int | None
) -> tuple[Key, Future[Found]]:
    """Start a diagnosis, or return the one of the run as it is, and the key of its answer.

    Raises:
        NotFound: no such run.
        NotReady: too many computations are running.
    """
    key = change_key(deps, "diagnosis", run, (attempt, step))
    return key, deps.computations.start_once(key, diagnosis_of, deps, run, attempt, step)[1]


def diagnosis_of(deps: Dependencies, run: str, attempt: int | None, step: int | None) -> Found:
    """Return the fields of the answer, and its rows."""
    # One transaction: what a commit in the middle changed would contradict what was read before.
    with deps.catalogue.snapshot() as catalogue:
        pinned = dataclasses.replace(
            deps, catalogue=catalogue, finder=deps.finder.within(catalogue)
        )
        return _diagnosis_of(pinned, run, attempt, step)


def _diagnosis_of(deps: Dependencies, run: str, attempt: int | None, step: int | None) -> Found:
    target = deps.finder.attempt(run, attempt)
    kept = _KeptTensors(deps, target.run)
    memory = deps.memories.of(target.run)
    history = RunHistory(
        deps.catalogue, target.run, attempt=attempt, last=step, kept=kept, memory=memory
    )
    rows = diagnose(history)
    if attempt is None:
        for number in islice(history.earlier_attempts(), _EARLIER):
            own = RunHistory(deps.catalogue, target.run, attempt=number, last=step, memory=memory)
            rows = add_earlier(rows, history, own, number, step)
    steps = [each.step for each in history.steps]
    newest = history.newest
    left = unexplained(rows, history)
    shown = target.display_name + ("" if attempt is None else f", attempt {attempt}")
    fields: JsonObject = {
        **target.heading(),
        "attempt": attempt,
        "from_step": steps[0] if steps else None,
        "to_step": steps[-1] if steps else None,
        "steps": len(steps),
        "measured": len(history.measured),
        "measured_step": None if newest is None else newest.step,
        "healthy": False if left or any(each.lasts for each in rows) else bool(steps) or None,
        "text": f"{_found(rows, history, shown, _not_examined(deps, history, step), bool(left))}"
        f"{_left(target.run, left, attempt)}{_before(target.run, rows, step)}",
        "unexplained": left,
        "notes": [
            {"rule": each.rule.name, "text": each.evidence.note, "meaning": each.rule.meaning}
            for each in rows
            if each.evidence.note and not each.is_found
        ],
        "mismatch": list(map(dataclasses.asdict, mismatch_parts(history, rows))),
    }
    engines = [row["name"] for row in deps.catalogue.engines()]
    engine = engines[0] if len(engines) == 1 else "URL"
    return fields, [_row(history, kept, each, attempt, engine) for each in rows]


def _not_examined(deps: Dependencies, history: RunHistory, step: int | None) -> str:
    """Return why the asked step, or any, was not examined; "" if it was."""
    last = history.steps[-1].step if history.steps else None
    if last is not None and step in (None, last):
        return ""
    ids = [row["attempt_id"] for row in history.attempts]
    before = None if step is None else step + 1
    found = [row for each in ids for row in deps.catalogue.steps(each, before=before, limit=1)]
    newest = max(found, key=lambda row: row["step"], default=None)
    if newest is None or (step is not None and newest["step"] != step):
        firsts = [row["first_step"] for row in history.attempts if row["first_step"] is not None]
        if not firsts:
            return "no step was reported"
        begin = "" if last is not None else f", the first step is {min(firsts)}"
        return f"step {step} was not reported{begin}"
    if newest["closed_wall"] is None:
        return f"step {newest['step']} is not closed"
    return f"a later attempt replaced step {newest['step']}"


def _found(
    rows: Sequence[Diagnosis], history: RunHistory, shown: str, not_examined: str, has_left: bool,
) -> str:  # fmt: skip
    """Return what was not examined, how many causes were found, and what they explain.

    `shown` is the run, as people see it. With `has_left`, warnings or errors stand that no rule
    explains.
    """
    causes = [each for each in rows if each.is_cause and each.lasts]
    explained = sum(len(each.explains) for each in causes)
    ended = sum(each.is_found and not each.lasts for each in rows)
    unknown = sum(each.evidence.verdict == "not measured" for each in rows)
    steps = len(history.steps)
    is_wrong = has_left or any(each.lasts for each in rows)
    none = ("No cause was found" if is_wrong else "Nothing is wrong") if steps else ""
    head = counted(len(causes), "cause") if causes else none
    parts = [
        (explained, f"explain{'s' if len(causes) == 1 else ''} {counted(explained, 'symptom')}"),
        (ended, f"{counted(ended, 'symptom')} ended"),
        (unknown, f"{counted(unknown, 'rule')} not measured"),
    ]
    listed = ", ".join(what for count, what in parts if count)
    run = f"run {shown}"
    listed = f" ({listed})" if listed else ""
    if steps:
        newest = f"The newest step that was examined is {history.steps[-1].step}, because "
        text = f"{head} in {counted(steps, 'closed step')} of {run}{listed}"
        return f"{newest}{not_examined}. {text}" if not_examined else text
    why = f"No closed step of {run} was examined, because {not_examined}"
    return f"{head} in {run}{listed}. {why}" if head else f"{why}{listed}"


def _left(run: str, left: Mapping[str, int], attempt: int | None) -> str:
    """Return the warnings and errors that no rule explains, as a sentence; "" for none."""
    if not left:
        return ""
    count, kinds = sum(left.values()), [*left]
    stand = "1 warning or error stands" if count == 1 else f"{count} warnings or errors stand"
    named = ", ".join(kinds[:_KINDS]) + (", ..." if len(kinds) > _KINDS else "")
    only = f" --only {','.join(kinds)}" if len(kinds) <= _KINDS else ""
    of_attempt = "" if attempt is None else f" --attempt {attempt}"
    return (
        f". {stand} that no rule explains: {named} "
        f"(stagescope findings{only} --run {run}{of_attempt})"
    )


_KINDS: Final = 3
"""Kinds of findings that a sentence names."""


def _before(run: str, rows: Sequence[Diagnosis], step: int | None) -> str:
    """Return the causes that earlier attempts showed, as sentences; "" for none."""
    by_attempt: dict[tuple[int, bool], list[str]] = {}
    for each in rows:
        before = each.evidence.before
        if before is not None and before.is_cause and not each.lasts:
            since = "" if before.since_step is None else f", since step {before.since_step}"
            key = before.attempt, before.is_end
            by_attempt.setdefault(key, []).append(each.rule.title + since)
    sentences = []
    up_to = "" if step is None else f" --step {step}"
    for (attempt, is_end), titles in sorted(by_attempt.items(), reverse=True):
        what = "ended with" if is_end else "had" if step is None else f"had, up to step {step}"
        command = f"stagescope doctor {run} --attempt {attempt}{up_to}"
        sentences.append(f". Attempt {attempt} {what}: {'; '.join(titles)} ({command})")
    return "".join(sentences)


class _KeptStep:
    """What is kept of a step, read on demand.

    Attributes:
        target: the step.
        size: bytes of its files.
        files: the files.
        tensors: the names of the tensors in them.
    """

    def __init__(self, deps: Dependencies, run: str, step: CurrentStep) -> None:
        self._deps, self._run, self._step = deps, run, step

    @functools.cached_property
    def target(self) -> Target:
        return self._deps.finder.step(self._run, self._step.attempt, self._step.step)

    @functools.cached_property
    def files(self) -> list[ArtifactRow]:
        return payload_artifacts(self._deps, self.target, self._step.step)

    @property
    def size(self) -> int:
        return sum(row["bytes"] for row in self.files)

    @functools.cached_property
    def tensors(self) -> set[str]:
        in_files: set[str] = set()
        for row in self.files:
            in_files |= RECENT_TENSORS if row["tensors"] is None else set(row["tensors"])
        return in_files


class _KeptTensors:
    """Reads the tensors of a run's steps, for `RunHistory`."""

    def __init__(self, deps: Dependencies, run: str) -> None:
        self._deps = deps
        self._of = functools.lru_cache(maxsize=_STEPS_READ)(functools.partial(_KeptStep, deps, run))
        self._recorded: dict[StepKey, set[str]] = {}
        """The names of the tensors that were recorded in a step."""

    def loss(self, step: CurrentStep, wanted: Collection[str]) -> LossOfStep:
        kept = self._of(step)
        if not self._may_have(step, wanted):
            return LossOfStep(0, {}, {name: RECORD[name] for name in wanted})
        if kept.size > _MAX_BYTES:
            raise NotFound(
                f"the tensors of step {step.step} are {kept.size >> 20} MiB, too many for a "
                "diagnosis",
                advice=f"stagescope gradient {step.step}",
            )
        found = kept_loss(self._deps, kept.target, kept.files)
        return LossOfStep(
            tokens=found.count,
            shares={NAMES[fate]: share for fate, share in found.shares.items()},
            unrecorded={str(each["name"]): str(each["record"]) for each in found.unrecorded},
        )

    def _may_have(self, step: CurrentStep, fields: Collection[str]) -> bool:
        """Return whether some of these fields of the loss may be recorded in what is kept."""
        kept, recorded = self._of(step), self._recorded_in(step)
        attempts = {row["attempt_id"] for row in kept.files}
        # Retention may have removed the list, and it lacks the tensors of other attempts.
        if not recorded or attempts != {step.attempt_id}:
            return True
        settings = self._deps.catalogue.settings_with(step.attempt_id, "rollout_is")
        known = fields_in(kept.files, recorded & kept.tensors, settings)
        return not known.isdisjoint(fields)

    def batch(self, step: CurrentStep, names: Sequence[str]) -> Batch | None:
        kept = self._of(step)
        if not self._has(step, {*names}) or kept.size > _MAX_BYTES:
            return None
        return batch_of(
            self._deps, kept.target, Selection(names), artifacts=kept.files, described=False
        )

    def can_score(self, step: CurrentStep) -> bool:
        """Return whether the token ids of a step are kept, so that they can be scored again."""
        return self._has(step, {"prompts", "responses"})

    def _has(self, step: CurrentStep, names: set[str]) -> bool:
        """Return whether tensors of a step were recorded, and are kept."""
        # Most steps do not have the tensors: their files need not be looked up.
        return names <= self._recorded_in(step) and names <= self._of(step).tensors

    def _recorded_in(self, step: CurrentStep) -> set[str]:
        key = (step.attempt_id, step.step)
        if key not in self._recorded:
            # The steps before it are looked at next.
            first = step.step - NEWEST + 1
            found = self._deps.catalogue.recorded_tensors(
                step.attempt_id, first=first, last=step.step
            )
            for each in range(first, step.step + 1):
                self._recorded[step.attempt_id, each] = found.get(each, set())
        return self._recorded[key]


def _row(
    history: RunHistory, kept: _KeptTensors, found: Diagnosis, asked: int | None, engine: str
) -> JsonObject:
    """Return a row; its commands and its figure are of the attempt that is asked for, its
    experiments with a registered engine."""
    rule, evidence = found.rule, found.evidence
    newest = history.newest
    last = history.steps[-1] if history.steps else None
    step = evidence.since_step if evidence.captured_step is None else evidence.captured_step
    if step is None:
        step = newest.step if newest is not None else None if last is None else last.step
    found_in = None if step is None else history.attempt_of(step)
    attempt = found_in or (last.attempt if last is not None and step is not None else 1)
    shown = history.measured[-1] if history.measured else None
    if evidence.last_step is not None:
        seen = (each for each in reversed(history.measured) if each.step == evidence.last_step)
        shown = next(seen, shown)
    slow = shown if evidence.is_about else None  # its first steps show little of it
    lacking = {} if history.has_weights(attempt) else {"stagescope weights ": _RECORD_WEIGHTS}
    if found.is_found and shown is not None and not kept.can_score(shown):
        lacking["stagescope bisect "] = _RECORD_TOKENS
    if newest is not None and all(newest.summary.summary.sequences.samples):
        lacking[_GIVE_IDS] = ""
    scalar = history.logged.first_name(rule.evidence.parameters.get("names") or ())
    example = evidence.example
    absent = [
        word
        for word, value in (("{scalar}", scalar), ("{example}", example))
        if value is None and (found.is_found or word == "{scalar}")
    ]
    commands = [text for text in rule.next if not any(word in text for word in absent)]
    words = {
        "{run}": history.run,
        "{step}": "STEP" if step is None else str(step if slow is None else slow.step),
        "{newest}": "STEP" if shown is None else str(shown.step),
        "{attempt}": str(attempt),
        "{where}": evidence.where or "RUN",
        "{engine}": shlex.quote(engine),
        "{before}": str(max(attempt - 1, 1)),
        "{scalar}": shlex.quote(scalar or "NAME"),
        "{example}": "STEP SAMPLE"
        if example is None
        else f"{example.step} {shlex.quote(example.sample)}",
    }
    figure = rule.figure if step is not None else None
    if figure is not None and "{scalar}" in figure:
        figure = None if scalar is None else figure.replace("{scalar}", quote(scalar))
    if figure is not None and asked is not None:
        figure = f"{figure}&attempt={asked}"
    return {
        "rule": rule.name,
        "family": rule.family,
        "title": rule.title,
        "sentence": _sentence(found, history),
        "verdict": evidence.verdict,
        "sure": evidence.sure,
        "shown": None if evidence.count is None else evidence.count.shown,
        "examined": None if evidence.count is None else evidence.count.examined,
        "unit": None if evidence.count is None else evidence.count.unit,
        "since_step": evidence.since_step,
        "last_step": evidence.last_step,
        "cause": None if found.cause is None else found.cause.name,
        "explains": [each.name for each in found.explains],
        "explained_by": [each.name for each in found.explained_by],
        "where": evidence.where or None,
        "for": list(evidence.supports),
        "against": list(evidence.against),
        "meaning": rule.meaning,
        "next": [_filled(_of_attempt(text, asked), words) for text in _possible(commands, lacking)],
        "figure": None if figure is None else _filled(figure, words),
        "record": _to_record(found, history),
        "waits": evidence.waits,
        "sources": list(rule.sources),
    }


def _to_record(found: Diagnosis, history: RunHistory) -> str | None:
    """Return what to record so that a rule is measured; None: it is, or nothing can be recorded."""
    if found.evidence.verdict != "not measured" or found.evidence.waits:
        return None
    needs_streams = found.rule.family in ("precision", "mismatch") and not history.measured
    return found.rule.record or (_RECORD_STREAMS if needs_streams else None)


def _possible(commands: Sequence[str], lacking: Mapping[str, str]) -> list[str]:
    """Return what can be done, then what to record so that more can be.

    If the first command is impossible, the next one that is possible takes its place.

    Args:
        commands: what to do next.
        lacking: the begin of what is impossible or done already -> what to record for it, or "".
    """
    begun = (hint for begin, hint in lacking.items() if any(c.startswith(begin) for c in commands))
    left = [each for each in commands if not each.startswith(tuple(lacking))]
    if commands and commands[0] not in left:
        left.sort(key=lambda each: not each.startswith(_COMMAND))
    return [*left, *filter(None, begun)]


def _sentence(found: Diagnosis, history: RunHistory) -> str:
    """Return a symptom with its place, its steps, and how many of them show it.

    If not all measured steps since its first one were examined, it says so.
    """
    evidence = found.evidence
    parts = [evidence.headline or found.rule.title]
    if not found.is_found:
        return parts[0]
    is_named = evidence.where.casefold() in parts[0].casefold()
    says_where = bool(evidence.headline and evidence.ranks) or evidence.proof is not None
    if evidence.where and not is_named and not says_where:
        parts.append(evidence.where)
    if evidence.captured_step is not None:
        parts.append(
            f"first captured in step {evidence.captured_step}; sick since step "
            f"{evidence.since_step}"
        )
    elif evidence.since_step is not None:
        about = "about " if evidence.is_about else ""
        parts.append(f"since {about}step {evidence.since_step}")
    if evidence.last_step is not None:
        parts.append(f"last seen in step {evidence.last_step}")
    if evidence.count is not None:
        parts.append(f"in {_examined(evidence, history)}")
    return ", ".join(parts)


def _examined(evidence: Evidence, history: RunHistory) -> str:
    """Return how many of the examined items show a symptom."""
    count, since = evidence.count, evidence.since_step
    assert count is not None
    if count.unit != "step" or since is None:
        return str(count)
    own = [each for each in history.measured if each.step >= since]
    if evidence.last_step is not None:
        own = [each for each in own if each.step <= evidence.last_step]
    return str(count if len(own) <= count.examined else count._replace(unit="examined step"))


def _of_attempt(text: str, attempt: int | None) -> str:
    """Return what to do next, for one attempt if it is a command with `--attempt`."""
    if attempt is None or not text.startswith(_COMMAND):
        return text
    command, mark, comment = text.partition("  # ")
    if command.split()[1] in OF_AN_ATTEMPT:
        command = f"{command} --attempt {attempt}"
    return command.replace("{run}:", f"{{run}}@{attempt}:") + mark + comment


def _filled(text: str, words: dict[str, str]) -> str:
    """Replace the placeholders of a rule; other braces stay."""
    for word, value in words.items():
        text = text.replace(word, value)
    return text
