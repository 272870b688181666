"""Evidence of experiments: what `stagescope bisect` found in a step."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Final

import numpy as np

from stagescope_service.rules.evidence import (
    ABS_DIFF,
    Count,
    Evidence,
    Proof,
    not_found,
    not_measured,
)
from stagescope_service.rules.history import RunHistory
from stagescope_wire.names import EXPERIMENT
from stagescope_wire.render import printable
from stagescope_wire.schema import RankKey

_NO_CAUSE = ("none", "healthy")
_MAX_TEXT = 500
_ENGINE: Final = ("weights", "changed", "trainer_weights")
_OF_KIND: Final[Mapping[str, tuple[str, ...]]] = {
    "engine_weights": (*_ENGINE, "positions", "dtype", "attention", "decode", "routing"),
    "weights_differ": _ENGINE,
    "adapter_not_applied": _ENGINE,
    "prefix_cache_stale": ("prefix_cache", "changed"),
    "sampling_temperature": ("temperature", "processed"),
    "engine_inconsistent": ("prefix_cache", "decode", "batching", "positions"),
    "streams_shifted": ("shifted",),
    "streams_unrelated": (
        "shifted", "reordered", "weights", "trainer_weights", "positions", "prefix_cache",
        "temperature", "processed",
    ),
}  # fmt: skip
"""Rule -> kinds of causes that a bisection can name, which explain it."""
_BETTER: Final = ("streams_shifted", "streams_unrelated")
"""Rules of exact matches in the recorded numbers: another kind that a bisection names contradicts
them, and they say more."""
_ALWAYS_BETTER: Final = (
    "streams_not_log_probs", "streams_lack_values", "mask_covers_padding", "streams_copied",
)  # fmt: skip
"""Rules of recorded values that no kind stands for."""
_PROVES: Final[Mapping[str, tuple[str, ...]]] = {
    "shifted": ("streams_shifted",),
    "reordered": ("streams_unrelated",),
    "rounded": ("rounded_stream", "lattice"),
    "head_rounding": ("rounded_stream", "lattice"),
    "prefix_cache": ("prefix_cache_stale",),
    **dict.fromkeys(("temperature", "processed", "constant"), ("sampling_differs",)),
    **dict.fromkeys(("weights", "positions"), ("engine_weights",)),
}
"""Kind -> the rules that see the same cause."""
_BEGINS: Final = ("rank_apart", "engine_apart", "round_apart", "mismatch_jump*")
"""Rules that say since when the mismatch is what it is, the most exact first."""


def with_begin_of_proven(evidence: Evidence, others: Mapping[str, Evidence]) -> Evidence:
    """Return the evidence of a bisection; it begins when the symptom does that it proves, or that
    contradicts it.

    The bisected step itself says nothing of the steps before it.

    Args:
        evidence: of an experiment; any other is returned as it is.
        others: the evidence of the other rules, by name.
    """
    proof = evidence.proof
    if proof is None:
        return evidence
    names = (*proof.yields_to, *proof.proves, *_BEGINS)
    shown = [
        (name, each)
        for pattern in names
        for name, each in others.items()
        if fnmatch.fnmatchcase(name, pattern) and _holds_in(each, proof.step)
        if not (each.ranks and evidence.ranks) or each.ranks & evidence.ranks
    ]
    if not shown:
        return evidence
    name, first = shown[0]
    against = evidence.against
    if name in proof.yields_to:
        text = f"the recorded streams say otherwise: {first.headline or name}"
        against = (*against, text)
    return dataclasses.replace(
        evidence,
        since_step=first.since_step,
        last_step=first.last_step,
        count=first.count,
        is_about=first.is_about,
        against=against,
    )


def _holds_in(evidence: Evidence, step: int) -> bool:
    """Return whether a symptom was found in a step, and its count is of steps."""
    if evidence.verdict != "found" or evidence.since_step is None:
        return False
    is_of_steps = evidence.count is not None and evidence.count.unit == "step"
    is_inside = evidence.since_step <= step <= (evidence.last_step or step)
    return is_of_steps and is_inside


def bisected(history: RunHistory) -> Evidence:
    """Return the cause that the newest bisection named, while the mismatch stays as large.

    Steps with half to twice the mean |d| of the bisected step count as the same symptom. A larger
    mismatch is another one.
    """
    if not history.bisections:
        return not_measured("no step was bisected")
    newest = history.bisections[0]
    step, text = int(newest["step"]), printable(str(newest.get("text") or ""))[:_MAX_TEXT]
    if newest.get("kind") in _NO_CAUSE:
        return not_found(f"step {step} was bisected: {text}")
    series = history.metric(ABS_DIFF).finite
    at = np.flatnonzero(series.steps == step)
    if not len(at):
        return not_measured(f"step {step} was bisected, and has no finite {ABS_DIFF}")
    ratio = series.values / series.values[at[0]]
    others = np.flatnonzero(~((ratio > 0.5) & (ratio < 2.0)))
    before, after = others[others < at[0]], others[others > at[0]]
    first = int(before[-1]) + 1 if len(before) else 0
    last = int(after[0]) - 1 if len(after) else len(series) - 1
    evidence = Evidence(
        "found",
        1.0,
        int(series.steps[first]),
        f"{EXPERIMENT}{history.run}-{step}",
        (f"step {step} was bisected: {text}",),
        count=Count(last - first + 1, last - first + 1),
        headline=text.rstrip("."),
        ranks=_ranks(newest.get("ranks")),
        proof=_proof(step, str(newest.get("kind"))),
    )
    return evidence.ended_after(series.steps.tolist(), int(series.steps[last]), 0)


def _ranks(reported: object) -> frozenset[RankKey]:
    """Return the ranks that a report names as [role, rank]."""
    listed = reported if isinstance(reported, list | tuple) else ()
    return frozenset(
        (str(each[0]), each[1])
        for each in listed
        if isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[1], int)
    )


def _proof(step: int, kind: str) -> Proof:
    return Proof(
        step,
        _PROVES.get(kind, ()),
        tuple(rule for rule, kinds in _OF_KIND.items() if kind in kinds),
        (*_ALWAYS_BETTER, *(rule for rule in _BETTER if kind not in _OF_KIND[rule])),
    )
