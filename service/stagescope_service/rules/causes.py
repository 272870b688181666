"""From symptoms to causes: which found symptom explains another one, and what contradicts it.

A cause is a found symptom that no other found symptom explains. Links are acyclic: one that would
close a circle is left out.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from stagescope_service.rules.evidence import Evidence, Firing
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.symptom import FAMILIES, SymptomRule
from stagescope_service.rules.symptoms.agreements import weights_agree
from stagescope_service.rules.symptoms.experiments import with_begin_of_proven
from stagescope_service.rules.symptoms.firings import fired
from stagescope_service.rules.symptoms.rows import TRIGGER
from stagescope_service.statistics.comparability import LIKELIEST_FIRST

FACTS: Final[Mapping[str, Callable[[RunHistory, Evidence], str | None]]] = {
    function.__name__: function for function in (weights_agree,)
}
"""Name in `contradicted_by` -> what the history says against a symptom; None: nothing."""
_ORDER: Final = {"found": 0, "not measured": 1, "not found": 2}
_EVENTS: Final = frozenset({"jump", "step_change"})
"""Functions of an event in one step: its cause begins in that step, too."""
_AT_ONCE: Final = 2
"""Maximum steps between the begins of a symptom and its explanation, in either direction."""
_OF_STAGES: Final = ("service", "time")
_OF_NUMBERS: Final = ("precision", "mismatch")
"""Families of causes that change what triggers read: of stage events, and of published numbers."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A rule and what was found for and against it.

    Attributes:
        rule: the rule.
        evidence: what was found.
        explained_by: the found rules that explain this one.
        cause: the one of them, or of those that explain these, that nothing explains; None: this
            symptom is a cause, or was not found.
        explains: the symptoms whose cause this one is.
        is_contradicted: whether facts speak against this symptom as a cause.
    """

    rule: SymptomRule
    evidence: Evidence
    explained_by: tuple[SymptomRule, ...] = ()
    cause: SymptomRule | None = None
    explains: tuple[SymptomRule, ...] = ()
    is_contradicted: bool = False

    @property
    def is_found(self) -> bool:
        """Whether the symptom was found, also if it ended."""
        return self.evidence.verdict == "found"

    @property
    def lasts(self) -> bool:
        """Whether the symptom was found and did not end."""
        return self.is_found and self.evidence.last_step is None

    @property
    def is_cause(self) -> bool:
        """Whether the symptom was found, and nothing explains it."""
        return self.is_found and not self.explained_by


def link(found: Sequence[Diagnosis], history: RunHistory) -> list[Diagnosis]:
    """Return the diagnoses with their links: causes first, the likeliest one first.

    A cause that lasts precedes one that ended, and one that hid another precedes that. Of two, the
    one that explains more is likelier; a contradicted one is less likely. Explained symptoms
    follow, then what was not found.
    """
    others = {each.rule.name: each.evidence for each in found}
    found = [
        dataclasses.replace(each, evidence=with_begin_of_proven(each.evidence, others))
        for each in found
    ]
    found = [_like_its_symptoms(each, found) for each in found]
    found = [_without_explained_firings(each, found, history) for each in found]
    above = _explanations(found)
    linked = [_with_links(each, above[each.rule.name], history) for each in found]
    by_name = {each.rule.name: each for each in linked}
    causes = sorted((each for each in linked if each.is_cause), key=lambda each: _key(each, linked))
    place = {each.rule.name: at for at, each in enumerate(causes)}

    def cause_of(each: Diagnosis) -> SymptomRule | None:
        if each.is_cause or not each.is_found:
            return None
        above = (by_name[rule.name] for rule in each.explained_by)
        roots = [cause_of(other) or other.rule for other in above]
        return min(roots, key=lambda root: place[root.name])

    folded = {each.rule.name: cause_of(each) for each in linked}
    complete = [
        dataclasses.replace(
            each,
            cause=folded[each.rule.name],
            explains=tuple(other.rule for other in linked if folded[other.rule.name] == each.rule),
        )
        for each in linked
    ]
    complete = [_as_note(each) for each in complete]
    return sorted(complete, key=lambda each: _key(each, complete))


def _like_its_symptoms(cause: Diagnosis, found: Sequence[Diagnosis]) -> Diagnosis:
    """Return what only captured steps show with the begin and the end of what it explains.

    When a step was captured does not say when the fault began or ended. Symptoms of values that are
    not finite decide; others may have another reason.
    """
    captured = cause.evidence.since_step
    looked = cause.rule.evidence.parameters.get("looked")
    if looked != "captures" or not cause.is_found or captured is None:
        return cause
    explained = [
        each
        for each in found
        if each.is_found and _is_declared(cause, each) and _share_ranks(cause, each)
        if each.evidence.since_step is not None
        if each.lasts or (each.evidence.last_step or 0) >= captured
    ]
    own = [each for each in explained if each.rule.name.startswith(_NOT_FINITE)] or explained
    evidence = _ended_like(cause.evidence, own)
    since = min((each.evidence.since_step or 0 for each in own), default=captured)
    if since < captured:
        evidence = dataclasses.replace(evidence, since_step=since, captured_step=captured)
    return dataclasses.replace(cause, evidence=evidence)


def _ended_like(evidence: Evidence, symptoms: Sequence[Diagnosis]) -> Evidence:
    """Return evidence of captured steps as ended if no symptom lasts, and something says so."""
    end = evidence.presumed_end
    if any(each.lasts for each in symptoms) or not (symptoms or end):
        return evidence
    lasts = [each.evidence.last_step or 0 for each in symptoms]
    last = max(lasts if end is None else [*lasts, end.step])
    why = "its symptoms ended" if symptoms or end is None else end.why
    text = f"last seen in step {last}; {why}"
    return dataclasses.replace(evidence, last_step=last, against=(*evidence.against, text))


_NOT_FINITE: Final = "non_finite_"
"""Begin of the names of rules of values that are not finite."""


def _as_note(each: Diagnosis) -> Diagnosis:
    """Return a cause that is only a note, unless it explains another symptom, as not found."""
    evidence = each.evidence
    if not each.is_cause or not evidence.note or each.explains:
        return each
    against = (*evidence.supports, *evidence.against)
    return dataclasses.replace(
        each, evidence=Evidence("not found", against=against, note=evidence.note)
    )


def _key(each: Diagnosis, linked: Sequence[Diagnosis]) -> tuple[object, ...]:
    explained = sum(each.rule in other.explained_by for other in linked)
    return (
        _ORDER[each.evidence.verdict],
        each.evidence.last_step is not None,
        bool(each.explained_by),
        each.is_contradicted,
        bool(each.evidence.beside),
        -explained,
        FAMILIES.index(each.rule.family),
        -each.evidence.sure,
        each.rule.name,
    )


def _without_explained_firings(
    symptom: Diagnosis, found: Sequence[Diagnosis], history: RunHistory
) -> Diagnosis:
    """Return the firings of triggers that no cause explains; all of them, if causes explain all."""
    firings = symptom.evidence.firings
    explained = {
        each.finding_id for each in firings if any(_stands_in(cause, each) for cause in found)
    }
    if not 0 < len(explained) < len(firings):
        return symptom
    left = fired(history, **symptom.rule.evidence.parameters, explained=explained)
    return dataclasses.replace(symptom, evidence=left)


def _stands_in(cause: Diagnosis, firing: Firing) -> bool:
    """Return whether a cause changes what a trigger reads, in the step in which it fired."""
    evidence = cause.evidence
    families = _OF_STAGES if firing.of_stages else _OF_NUMBERS
    if not cause.is_found or evidence.firings or evidence.note or cause.rule.family not in families:
        return False
    if firing.step is None or evidence.since_step is None:
        return True
    last = math.inf if evidence.last_step is None else evidence.last_step
    return evidence.since_step - _AT_ONCE <= firing.step <= last


def _explanations(found: Sequence[Diagnosis]) -> dict[str, list[Diagnosis]]:
    """Return the name of each found symptom's rule -> the symptoms that explain it, acyclic.

    Of two checks that explain each other in different steps, the one that is usually likelier
    explains the other.
    """
    pairs = [
        (cause, symptom)
        for symptom in found
        if symptom.is_found
        for cause in found
        if _explains(cause, symptom)
    ]
    pairs.sort(key=lambda pair: (not _is_declared(*pair), _likelihood(pair[0])))
    above: dict[str, list[Diagnosis]] = {each.rule.name: [] for each in found}

    def follows(symptom: Diagnosis, cause: Diagnosis) -> bool:
        return symptom is cause or any(follows(each, cause) for each in above[symptom.rule.name])

    for cause, symptom in pairs:
        if not follows(cause, symptom):
            above[symptom.rule.name].append(cause)
    order = {each.rule.name: at for at, each in enumerate(found)}
    for each in above.values():
        each.sort(key=lambda one: order[one.rule.name])
    return above


def _likelihood(cause: Diagnosis) -> int:
    return min(map(LIKELIEST_FIRST.index, cause.rule.causes), default=0)


def _with_links(symptom: Diagnosis, causes: Sequence[Diagnosis], history: RunHistory) -> Diagnosis:
    """Return a found symptom with what explains it and what speaks against it."""
    if not symptom.is_found:
        return symptom
    against = [
        text
        for name in symptom.rule.contradicted_by
        if (text := FACTS[name](history, symptom.evidence)) is not None
    ]
    texts = (f"explained by {each.rule.name}: {each.rule.title}" for each in causes)
    evidence = dataclasses.replace(
        symptom.evidence, against=(*texts, *against, *symptom.evidence.against)
    )
    return dataclasses.replace(
        symptom,
        evidence=evidence,
        explained_by=tuple(each.rule for each in causes),
        is_contradicted=bool(against),
    )


def _explains(cause: Diagnosis, symptom: Diagnosis) -> bool:
    """Return whether a found symptom explains another one.

    Its rule says so, or the checks of the same step do. It must begin no later, last as long, and
    be on the same ranks, if both name some. A firing of a trigger needs only a cause in its step.
    """
    evidence = symptom.evidence
    if evidence.firings:
        return any(_stands_in(cause, firing) for firing in evidence.firings)
    likelier = (*cause.rule.causes, *cause.rule.kinds)
    is_known = _is_declared(cause, symptom) or evidence.likelier in likelier
    if not cause.is_found or not is_known or cause.rule == symptom.rule:
        return False
    if cause.rule.name in evidence.beside:
        return False
    if not _share_ranks(cause, symptom):
        return False
    has_ended = cause.evidence.last_step is not None and evidence.last_step is None
    if has_ended and not _may_be_silent(symptom.rule):
        return False
    if cause.evidence.since_step is None or evidence.since_step is None:
        return True
    later = cause.evidence.since_step - evidence.since_step
    is_event = symptom.rule.evidence.function in _EVENTS
    return later <= _AT_ONCE and (not is_event or later >= -_AT_ONCE)


def _share_ranks(one: Diagnosis, other: Diagnosis) -> bool:
    """Return whether two symptoms are of a common rank, or one names none."""
    own, others = one.evidence.ranks, other.evidence.ranks
    return not (own and others) or bool(own & others)


def _is_declared(cause: Diagnosis, symptom: Diagnosis) -> bool:
    own, proof = symptom.evidence.proof, cause.evidence.proof
    if own is not None and cause.rule.name in own.yields_to:
        return True
    explains = cause.rule.explains if proof is None else (*cause.rule.explains, *proof.explains)
    return any(fnmatch.fnmatchcase(symptom.rule.name, each) for each in explains)


def _may_be_silent(rule: SymptomRule) -> bool:
    """Return whether a symptom seems to last because its trigger is silent in its cooldown."""
    return any(kind.startswith(TRIGGER) for kind in rule.kinds)
