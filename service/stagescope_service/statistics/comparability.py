"""Whether two streams can be compared at all: asked before a number is trusted.

Each check answers `ok`, `suspect` or `unknown` (too few tokens), with the numbers it looked at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final, Literal

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.summary import Summary

Status = Literal["ok", "suspect", "unknown"]

ENOUGH: Final = 32
"""Tokens below which a correlation or a share says nothing."""
SHIFT_MARGIN: Final = 0.1
SLOPE_MARGIN: Final = 0.05
RENORMALISED_SHARE: Final = 0.95
RENORMALISED_MEAN: Final = 1e-3
POSITIVE_BOUND: Final = 1e-3
"""Rounding can leave a log-prob slightly above 0."""
LACKING_SHARE: Final = 0.01


@dataclasses.dataclass(frozen=True)
class Check:
    """One question about the two streams, answered."""

    name: str
    status: Status
    text: str
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Comparability:
    """All checks. `verdict` is 'comparable', 'suspect', 'not measured' or 'unknown'."""

    verdict: str
    checks: tuple[Check, ...]

    @property
    def suspects(self) -> tuple[Check, ...]:
        """The checks that found something."""
        return tuple(check for check in self.checks if check.status == "suspect")


def examine(summary: Summary) -> Comparability:
    """Ask every question of a summary's two streams."""
    cell = summary.total
    p, q = summary.pair
    checks = (
        _equal(cell, p, q),
        _constant(cell, p, q),
        _shifted(cell, p, q),
        _temperature(cell, p, q),
        _renormalised(cell, p, q),
        _positive(cell, p, q),
        _coverage(cell, p, q),
        _versions(summary),
    )
    if checks[0].status == "suspect":
        verdict = "not measured"
    elif any(check.status == "suspect" for check in checks):
        verdict = "suspect"
    else:
        verdict = "comparable" if cell.tokens >= ENOUGH else "unknown"
    return Comparability(verdict, checks)


def _equal(cell: Cell, p: str, q: str) -> Check:
    share = cell.share(Field.EQUAL)
    if not cell.tokens:
        return Check("bitwise_equal", "unknown", "no token counts", {"share": share})
    if int(cell[Field.EQUAL]) == cell.tokens:
        text = (
            f"{p} and {q} are the same numbers in all {cell.tokens} tokens: one is most likely a "
            "copy of the other (synchronous and bypass modes do that), so nothing was measured"
        )
        return Check("bitwise_equal", "suspect", text, {"share": share})
    text = f"{p} and {q} are the same number in {share:.1%} of the tokens"
    return Check("bitwise_equal", "ok", text, {"share": share})


def _constant(cell: Cell, p: str, q: str) -> Check:
    values = {side: cell.extreme(Field[f"{side.upper()}_MIN"]) for side in ("p", "q")}
    if cell.tokens < ENOUGH:
        return Check("constant", "unknown", f"only {cell.tokens} tokens count", values)
    flat = [
        f"{stream} is {values[side]:g} in every token"
        for side, stream in (("p", p), ("q", q))
        if cell[Field[f"{side.upper()}_MIN"]] == cell[Field[f"{side.upper()}_MAX"]]
    ]
    if flat:
        text = f"{' and '.join(flat)}: a stream that was never filled in?"
        return Check("constant", "suspect", text, values)
    return Check("constant", "ok", "both streams vary", values)


def _shifted(cell: Cell, p: str, q: str) -> Check:
    aligned = cell.correlation(Field.P_M2, Field.Q_M2, Field.PQ_C)
    after = cell.correlation(Field.NEXT_P_M2, Field.NEXT_Q_M2, Field.NEXT_C)
    before = cell.correlation(Field.LAST_P_M2, Field.LAST_Q_M2, Field.LAST_C)
    values = {"lag_0": aligned, "lag_plus_1": after, "lag_minus_1": before}
    if cell.tokens < ENOUGH or math.isnan(aligned):
        return Check("shifted", "unknown", "too few tokens, or a constant stream", values)
    for name, value, where in (("after", after, "next"), ("before", before, "previous")):
        if value > aligned + SHIFT_MARGIN:
            text = (
                f"{p} of a token correlates with {q} of the {where} one ({value:.3f}) better than "
                f"with its own ({aligned:.3f}): one stream lies one token {name} the other"
            )
            return Check("shifted", "suspect", text, values)
    return Check("shifted", "ok", f"aligned: correlation {aligned:.3f} token by token", values)


def _temperature(cell: Cell, p: str, q: str) -> Check:
    variance = cell[Field.Q_M2]
    slope = cell[Field.PQ_C] / variance if variance > 0.0 else math.nan
    aligned = cell.correlation(Field.P_M2, Field.Q_M2, Field.PQ_C)
    values = {"slope": slope, "correlation": aligned}
    if cell.tokens < ENOUGH or math.isnan(aligned) or math.isnan(slope):
        return Check("temperature", "unknown", "too few tokens, or a constant stream", values)
    # Noise flattens the slope by the square of the correlation; only more than that is a scale.
    off = abs(slope - 1.0) > SLOPE_MARGIN + (1.0 - aligned * aligned)
    if off and aligned > 0.5:
        text = (
            f"{p} grows by {slope:.3f} for each nat of {q}: the streams were taken at different "
            "temperatures, or one of them before and one after scaling"
        )
        return Check("temperature", "suspect", text, values)
    return Check("temperature", "ok", f"slope of {p} on {q} is {slope:.3f}", values)


def _renormalised(cell: Cell, p: str, q: str) -> Check:
    unequal = cell.tokens - cell[Field.EQUAL]
    greater, mean = cell.share(Field.Q_GREATER), cell.mean(Field.D_SUM)
    among = cell[Field.Q_GREATER] / unequal if unequal else math.nan
    values = {"share": greater, "share_of_unequal": among, "mean_d": mean}
    if unequal < ENOUGH:
        return Check("renormalised", "unknown", "too few tokens that differ", values)
    lopsided = max(among, 1.0 - among) >= RENORMALISED_SHARE and abs(mean) > RENORMALISED_MEAN
    if lopsided:
        high, low = (q, p) if among > 0.5 else (p, q)
        text = (
            f"{high} is above {low} in {max(among, 1.0 - among):.1%} of the tokens that differ: "
            f"{high} was renormalised over a cut vocabulary (top-p, top-k), or holds processed "
            f"log-probs where {low} holds raw ones"
        )
        return Check("renormalised", "suspect", text, values)
    return Check("renormalised", "ok", f"{q} is above {p} in {greater:.1%} of the tokens", values)


def _positive(cell: Cell, p: str, q: str) -> Check:
    values = {"p_count": cell[Field.P_POSITIVE], "q_count": cell[Field.Q_POSITIVE]}
    if not cell.tokens:
        return Check("probabilities", "unknown", "no token counts", values)
    found = [
        f"{stream} has {cell[Field[f'{side}_POSITIVE']]:.0f} values above 0 "
        f"(up to {cell[Field[f'{side}_MAX']]:.3g})"
        for side, stream in (("P", p), ("Q", q))
        if cell[Field[f"{side}_MAX"]] > POSITIVE_BOUND
    ]
    if found:
        text = f"{' and '.join(found)}: log-probs cannot be positive; are they probabilities?"
        return Check("probabilities", "suspect", text, values)
    return Check("probabilities", "ok", "no log-prob lies above 0", values)


def _coverage(cell: Cell, p: str, q: str) -> Check:
    values = {"p_lacks": cell[Field.P_LACKS], "q_lacks": cell[Field.Q_LACKS]}
    if not cell.masked:
        return Check("coverage", "unknown", "the mask covers no token", values)
    found = [
        f"{stream} is non-finite or exactly 0 in {values[side]:.0f} tokens where the other "
        "stream has a value"
        for side, stream in (("p_lacks", p), ("q_lacks", q))
        if values[side] >= LACKING_SHARE * cell.masked
    ]
    if found:
        text = f"{' and '.join(found)}: the mask covers tokens that it lacks"
        return Check("coverage", "suspect", text, values)
    return Check("coverage", "ok", "both streams cover the mask", values)


def _versions(summary: Summary) -> Check:
    versions = summary.versions
    values = {"versions": float(len(versions))}
    if len(versions) == 0:
        return Check("versions", "unknown", "nobody said which policy sampled the tokens", values)
    if len(versions) > 1:
        text = (
            f"the tokens come from {len(versions)} policy versions ({versions[0]} to "
            f"{versions[-1]}): the difference is policy drift plus mismatch; look at staleness 0"
        )
        return Check("versions", "suspect", text, values)
    return Check("versions", "ok", f"one policy version, {versions[0]}", values)
