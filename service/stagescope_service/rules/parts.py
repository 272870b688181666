"""The parts of a step's mismatch, by cause, and the rest.

Stale tokens, the line, and the noise floor or rounding are counted: `unexplained` excludes them.
Rejected and worst tokens are places of |d|, whatever its cause, and overlap the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.fields import Described, Number
from stagescope_service.rules.causes import Diagnosis
from stagescope_service.rules.evidence import ABS_DIFF, short
from stagescope_service.rules.history import RunHistory
from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import ENOUGH, MANY
from stagescope_service.statistics.comparability import Comparability
from stagescope_service.statistics.loss_fate import NAMES, Fate
from stagescope_service.statistics.summary import Summary
from stagescope_wire.errors import StagescopeError
from stagescope_wire.render import counted

_OTHER_TOKENS: Final = frozenset(
    {"constant", "probabilities", "coverage", "padding", "shifted", "unrelated"}
)
"""Checks that fail if the streams have different tokens: a line through these has no meaning."""
_REJECTED: Final = {Fate.REJECTED: "in_loss", Fate.ZERO_WEIGHT: "weight"}
"""Fate of tokens that importance sampling drops -> the field of the loss that decides it."""


@dataclasses.dataclass(frozen=True)
class MismatchPart(Described):
    """A part of the newest measured step's mismatch."""

    name: str
    """`stale tokens`, `temperature or truncation`, `noise floor`, `rounding`, `rejected tokens`,
    `worst tokens` or `unexplained`."""
    share: Number | None
    """Share of the sum of |p - q|, 0 to 1; for `temperature or truncation`, share of the sum of
    squares of p - q over the fresh tokens. null: not measured."""
    text: str
    """The whole and the basis of the share, or why it is not measured."""
    counted: bool = True
    """Whether `unexplained` excludes it; parts that are not counted overlap others."""


def mismatch_parts(history: RunHistory, found: Sequence[Diagnosis]) -> list[MismatchPart]:
    """Split the mismatch of the newest measured step into parts; [] if no step has both streams.

    The rest has a share only if the mismatch rose and nothing that was found says why. It is the
    noise of the run, or follows from a cause, otherwise.

    The noise floor (the trainer against itself) and rounding are means of |d|, as the mismatch is.
    The larger of them is the share of the fresh tokens that either explains.
    """
    newest = history.newest
    if newest is None:
        return []
    summary, total = newest.summary.summary, newest.summary.total
    size = newest.published[ABS_DIFF]
    if not (total.tokens and size > 0.0):
        return []
    stale = _stale_share(summary, total)
    line = fitted_line(summary.fresh, newest.comparability)
    floor = newest.published_noise
    noise = None if floor is None else _share(floor[ABS_DIFF] / size)
    rounding = _share(newest.published["rounding/abs_diff_floor"] / size)
    larger_is_noise = noise is not None and noise >= (rounding or 0.0)
    return [
        MismatchPart(
            "stale tokens",
            stale,
            summary.why_no_staleness
            if stale is None
            else "share of the sum of |d|: tokens of older policy versions, whose |d| is drift and "
            "mismatch",
        ),
        MismatchPart(
            "temperature or truncation",
            line.share,
            line.text
            + (" (over all tokens, because staleness is not known)" if stale is None else ""),
        ),
        MismatchPart(
            "noise floor",
            noise,
            "no recomputed_log_probs"
            if floor is None
            else "no token of recomputed_log_probs counts"
            if noise is None
            else "mean |d| of the trainer against itself over that of the mismatch",
            counted=larger_is_noise,
        ),
        MismatchPart(
            "rounding",
            rounding,
            "the dtypes of the streams are not known"
            if rounding is None
            else "what the dtypes of the streams add to mean |d|, over mean |d|",
            counted=not larger_is_noise,
        ),
        _rejected(history, newest.step),
        _worst(summary, total),
        _without_known(
            _unexplained(
                stale, line.share,
                _floor_of(summary.fresh, size * max(noise or 0.0, rounding or 0.0)),
            ),
            size, newest.comparability, found,
        ),
    ]  # fmt: skip


def _without_known(
    rest: MismatchPart, size: float, checks: Comparability, found: Sequence[Diagnosis]
) -> MismatchPart:
    """Return the rest without its share, where it is known what the rest is."""
    causes = [each.rule for each in found if each.is_cause and each.lasts]
    of_mismatch = [rule for rule in causes if rule.family in _OF_NUMBERS]
    if _other_tokens(checks):
        text = "the streams are not of the same tokens: no share of their difference is a part"
    elif of_mismatch and all(rule.evidence.function in _RISES for rule in of_mismatch):
        return rest
    else:
        left = f"what is left of mean |d|, {short((rest.share or 0.0) * size)} nat, is "
        text = left + (
            "noise, or that of a cause that was found"
            if of_mismatch
            else "the noise of this run: no rule finds a symptom of the mismatch"
        )
    return dataclasses.replace(rest, share=None, text=text)


_OF_NUMBERS: Final = ("precision", "mismatch")
_RISES: Final = frozenset({"jump", "step_change", "growth"})
"""Functions that find that the mismatch rose, and do not say why."""


def _share(value: float) -> float | None:
    """Return a share, at most 1; None where it is not finite."""
    return min(1.0, value) if math.isfinite(value) else None


def _floor_of(fresh: Cell, floor: float) -> float:
    """Return the ratio of a floor to mean |d| of the fresh tokens, at most 1."""
    mean = fresh[Field.D_ABS_SUM] / fresh.tokens if fresh.tokens else 0.0
    return min(1.0, floor / mean) if mean > 0.0 else 1.0


def _stale_share(summary: Summary, total: Cell) -> float | None:
    if not summary.is_staleness_known:
        return None
    old = [cell[Field.D_ABS_SUM] for age, cell in summary.staleness.items() if age > 0]
    return _share(sum(old) / total[Field.D_ABS_SUM])


def _other_tokens(comparability: Comparability) -> list[str]:
    """Return the failed checks that say that the two streams are of different tokens."""
    return sorted({check.name for check in comparability.suspects} & _OTHER_TOKENS)


# --- temperature or truncation ------------------------------------------------------------------
class FittedLine(NamedTuple):
    """The part of d that a line through p and q explains.

    Attributes:
        share: share of the sum of squares of d, 0 to 1; None: not measured.
        text: the line, or why there is none.
    """

    share: float | None
    text: str


def fitted_line(cell: Cell, comparability: Comparability) -> FittedLine:
    """Return the share of d's sum of squares that an affine relation of p and q explains.

    A temperature scales q, a renormalised truncation shifts it: p = a + b q. The least-squares line
    of p on q leaves M2(p) - C(p, q)^2 / M2(q) of the sum of d^2 = M2(d) + n mean(d)^2. Noise of q
    flattens that line, and noise of p flattens the line of q on p. The smaller amount that the two
    lines remove counts: noise of one side then explains about 0. (Noise of variance s on both sides
    of a stream of variance v explains s / 2(v + s).) Two parameters fit 2 / n of any sum of
    squares. That is subtracted, where n is the number of tokens that d's size is spread over,
    (sum |d|)^2 / sum d^2. The relation is affine only within a context, so the line of all tokens
    finds about 0.45 of a temperature of 0.7.

    Args:
        cell: the tokens.
        comparability: of the step; no line is drawn through streams of different tokens.
    """
    other = _other_tokens(comparability)
    if other:
        return FittedLine(None, f"the streams are not of the same tokens ({', '.join(other)})")
    n, p2, q2, c = cell.tokens, cell[Field.P_M2], cell[Field.Q_M2], cell[Field.PQ_C]
    if n < MANY:
        return FittedLine(None, f"{n} fresh tokens, {MANY} are needed")
    squares = cell[Field.D_M2] + cell[Field.D_SUM] ** 2 / n
    if not (math.isfinite(squares) and squares > 0.0 and p2 > 0.0 and q2 > 0.0):
        return FittedLine(None, "a stream is constant, or d is 0 or not finite")
    spread_over = cell[Field.D_ABS_SUM] ** 2 / squares
    if spread_over < ENOUGH:
        return FittedLine(
            None, f"{spread_over:.0f} tokens hold most of d's sum of squares, {ENOUGH} are needed"
        )
    if not math.isfinite(c):
        return FittedLine(None, "the streams are too large for a line")
    left = max(p2 - c * c / q2, q2 - c * c / p2, 0.0) / squares
    share = min(1.0, max(0.0, 1.0 - left * spread_over / (spread_over - 2.0)))
    slope = c / q2
    shift = (cell[Field.P_SUM] - slope * cell[Field.Q_SUM]) / n
    text = (
        f"share of the sum of squares of d over {n} fresh tokens that the line p = "
        f"{short(shift)} + {short(slope)} q removes: a temperature scales q, a "
        "renormalised truncation shifts it"
    )
    return FittedLine(share, text)


# --- places -------------------------------------------------------------------------------------
def _rejected(history: RunHistory, number: int) -> MismatchPart:
    """Return the share of |d| in tokens that the loss drops by their importance weight."""
    name = "rejected tokens"
    if history.kept is None:
        return MismatchPart(name, None, "the step's tensors cannot be read here", counted=False)
    try:
        step = next(each for each in history.measured if each.step == number)
        loss = history.kept.loss(step, _REJECTED.values())
    except StagescopeError as error:
        return MismatchPart(name, None, str(error), counted=False)
    lacking = [loss.unrecorded[field] for field in _REJECTED.values() if field in loss.unrecorded]
    if len(lacking) == len(_REJECTED):
        return MismatchPart(name, None, "not recorded: " + "; ".join(lacking), counted=False)
    share = sum(loss.shares.get(NAMES[fate], 0.0) for fate in _REJECTED)
    seen = {NAMES[Fate.TRAINED], NAMES[Fate.UNKNOWN]}
    hidden = sum(part for fate, part in loss.shares.items() if fate not in seen)
    text = (
        f"share of the sum of |d| over the {counted(loss.tokens, 'token')} whose tensors are kept: "
        f"rejected, masked, or with an importance weight of 0; {hidden:.1%} with those that were "
        "clipped or have an advantage of 0, which no gradient sees either"
    )
    if lacking:
        text += f"; at least: it is not recorded {lacking[0]}"
    return MismatchPart(name, _share(share), text, counted=False)


def _worst(summary: Summary, total: Cell) -> MismatchPart:
    sizes = np.abs(summary.worst.p - summary.worst.q)
    return MismatchPart(
        "worst tokens",
        float(sizes.sum()) / total[Field.D_ABS_SUM],
        f"share of the sum of |d|: the {len(sizes)} tokens with the largest |d| of {total.tokens}",
        counted=False,
    )


# --- what is left -------------------------------------------------------------------------------
def _unexplained(stale: float | None, line: float | None, floor: float) -> MismatchPart:
    """Return the rest of the sum of |d| without the counted parts.

    Without the line, d is sqrt(1 - line) times as large; the floor is subtracted from that.
    """
    rest = (1.0 - (stale or 0.0)) * max(0.0, math.sqrt(1.0 - (line or 0.0)) - floor)
    taken: Sequence[tuple[str, float | None]] = (
        ("without the stale tokens", stale),
        ("with the line drawn", line),
        ("with the noise floor or rounding, the larger, subtracted", floor),
    )
    words = [word for word, share in taken if share]
    text = "share of the sum of |d| for which this list has no cause: " + (
        f"what is left {', '.join(words)}"
        if words
        else "all of it, because every counted part is 0"
    )
    return MismatchPart("unexplained", rest, text, counted=False)
