"""Temperatures and cuts that are found from logits alone."""

from __future__ import annotations

import numpy as np
import pytest

from stagescope_wire.engines import Sampling
from stagescope_workers.bisect.variants import Logits

UNKNOWN = Sampling(temperature=1.0)


def drawn(
    sampling: Sampling, noise: float
) -> tuple[Logits, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Tokens that an engine draws so, with logits of another rounding, and their log-probs."""
    random = np.random.default_rng(3)
    logits = (random.normal(size=(100, 300)) * 2.5).astype(np.float32)
    scaled = np.exp(logits.astype(np.float64) / sampling.temperature)
    p = scaled / scaled.sum(axis=1, keepdims=True)
    ids, log_probs = [], []
    for row in p:
        order = np.argsort(-row)
        kept = sampling.top_k or len(row)
        if sampling.top_p < 1:
            kept = min(kept, int(np.searchsorted(np.cumsum(row[order]), sampling.top_p)) + 1)
        own = row[order[:kept]] / row[order[:kept]].sum()
        at = random.choice(kept, p=own)
        ids.append(order[at])
        log_probs.append(np.log(own[at]))
    rounded = (logits + noise * random.normal(size=logits.shape)).astype(np.float32)
    return Logits(rounded, np.array(ids)), np.array(log_probs)


@pytest.mark.parametrize("noise", [0.0, 0.025])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.7), Sampling(temperature=1.35), Sampling(temperature=1.0, top_p=0.9),
     Sampling(temperature=1.0, top_k=20), Sampling(temperature=0.8, top_p=0.95),
     Sampling(temperature=0.6, top_k=10), Sampling(temperature=1.0, top_p=0.83)],
    ids=str,
)  # fmt: skip
def test_the_sampling_is_found_from_processed_log_probs(sampling: Sampling, noise: float) -> None:
    logits, target = drawn(sampling, noise)
    found = logits.fit(target, UNKNOWN)
    assert found.sampling.temperature == pytest.approx(sampling.temperature, abs=0.005)
    assert found.sampling.top_k == sampling.top_k
    assert found.sampling.top_p == pytest.approx(sampling.top_p, abs=0.011)
    assert found.mean < 1.5 * noise + 1e-5


def test_both_cuts_are_found_where_they_were_recorded() -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=50)
    logits, _ = drawn(Sampling(temperature=0.8, top_k=5), 0.0)
    target = logits.processed(sampling)
    assert np.isfinite(target).all()
    assert logits.fit(target, sampling).sampling == sampling


def test_other_weights_are_no_temperature() -> None:
    logits, target = drawn(UNKNOWN, 0.0)
    other = target + np.random.default_rng(9).normal(0, 1, len(target))
    assert logits.fit(other, UNKNOWN).mean > 0.5 * np.abs(other - logits.log_probs).mean()
