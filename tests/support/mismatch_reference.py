"""The design's statistics once more: slow, plain, float64, token by token.

Written from the table's definitions and without the service's code, so that agreement means
something. Only the histogram's quantiles are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


class Token:
    """One model token with both values finite."""

    def __init__(self, p: float, q: float, sample: object, number: int) -> None:
        self.p, self.q, self.sample, self.round = p, q, sample, number
        self.d = p - q


def tokens_of(
    p: Float64, q: Float64, mask: npt.NDArray[np.generic], samples: Sequence[object] | None = None
) -> tuple[list[Token], dict[str, int]]:
    """Walk over [rows, tokens]; return the finite tokens and the counts of the others."""
    tokens: list[Token] = []
    odd = dict.fromkeys(
        (f"{s}_{k}" for s in ("old", "rollout") for k in ("nan", "posinf", "neginf")), 0
    )
    for row in range(len(mask)):
        number, inside = -1, False
        for column in range(mask.shape[1]):
            on = mask[row, column] == 1
            number += bool(on and not inside)
            inside = bool(on)
            if not on:
                continue
            x, y = float(p[row, column]), float(q[row, column])
            if math.isfinite(x) and math.isfinite(y):
                tokens.append(Token(x, y, row if samples is None else samples[row], number))
            for stream, value in (("old", x), ("rollout", y)):
                if math.isnan(value):
                    odd[f"{stream}_nan"] += 1
                elif math.isinf(value):
                    odd[f"{stream}_{'posinf' if value > 0 else 'neginf'}"] += 1
    return tokens, odd


def pearson(x: Float64, y: Float64) -> float:
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()))


def expm1_minus(d: Float64) -> Float64:
    """e^d - 1 - d without cancellation: by series where d is small."""
    series = np.zeros_like(d)
    for k in range(20, 1, -1):
        series = series + d**k / math.factorial(k)
    return np.where(np.abs(d) < 0.5, series, np.expm1(d) - d)


def reference(tokens: Sequence[Token]) -> dict[str, float]:
    """Return the published numbers, by their published names."""
    p = np.array([t.p for t in tokens])
    q = np.array([t.q for t in tokens])
    d = p - q
    size = np.abs(d)
    u, v = np.expm1(p), np.expm1(q)
    gap = np.exp(q) * np.abs(np.expm1(d))
    clamped = np.clip(d, -20, 20)
    weight = np.exp(clamped)
    out = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_mean": gap.mean(),
        "training/rollout_probs_diff_std": gap.std(ddof=1) if len(gap) > 1 else math.nan,
        "training/rollout_actor_probs_pearson_corr": pearson(u, v),
        "rollout_corr/kl": (-d).mean(),
        "rollout_corr/k3_kl": expm1_minus(d).mean(),
        "rollout_corr/chi2_token": np.expm1(2 * clamped).mean(),
        "token_mult_prob_error": np.exp(size).mean(),
        "rollout_corr/rollout_is_mean": weight.mean(),
        "rollout_corr/rollout_is_max": weight.max(),
        "rollout_corr/rollout_is_min": weight.min(),
        "rollout_corr/rollout_is_std": np.expm1(clamped).std(),
        "rollout_corr/rollout_is_eff_sample_size": (weight.mean() + 1e-8) ** 2 / (weight**2).mean(),
        "rollout_corr/rollout_is_truncated": 0.0,
        "logprob_abs_diff/mean": size.mean(),
        "logprob_abs_diff/max": size.max(),
        "counts/tokens": float(len(tokens)),
    }
    for name, values in (("old", p), ("rollout", q)):
        out[f"logprob/{name}_mean"] = values.mean()
        out[f"logprob/{name}_std"] = values.std(ddof=1) if len(values) > 1 else math.nan
        out[f"logprob/{name}_min"], out[f"logprob/{name}_max"] = values.min(), values.max()
    out |= _rounds(tokens) | _sequences(tokens)
    return {name: float(value) for name, value in out.items()}


def _rounds(tokens: Sequence[Token]) -> dict[str, float]:
    rounds: dict[int, list[float]] = {}
    for token in tokens:
        rounds.setdefault(token.round, []).append(abs(token.d))
    means = {number: sum(values) / len(values) for number, values in rounds.items()}
    top = max(means.values())
    out: dict[str, float] = {"per_round/max_diff_value": top}
    for number, mean in means.items():
        out[f"per_round/round_{number}_abs_diff_mean"] = mean
        out[f"per_round/round_{number}_token_count"] = len(rounds[number])
    return out


def tails(tokens: Sequence[Token]) -> dict[str, float]:
    """Counts of tail tokens."""
    out: dict[str, float] = {}
    for bound in ("0.1", "0.5", "1", "5"):
        out[f"tail/abs_diff_over_{bound}_count"] = sum(abs(t.d) > float(bound) for t in tokens)
    for low, high in (("0.9", "1.1"), ("0.5", "2")):
        name = f"tail/ratio_outside_{low}_{high}_count"
        out[name] = sum(not float(low) <= math.exp(t.d) <= float(high) for t in tokens)
    return out


def _sequences(tokens: Sequence[Token]) -> dict[str, float]:
    samples: dict[object, list[Token]] = {}
    for token in tokens:
        samples.setdefault(token.sample, []).append(token)
    own = list(samples.values())
    n = np.array([len(ts) for ts in own])
    p = np.array([math.fsum(t.p for t in ts) for ts in own]) / n
    q = np.array([math.fsum(t.q for t in ts) for ts in own]) / n
    total = np.array([math.fsum(t.d for t in ts) for ts in own])
    gap = -total / n
    # Weight minus 1: what is left of a weight near 1 after its rounding is no measure.
    excess = np.array([math.fsum(math.expm1(max(-20, min(20, t.d))) for t in ts) for ts in own]) / n
    weights = 1 + excess
    size = np.array([math.fsum(abs(t.d) for t in ts) for ts in own]) / n
    corr = {
        "training_ppl": np.exp(-p).mean(),
        "rollout_ppl": np.exp(-q).mean(),
        "training_log_ppl": (-p).mean(),
        "rollout_log_ppl": (-q).mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": np.abs(gap).mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": np.exp(gap).mean(),
        "chi2_seq": np.expm1(2 * np.clip(total, -20, 20)).mean(),
        "rollout_is_seq_mean": weights.mean(),
        "rollout_is_seq_std": excess.std(ddof=1) if len(own) > 1 else 0.0,
        "rollout_is_seq_max": weights.max(),
        "rollout_is_seq_min": weights.min(),
        "rollout_is_seq_max_deviation": np.abs(excess).max(),
    }
    shares = {
        f"tail/abs_diff_over_{b}_seq_{how}": float(
            pick([sum(abs(t.d) > float(b) for t in ts) / len(ts) for ts in own])
        )
        for b in ("0.1", "0.5", "1", "5")
        for how, pick in (("mean", np.mean), ("max", np.max))
    }
    return {
        **{f"rollout_corr/{name}": float(value) for name, value in corr.items()},
        **shares,
        "train_rollout_logprob_abs_diff": size.mean(),
        "logprob/old_seq_mean": p.mean(),
        "logprob/rollout_seq_mean": q.mean(),
        "logprob/old_seq_max": p.max(),
        "logprob/rollout_seq_max": q.max(),
        "counts/sequences": float(len(own)),
    }
