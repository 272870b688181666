"""The published numbers: from a summary to a flat dict of floats.

docs/metrics.md states their units, formulas and sources.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from stagescope_service.statistics.cell import (
    ABS_TAILS,
    CLAMP,
    RATIO_TAILS,
    SMALL,
    Bool,
    Cell,
    Field,
    Float64,
)
from stagescope_service.statistics.checks import ROUNDED_SHARE, held_by_bfloat16
from stagescope_service.statistics.noise_checks import calibration
from stagescope_service.statistics.routing_checks import published_routing
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.settings import StatisticsSettings, clamped_exp
from stagescope_service.statistics.summary import Summary

Metrics = dict[str, float]

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
ABS_TAIL_NAMES: Final = tuple(f"abs_diff_over_{bound:g}" for bound in ABS_TAILS)
RATIO_TAIL_NAMES: Final = tuple(f"ratio_outside_{low:g}_{high:g}" for low, high in RATIO_TAILS)
_EPSILON: Final = 1e-8
"""The epsilon that verl adds to a mean before dividing by it."""


def publish(summary: Summary) -> Metrics:
    """Return every published number of a summary under its published name."""
    cell = summary.total
    sequences = SequenceColumns.from_summary(summary)
    p, q = summary.pair
    return {
        **_probabilities(cell),
        **per_round(summary),
        **_divergences(cell, sequences),
        **_importance(cell, sequences, summary.settings),
        "train_rollout_logprob_abs_diff": _mean(sequences["d_abs_sum"] / sequences.n),
        "token_mult_prob_error": cell.mean(Field.EXP_ABS_SUM),
        **_log_probs(cell, sequences, p, q),
        **_quantiles(summary, cell),
        **_tails(cell, sequences),
        **_calibration(summary.fresh),
        "rounding/abs_diff_floor": rounding_floor(summary, cell),
        **non_finite(cell, p, q),
        "counts/tokens": float(cell.tokens),
        "counts/masked_tokens": float(cell.masked),
        "counts/sequences": float(len(sequences.n)),
        "counts/empty_rows": float(summary.empty_rows),
        **published_routing(summary),
    }


def publish_cell(cell: Cell, pair: tuple[str, str] = ("old", "rollout")) -> Metrics:
    """Return the published numbers of one cell, for a round, a turn, a staleness or a rank."""
    p, q = pair
    return {
        **_probabilities(cell),
        "rollout_corr/kl": _negated(cell.mean(Field.D_SUM)),
        "rollout_corr/k3_kl": cell.mean(Field.K3_SUM),
        "rollout_corr/chi2_token": cell.mean(Field.CHI2_SUM),
        "token_mult_prob_error": cell.mean(Field.EXP_ABS_SUM),
        **_log_probs(cell, None, p, q),
        "logprob_abs_diff/mean": cell.mean(Field.D_ABS_SUM),
        "logprob_abs_diff/max": cell.abs_max,
        **_tails(cell, None),
        **_calibration(cell),
        **non_finite(cell, p, q),
        "counts/tokens": float(cell.tokens),
        "counts/masked_tokens": float(cell.masked),
    }


class SequenceColumns:
    """Columns of the samples that have a counted token, merged over their fragments."""

    def __init__(self, values: Float64) -> None:
        self._values = values[values[:, 0] > 0]

    @classmethod
    def from_summary(cls, summary: Summary) -> SequenceColumns:
        """Merge a summary's fragments by sample."""
        return cls(summary.sequences.by_sample()[1])

    def __getitem__(self, name: str) -> Float64:
        column: Float64 = self._values[:, ROW.index(name)]
        return column

    @property
    def n(self) -> Float64:
        """Number of counted tokens of each sample."""
        return self["tokens"]


def per_round(summary: Summary) -> Metrics:
    """Return the `per_round/*` numbers; without a round only `total_rounds`."""
    if not summary.rounds.keys.size:
        return {"per_round/total_rounds": 0}
    metrics: Metrics = {"per_round/total_rounds": int(summary.rounds.keys[-1]) + 1}
    largest, where = -1.0, -1
    for number, cell in summary.rounds.items():
        mean = cell.mean(Field.D_ABS_SUM)
        metrics[f"per_round/round_{number}_abs_diff_mean"] = mean
        metrics[f"per_round/round_{number}_token_count"] = cell.tokens
        if mean > largest:
            largest, where = mean, number
    metrics["per_round/max_round_diff"] = where
    if where >= 0:
        metrics["per_round/max_diff_value"] = largest
    return metrics


def _probabilities(cell: Cell) -> Metrics:
    prefix = "training/rollout_probs_diff"
    return {
        f"{prefix}_valid": int(cell.tokens > 0),
        f"{prefix}_max": cell.extreme(Field.A_MAX),
        f"{prefix}_mean": cell.mean(Field.A_SUM),
        f"{prefix}_std": cell.std(Field.A_M2, Field.A_MIN, Field.A_MAX),
        "training/rollout_actor_probs_pearson_corr": cell.correlation(
            Field.U_M2, Field.V_M2, Field.UV_C
        ),
    }


def _divergences(cell: Cell, sequences: SequenceColumns) -> Metrics:
    n, d = sequences.n, sequences["d_sum"]
    p_mean, q_mean = sequences["p_sum"] / n, sequences["q_sum"] / n
    difference = -d / n
    with np.errstate(over="ignore"):
        values = {
            "kl": _negated(cell.mean(Field.D_SUM)),
            "k3_kl": cell.mean(Field.K3_SUM),
            "training_ppl": _mean(np.exp(-p_mean)),
            "rollout_ppl": _mean(np.exp(-q_mean)),
            "training_log_ppl": _mean(-p_mean),
            "rollout_log_ppl": _mean(-q_mean),
            "log_ppl_diff": _mean(difference),
            "log_ppl_abs_diff": _mean(np.abs(difference)),
            "log_ppl_diff_max": float(difference.max()) if n.size else math.nan,
            "log_ppl_diff_min": float(difference.min()) if n.size else math.nan,
            "ppl_ratio": _mean(np.exp(difference)),
            "chi2_token": cell.mean(Field.CHI2_SUM),
            "chi2_seq": _mean(np.expm1(2.0 * np.clip(d, -CLAMP, CLAMP))),
        }
    return {f"rollout_corr/{name}": value for name, value in values.items()}


def _importance(cell: Cell, sequences: SequenceColumns, settings: StatisticsSettings) -> Metrics:
    if settings.rollout_is == "sequence":
        values = _sequence_weights(sequences, settings)
    else:
        values = _token_weights(cell, sequences, settings)
    values["truncated"] = float(settings.rollout_is is not None)
    return {f"rollout_corr/rollout_is_{name}": value for name, value in values.items()}


def _token_weights(cell: Cell, sequences: SequenceColumns, settings: StatisticsSettings) -> Metrics:
    n, drops = cell.tokens, settings.bounds[2]
    least, most = _extreme_weights(cell, settings)
    mean = least if least == most else cell.mean_weight(Field.W_SUM)
    variance = max(cell[Field.W_M2], 0.0) / n if n else math.nan
    if least == most:
        variance = 0.0
    values = {
        "mean": mean,
        "max": most,
        "min": least,
        **_spread(mean, variance, n),
    }
    if settings.rollout_is is not None:
        values["ratio_fraction_high"] = cell.share(Field.IS_HIGH)
        values["ratio_fraction_low"] = cell.share(Field.IS_LOW)
        if drops:
            values["oob_ratio"] = cell.share(Field.IS_HIGH, Field.IS_LOW)
        if settings.rollout_is_batch_normalize:
            values["batch_norm_factor"] = _norm_factor(mean)
    above_1, raw = (sequences[name] / sequences.n for name in ("w_sum", "raw_sum"))
    applied = sequences["weight_sum"] / sequences.n
    # `Summary.without_settings` leaves no sum of the weights themselves.
    applied = np.where(np.isnan(applied), 1.0 + above_1, applied)
    return {**values, **_by_sequence(applied, above_1, 1.0 + raw, settings)}


def _extreme_weights(cell: Cell, settings: StatisticsSettings) -> tuple[float, float]:
    """Return the smallest and the largest applied weight; full precision even far below 1."""
    if not cell.tokens:
        return math.nan, math.nan
    if settings.bounds[2] and cell[Field.IS_LOW] + cell[Field.IS_HIGH]:
        return 1.0 + cell[Field.W_MIN], 1.0 + cell[Field.W_MAX]
    ends = clamped_exp(np.array([cell[Field.D_MIN], cell[Field.D_MAX]]))
    least, most = settings.apply(ends) if settings.rollout_is == "token" else ends
    return float(least), float(most)


def _sequence_weights(sequences: SequenceColumns, settings: StatisticsSettings) -> Metrics:
    n, log_ratio = sequences.n, sequences["d_sum"]
    lower, upper, drops = settings.bounds
    raw = clamped_exp(log_ratio)
    applied, total = settings.apply(raw), float(n.sum())
    mean = float((n * applied).sum()) / total if total else math.nan
    variance = float((n * (applied - mean) ** 2).sum()) / total if total else math.nan
    values = {
        "mean": mean,
        "max": math.exp(min(float(log_ratio.max()), CLAMP)) if n.size else math.nan,
        "min": math.exp(min(float(log_ratio.min()), 700.0)) if n.size else math.nan,
        **_spread(mean, variance, int(total)),
        "ratio_fraction_high": _mean(log_ratio > math.log(upper)),
        "ratio_fraction_low": _mean(log_ratio < (math.log(lower) if lower else -math.inf)),
    }
    if drops:
        outside = (raw < lower) | (raw > upper)
        values["oob_ratio"] = float((n * outside).sum()) / total if total else math.nan
    if settings.rollout_is_batch_normalize:
        values["batch_norm_factor"] = _norm_factor(_mean(applied))
    return {**values, **_by_sequence(applied, applied - 1.0, raw, settings)}


def _spread(mean: float, variance: float, tokens: int) -> Metrics:
    square = variance + mean * mean
    return {
        "std": math.sqrt(variance) if tokens > 1 else (0.0 if tokens else math.nan),
        "eff_sample_size": (mean + _EPSILON) ** 2 / square if square > 0.0 else math.nan,
    }


def _norm_factor(mean: float) -> float:
    return mean if math.isnan(mean) or mean > _EPSILON else 1.0


def _by_sequence(
    applied: Float64, above_1: Float64, raw: Float64, settings: StatisticsSettings
) -> Metrics:
    """Return statistics of the sequences' mean weights: applied, applied minus 1, and raw."""
    if not applied.size:
        names = ("mean", "std", "max", "min", "max_deviation")
        return {f"seq_{name}": math.nan for name in names}
    mean = _mean(applied)
    spread = applied if mean < SMALL else above_1
    values = {
        "seq_mean": mean,
        "seq_std": float(spread.std(ddof=1)) if applied.size > 1 else 0.0,
        "seq_max": float(applied.max()),
        "seq_min": float(applied.min()),
        "seq_max_deviation": float(np.abs(above_1).max()),
    }
    if settings.rollout_is is not None:
        lower, upper, _ = settings.bounds
        values["seq_fraction_high"] = _mean(raw > upper)
        values["seq_fraction_low"] = _mean(raw < lower)
    return values


def _log_probs(cell: Cell, sequences: SequenceColumns | None, p: str, q: str) -> Metrics:
    metrics: Metrics = {}
    for side, stream in (("Q", q), ("P", p)):
        low, high = Field[f"{side}_MIN"], Field[f"{side}_MAX"]
        metrics[f"logprob/{stream}_mean"] = cell.mean(Field[f"{side}_SUM"])
        metrics[f"logprob/{stream}_std"] = cell.std(Field[f"{side}_M2"], low, high)
        metrics[f"logprob/{stream}_min"] = cell.extreme(low)
        metrics[f"logprob/{stream}_max"] = cell.extreme(high)
        if sequences is not None:
            means = sequences[f"{side.lower()}_sum"] / sequences.n
            metrics[f"logprob/{stream}_seq_mean"] = _mean(means)
            metrics[f"logprob/{stream}_seq_max"] = _largest(means)
    return metrics


def _quantiles(summary: Summary, cell: Cell) -> Metrics:
    histogram, zeros = summary.histogram.collapsed(), int(cell[Field.EQUAL])
    return {
        "logprob_abs_diff/mean": cell.mean(Field.D_ABS_SUM),
        "logprob_abs_diff/max": cell.abs_max,
        **{
            f"logprob_abs_diff/{name}": histogram.quantile(share, zeros=zeros, largest=cell.abs_max)
            for name, share in QUANTILES.items()
        },
    }


def _calibration(cell: Cell) -> Metrics:
    found = calibration(cell)
    return {
        "calibration/ratio_mean": found.mean,
        "calibration/z": found.z,
        "calibration/tokens": float(found.tokens),
    }


_MANTISSA: Final = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


def rounding_floor(summary: Summary, cell: Cell) -> float:
    """Return the larger of the two streams' mean error of rounding.

    The mean error of a value x = m * 2^e is a quarter of its last place, 2^(e - bits). If mantissas
    m are uniform in their logarithm, 2^e averages |x| / (2 ln 2).
    """
    floors = []
    for side, stream in zip("PQ", summary.pair, strict=True):
        bits = min(_MANTISSA[name] for name in summary.dtypes.get(stream, ("float64",)))
        if held_by_bfloat16(cell, side) >= ROUNDED_SHARE:
            bits = min(bits, _MANTISSA["bfloat16"])
        size = abs(cell.mean(Field[f"{side}_SUM"])) / (2.0 * math.log(2.0))
        floors.append(size * 2.0 ** (-bits - 2))
    return max(floors)


def _tails(cell: Cell, sequences: SequenceColumns | None) -> Metrics:
    metrics: Metrics = {}
    for i, name in enumerate(ABS_TAIL_NAMES):
        fields = (Field(Field.ABS_OVER_0 + i),)
        metrics |= _tail(name, cell, fields, sequences, f"over_{i}")
    for i, name in enumerate(RATIO_TAIL_NAMES):
        fields_both = (Field(Field.RATIO_BELOW_0 + 2 * i), Field(Field.RATIO_ABOVE_0 + 2 * i))
        metrics |= _tail(name, cell, fields_both, sequences, f"ratio_{i}")
    return metrics


def _tail(
    name: str,
    cell: Cell,
    fields: tuple[Field, ...],
    sequences: SequenceColumns | None,
    column: str,
) -> Metrics:
    metrics: Metrics = {
        f"tail/{name}_count": sum(cell[field] for field in fields),
        f"tail/{name}_share": cell.share(*fields),
    }
    if sequences is not None:
        shares = sequences[column] / sequences.n
        metrics[f"tail/{name}_seq_mean"] = _mean(shares)
        metrics[f"tail/{name}_seq_max"] = _largest(shares)
    return metrics


def non_finite(cell: Cell, p: str, q: str) -> Metrics:
    """Return the `nonfinite/*` counts."""
    return {
        f"nonfinite/{stream}_{kind}": cell[Field[f"{side}_{kind.upper()}"]]
        for side, stream in (("P", p), ("Q", q))
        for kind in ("nan", "posinf", "neginf")
    }


def _mean(values: Float64 | Bool) -> float:
    return float(np.mean(values)) if values.size else math.nan


def _largest(values: Float64) -> float:
    return float(values.max()) if values.size else math.nan


def _negated(value: float) -> float:
    return 0.0 - value
