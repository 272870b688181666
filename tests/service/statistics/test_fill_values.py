"""Which fill values and clamps are found, and which ordinary values are not taken for one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from tests.service.statistics.test_causes import SHAPES, judged, summary_of
from tests.service.statistics.test_comparability import assembled
from tests.support.batches import Array, bfloat16, from_bfloat16
from tests.support.sampler import NOISE, SHARPNESS, Batch, draw

from stagescope_service.statistics import examine
from stagescope_service.statistics.coverage import missing_values

Format = Callable[[Array], Array]

KINDS = list(itertools.product([m for m in SHARPNESS if m not in ("certain", "vague")], NOISE))
CLAMPS = (-9999.0, -1e4, -100.0, -1e9, float(np.finfo(np.float32).min), -57.3)
CHOSEN = (*np.log([1e-6, 1e-8, 1e-10, 1e-20]).tolist(), -10.0, -1.0, -1e-8, -1e-10, -1e-45)


def in_bfloat16(values: Array) -> Array:
    return from_bfloat16(bfloat16(values.astype(np.float32))).astype(np.float32)


def as_it_is(values: Array) -> Array:
    return values


def decimals(digits: int) -> Format:
    return lambda values: np.round(values.astype(np.float64), digits).astype(np.float32)


def multiples_of(step: float) -> Format:
    return lambda values: (np.round(values / step) * step).astype(np.float32)


FORMATS: dict[str, Format] = {
    "float32": as_it_is, "bfloat16": in_bfloat16, "2 decimals": decimals(2),
    "3 decimals": decimals(3), "4 decimals": decimals(4), "6 decimals": decimals(6),
    "quarters": multiples_of(0.25), "64ths": multiples_of(1 / 64),
}  # fmt: skip


def filled(seed: int, side: str, value: float, count: int) -> tuple[Batch, list[tuple[int, int]]]:
    """A batch of a kind, with a value at some places where the other stream is at about -12."""
    rng = np.random.default_rng(seed)
    model, engine = KINDS[seed % len(KINDS)]
    batch = draw(rng, *SHAPES[seed % len(SHAPES)], model=model, engine=engine)
    places = [divmod(int(at), batch.p.shape[1]) for at in rng.permutation(batch.p.size)[:count]]
    own, other = (batch.p, batch.q) if side == "p" else (batch.q, batch.p)
    for place in places:
        own[place] = value
        if value > -8.0:
            other[place] = -10.8 - 3.0 * rng.random()
    return batch, places


@pytest.mark.parametrize("side", ["p", "q"])
@pytest.mark.parametrize("count", [1, 2, 3, 30])
@pytest.mark.parametrize("value", [*CLAMPS, *CHOSEN])
def test_a_fill_value_is_the_cause_and_named(value: float, count: int, side: str) -> None:
    for seed in range(6):
        batch, places = filled(seed, side, value, count)
        found = judged(batch)
        assert (found.verdict, found.cause) == ("suspect", "coverage"), found.suspects
        text = found.suspects[0].text
        number = "0 to within 1.4e-45" if value == -1e-45 else f"exactly {np.float32(value):.8g}"
        stream = {"p": "old", "q": "rollout"}[side]
        assert text.startswith(f"{stream} is {number} in {count} of "), text
        assert sum(f"sample s{row}, token {at}: " in text for row, at in places) == min(count, 3)


@pytest.mark.parametrize("value", [-9999.0, -1e4, -100.0, -57.25])
def test_a_clamp_of_a_coarse_stream_is_found(value: float) -> None:
    for seed, count in itertools.product(range(6), (1, 3)):
        batch, _ = filled(seed, "q", value, count)
        given = Batch(in_bfloat16(batch.p), in_bfloat16(batch.q), batch.entropy)
        assert judged(given).cause == "coverage"


@pytest.mark.parametrize("value", [-1.0, -2.5, -5.0])
def test_a_clamp_of_many_tokens_is_the_cause(value: float) -> None:
    """All tokens that differ most have it, so no other value shows how many digits there are."""
    rng = np.random.default_rng(5)
    for side in ("p", "q"):
        batch = draw(rng, 32, 200, model="unsure", engine=next(iter(NOISE)))
        cut = np.maximum(batch.p if side == "p" else batch.q, np.float32(value))
        batch = dataclasses.replace(batch, **{side: cut})
        found = judged(batch)
        assert found.cause == "coverage", found.suspects
        assert f"exactly {value:.8g} in 64 of the 64 tokens" in found.suspects[0].text
        assert "was cut off there (a clamp), or filled with it" in found.suspects[0].text


def test_a_number_without_a_name_is_found_where_several_tokens_have_it() -> None:
    """As of a trainer that clamps to a number of its own; one such token may be ordinary."""
    rng = np.random.default_rng(2)
    q = -rng.exponential(1.5, (32, 60)).astype(np.float32)
    p = np.minimum(q + 0.01 * rng.standard_normal(q.shape), -1e-5).astype(np.float32)
    batch = Batch(p, q, np.zeros_like(q))
    assert judged(batch).cause is None
    batch.q[3, 7] = -23.4
    assert judged(batch).cause is None
    batch.q[8, 11] = batch.q[19, 40] = -23.4
    batch.p[3, 7], batch.p[8, 11], batch.p[19, 40] = -0.3, -1.2, -3.4
    found = judged(batch)
    assert found.cause == "coverage"
    assert "exactly -23.4 in 3 of the 64 tokens" in found.suspects[0].text


@pytest.mark.parametrize("both", [True, False], ids=["both streams", "rollout"])
@pytest.mark.parametrize("name", [*FORMATS])
def test_heavy_tails_and_coarse_formats_have_no_fill_values(name: str, both: bool) -> None:
    """Tokens of -15 to -25 differ by up to 3 nat, and repeated values are usual where few exist."""
    kinds = list(itertools.product(SHARPNESS, NOISE))
    found = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        model, engine = kinds[seed % 15]
        batch = draw(rng, *SHAPES[seed % 4], model=model, engine=engine)
        if seed % 2:
            at = rng.permutation(batch.p.size)[: rng.integers(1, 30)]
            batch.p.reshape(-1)[at] = -rng.uniform(15.0, 25.0, len(at))
            batch.q.reshape(-1)[at] = batch.p.reshape(-1)[at] + rng.uniform(-3.0, 3.0, len(at))
        q = FORMATS[name](batch.q)
        p = FORMATS[name](batch.p) if both else batch.p
        check = missing_values(summary_of(Batch(p, q, batch.entropy)))
        if check.status != "ok":
            found.append((seed, model, engine, check.text))
    assert not found


def test_values_at_the_end_of_float64_are_named_without_an_overflow() -> None:
    batch = draw(np.random.default_rng(5), 32, 60)
    q = batch.q.astype(np.float64)
    q[3:6, 7] = -1.7e308
    check = missing_values(summary_of(Batch(batch.p.astype(np.float64), q, batch.entropy)))
    assert check.status == "suspect"


def test_rank_and_round_of_a_fill_value_are_named() -> None:
    batch = draw(np.random.default_rng(1), 16, 100)
    mask = np.ones(batch.p.shape, np.int64)
    mask[:, 50] = 0
    batch.q[13, 70] = -9999.0
    whole = assembled(batch, 4, mask=mask)
    found = examine(whole.summary, whole.ranks)
    assert [check.name for check in found.suspects] == ["coverage"]
    place = f"(actor 3, round 1, sample s13, token 70: {batch.p[13, 70]:.4g})"
    assert place in found.suspects[0].text


@pytest.mark.parametrize("at", [0, -1])
def test_a_fill_value_at_the_edge_of_few_rows_is_no_shift_and_no_bias_of_edges(at: int) -> None:
    """The first and the last token are in fewer pairs at other lags than in those of its own."""
    for rows in (slice(0, 1), slice(3, 6)):
        batch = draw(np.random.default_rng(5), 32, 60, model="unsure")
        batch.q[rows, at] = -9999.0
        whole = assembled(batch, 4)
        found = examine(whole.summary, whole.ranks)
        assert [check.name for check in found.suspects] == ["coverage"], found.suspects
        # A rank that is shifted indeed is named beside it.
        batch.q[8:16] = np.roll(batch.q[8:16], 1, axis=1)
        whole = assembled(dataclasses.replace(batch), 4)
        found = examine(whole.summary, whole.ranks)
        named = [check.text for check in found.suspects if check.name == "shifted"]
        assert any("(actor 1)" in text or "s8" in text for text in named), found.suspects
