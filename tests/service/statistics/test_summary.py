from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.batches import batch_of, bfloat16, from_bfloat16, random_streams
from tests.support.mismatch_reference import reference, tails, tokens_of

from stagescope_service.statistics import (
    Field,
    StatisticsSettings,
    Summary,
    publish,
    publish_cell,
    summarise,
)
from stagescope_service.statistics import cell as cells
from stagescope_service.statistics.codec import summary_from_bytes, summary_to_bytes
from stagescope_service.statistics.sequence_row import ROW
from stagescope_wire.errors import InvalidInput
from stagescope_wire.names import unit_of_metric

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
DOCUMENTED = [
    tuple(cell.strip().strip("`") if not at else cell.strip() for at, cell in enumerate(cells_))
    for line in PAGE.read_text("utf-8").splitlines()
    if line.startswith("| `") and (cells_ := line.strip("| ").split(" | "))
]
"""The table of metrics: names, unit, formula, source."""
CASES = st.tuples(
    st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 300), st.sampled_from([1e-7, 0.05, 3])
)


def assert_close(found: dict[str, float], expected: dict[str, float], tolerance: float) -> None:
    for name, value in expected.items():
        if math.isnan(value):
            assert math.isnan(found[name]), name
        else:
            assert found[name] == pytest.approx(value, rel=tolerance, abs=1e-300), name


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_every_number_agrees_with_the_plain_reference(case: tuple[int, int, int, float]) -> None:
    seed, rows, width, noise = case
    p, q, mask = random_streams(np.random.default_rng(seed), rows, width, noise)
    tokens, _ = tokens_of(p.astype(float), q.astype(float), mask)
    if len(tokens) < 3 or len({t.p for t in tokens}) < 2 or len({t.q for t in tokens}) < 2:
        return
    found = publish(summarise(batch_of(p, q, mask)))
    expected = reference(tokens) | tails(tokens)
    # kl is a difference of sums that may nearly cancel: compare it on the scale of its terms.
    scale = float(np.mean([abs(t.d) for t in tokens]))
    for name in ("rollout_corr/kl", "rollout_corr/log_ppl_diff", "rollout_corr/chi2_token"):
        assert found[name] == pytest.approx(expected.pop(name), abs=1e-9 * scale, rel=1e-9)
    assert_close(found, expected, 1e-9)
    assert sum(v for k, v in found.items() if k.endswith("_token_count")) == len(tokens)


@settings(max_examples=60, deadline=None)
@given(CASES, st.data())
def test_any_split_over_rows_merges_to_the_whole(
    case: tuple[int, int, int, float], data: st.DataObject
) -> None:
    seed, rows, width, noise = case
    rng = np.random.default_rng(seed)
    p, q, mask = random_streams(rng, rows, width, noise)
    p[rng.random(p.shape) < 0.01] = np.nan
    q[rng.random(p.shape) < 0.01] = -np.inf
    samples = [f"sample-{i}" for i in range(rows)]
    whole = summarise(batch_of(p, q, mask, samples=samples))
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    parts = [
        summarise(
            batch_of(p[owner == k], q[owner == k], mask[owner == k],
                     samples=[samples[i] for i in np.flatnonzero(owner == k)])
        )
        for k in range(3)
    ]  # fmt: skip
    merged = Summary.merge([summary_from_bytes(summary_to_bytes(part)) for part in parts])
    assert_same(merged, whole)


def assert_same(merged: Summary, whole: Summary) -> None:
    """Counts, extremes, histograms and kept tokens exactly; sums and moments closely."""
    assert merged.rounds.keys.tolist() == whole.rounds.keys.tolist()
    for (_, a), (_, b) in zip(merged.rounds.items(), whole.rounds.items(), strict=True):
        assert_same_cell(a.vector, b.vector)
    assert_same_cell(merged.total.vector, whole.total.vector)
    for name in ("rounds", "buckets", "counts"):
        assert np.array_equal(getattr(merged.histogram, name), getattr(whole.histogram, name))
    for kept in ("worst", "non_finite"):
        a, b = getattr(merged, kept), getattr(whole, kept)
        for name in ("position", "round", "p", "q"):
            assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True), name
        assert [merged.sequences.samples[i] for i in a.sequence] == [
            whole.sequences.samples[i] for i in b.sequence
        ]
    found, expected = publish(merged), publish(whole)
    assert found.keys() == expected.keys()
    # Its variance is a difference of sums, which has eight digits where d is about 1e-8.
    assert_close(found, {"calibration/z": expected.pop("calibration/z")}, 1e-7)
    assert_close(found, {k: v for k, v in expected.items() if "kl" not in k}, 1e-9)


def assert_same_cell(found: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> None:
    sums, last_count = list(range(Field.D_SUM, Field.D_MIN)), Field.IS_LOW
    assert np.array_equal(found[: last_count + 1], expected[: last_count + 1])
    extremes = slice(Field.D_MIN, Field.D_M2)
    assert np.array_equal(found[extremes], expected[extremes])
    for field in sums:
        # Differences, and weights minus 1, may cancel: what is rounded are their terms.
        terms = max(abs(expected[field]), expected[Field.D_ABS_SUM])
        assert abs(found[field] - expected[field]) <= 1e-12 * terms + 1e-290, Field(field)
    for x, y, xy in (
        (Field.P_M2, Field.Q_M2, Field.PQ_C),
        (Field.U_M2, Field.V_M2, Field.UV_C),
        (Field.D_M2, Field.A_M2, None),
    ):
        assert found[x] == pytest.approx(expected[x], rel=1e-9, abs=1e-24)
        assert found[y] == pytest.approx(expected[y], rel=1e-9, abs=1e-24)
        if xy is not None:
            scale = math.sqrt(expected[x] * expected[y])
            assert found[xy] == pytest.approx(expected[xy], abs=1e-9 * scale + 1e-24)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from([1, 2, 3, 255, 256, 257, 600]))
def test_what_alignment_rounding_and_padding_show(seed: int, rows: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    p, q, mask = random_streams(rng, rows, width, 0.01)
    p[rng.random(p.shape) < 0.3] = 0.0
    q[rng.random(p.shape) < 0.3] = 0.0
    p[rng.random(p.shape) < 0.02] = 0.25
    q[rng.random(p.shape) < 0.01] = np.nan
    rounded = rng.random(p.shape) < 0.2
    q[rounded] = from_bfloat16(bfloat16(p[rounded]))
    expected: dict[str, float] = dict.fromkeys(
        ("AHEAD_1", "BEHIND_1", "AHEAD_2", "BEHIND_2", "NEXT_N", "LAG2_N", "SEGMENTS",
         "EDGE_ZERO", "EDGE_CAPPED", "TRAIL_CAPPED", "TRAIL_SQUARES", "P_BF16",
         "Q_BF16", "SAME_BF16", "P_ZERO", "Q_ZERO",
         "P_POSITIVE", "Q_POSITIVE", "BOTH_ZERO", "P_LACKS", "Q_LACKS", "P_LACKS_ABS",
         "Q_LACKS_ABS"), 0.0,
    )  # fmt: skip
    first = None
    for row in range(rows):
        for start, stop in stretches(mask[row]):
            x, y = p[row, start:stop].astype(float), q[row, start:stop].astype(float)
            both = np.isfinite(x) & np.isfinite(y)
            for name, lag in (("AHEAD", 1), ("AHEAD", 2), ("BEHIND", 1), ("BEHIND", 2)):
                a, b = (x[:-lag], y[lag:]) if name == "AHEAD" else (x[lag:], y[:-lag])
                run = np.ones(max(len(x) - lag, 0), bool)
                for k in range(lag + 1):
                    run &= both[k : len(x) - lag + k]
                expected[f"{name}_{lag}"] += float(np.abs(a - b)[run].sum())
                expected["NEXT_N" if lag == 1 else "LAG2_N"] += 0.5 * int(run.sum())
            zeros = (x == 0) & (y == 0)
            lead = len(x) if zeros.all() else int(np.argmin(zeros))
            trail = 0 if zeros.all() else int(np.argmin(zeros[::-1]))
            expected["SEGMENTS"] += 1
            expected["EDGE_ZERO"] += lead + trail
            expected["EDGE_CAPPED"] += min(lead, cells.EDGE) + min(trail, cells.EDGE)
            expected["TRAIL_CAPPED"] += min(trail, cells.EDGE)
            expected["TRAIL_SQUARES"] += min(trail, cells.EDGE) ** 2
            x_lacks, y_lacks = ((v == 0) | ~np.isfinite(v) for v in (x, y))
            expected["P_LACKS"] += int((x_lacks & ~y_lacks).sum())
            expected["Q_LACKS"] += int((y_lacks & ~x_lacks).sum())
            x, y = x[both], y[both]
            for name, values in (("P", x), ("Q", y)):
                expected[f"{name}_ZERO"] += int((values == 0).sum())
                expected[f"{name}_POSITIVE"] += int((values > 0).sum())
            p_held, q_held = (
                from_bfloat16(bfloat16(v.astype(np.float32))).astype(float) for v in (x, y)
            )
            expected["P_BF16"] += int((p_held == x).sum())
            expected["Q_BF16"] += int((q_held == y).sum())
            expected["SAME_BF16"] += int((p_held == q_held).sum())
            expected["BOTH_ZERO"] += int(((x == 0) & (y == 0)).sum())
            expected["P_LACKS_ABS"] += float(np.abs(y[x == 0]).sum())
            expected["Q_LACKS_ABS"] += float(np.abs(x[y == 0]).sum())
            differ = np.flatnonzero(both & (p[row, start:stop] != q[row, start:stop]))
            if first is None and len(differ):
                first = (row, start + int(differ[0]))
    found = summarise(batch_of(p, q, mask))
    for name, value in expected.items():
        assert found.total[Field[name]] == pytest.approx(value, rel=1e-12, abs=1e-12), name
    columns = found.sequences.values.sum(axis=0)
    for name in ("ahead_1", "behind_1", "ahead_2", "behind_2", "lag2_n"):
        field = Field["LAG2_N" if name == "lag2_n" else name.upper()]
        assert columns[ROW.index(name)] == pytest.approx(found.total[field], rel=1e-12)
    where = [
        (int(found.sequences.row[sequence]), int(position))
        for sequence, position in zip(found.unequal.sequence, found.unequal.position, strict=True)
    ]
    assert where == ([] if first is None else [first])


def stretches(mask: npt.NDArray[np.generic]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@pytest.mark.parametrize("p_type", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("q_type", ["float64", "float16", "bfloat16"])
def test_dtypes_are_widened_exactly(p_type: str, q_type: str) -> None:
    rng = np.random.default_rng(1)
    p, q, mask = random_streams(rng, 5, 200, 0.5)
    p[0, :4] = [-65504.0, -6e-8, -3.1e-5, -0.0]

    def cast(values: Any, kind: str) -> tuple[Any, Any]:
        if kind == "bfloat16":
            bits = bfloat16(values)
            return bits, from_bfloat16(bits)
        return values.astype(kind), values.astype(kind).astype(np.float64)

    (p, p_wide), (q, q_wide) = cast(p, p_type), cast(q, q_type)
    summary = summarise(batch_of(p, q, mask))
    tokens, _ = tokens_of(p_wide, q_wide, mask)
    found = publish(summary)
    expected = {k: v for k, v in reference(tokens).items() if "kl" not in k and "ppl" not in k}
    expected.pop("rollout_corr/chi2_token")
    assert_close(found, expected, 1e-9)
    assert summary.dtypes == {"old": (p_type,), "rollout": (q_type,)}


def test_float16_and_bfloat16_keep_what_is_not_finite() -> None:
    values = np.array([[np.nan, np.inf, -np.inf, -1.0]], np.float32)
    mask = np.ones((1, 4), np.int64)
    for stored in (values.astype(np.float16), bfloat16(values)):
        found = publish(summarise(batch_of(stored, np.full((1, 4), -1.0), mask)))
        kinds = {k: v for k, v in found.items() if k.startswith("nonfinite/old")}
        assert list(kinds.values()) == [1.0, 1.0, 1.0]
        assert found["counts/tokens"] == 1.0


def test_non_finite_tokens_are_counted_by_kind_and_listed() -> None:
    rng = np.random.default_rng(2)
    p, q, _ = random_streams(rng, 4, 700)
    mask = np.ones((4, 700), np.int64)
    mask[:, ::50] = 0
    p[1, 3], p[2, 5], p[3, 699] = np.nan, np.inf, -np.inf
    q[1, 3], q[0, 301] = -np.inf, np.nan
    p[0, 0] = np.nan  # Under no mask: not there at all.
    tokens, odd = tokens_of(p, q, mask)
    summary = summarise(batch_of(p, q, mask, responses=np.arange(2800).reshape(4, 700)))
    found = publish(summary)
    assert {k: found[f"nonfinite/{k}"] for k in odd} == odd
    assert found["counts/masked_tokens"] - found["counts/tokens"] == 4
    expected = {k: v for k, v in reference(tokens).items() if "kl" not in k}
    assert_close(found, expected, 1e-9)
    listed = summary.non_finite
    assert summary.sequences.row[listed.sequence].tolist() == [0, 1, 2, 3]
    assert listed.position.tolist() == [301, 3, 5, 699]
    assert listed.token_id.tolist() == [301, 703, 1405, 2799]
    assert listed.round.tolist() == [6, 0, 0, 13]


def test_constant_streams_have_no_spread_and_no_correlation() -> None:
    p, q = np.full((3, 1000), -0.3), np.full((3, 1000), -0.7)
    found = publish(summarise(batch_of(p, q, np.ones((3, 1000), bool))))
    assert found["training/rollout_probs_diff_std"] == 0.0
    assert found["logprob/old_std"] == 0.0
    assert found["rollout_corr/rollout_is_std"] == 0.0
    assert found["logprob/old_min"] == found["logprob/old_max"] == -0.3
    assert math.isnan(found["training/rollout_actor_probs_pearson_corr"])


def test_no_token_that_counts() -> None:
    found = publish(summarise(batch_of(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 3)))))
    assert found["training/rollout_probs_diff_valid"] == 0
    assert math.isnan(found["training/rollout_probs_diff_mean"])
    assert math.isnan(found["rollout_corr/kl"])
    assert {k: v for k, v in found.items() if k.startswith("per_round/")} == {
        "per_round/total_rounds": 0
    }
    assert found["counts/empty_rows"] == 2


def test_one_token() -> None:
    found = publish(summarise(batch_of(np.array([[-1.0]]), np.array([[-1.5]]), np.ones((1, 1)))))
    assert math.isnan(found["training/rollout_probs_diff_std"])
    assert math.isnan(found["training/rollout_actor_probs_pearson_corr"])
    assert found["rollout_corr/rollout_is_std"] == 0.0
    assert found["per_round/max_round_diff"] == 0
    assert found["logprob_abs_diff/max"] == 0.5
    assert found["logprob_abs_diff/p50"] == pytest.approx(0.5, rel=0.045)


def test_rows_without_a_model_token_are_in_no_sequence_mean() -> None:
    p, q, mask = random_streams(np.random.default_rng(4), 4, 50)
    mask[1] = 0
    alone = publish(summarise(batch_of(p[[0, 2, 3]], q[[0, 2, 3]], mask[[0, 2, 3]])))
    found = publish(summarise(batch_of(p, q, mask)))
    assert found.pop("counts/empty_rows") == alone.pop("counts/empty_rows") + 1
    assert found == alone


def test_the_worst_tokens_are_the_largest_then_the_first() -> None:
    rng = np.random.default_rng(5)
    q = np.zeros((6, 400))
    p = -rng.integers(0, 40, (6, 400)) / 8.0
    mask = np.ones((6, 400), np.int64)
    samples = ["f", "e", "d", "c", "b", "a"]
    summary = summarise(batch_of(p, q, mask, samples=samples))
    everything = sorted(
        (-abs(p[r, c]), samples[r], c) for r in range(6) for c in range(400) if p[r, c]
    )[:64]
    worst = summary.worst
    found = [
        (-abs(a - b), summary.sequences.samples[s], int(c))
        for a, b, s, c in zip(worst.p, worst.q, worst.sequence, worst.position, strict=True)
    ]
    assert found == everything


def test_summaries_of_other_pairs_or_settings_do_not_merge() -> None:
    p, q, mask = random_streams(np.random.default_rng(7), 2, 20)
    one = summarise(batch_of(p, q, mask))
    with pytest.raises(InvalidInput, match="settings"):
        Summary.merge(
            [one, summarise(batch_of(p, q, mask), StatisticsSettings(rollout_is="token"))]
        )
    with pytest.raises(InvalidInput, match="recomputed"):
        Summary.merge([one, summarise(batch_of(p, q, mask, pair=("old", "recomputed")))])
    with pytest.raises(InvalidInput, match="at least one"):
        Summary.merge([])


@pytest.mark.parametrize("far", [4096, 2**40, 2**62])
def test_ids_that_are_no_rounds_are_not_taken_for_them(far: int) -> None:
    p, q, mask = random_streams(np.random.default_rng(1), 4, 60)
    plain = summarise(batch_of(p, q, mask))
    wrong = summarise(batch_of(p, q, mask, round_ids=np.full((4, 60), far)))
    assert wrong.ignored == ("round_ids",)
    assert publish(wrong) == publish(plain)
    for offset in (far, -1):
        moved = summarise(batch_of(p, q, mask, round_offset=np.full(4, offset)))
        assert moved.ignored == ("round_offset",)
        assert publish(moved) == publish(plain)
    under_no_token = np.where(mask == 1, 3, far)
    assert summarise(batch_of(p, q, mask, round_ids=under_no_token)).ignored == ()
    again = summary_from_bytes(summary_to_bytes(Summary.merge([wrong, moved])))
    assert again.ignored == ("round_ids", "round_offset")


def test_rounds_turns_and_versions_without_end_are_bounded() -> None:
    tokens = 9000
    p, q, _ = random_streams(np.random.default_rng(2), 1, tokens)
    numbers = np.arange(tokens)[None]
    summary = summarise(batch_of(
        p, q, numbers % 2, turn_ids=numbers, versions=numbers, policy_version=3,
    ))  # fmt: skip
    assert summary.ignored == ("response_mask", "turn_ids", "versions")
    assert len(summary.rounds.keys) == 4096
    assert not len(summary.turns.keys)
    assert not len(summary.staleness.keys)
    assert summary.total.tokens == tokens // 2
    assert publish(summary)["per_round/total_rounds"] == 4096


def test_a_rounds_numbers_are_those_of_its_tokens() -> None:
    p, q, mask = random_streams(np.random.default_rng(12), 9, 300)
    tokens, _ = tokens_of(p.astype(float), q.astype(float), mask)
    rounds = dict(summarise(batch_of(p, q, mask)).rounds.items())
    assert len(rounds) > 3
    for number in (0, 1, 2):
        found = publish_cell(rounds[number])
        expected = reference([token for token in tokens if token.round == number])
        own = {name: value for name, value in expected.items() if name in found}
        assert len(own) > 10
        assert_close(found, own, 1e-9)


def test_every_metric_says_where_it_is_from() -> None:
    assert len(DOCUMENTED) > 25
    assert [row for row in DOCUMENTED if len(row) != 4 or not all(row)] == []


def test_units_are_those_of_the_documented_table() -> None:
    units: list[tuple[str, str]] = []
    for name, unit, *_ in DOCUMENTED:
        name = name.replace("...", "{stream}").replace("*", "{stream}")
        name = re.sub(r"\{(stream|i)\}", r"<\1>", name)
        names = list(_expanded(name))
        several = unit.split(", ") if ", " in unit else [unit] * len(names)
        units += zip(names, several, strict=True)
    streams = random_streams(np.random.default_rng(12), 9, 300)
    published = publish(summarise(batch_of(*streams), StatisticsSettings(rollout_is="token")))
    assert len(published) > 90
    for name in published:
        patterns = [
            (re.escape(each).replace("<stream>", r"[\w.]+").replace("<i>", r"\d+"), unit)
            for each, unit in units
        ]
        found = [unit for pattern, unit in patterns if re.fullmatch(pattern, name)]
        assert found, name
        unit = found[0]
        pure = unit in ("1", "0 or 1", "rounds", "index")
        assert unit_of_metric(name) == ("" if pure else unit), name


def _expanded(name: str) -> Iterator[str]:
    """Yield the names of `a_{b,c}`."""
    found = re.search(r"\{([^}]*)\}", name)
    if found is None:
        yield name
        return
    for each in found[1].split(","):
        yield from _expanded(name[: found.start()] + each + name[found.end() :])


@pytest.mark.parametrize("size", [1e140, 1e153, 1e160, 1e200])
def test_moments_that_exceed_float64_make_no_number(size: float) -> None:
    at = cells.Field
    p, q, mask = random_streams(np.random.default_rng(3), 4, 60)
    cell = summarise(batch_of(p.astype(float) * size, q.astype(float) * size, mask)).total
    correlation = cell.correlation(at.P_M2, at.Q_M2, at.PQ_C)
    spread = cell.std(at.P_M2, at.P_MIN, at.P_MAX)
    if size < 1e150:
        assert correlation > 0.9
        assert 0.0 < spread < 1e150
    else:
        assert math.isnan(correlation)
        assert not math.isfinite(spread)


def test_the_correlation_of_probabilities_that_exceed_float64_is_no_number() -> None:
    """As of values that are no log-probs: the square of e^400 is infinite, its product is not."""
    q = -np.random.default_rng(3).exponential(1.0, (1, 40))
    cell = summarise(batch_of(q + 400.0, q, np.ones(q.shape, np.int64))).total
    at = cells.Field
    assert math.isinf(cell[at.U_M2])
    assert math.isfinite(cell[at.UV_C])
    assert math.isnan(cell.correlation(at.U_M2, at.V_M2, at.UV_C))
