"""The published numbers by name: unit, formula and source; `mismatch` computes them.

All are over the finite tokens under the mask; `nonfinite/*` counts the others. p is the trainer's
log-prob, q the rollout's, d = p - q, all natural logarithms. If no token counts, means are NaN and
counts 0. <> is a mean over tokens, [] one over sequences.

`{stream}` is the pair's own name, `old` and `rollout` by default. A sequence is a sample with
at least one counted token: rows without one are in no mean (verl counts them as log-prob 0).

A number is within 1e-9 of its definition for |d| <= 700, a mean of weights within 1e-12, however
small it is: means of weights are stored beside those of weight - 1. A standard deviation, a
correlation or a z of values that are the same but for their last digits has only those digits (of
log-probs -5 ± 1e-9 the first 7 or 8). The correlation of e^p and e^q is off by at most 1e-15 times
mean / deviation of e^p, of 1 - e^p or of the same of q, whichever is largest: by more than 1e-9
only where probabilities agree in their first 6 digits. It is NaN where they agree in the first 12,
and where the squares of e^p or of e^q are below 1e-280. `inf` means that a number (or the sum
behind a mean) exceeds float64's maximum of 1.8e308: e^abs(d) and k3 for abs(d) > 709, a perplexity
for a mean log-prob below -709. A correlation of such sums is NaN.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Definition(NamedTuple):
    """What published numbers are.

    Attributes:
        names: Name of one number, or of several: `{a,b}` stands for each, `{i}` for a number,
            `{stream}` for the name of a stream, `*` and `...` for anything.
        unit: Of the number; of several numbers with several units one each.
        formula: How it is computed.
        source: Paper or framework whose metric it is; `stagescope` where it is of this project.
    """

    names: str
    unit: str
    formula: str
    source: str


_OURS: Final = "stagescope"
_DEBUG: Final = "verl, `verl.utils.debug.metrics.calculate_debug_metrics`"
_ROUNDS: Final = "verl pull request 5229, `_calculate_per_round_metrics`"
_CORRECTION: Final = "verl, `verl.trainer.ppo.rollout_corr_helper"
_OFF_POLICY: Final = f"{_CORRECTION}.compute_offpolicy_metrics`"
_WEIGHTS: Final = f"{_CORRECTION}.compute_rollout_correction_weights`"
_SCHULMAN: Final = "Schulman, [Approximating KL divergence](http://joschu.net/blog/kl-approx.html)"

DEFINITIONS: Final = (
    Definition(
        "training/rollout_probs_diff_{valid,max,mean,std}",
        "1",
        "of abs(e^p - e^q); std with n - 1; valid 0 if no token counts",
        _DEBUG,
    ),
    Definition(
        "training/rollout_actor_probs_pearson_corr",
        "1",
        "of e^p and e^q",
        _DEBUG,
    ),
    Definition(
        "per_round/round_{i}_{abs_diff_mean,token_count}",
        "nat, tokens",
        "mean of abs(d) over the i-th round's tokens in the whole batch",
        _ROUNDS,
    ),
    Definition(
        "per_round/{total_rounds,max_round_diff,max_diff_value}",
        "rounds, index, nat",
        (
            "the highest round and 1, the one with the largest mean of abs(d) (ties: the lowest), "
            "that mean"
        ),
        _ROUNDS,
    ),
    Definition(
        "rollout_corr/kl",
        "nat",
        "<q - p>",
        (
            f"{_OFF_POLICY}; k1 of {_SCHULMAN}; OpenRLHF's `vllm_kl`; AReaL's "
            "`behave_approx_kl` has the other sign"
        ),
    ),
    Definition(
        "rollout_corr/k3_kl",
        "nat",
        "<e^d - 1 - d>, not clamped",
        f"{_OFF_POLICY}; k3 of {_SCHULMAN}; prime-rl's `mismatch_kl`",
    ),
    Definition(
        "rollout_corr/{training,rollout}_ppl",
        "1",
        "[e^-p'], [e^-q'] with p', q' the sequence's means",
        _OFF_POLICY,
    ),
    Definition(
        "rollout_corr/{training,rollout}_log_ppl",
        "nat",
        "[-p'], [-q']",
        _OFF_POLICY,
    ),
    Definition(
        "rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}",
        "nat",
        "of q' - p': mean, mean of its absolute value, extremes",
        f"{_OFF_POLICY} (its code; its documentation has the other sign)",
    ),
    Definition(
        "rollout_corr/ppl_ratio",
        "1",
        "[e^(q' - p')]",
        _OFF_POLICY,
    ),
    Definition(
        "rollout_corr/chi2_{token,seq}",
        "1",
        "<e^(2 clamp(d, ±20)) - 1>, [e^(2 clamp(sum of d, ±20)) - 1]",
        _OFF_POLICY,
    ),
    Definition(
        "rollout_corr/rollout_is_*",
        "1",
        (
            "of verl's weights, by the run's `rollout_is` and threshold; without them e^clamp(d, "
            "±20)"
        ),
        (
            f"{_WEIGHTS}; truncation as in Ionides, Truncated Importance Sampling (2008); "
            "`eff_sample_size` after Kish, Survey Sampling (1965)"
        ),
    ),
    Definition(
        "train_rollout_logprob_abs_diff",
        "nat",
        "[the sequence's mean of abs(d)]",
        "slime and miles, `train/train_rollout_logprob_abs_diff`",
    ),
    Definition(
        "token_mult_prob_error",
        "1",
        "<e^abs(d)>",
        "NeMo-RL, whose alarm is at 1.05",
    ),
    Definition(
        "logprob/{stream}_{mean,std,min,max}",
        "nat",
        "over tokens; std with n - 1",
        "stagescope, for the streams that are compared",
    ),
    Definition(
        "logprob/{stream}_seq_{mean,max}",
        "nat",
        "of the sequences' token means",
        "stagescope, for the streams that are compared",
    ),
    Definition(
        "logprob_abs_diff/{mean,max}",
        "nat",
        "of abs(d) over tokens",
        (
            "TRL, `sampling/sampling_logp_difference/*`; SkyRL, "
            "`policy/rollout_train_logprobs_abs_diff_*`"
        ),
    ),
    Definition(
        "logprob_abs_diff/{p50,p90,p99,p999}",
        "nat",
        "quantiles by histogram, within 4.5 %",
        "stagescope; the histogram is OpenTelemetry's exponential one, scale 3",
    ),
    Definition(
        "tail/abs_diff_over_{0.1,0.5,1,5}_count",
        "tokens",
        "abs(d) > the bound",
        "stagescope; torchtitan's `bit_wise/ratio_tokens_different` is the share over 1e-6",
    ),
    Definition(
        "tail/ratio_outside_{0.9_1.1,0.5_2}_count",
        "tokens",
        "e^d outside the interval",
        "stagescope; [0.5, 2] is verl's example of bounds on weights",
    ),
    Definition(
        "tail/..._share",
        "1",
        "count over counted tokens",
        _OURS,
    ),
    Definition(
        "tail/..._seq_{mean,max}",
        "1",
        "of the sequences' shares",
        _OURS,
    ),
    Definition(
        "nonfinite/{stream}_{nan,posinf,neginf}",
        "tokens",
        "under the mask",
        _OURS,
    ),
    Definition(
        "counts/{tokens,masked_tokens,sequences,empty_rows}",
        "tokens, tokens, sequences, rows",
        (
            "counted tokens, all under the mask, samples with a counted token, rows without a model"
            " token"
        ),
        _OURS,
    ),
    Definition(
        "calibration/ratio_mean",
        "1",
        (
            "mean of e^clamp(d, ±20) before any rejection; 1 where q is the distribution that "
            "sampled (E_q[p/q] = 1)"
        ),
        (
            "the identity behind importance sampling: Owen, Monte Carlo Theory, Methods and "
            "Examples (2013), chapter 9"
        ),
    ),
    Definition(
        "calibration/z",
        "1",
        (
            "(that - 1) over its standard error: beyond ±6 q is another distribution (top-k, top-p,"
            " processed or raw log-probs, temperature, adapter)"
        ),
        "stagescope; the z-test of that mean",
    ),
    Definition(
        "calibration/tokens",
        "tokens",
        "what both are over: of the step those of staleness 0 where versions are known, else all; "
        "of a rank or a round all of its own",
        _OURS,
    ),
    Definition(
        "rounding/abs_diff_floor",
        "nat",
        (
            "about what rounding alone adds to the mean of abs(d), by the dtypes in which the "
            "streams arrived (bfloat16 is seen in values, too)"
        ),
        (
            "stagescope, from the spacing of floating-point numbers: Higham, Accuracy and Stability"
            " of Numerical Algorithms (2002), chapter 2"
        ),
    ),
    Definition(
        "rollout_corr/rollout_is_truncated",
        "0 or 1",
        "whether the weights are those of the run's settings; 0: untruncated e^clamp(d, ±20)",
        _OURS,
    ),
    Definition(
        "noise_floor/...",
        "that of the number",
        "the same (but `per_round/*`) of p against itself, where `recomputed_log_probs` (q) is "
        "recorded; in `series` alone, an answer of metrics has a field `noise_floor`",
        _OURS,
    ),
    Definition(
        "staleness_{k}/...",
        "that of the number",
        "some of the same over tokens that are k versions old (k < 8), where a step has several k; "
        "in `series` alone",
        _OURS,
    ),
)
