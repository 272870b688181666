"""The doctor's answer: its rules compared with a run's history."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

from stagescope_service.dumps.joining.join import Selection
from stagescope_service.rules.doctor import Diagnosis, add_earlier, diagnose, unexplained
from stagescope_service.rules.history import CurrentStep, LossOfStep, RunHistory
from stagescope_service.rules.parts import mismatch_parts
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.kept import payload_artifacts
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.samples.batches import batch_of
from stagescope_service.views.samples.listing import loss_of
from stagescope_wire.batch import Batch
from stagescope_wire.errors import NotFound
from stagescope_wire.schema import RECENT_TENSORS

OF_AN_ATTEMPT: Final = frozenset({
    "anatomy", "batch", "exact", "findings", "loss", "losses", "metrics", "non-finite",
    "operators", "ranks", "rounds", "samples", "scalars", "series", "stacks", "stages", "steps",
    "stuck", "tokens", "weights",
})  # fmt: skip
"""Commands with an option `--attempt`."""

_MAX_BYTES: Final = 256 << 20
"""Most bytes of a step's payload files that a diagnosis reads."""

_RECORD_WEIGHTS: Final = (
    "record the weights on both sides of a sync, which would say whether they arrive: "
    "probe.record_weights(..., step=...), docs/weights.md"
)

_EARLIER: Final = 3
"""Earlier attempts whose symptoms are added to the answer."""


def diagnosis_of(
    deps: Dependencies, run: str, attempt: int | None, step: int | None
) -> tuple[JsonObject, list[JsonObject]]:
    """Return the fields of the answer, and its rows."""
    target = deps.finder.attempt(run, attempt)
    kept = _KeptTensors(deps, target.run)
    history = RunHistory(deps.catalogue, target.run, attempt=attempt, last=step, kept=kept)
    rows = diagnose(history)
    if attempt is None:
        for number in itertools.islice(history.earlier_attempts(), _EARLIER):
            own = RunHistory(deps.catalogue, target.run, attempt=number, last=step)
            rows = add_earlier(rows, history, own, number, step)
    steps = [each.step for each in history.steps]
    newest = history.newest
    unknown = sum(each.evidence.verdict == "not measured" for each in rows)
    left = unexplained(rows, history)
    fields: JsonObject = {
        **target.heading(),
        "attempt": attempt,
        "from_step": steps[0] if steps else None,
        "to_step": steps[-1] if steps else None,
        "steps": len(steps),
        "measured": len(history.measured),
        "measured_step": None if newest is None else newest.step,
        "text": f"{_found(rows)}, {unknown} not measured, in {len(steps)} "
        f"closed steps of run {target.run}{_left(target.run, left, attempt)}"
        f"{_before(target.run, rows, step)}",
        "unexplained": left,
        "notes": [
            {"rule": each.rule.name, "text": each.evidence.note, "meaning": each.rule.meaning}
            for each in rows
            if each.evidence.note
        ],
        "mismatch": list(map(dataclasses.asdict, mismatch_parts(history))),
    }
    return fields, [_row(history, each, attempt) for each in rows]


def _found(rows: Sequence[Diagnosis]) -> str:
    """Return how many symptoms were found, and how many of them are no news."""
    found = [each for each in rows if each.evidence.verdict == "found"]
    ended = sum(each.evidence.last_step is not None for each in found)
    explained = sum(bool(each.explained_by) and each.evidence.last_step is None for each in found)
    parts = [(explained, "explained by others"), (ended, "ended")]
    listed = ", ".join(f"{count} {what}" for count, what in parts if count)
    return f"{len(found)} of {len(rows)} symptoms found" + (f" ({listed})" if listed else "")


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
    """Return the symptoms that earlier attempts showed, as sentences; "" for none."""
    by_attempt: dict[tuple[int, bool], list[str]] = {}
    for each in rows:
        before = each.evidence.before
        if before is not None and each.evidence.verdict != "found":
            since = "" if before.since_step is None else f" (since step {before.since_step})"
            key = before.attempt, before.is_end
            by_attempt.setdefault(key, []).append(each.rule.title + since)
    sentences = []
    up_to = "" if step is None else f" --step {step}"
    for (attempt, is_end), titles in sorted(by_attempt.items(), reverse=True):
        what = "ended with" if is_end else "had" if step is None else f"had, up to step {step}"
        command = f"stagescope doctor {run} --attempt {attempt}{up_to}"
        sentences.append(f". Attempt {attempt} {what}: {'; '.join(titles)} ({command})")
    return "".join(sentences)


class _KeptTensors:
    """Reads the tensors of a run's steps, for `RunHistory`."""

    def __init__(self, deps: Dependencies, run: str) -> None:
        self._deps = deps
        self._run = run

    def loss(self, step: CurrentStep) -> LossOfStep:
        target = self._target(step)
        size = sum(row["bytes"] for row in payload_artifacts(self._deps, target, step.step))
        if size > _MAX_BYTES:
            raise NotFound(
                f"the tensors of step {step.step} are {size >> 20} MiB, too many for a diagnosis",
                advice=f"stagescope loss {step.step}",
            )
        found = loss_of(self._deps, target)
        unrecorded = found.fields["unrecorded"]
        return LossOfStep(
            tokens=found.fields["tokens"],
            shares={str(row["fate"]): row["share_of_mismatch"] for row in found.rows},
            unrecorded={str(each["name"]): str(each["record"]) for each in unrecorded},
        )

    def batch(self, step: CurrentStep, names: Sequence[str]) -> Batch | None:
        target = self._target(step)
        files = payload_artifacts(self._deps, target, step.step)
        there: set[str] = set()
        for row in files:
            there |= RECENT_TENSORS if row["tensors"] is None else set(row["tensors"])
        if not {*names} <= there or sum(row["bytes"] for row in files) > _MAX_BYTES:
            return None
        return batch_of(self._deps, target, Selection(names, None))

    def _target(self, step: CurrentStep) -> Target:
        return self._deps.finder.step(self._run, step.attempt, step.step)


def _row(history: RunHistory, found: Diagnosis, asked: int | None) -> JsonObject:
    """Return a row; its commands and its figure are of the attempt that is asked for."""
    rule, evidence = found.rule, found.evidence
    newest = history.newest
    last = history.steps[-1] if history.steps else None
    step = evidence.since_step
    if step is None:
        step = newest.step if newest is not None else None if last is None else last.step
    attempts = {each.step: each.attempt for each in history.steps}
    attempt = attempts.get(step, last.attempt if last else 1) if step is not None else 1
    has_weights = history.has_weights(attempt)
    scalar = history.scalar_name(rule.evidence.parameters.get("names") or ())
    words = {
        "{run}": history.run,
        "{step}": "STEP" if step is None else str(step),
        "{attempt}": str(attempt),
        "{before}": str(max(attempt - 1, 1)),
        "{scalar}": shlex.quote(scalar or "NAME"),
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
        "verdict": evidence.verdict,
        "sure": evidence.sure,
        "since_step": evidence.since_step,
        "last_step": evidence.last_step,
        "explained_by": [each.name for each in found.explained_by],
        "where": evidence.where or None,
        "for": list(evidence.supports),
        "against": list(evidence.against),
        "meaning": rule.meaning,
        "next": [
            _RECORD_WEIGHTS
            if text.startswith("stagescope weights ") and not has_weights
            else _filled(_of_attempt(text, asked), words)
            for text in rule.next
        ],
        "figure": None if figure is None else _filled(figure, words),
        "record": (
            rule.record if evidence.verdict == "not measured" and not evidence.waits else None
        ),
        "sources": list(rule.sources),
    }


def _of_attempt(text: str, attempt: int | None) -> str:
    """Return what to do next, for one attempt if it is a command with `--attempt`."""
    if attempt is None or not text.startswith("stagescope "):
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
