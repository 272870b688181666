"""Published numbers against 60 decimal digits, from d = -700 to 700."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.batches import batch_of

from stagescope_service.statistics import Field, StatisticsSettings, Summary, publish, summarise
from stagescope_service.statistics.blocks import lagged, ratio_sums
from stagescope_service.statistics.exponentials import (
    NEAR,
    exponentials_near_0,
    exponentials_of_d,
    one_more,
)

Float64 = npt.NDArray[np.float64]
Digits = list[Decimal]

SCALARS = (
    -700.0, -400.0, -100.0, -50.0, -40.0, -37.0, -36.0, -20.5, -15.0, -2.0, -0.3, -1e-4, -1e-9,
    0.0, 1e-9, 1e-4, 0.3, 2.0, 15.0, 20.5, 36.0, 40.0, 100.0, 400.0, 700.0,
)  # fmt: skip


def reference(p: Float64, q: Float64) -> dict[str, float]:
    """One sample's numbers, token by token, in decimal arithmetic."""
    with localcontext() as context:
        context.prec = 60
        x, y = ([Decimal(float(value)) for value in stream] for stream in (p, q))
        return {name: float(value) for name, value in _exact(x, y).items()}


def _exact(x: Digits, y: Digits) -> dict[str, Decimal]:
    n = Decimal(len(x))
    d = [a - b for a, b in zip(x, y, strict=True)]
    clamped = [max(min(value, Decimal(20)), Decimal(-20)) for value in d]
    weight = [value.exp() for value in clamped]
    gap = [abs(a.exp() - b.exp()) for a, b in zip(x, y, strict=True)]
    total = max(min(sum(d, Decimal(0)), Decimal(20)), Decimal(-20))
    mean_p, mean_q, mean_d, mean_w = (sum(each, Decimal(0)) / n for each in (x, y, d, weight))
    found = {
        "token_mult_prob_error": _mean(d, lambda value: abs(value).exp()),
        "train_rollout_logprob_abs_diff": _mean(d, abs),
        "logprob_abs_diff/mean": _mean(d, abs),
        "logprob_abs_diff/max": max(map(abs, d)),
        "rollout_corr/kl": -mean_d,
        "rollout_corr/k3_kl": _mean(d, lambda value: value.exp() - 1 - value),
        "rollout_corr/chi2_token": _mean(clamped, lambda value: (2 * value).exp() - 1),
        "rollout_corr/chi2_seq": (2 * total).exp() - 1,
        "rollout_corr/training_ppl": (-mean_p).exp(),
        "rollout_corr/rollout_ppl": (-mean_q).exp(),
        "rollout_corr/training_log_ppl": -mean_p,
        "rollout_corr/rollout_log_ppl": -mean_q,
        "rollout_corr/log_ppl_diff": -mean_d,
        "rollout_corr/log_ppl_abs_diff": abs(mean_d),
        "rollout_corr/log_ppl_diff_max": -mean_d,
        "rollout_corr/log_ppl_diff_min": -mean_d,
        "rollout_corr/ppl_ratio": (-mean_d).exp(),
        "rollout_corr/rollout_is_mean": mean_w,
        "rollout_corr/rollout_is_max": max(weight),
        "rollout_corr/rollout_is_min": min(weight),
        "rollout_corr/rollout_is_seq_mean": mean_w,
        "rollout_corr/rollout_is_seq_max": mean_w,
        "rollout_corr/rollout_is_seq_min": mean_w,
        "rollout_corr/rollout_is_seq_max_deviation": abs(mean_w - 1),
        "rollout_corr/rollout_is_std": _mean(weight, lambda w: (w - mean_w) ** 2).sqrt(),
        "rollout_corr/rollout_is_eff_sample_size": (mean_w + Decimal("1e-8")) ** 2
        / _mean(weight, lambda w: w * w),
        "training/rollout_probs_diff_mean": sum(gap) / n,
        "training/rollout_probs_diff_max": max(gap),
        "calibration/ratio_mean": _mean(clamped, lambda value: value.exp()),
        "calibration/tokens": Decimal(n),
        "per_round/max_diff_value": _mean(d, abs),
        "per_round/round_0_abs_diff_mean": _mean(d, abs),
    }
    for name, values in (("old", x), ("rollout", y)):
        mean = sum(values, Decimal(0)) / n
        for key in ("mean", "seq_mean", "seq_max"):
            found[f"logprob/{name}_{key}"] = mean
        found[f"logprob/{name}_min"], found[f"logprob/{name}_max"] = min(values), max(values)
        if n > 1:
            found[f"logprob/{name}_std"] = _std(values)
    if n > 1:
        found["training/rollout_probs_diff_std"] = _std(gap)
        found["calibration/z"] = _z(weight)
    for bound in ("0.1", "0.5", "1", "5"):
        outside = [abs(value) > Decimal(bound) for value in d]
        found |= _tail(f"abs_diff_over_{bound}", outside)
    for low, high in (("0.9", "1.1"), ("0.5", "2")):
        outside = [not Decimal(low) <= value.exp() <= Decimal(high) for value in d]
        found |= _tail(f"ratio_outside_{low}_{high}", outside)
    return found


def _tail(name: str, outside: Sequence[bool]) -> dict[str, Decimal]:
    count = Decimal(sum(outside))
    shares = {
        f"tail/{name}_{key}": count / len(outside) for key in ("share", "seq_mean", "seq_max")
    }
    return {f"tail/{name}_count": count, **shares}


def _mean(values: Sequence[Decimal], of: Callable[[Decimal], Decimal]) -> Decimal:
    return sum((of(value) for value in values), Decimal(0)) / len(values)


def _std(values: Sequence[Decimal]) -> Decimal:
    mean = sum(values, Decimal(0)) / len(values)
    square = sum(((value - mean) ** 2 for value in values), Decimal(0))
    return (square / (len(values) - 1)).sqrt()


def _z(ratios: Sequence[Decimal]) -> Decimal:
    bias = sum(ratios, Decimal(0)) / len(ratios) - 1
    if len({*ratios}) == 1:
        return Decimal("inf").copy_sign(bias) if bias else Decimal("nan")
    return bias / (_std(ratios) / Decimal(len(ratios)).sqrt())


UNCHECKED = {
    "training/rollout_actor_probs_pearson_corr", "training/rollout_probs_diff_valid",
    "per_round/total_rounds", "per_round/max_round_diff", "per_round/round_0_token_count",
    "rollout_corr/rollout_is_seq_std", "rollout_corr/rollout_is_truncated",
    "rounding/abs_diff_floor",
}  # fmt: skip
"""Of one sample nothing, or no matter of precision; quantiles are within 4.5 %, as said."""


def is_mean_of_weights(name: str) -> bool:
    return name == "calibration/ratio_mean" or (
        "rollout_is" in name and not name.endswith(("_std", "_deviation"))
    )


def assert_precise(p: Float64, q: Float64) -> None:
    found = publish(summarise(batch_of(p[None], q[None], np.ones((1, len(p)), np.int64))))
    expected = reference(p, q)
    skipped = ("nonfinite/", "counts/", "logprob_abs_diff/p")
    names = {name for name in found if name not in UNCHECKED and not name.startswith(skipped)}
    if len(p) < 2:
        names = {name for name in names if not math.isnan(found[name])}
        assert {"token_mult_prob_error", "rollout_corr/k3_kl"} <= names
    assert names <= set(expected)
    scale = float(np.abs(p - q).mean())
    for name in sorted(names):
        # Means of weights far below 1, and of differences that cancel, are as exact as their terms.
        cancels = name.endswith(("/kl", "chi2_token", "chi2_seq")) or "log_ppl" in name
        stepless = 1e-14 * scale if cancels else 0.0
        if name.endswith("_std"):
            largest = expected.get(name.replace("_std", "_max"), 1.0)
            stepless = 1e-14 * (largest if "rollout_is" in name else max(1.0, largest))
        within = 1e-12 if is_mean_of_weights(name) else 1e-9
        if name == "calibration/z":
            # Ratios that are equal to 13 digits are equal: float64 has no more of their deviation.
            within = 1e-7
            if abs(expected[name]) > 1e12:
                expected[name] = math.copysign(math.inf, expected[name])
        wanted = pytest.approx(
            expected[name], rel=within, abs=stepless, nan_ok=name == "calibration/z"
        )
        assert found[name] == wanted, name


def streams(d: Float64, rng: np.random.Generator) -> tuple[Float64, Float64]:
    """Return p and q, none above 0, that differ by d."""
    top = -rng.exponential(0.5, len(d))
    return np.where(d > 0, top, top + d), np.where(d > 0, top - d, top)


@pytest.mark.parametrize("d", SCALARS)
def test_every_name_of_tokens_that_differ_by_one_number(d: float) -> None:
    rng = np.random.default_rng(int(abs(d) * 10))
    for tokens in (1, 3):
        assert_precise(*streams(np.full(tokens, d), rng))


@pytest.mark.parametrize("reach", [1e-6, 0.1, 3.0, 25.0, 45.0, 300.0, 700.0])
@pytest.mark.parametrize("side", [-1, 0, 1])
def test_every_name_of_mixtures(reach: float, side: int) -> None:
    rng = np.random.default_rng(side + 1)
    d = rng.uniform(-reach if side < 1 else 0.0, reach if side > -1 else 0.0, 40)
    assert_precise(*streams(d, rng))


@pytest.mark.parametrize("d", [-700.0, -2.0, 1e-6, 0.3, 2.0, 700.0])
@pytest.mark.parametrize("top", [-20.25, -40.0, -100.0, -650.0])
def test_differences_of_improbable_tokens(d: float, top: float) -> None:
    x = top - np.array([0.0, 0.5, 3.0, 30.0])
    p, q = (x, x - d) if d > 0 else (x + d, x)
    found = publish(summarise(batch_of(p[None], q[None], np.ones((1, 4), np.int64))))
    expected = reference(p, q)
    for name in ("mean", "max"):
        key = f"training/rollout_probs_diff_{name}"
        assert found[key] == pytest.approx(expected[key], rel=1e-12, abs=1e-320), (d, top)


FAR_BELOW = {
    "all clamped": (-700.0, -20.0), "near the clamp": (-20.0, -19.9), "far": (-25.0, -10.0),
    "wide": (-720.0, -15.0), "some near 1": (-700.0, 0.0), "around 1": (-20.0, 20.0),
    "no further than rounding": (-1e-9, 1e-9),
}  # fmt: skip


@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("name", [*FAR_BELOW])
def test_weights_far_below_1_in_many_parts(name: str, level: str | None) -> None:
    """Of several blocks of tokens a row, rows a part and parts; in decimal, from their tokens."""
    low, high = FAR_BELOW[name]
    rng = np.random.default_rng(11)
    settings = StatisticsSettings(level, 2.0 if level else None)
    p, q = streams(rng.uniform(low, high, 4 * 300), rng)
    p, q = p.reshape(4, 300), q.reshape(4, 300)
    on = np.ones((2, 300), np.int64)
    parts = [summarise(batch_of(p[at], q[at], on), settings) for at in (slice(2), slice(2, 4))]
    found = publish(Summary.merge([part.named(str(at)) for at, part in enumerate(parts)]))
    with localcontext() as context:
        context.prec = 60
        d = [[Decimal(x) - Decimal(y) for x, y in zip(*row, strict=True)]
             for row in zip(p.tolist(), q.tolist(), strict=True)]  # fmt: skip
        most = Decimal(2) if level else Decimal(10**10)
        ratios = [[_clamped_exp(value) for value in row] for row in d]
        weights = [[min(ratio, most) for ratio in row] for row in ratios]
        if level == "sequence":
            weights = [[min(_clamped_exp(sum(row, Decimal(0))), most)] * 300 for row in d]
        every = [w for row in weights for w in row]
        mean, square = _mean(every, lambda w: w), _mean(every, lambda w: w * w)
        rows = [_mean(row, lambda w: w) for row in weights]
        flat = [ratio for row in ratios for ratio in row]
        z = float(_z(flat))
        expected = {
            "rollout_corr/rollout_is_mean": mean,
            "rollout_corr/rollout_is_seq_mean": _mean(rows, lambda w: w),
            "rollout_corr/rollout_is_seq_max": max(rows),
            "rollout_corr/rollout_is_seq_min": min(rows),
            "rollout_corr/rollout_is_eff_sample_size": (mean + Decimal("1e-8")) ** 2 / square,
            "calibration/ratio_mean": _mean(flat, lambda ratio: ratio),
        }
        spread = _mean(every, lambda w: (w - mean) ** 2).sqrt()
    for key, value in expected.items():
        assert found[key] == pytest.approx(float(value), rel=1e-12, abs=0.0), key
    assert found["rollout_corr/rollout_is_std"] == pytest.approx(float(spread), rel=1e-7, abs=1e-30)
    assert found["calibration/z"] == pytest.approx(z, rel=1e-7)


def _clamped_exp(value: Decimal) -> Decimal:
    return max(min(value, Decimal(20)), Decimal(-20)).exp()


def test_a_token_far_below_the_others_spoils_none() -> None:
    rng = np.random.default_rng(5)
    p, q = streams(rng.normal(0.0, 1e-9, 30), rng)
    p[7] = q[7] = -720.0
    assert_precise(p, q)


def test_what_is_beyond_float64_is_infinite_and_never_nan() -> None:
    p, q = np.array([-1.0, -0.5, -0.2]), np.array([-1.0, -760.0, -0.1])
    found = publish(summarise(batch_of(p[None], q[None], np.ones((1, 3), np.int64))))
    assert found["token_mult_prob_error"] == found["rollout_corr/k3_kl"] == math.inf
    assert math.isfinite(found["rollout_corr/chi2_token"])
    swapped = publish(summarise(batch_of(q[None], p[None], np.ones((1, 3), np.int64))))
    assert swapped["token_mult_prob_error"] == math.inf
    assert swapped["rollout_corr/k3_kl"] == pytest.approx(758.5 / 3, rel=0.01)
    for metrics in (found, swapped):
        assert not [name for name, value in metrics.items() if math.isnan(value)]


def test_no_correlation_is_made_of_rounding() -> None:
    rng = np.random.default_rng(6)
    q = -rng.exponential(0.5, 300)
    mask = np.ones((1, 300), np.int64)
    name = "training/rollout_actor_probs_pearson_corr"
    for shift in (5.0, 10.0, 15.0, 36.0, 300.0):
        found = publish(summarise(batch_of((q - shift)[None], q[None], mask)))
        assert found[name] == pytest.approx(1.0, abs=1e-12)
    for flat in (-5.0 + 1e-14 * q, q - 360.0):
        assert math.isnan(publish(summarise(batch_of(flat[None], q[None], mask)))[name])


@pytest.mark.parametrize(
    ("top", "spread"),
    [(-1.0, 1.0), (-14.0, 0.5), (-17.0, 0.1), (-25.0, 1.0), (-100.0, 2.0), (-1e-8, 5e-9),
     (-1e-13, 5e-14), (-0.7, 0.01), (-5.0, 1e-5), (-10.0, 20.0)],
)  # fmt: skip
def test_a_correlation_of_probabilities_is_exact_wherever_they_lie(
    top: float, spread: float
) -> None:
    """By round and of all rounds, in several blocks and parts; in decimal, from their tokens."""
    rng = np.random.default_rng(7)
    q = np.minimum(top + spread * rng.normal(size=(4, 1400)), 0.0)
    p = np.minimum(q + 0.5 * spread * rng.normal(size=q.shape), 0.0)
    mask = np.ones((2, 1400), np.int64)
    mask[:, 700] = 0
    parts = [summarise(batch_of(p[at], q[at], mask)) for at in (slice(2), slice(2, 4))]
    summary = Summary.merge([part.named(str(at)) for at, part in enumerate(parts)])
    rounds = [cell for _, cell in summary.rounds.items()]
    for cell, chosen in zip(
        [*rounds, summary.total],
        (slice(700), slice(701, 1400), np.arange(1400) != 700), strict=True,
    ):  # fmt: skip
        with localcontext() as context:
            context.prec = 60
            x, y = ([Decimal(v).exp() for v in each[:, chosen].ravel()] for each in (p, q))
            a, b = (_mean(each, lambda v: v) for each in (x, y))
            moment = sum((u - a) * (v - b) for u, v in zip(x, y, strict=True))
            squares = [sum((v - m) ** 2 for v in each) for each, m in ((x, a), (y, b))]
            expected = float(moment / (Decimal(squares[0]) * squares[1]).sqrt())
        found = cell.correlation(Field.U_M2, Field.V_M2, Field.UV_C)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-10)


def test_exponentials_near_0_have_the_same_digits() -> None:
    x = np.concatenate([np.linspace(-NEAR, NEAR, 4001), [0.0, 5e-324, 1e-300, -1e-17]])
    near, far = np.empty((2, len(x))), np.empty((2, len(x)))
    of_near, of_far = np.zeros(len(Field)), np.zeros(len(Field))
    of_near[Field.D_SUM] = of_far[Field.D_SUM] = x.sum()
    exponentials_near_0(x, len(x), near[0], of_near)
    one_more(near[0], len(x), near[1])
    exponentials_of_d(x, len(x), far[0], far[1], of_far)
    ratio_sums(far[0], far[1], len(x), of_far)
    assert np.array_equal(near, far)
    assert of_near == pytest.approx(of_far, rel=1e-14, abs=1e-12)


def test_a_loop_counts_no_references_to_its_arrays() -> None:
    """The atomic operations took a third of the kernel's time."""
    numbers, out = np.full(4, -0.5), np.zeros(len(Field))
    lagged(numbers, numbers, 4, 1.0, 0, np.zeros(5), out)
    # One form, or two if this process also compiled the kernel that calls it.
    for code in lagged.inspect_llvm().values():  # type: ignore[attr-defined]
        assert "fadd" in code
        assert "NRT_incref" not in code
