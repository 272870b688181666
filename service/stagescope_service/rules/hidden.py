"""Causes that a larger one hides: they show without the ranks or the engine of the larger one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stagescope_service.rules.causes import Diagnosis, link
from stagescope_service.rules.evidence import Evidence
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.pooled import RANKS
from stagescope_service.rules.rest import OtherEngines, OtherRanks
from stagescope_service.rules.symptom import SymptomRule
from stagescope_service.rules.symptoms.mismatch import mean_of_others
from stagescope_service.rules.symptoms.trends import has_grown
from stagescope_wire.render import ranks_text
from stagescope_wire.schema import RankKey

Examine = Callable[[SymptomRule, RunHistory], Evidence]
_BY_TOKENS: Final = frozenset({
    "rank_apart", "rounds_rise", "round_apart", "edge_token", "engine_apart", "lattice", "rounded",
    "suspect", "sampling", "stale", "jump", "step_change", "growth",
})  # fmt: skip
"""Functions of the tokens' differences: one rank's can decide what they find."""
_OF_CHECKS: Final = frozenset({"suspect", "sampling"})
"""Those of them whose ranks may be more than are certain."""
_FAMILIES: Final = ("precision", "mismatch")
_MOST: Final = 2
"""Maximum number of causes whose ranks are left out together."""
_RANK, _ENGINE = "rank_apart", "engine_apart"


def reveal(found: Sequence[Diagnosis], history: RunHistory, examine: Examine) -> list[Diagnosis]:
    """Link diagnoses as `link` does, with the symptoms that the larger causes hid.

    Args:
        found: the diagnosis of each rule, not linked.
        history: of the run.
        examine: returns the evidence of a rule in a history.
    """
    found, linked = [*found], link(found, history)
    left_out: frozenset[RankKey] = frozenset()
    tried: set[str] = set()
    for _ in range(_MOST):
        of_ranks = [each for each in linked if _is_of_ranks(each, history, tried)]
        if not of_ranks:
            break
        cause = min(of_ranks, key=lambda each: each.evidence.likelier is not None)
        tried.add(cause.rule.name)
        rest = OtherRanks(history, left_out | cause.evidence.ranks)
        own = cause.rule.evidence.function in _OF_CHECKS
        if own and examine(cause.rule, rest).verdict == "found":
            continue  # it is not of these ranks alone
        left_out |= cause.evidence.ranks
        found = _with_others(found, cause, linked, rest, left_out, examine)
        linked = link(found, history)
    engine = next((each for each in linked if _function(each) == _ENGINE and each.lasts), None)
    if engine is not None:
        found = [_of_other_engines(each, engine, linked, history, examine) for each in found]
        linked = link(found, history)
    begun = [_from_growth(each, linked, history) for each in found]
    return linked if begun == found else link(begun, history)


def _from_growth(each: Diagnosis, linked: Sequence[Diagnosis], history: RunHistory) -> Diagnosis:
    """Let what differs begin where the mismatch began to grow, if nothing else grows.

    A growth shows in the mean of all tokens before one rank or engine has several times the mean of
    the others.
    """
    evidence = each.evidence
    growth = next((one.evidence for one in linked if _function(one) == "growth"), None)
    if _function(each) not in (_RANK, _ENGINE) or growth is None or evidence.beside:
        return each
    if not (_lasts(evidence) and _lasts(growth)) or growth.beside:
        return each
    if growth.since_step is None or evidence.since_step is None:
        return each
    if growth.since_step >= evidence.since_step:
        return each
    if has_grown(history, mean_of_others(history, evidence)):
        return each
    evidence = dataclasses.replace(evidence, since_step=growth.since_step, is_about=True)
    return dataclasses.replace(each, evidence=evidence)


def _lasts(evidence: Evidence) -> bool:
    return evidence.verdict == "found" and evidence.last_step is None


def _function(each: Diagnosis) -> str:
    return each.rule.evidence.function


def _is_of_ranks(cause: Diagnosis, history: RunHistory, tried: set[str]) -> bool:
    """Return whether a cause is of the tokens of some ranks, and others have tokens, too."""
    if not (cause.is_cause and cause.lasts and cause.rule.family in _FAMILIES):
        return False
    if cause.rule.name in tried or cause.evidence.beside or not cause.evidence.ranks:
        return False
    newest = history.newest
    ranks = set() if newest is None else {(row.role, row.rank) for row in newest.summary.ranks}
    return cause.evidence.ranks < ranks and len(ranks) <= RANKS  # others report no tokens


def _is_hidden(each: Diagnosis, cause: Diagnosis, linked: Sequence[Diagnosis]) -> bool:
    """Return whether a cause may hide what a rule would find, or in which ranks it would."""
    if _function(each) not in _BY_TOKENS or each.rule == cause.rule or each.evidence.beside:
        return False
    shown = next(other for other in linked if other.rule == each.rule)
    return not shown.is_cause or each.evidence.likelier in cause.rule.causes


def _with_others(
    found: Sequence[Diagnosis],
    cause: Diagnosis,
    linked: Sequence[Diagnosis],
    rest: OtherRanks,
    left_out: frozenset[RankKey],
    examine: Examine,
) -> list[Diagnosis]:
    """Return the diagnoses, with the symptoms that show without the ranks of a cause."""
    shown: dict[str, Evidence] = {}
    for each in found:
        if _is_hidden(each, cause, linked):
            evidence = examine(each.rule, rest)
            if evidence.verdict == "found":
                shown[each.rule.name] = evidence
    follows = {cause.rule.name, *(rule.name for rule in cause.explains)} - {*shown}
    text = f"with {ranks_text(sorted(left_out))} left out"
    return [
        _besides(each, shown[each.rule.name], follows, text, rest.ranks)
        if each.rule.name in shown
        else each
        for each in found
    ]


def _besides(
    each: Diagnosis,
    evidence: Evidence,
    rules: Iterable[str],
    text: str,
    ranks: frozenset[RankKey] = frozenset(),
) -> Diagnosis:
    """Return a diagnosis with evidence that rules do not explain, and what was left out of it."""
    evidence = dataclasses.replace(
        evidence,
        ranks=evidence.ranks or ranks,
        supports=(*evidence.supports, text),
        beside=frozenset(rules),
    )
    return dataclasses.replace(each, evidence=evidence)


def _of_other_engines(
    each: Diagnosis,
    engine: Diagnosis,
    linked: Sequence[Diagnosis],
    history: RunHistory,
    examine: Examine,
) -> Diagnosis:
    """Return whether a rank differs without the tokens of an engine that does."""
    if _function(each) != _RANK or not _is_hidden(each, engine, linked):
        return each
    above = {engine.rule.name, *(rule.name for rule in engine.explained_by)}
    shown = next(other for other in linked if other.rule == each.rule)
    if shown.is_found and not above & {rule.name for rule in shown.explained_by}:
        return each
    evidence = examine(each.rule, OtherEngines(history, engine.evidence.where))
    if evidence.verdict != "found":
        return each
    return _besides(each, evidence, above, f"with the tokens of {engine.evidence.where} left out")
