"""Checks of the alignment of each sample; a mean hides a single misplaced one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from stagescope_service.statistics.cell import Bool, Float64, Int64
from stagescope_service.statistics.checks import CUT_UNRELATED, FITS, UNRELATED, Check, Scope
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.summary import Summary

_SAMPLE_TOKENS: Final = 16
"""Minimum tokens of a sample for its alignment to be checked."""
_SAMPLE_FAR: Final = 6
_SAMPLE_FAR_SHARE: Final = 0.12
"""Minimum number and share of a sample's tokens with |d| over 0.5 to report it as unrelated: a few
far off are no other sample's."""
_ONE_SIGN: Final = 0.9
"""Minimum |sum of d| over sum of |d|, without the largest, of a sample of a cut vocabulary and of
the median sample."""
_CUT_Z: Final = 8.0
"""Minimum distance below the median sample's correlation, in standard errors, of an unrelated
sample of a cut vocabulary. The errors are those of Fisher's z = artanh(correlation), which are
1 / sqrt(tokens - 3) (On the "Probable Error" of a Coefficient of Correlation, 1921)."""
_RELATED: Final = 0.35
_RELATED_Z: Final = 2.0
"""Correlation of a sample's own p and q, and its standard errors (of the same z), beyond which they
are of the same tokens."""
_DRIFTED_Z: Final = 5.0
"""Standard errors below the median sample's correlation, beyond which a sample of stale tokens is
unrelated. An update that went far since they were sampled lowers the correlation of all."""
_R: Final = 0.999
"""Maximum |correlation|, where z is finite."""
_OUTLIER: Final = 0.3
"""Share of a sample's sum of squared deviations of d that one token must not exceed."""
_LISTED: Final = 5


@dataclasses.dataclass(frozen=True)
class SampleChecks:
    """Which samples fit other tokens, or none; arrays [samples], by the order of their keys."""

    pair: tuple[str, str]
    names: tuple[str, ...]
    tokens: Float64
    judged: Bool
    """Whether it has enough tokens."""
    moved: Bool
    strange: Bool
    fitting: Bool

    def scopes(self, own: Int64 | None = None) -> list[Scope]:
        """Return the checks `shifted` and `unrelated` of these samples (indexes), or of all."""
        at = np.arange(len(self.names)) if own is None else own
        if not len(at):
            return []
        p, q = self.pair
        texts = {
            "shifted": f"{p}[t] matches {q} of a token 1 or 2 tokens away, not {q}[t]",
            "unrelated": f"{p}[t] matches {q}[t] no better than its neighbours: the rows are in "
            "another order, or the tokens are others",
        }
        names, tokens = [self.names[index] for index in at.tolist()], self.tokens[at]
        found = []
        for (name, text), failed in zip(texts.items(), (self.moved, self.strange), strict=True):
            chosen = failed[at]
            check = _sample_check(name, chosen, self.judged[at], names, text)
            unfit = ~chosen & ~self.fitting[at]
            found.append(Scope(check, float(tokens[chosen].sum()), float(tokens[unfit].sum())))
        return found


def check_samples(summary: Summary) -> SampleChecks:
    """Judge the alignment of each sample against its neighbouring tokens and the other samples."""
    keys, values = summary.sequences.by_sample()
    names = tuple(sample or f"row {row}" for sample, _, row in keys)
    if not len(values):
        none = np.zeros(0, bool)
        return SampleChecks(summary.pair, names, np.zeros(0), none, none, none, none)
    column = {name: values[:, at] for at, name in enumerate(ROW)}
    n = column["tokens"]
    judged = (n >= _SAMPLE_TOKENS) & (column["lag2_n"] >= _SAMPLE_TOKENS - 4)
    lags = np.stack(
        [
            column[f"{side}_{lag}"] / np.maximum(column[f"lag{lag}_n"], 1.0)
            for lag in (1, 2)
            for side in ("ahead", "behind")
        ]
    )
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        least, own = lags.min(axis=0), column["d_abs_sum"] / n
        # Without its largest token: one outlier must not make a shift.
        moved = judged & (least < 0.35 * (own - column["d_abs_max"] / n))
        far = column["over_1"]
        strange = judged & ~moved & (far >= np.maximum(_SAMPLE_FAR, _SAMPLE_FAR_SHARE * n))
        strange &= own > 0.7 * least
        correlation, below, is_cut, is_odd = _of_cut_vocabulary(column, judged)
        # With many samples of few noisy tokens, a neighbour may fit as well by chance.
        z = np.arctanh(np.clip(correlation, -_R, _R)) * np.sqrt(n - 3.0)
        strange &= ~((correlation > _RELATED) & (z > _RELATED_Z))
        if summary.has_stale_tokens and _median(correlation[judged]) < UNRELATED:
            strange &= (below > _DRIFTED_Z) & (correlation < _RELATED)
        strange = np.where(is_cut, is_odd, strange)
        fitting = judged & ((own < FITS * least) | (correlation > UNRELATED))
    return SampleChecks(summary.pair, names, n, judged, moved, strange, fitting)


def _of_cut_vocabulary(
    column: Mapping[str, Float64], judged: Bool
) -> tuple[Float64, Float64, Bool, Bool]:
    """Return each sample's correlation, and its distance below the median sample's in standard
    errors (0 if one token alone decides). Also return whether its vocabulary is cut, and whether it
    is then odd.

    With a cut vocabulary every d has one sign in all samples, so this is no fault of one sample. At
    any lag |p - q| is then the mass that was cut. Only the correlation of p and q shows whether
    they are of the same tokens.
    """
    n, p, q, size = (column[name] for name in ("tokens", "p_sum", "q_sum", "d_abs_sum"))
    pp = column["pp_sum"] - p * p / n
    qq = column["qq_sum"] - q * q / n
    pq = column["pq_sum"] - p * q / n
    correlation = pq / np.sqrt(pp * qq)
    largest = column["d_abs_max"]
    lean = (np.abs(column["d_sum"]) - largest) / (size - largest)
    is_cut = judged & (lean > _ONE_SIGN) & (_median(lean[judged]) > _ONE_SIGN)
    z, usual = (
        np.arctanh(np.clip(x, -_R, _R)) for x in (correlation, _median(correlation[judged]))
    )
    # One token far off spoils any correlation, and says nothing about the others.
    has_outlier = (largest - size / n) ** 2 > _OUTLIER * (pp + qq - 2.0 * pq)
    below = np.where(has_outlier, 0.0, (usual - z) * np.sqrt(n - 3.0))
    is_odd = (below > _CUT_Z) & (correlation < CUT_UNRELATED)
    return correlation, below, is_cut, is_odd


def _median(values: Float64) -> float:
    """Return the median of the values that are not NaN; NaN if there is none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else np.nan


def _sample_check(
    name: str,
    chosen: Bool,
    judged: Bool,
    names: Sequence[str],
    text: str,
) -> Check:
    places = np.flatnonzero(chosen)
    if not places.size:
        return Check(name, "ok" if judged.any() else "unknown", "no sample is out of place")
    listed = ", ".join(names[int(at)] for at in places[:_LISTED])
    more = ", ..." if places.size > _LISTED else ""
    message = f"in {places.size} of {int(judged.sum())} samples ({listed}{more}): {text}"
    return Check(name, "suspect", message, {"samples": float(places.size)})
