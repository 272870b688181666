"""verl's importance weights, against its formulas written out in torch-free float64."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.batches import batch_of, random_streams

from stagescope_service.statistics import StatisticsSettings, publish, summarise
from stagescope_service.statistics.codec import summary_from_bytes, summary_to_bytes
from stagescope_wire.errors import InvalidInput


def expected(
    p: npt.NDArray[np.float64],
    q: npt.NDArray[np.float64],
    mask: npt.NDArray[np.bool_],
    settings: StatisticsSettings,
) -> dict[str, float]:
    text = str(settings.rollout_is_threshold)
    low, _, high = text.rpartition("_")
    upper = float(high)
    lower = float(low) if low else 1 / upper
    on = mask == 1
    ratio = np.where(on, p.astype(float) - q.astype(float), 0.0)
    n = on.sum(axis=1)
    if settings.rollout_is == "sequence":
        ratio = np.repeat(ratio.sum(axis=1, keepdims=True), ratio.shape[1], axis=1)
    raw = np.exp(np.clip(ratio, -20, 20)) * on
    applied = np.where((raw >= lower) & (raw <= upper), raw, 0) if low else np.minimum(raw, upper)
    w = applied[on]
    row = applied.sum(axis=1) / n
    raw_row = raw.sum(axis=1) / n
    out = {
        "mean": w.mean(),
        "std": math.sqrt(max((w**2).mean() - w.mean() ** 2, 0)),
        "eff_sample_size": 1 / ((w / (w.mean() + 1e-8)) ** 2).mean(),
        "seq_mean": row.mean(),
        "seq_std": row.std(ddof=1),
        "seq_max": row.max(),
        "seq_min": row.min(),
        "seq_max_deviation": np.abs(row - 1).max(),
        "seq_fraction_high": (raw_row > upper).mean(),
        "seq_fraction_low": (raw_row < lower).mean(),
    }
    if settings.rollout_is == "sequence":
        log = ratio[:, 0]
        out |= {"max": math.exp(min(log.max(), 20)), "min": math.exp(log.min())}
        out |= {"ratio_fraction_high": (log > math.log(upper)).mean()}
        out |= {"ratio_fraction_low": (log < math.log(lower)).mean()}
    else:
        out |= {"max": w.max(), "min": w.min()}
        out |= {"ratio_fraction_high": (raw[on] > upper).mean()}
        out |= {"ratio_fraction_low": (raw[on] < lower).mean()}
    if low:
        out["oob_ratio"] = ((raw[on] < lower) | (raw[on] > upper)).mean()
    if settings.rollout_is_batch_normalize:
        out["batch_norm_factor"] = row.mean() if settings.rollout_is == "sequence" else w.mean()
    return {f"rollout_corr/rollout_is_{k}": float(v) for k, v in out.items()}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [2.0, "1.3", "0.8_1.2", 0.7])
def test_weights_are_those_of_verl(level: str, threshold: float | str) -> None:
    p, q, mask = random_streams(np.random.default_rng(8), 12, 60, 0.3)
    settings = StatisticsSettings(level, threshold, rollout_is_batch_normalize=True)
    found = publish(summarise(batch_of(p, q, mask), settings))
    assert found["rollout_corr/rollout_is_truncated"] == 1.0
    for name, value in expected(p, q, mask, settings).items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [math.inf, "inf"])
def test_weights_without_a_bound_are_cut_nowhere(level: str, threshold: float | str) -> None:
    p, q = np.array([[-1.0, -1.0]]), np.array([[-4.0, -0.5]])
    settings = StatisticsSettings(level, threshold)
    summary = summarise(batch_of(p, q, np.ones((1, 2))), settings)
    found = publish(summary_from_bytes(summary_to_bytes(summary)))
    largest = 3.0 if level == "token" else 2.5
    assert found["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(largest))
    assert found["rollout_corr/rollout_is_ratio_fraction_high"] == 0.0
    assert found["rollout_corr/rollout_is_ratio_fraction_low"] == 0.0


def test_without_settings_the_weights_are_untruncated_and_say_so() -> None:
    p, q = np.array([[-1.0, -1.0]]), np.array([[-4.0, -0.5]])
    found = publish(summarise(batch_of(p, q, np.ones((1, 2)))))
    assert found["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(3))
    assert found["rollout_corr/rollout_is_truncated"] == 0.0
    assert "rollout_corr/rollout_is_ratio_fraction_high" not in found


@pytest.mark.parametrize("bad", [0, -1.0, "2_1", "a", "nan", "0_2"])
def test_a_threshold_that_makes_no_sense_is_refused(bad: float | str) -> None:
    with pytest.raises(InvalidInput, match="rollout_is_threshold"):
        StatisticsSettings("token", bad)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidInput, match="geometric"):
        StatisticsSettings("geometric")
