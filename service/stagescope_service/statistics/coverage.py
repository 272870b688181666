"""Checks that both streams have a value in every token under the mask, and only there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagescope_service.statistics.cell import Bool, Cell, Field
from stagescope_service.statistics.checks import Check
from stagescope_service.statistics.fill_values import DENORMAL, WHY, FillValues
from stagescope_service.statistics.part import RankRow
from stagescope_service.statistics.summary import Summary

FEW_ZEROS: Final = 8
ROUNDED_TO_ONE: Final = 0.02
"""Nats: a probability nearer to 1 rounds to 1 in bfloat16, and a little further with its noise."""
ELSEWHERE: Final = 6.0
"""Ratio of mean |d| beside a stream's zeros to mean |d| elsewhere, above which zeros are missing
values. With other token ids it is up to 5, as a sure model makes the largest differences."""
APART: Final = 0.05
"""mean |d| of tokens if 1 % of them are scored as others; noise of int8 makes less."""
LACKING_SHARE: Final = 0.01
TEMPLATE: Final = 16
"""Tokens of a template at one end of a stretch that may have probability 1 on both sides."""
_FAR: Final = 1.0
"""Nats. An exact 0 whose other stream is further away is a missing value. Truncation to the only
token that is left gives at most -log(top_p), and rounding gives less."""
_DEEP: Final = 3.0
"""The same for a top_p of 0.05. Greedy sampling takes the likeliest token, and other weights do not
make that so unlikely."""
_IMPOSSIBLE: Final = 6.0
"""The same, beyond all noise of a sure token: the usual zeros lie beside values near 0."""
_BOUNDS: Final = ((_FAR, 5, 0.2), (_DEEP, 1, 0.05), (_IMPOSSIBLE, 1, 1.0))
"""Bounds of |d|, the minimum of zeros beyond each, and the maximum probability that all of these
are usual zeros. One token is often far off for another reason; five seldom are."""
_ODDS: Final = 10.0
"""Minimum odds of a zero among tokens that are far off, over the odds among all others. With other
ids it is up to 4, since a sure model makes the largest differences."""
_LISTED: Final = 3


def coverage(cell: Cell, p: str, q: str) -> Check:
    """Check whether the mask covers tokens that one stream lacks.

    Truncated sampling also gives an exact 0 to the only token that it kept; the other stream is
    then close to 0, too. For missing tokens the other stream is as far from 0 as elsewhere.
    Misaligned streams have such zeros on both sides, or the zeros of padding on one. Most of their
    difference is then in other tokens (`explains`, a share of the sum of |d|).
    """
    in_zeros = cell[Field.P_LACKS_ABS] + cell[Field.Q_LACKS_ABS]
    values = {
        "p_lacks": cell[Field.P_LACKS],
        "q_lacks": cell[Field.Q_LACKS],
        "explains": in_zeros / cell[Field.D_ABS_SUM] if cell[Field.D_ABS_SUM] else math.nan,
    }
    if not cell.masked:
        return Check("coverage", "unknown", "the mask covers no token", values)
    missing = {
        side: sum(cell[Field[f"{side}_{kind}"]] for kind in ("NAN", "POSINF", "NEGINF"))
        for side in ("P", "Q")
    }
    zeros = {side: max(cell[Field[f"{side}_LACKS"]] - missing[side], 0.0) for side in missing}
    found = []
    for side, other, stream in (("P", "Q", p), ("Q", "P", q)):
        lacks, filled = cell[Field[f"{side}_LACKS"]], zeros[side]
        if filled < 3.0 * zeros[other] or not _filled(cell, side, filled):
            lacks, filled = lacks - filled, 0.0
        if lacks >= LACKING_SHARE * cell.masked:
            kinds = (("not finite", lacks - filled), ("exactly 0", filled))
            what = " and ".join(f"{kind} in {count:.0f}" for kind, count in kinds if count)
            found.append((filled, f"{stream} is {what} tokens where the other stream has a value"))
    if found:
        values["zeros"] = sum(filled for filled, _ in found)
        if sum(missing.values()) >= LACKING_SHARE * cell.masked:
            values["explains"] = 1.0  # non-finite values are in no sum of differences
        why = (
            "the mask covers tokens that it lacks"
            if any(filled for filled, _ in found)
            else "the computation gave these values, or they stand for missing ones"
        )
        text = f"{' and '.join(each for _, each in found)}: {why}"
        return Check("coverage", "suspect", text, values)
    return Check("coverage", "ok", "both streams cover the mask", values)


def _filled(cell: Cell, side: str, zeros: float) -> bool:
    """Return whether the zeros of a stream stand for missing values."""
    if not zeros:
        return False
    others_at_zeros = cell[Field[f"{side}_LACKS_ABS"]]
    others = cell.tokens - zeros
    rest = abs(cell[Field.Q_SUM if side == "P" else Field.P_SUM]) - others_at_zeros
    if not others:
        # A slice of few tokens, such as a round: a sure model's probability rounds to 1, too.
        return zeros >= FEW_ZEROS or others_at_zeros / zeros > ROUNDED_TO_ONE
    if others_at_zeros / zeros <= 0.5 * max(rest, 0.0) / others:
        return False
    # Tokens that are scored as others are as far off, and as often, beside zeros as elsewhere.
    of_side = cell[Field[f"{side}_ZERO"]]
    far = cell[Field.ABS_OVER_1] - zeros
    if far >= FEW_ZEROS / 2 and zeros / of_side <= _ODDS * far / max(cell.tokens - of_side, 1):
        return False
    apart = cell[Field.D_ABS_SUM] - cell[Field.P_LACKS_ABS] - cell[Field.Q_LACKS_ABS]
    elsewhere = max(apart, 0.0) / others
    return elsewhere < APART or others_at_zeros / of_side > ELSEWHERE * elsewhere


def padding(cell: Cell) -> Check:
    """Check whether stretches of the mask begin or end in zeros that belong to padding.

    A confident model has exact zeros, too. If their share is f, f / (1 - f) of them are expected at
    each edge of a stretch. Tokens of a template (`<think>`, the brackets of a tool's call, the end
    of a turn) add some, about as many at the end of each stretch. The zeros of padding fill rows of
    several lengths up to one width. So their number varies, and is 0 in few rows. Responses that
    end in an endless repetition differ in that.
    """
    edge, capped, trail, squares, n = (
        cell[field]
        for field in (
            Field.EDGE_ZERO, Field.EDGE_CAPPED, Field.TRAIL_CAPPED, Field.TRAIL_SQUARES,
            Field.SEGMENTS,
        )
    )  # fmt: skip
    values = {"zeros": cell[Field.BOTH_ZERO], "zeros_at_edges": edge}
    if not cell.tokens or not n:
        return Check("padding", "unknown", "no token counts", values)
    inside = cell.tokens - edge
    share = (cell[Field.BOTH_ZERO] - edge) / inside if inside > 0 else 0.0
    usual = share / (1.0 - share) if share < 1.0 else math.inf
    at_end, spread = trail / n, math.sqrt(max(squares / n - (trail / n) ** 2, 0.0))
    varies = 1.0 + 0.2 * at_end < spread < 1.5 * at_end
    padded = varies and at_end > 1.0 + 3.0 * usual
    prefix = max((capped - trail) / n, at_end) > TEMPLATE + 3.0 * usual
    if edge >= LACKING_SHARE * cell.masked and (padded or prefix):
        text = (
            f"both streams are exactly 0 in {edge:.0f} tokens at the edges of the mask's "
            f"stretches ({edge / cell.masked:.1%} of the tokens). The mask covers padding or a "
            "prompt, and these equal tokens dilute every mean"
        )
        return Check("padding", "suspect", text, values)
    return Check("padding", "ok", "no run of zeros at the edges of the mask", values)


def missing_values(summary: Summary, ranks: Sequence[RankRow] = ()) -> Check:
    """Check whether a stream has a fill value in tokens where the other one is far from it."""
    found = _filled_zeros(summary, ranks)
    if found.status == "ok" and (filled := FillValues.of(summary)).values:
        return _of_fill_values(filled, summary, ranks)
    return found


def _of_fill_values(filled: FillValues, summary: Summary, ranks: Sequence[RankRow]) -> Check:
    worst, total = summary.worst, summary.total
    side = filled.values[0].side
    found = [each for each in filled.values if each.side == side]
    chosen: Bool = np.logical_or.reduce([each.tokens for each in found])
    stream, other = summary.pair[side], summary.pair[1 - side]
    listed = " and ".join(
        f"{each.value:.8g} in {int(each.tokens.sum())}" for each in found[:_LISTED]
    )
    text = (
        f"{stream} is exactly {listed} of the {len(worst)} tokens that differ most, where {other} "
        f"has an ordinary value ({_places(summary, chosen, side, ranks)}): "
    )
    values = {"tokens": float(chosen.sum()), "filled": found[0].value}
    if found[0].why == "cut off":  # more tokens than these have the value
        text += f"{stream} was cut off there (a clamp), or filled with it ({WHY['cut off']})"
        values["cut_off"] = float(side)
    else:
        text += f"it was filled in where {stream} lacks a value ({WHY[found[0].why]})"
        values["explains"] = sum(filled.sizes[chosen].tolist()) / total[Field.D_ABS_SUM]
    return Check("coverage", "suspect", text, values)


def _filled_zeros(summary: Summary, ranks: Sequence[RankRow]) -> Check:
    """Check whether a stream is exactly 0 in tokens where the other one is far from it.

    The check `coverage` of a cell compares means. A sure model, a coarse format and truncation give
    many exact zeros close to the other stream, which hide a few missing values. If zeros are usual,
    tokens that are far off for another reason have some by chance.
    """
    worst, total = summary.worst, summary.total
    size = np.abs(worst.p - worst.q)
    sides = (np.abs(worst.p) < DENORMAL, np.abs(worst.q) < DENORMAL)
    side = int((sides[1] & (size > _FAR)).sum() > (sides[0] & (size > _FAR)).sum())
    stream, other = summary.pair[side], summary.pair[1 - side]
    for least, enough, chance in _BOUNDS:
        far = size > least
        filled, on_other, n = sides[side] & far, sides[1 - side] & far, int(far.sum())
        count = int(filled.sum())
        zeros = total[(Field.P_ZERO, Field.Q_ZERO)[side]] - count
        usual = max(zeros, 0.0) / max(total.tokens - n, 1)
        # Misaligned streams have such zeros on both sides.
        if count < max(enough, n / 2, 3 * int(on_other.sum())):
            continue
        # If a sure model has other token ids, nearly all tokens that are far off are usual zeros,
        # most of all those that differ most.
        of_all = total[Field.ABS_OVER_2 if least == _FAR else Field.ABS_OVER_3]
        if n > count and of_all >= LACKING_SHARE * total.masked:
            continue
        if least == _IMPOSSIBLE and n >= FEW_ZEROS:
            continue
        if count * (1.0 - usual) < _ODDS * (n - count) * usual or usual**count > chance:
            continue
        value = (worst.p, worst.q)[side][filled]
        zero = "exactly 0" if not value.any() else f"0 to within {np.abs(value).max():.2g}"
        text = (
            f"{stream} is {zero} in {count} of the {len(size)} tokens that differ most, where "
            f"{other} lies below {-least:g} ({_places(summary, filled, side, ranks)}): its "
            "missing values were filled with 0"
        )
        if least == _FAR:
            text += " (or these tokens were sampled greedily)"
        elif least == _IMPOSSIBLE:
            text += f", or {other} scores another token there: at its other zeros they agree"
        in_zeros = total[Field.P_LACKS_ABS] + total[Field.Q_LACKS_ABS]
        values = {"explains": in_zeros / total[Field.D_ABS_SUM], "tokens": float(count)}
        return Check("coverage", "suspect", text, values)
    return Check("coverage", "ok", "both streams cover the mask")


def _places(summary: Summary, chosen: Bool, side: int, ranks: Sequence[RankRow]) -> str:
    """Return where the first tokens lie, and the value of the stream that has one."""
    worst, sequences = summary.worst, summary.sequences
    rank_of = {
        source: f"{row.role} {row.rank}, "
        for row in (ranks if len(ranks) > 1 else ())
        for source in row.sources
    }
    has_rounds = len(summary.rounds.keys) > 1
    at = np.flatnonzero(chosen)
    values = worst.q if side == 0 else worst.p
    places = []
    for token in at[:_LISTED].tolist():
        sequence = int(worst.sequence[token])
        name = sequences.samples[sequence]
        row = f"sample {name}" if name else f"row {int(sequences.row[sequence])}"
        rank = rank_of.get(int(sequences.source[sequence]), "")
        turn = f"round {int(worst.round[token])}, " if has_rounds else ""
        place = f"token {int(worst.position[token])}: {values[token]:.4g}"
        places.append(f"{rank}{turn}{row}, {place}")
    return "; ".join(places) + ("; ..." if len(at) > _LISTED else "")
