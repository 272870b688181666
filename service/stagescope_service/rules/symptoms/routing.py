"""Evidence of the routes of a mixture of experts: what is wrong with them, what they explain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from stagescope_service.rules.evidence import Count, Evidence, not_found, not_measured
from stagescope_service.rules.history import READ, RunHistory
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.statistics.routing_checks import (
    Fault,
    Kind,
    agreement_text,
    explained,
    faults,
)
from stagescope_service.statistics.summary import Summary

_BACK: Final = 64
"""Maximum number of newest steps that are looked at for the begin."""
_UNRECORDED: Final = "no step has the routes of rollout and trainer"


def routes_wrong(history: RunHistory, *, kind: Kind) -> Evidence:
    """Return whether the routes of the newest step have a fault of this kind."""

    def shown(summary: Summary) -> Fault | None:
        routing = summary.routing
        found = [] if routing is None else faults(routing, len(summary.sequences))
        return next((each for each in found if each.kind == kind), None)

    rows = _routed(history)
    newest = next(rows, None)
    if newest is None:
        return not_measured(_UNRECORDED)
    step, summary = newest
    fault = shown(summary)
    if fault is None:
        assert summary.routing is not None
        return not_found(f"step {step.step}: {agreement_text(summary.routing)}")
    since, count = _since(step, rows, lambda each: shown(each) is not None)
    return Evidence(
        "found", 1.0, since, "", (f"step {step.step}: {fault.text}",),
        count=Count(count, count), headline=fault.headline,
    )  # fmt: skip


def routes_explain(history: RunHistory, *, share: float, least: float, tokens: int) -> Evidence:
    """Return whether tokens with other experts explain `share` of the newest step's mismatch.

    Its mean |d| must be `least` nats or more, and `tokens` tokens must have other experts.
    """

    def explains(summary: Summary) -> bool:
        found, total = explained(summary), summary.total
        if found is None or found.hit < tokens or not total.tokens:
            return False
        mean = sum(each.d_abs_sum for each in summary.profiles.bins("position")) / total.tokens
        return found.excess >= share and mean >= least

    rows = _routed(history)
    newest = next(rows, None)
    if newest is None:
        return not_measured(_UNRECORDED)
    step, summary = newest
    found = explained(summary)
    if found is None:
        return not_measured(f"step {step.step}: no token has both routes")
    text = f"step {step.step}: {found.text}"
    if not explains(summary):
        return not_found(text)
    since, count = _since(step, rows, explains)
    headline = f"Tokens with another expert explain {found.excess:.0%} of the mismatch"
    return Evidence(
        "found", min(found.excess, 1.0), since, "", (text,), count=Count(count, count),
        headline=headline,
    )  # fmt: skip


def _routed(history: RunHistory) -> Iterator[tuple[CurrentStep, Summary]]:
    """Yield the newest steps whose routes are compared, the newest first."""
    lacking = 0
    for step in reversed(history.measured[-_BACK:]):
        shown = history.read(step)
        if shown is not None and (summary := shown.summary.summary).routing is not None:
            lacking = -_BACK
            yield step, summary
        lacking += 1
        if lacking == READ:  # a run without routes: its older steps need not be read
            return


def _since(
    newest: CurrentStep,
    earlier: Iterator[tuple[CurrentStep, Summary]],
    has: Callable[[Summary], bool],
) -> tuple[int, int]:
    """Return the first step of the newest ones that show it without a break, and their number."""
    since, count = newest.step, 1
    for step, summary in earlier:
        if not has(summary):
            break
        since, count = step.step, count + 1
    return since, count
