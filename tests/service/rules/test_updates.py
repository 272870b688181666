"""The first mini-batch of an update: its log-probs are the old ones, but for noise."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from tests.service.rules.planted import STAGE, proved_by, rows_of
from tests.support.api import Rank, Service

ROWS: Final = 8
WIDTH: Final = 40
Float64 = npt.NDArray[np.float64]


def update(
    live: Service, run: str, off: dict[int, list[int]], *, noise: float = 0.0, by: float = 0.02,
    later: bool = False, rollout: bool = True, apart: bool = False, steps: int = 2,
    bad: dict[int, list[int]] | None = None, pieces: int = 1, flips: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Train with two ranks; rows `off` of a rank are scored otherwise by the update.

    With `later` a second mini-batch follows, whose log-probs have moved. With `apart` the update
    records no old ones. Three tokens of each row `bad` are NaN. With `pieces` the first mini-batch
    comes in so many micro-batches. With `flips` streams hold values of bfloat16, and this share of
    the current ones is the next such value.
    """
    ranks = [Rank(live, run=run, rank=rank, world_size=2) for rank in range(2)]
    for step in range(1, steps + 1):
        for stage in (STAGE, "actor_update"):
            reports = []
            for at, rank in enumerate(ranks):
                random = np.random.default_rng([step, at])
                q = -1.0 - random.exponential(1.0, (ROWS, WIDTH))
                old = np.minimum(q + random.normal(0.0, 0.01, q.shape), -1e-6)
                current = old + random.normal(0.0, noise, q.shape) if noise else old.copy()
                if flips:
                    bits = old.astype(np.float32).view(np.uint32) & 0xFFFF0000
                    old = bits.view(np.float32).astype(np.float64)
                    moved = bits + (random.random(old.shape) < flips).astype(np.uint32) * 0x10000
                    current = moved.view(np.float32).astype(np.float64)
                for row in off.get(at, []):
                    current[row] += random.normal(0.0, by, WIDTH)
                current[(bad or {}).get(at, []), :3] = np.nan
                names = [f"s{step}r{at}-{row}" for row in range(ROWS)]
                streams = {"old_log_probs": old}
                streams |= {"rollout_log_probs": q} if rollout or stage == STAGE else {}
                if stage == STAGE:
                    reports.append(rank.draft_stage(stage, step, payload(streams, names)))
                    continue
                streams["log_probs"] = current
                if apart:
                    del streams["old_log_probs"]
                    streams.pop("rollout_log_probs", None) if not rollout else None
                reports += [
                    rank.draft_stage(
                        stage, step,
                        payload({name: each[own] for name, each in streams.items()}, names[own]),
                        epoch=0, minibatch=0, microbatch=piece,
                    )
                    for piece, own in enumerate(_split(pieces))
                ]  # fmt: skip
                if later:
                    streams["log_probs"] = current + random.normal(0.0, 0.5, q.shape)
                    reports.append(
                        rank.draft_stage(stage, step, payload(streams, names), epoch=0, minibatch=1)
                    )
            live.engine.take_together(reports)
    for rank in ranks:
        rank.begin(STAGE, steps + 1)
    return rows_of(live, run)["current_differs"]


def _split(pieces: int) -> list[slice]:
    size = ROWS // pieces
    return [slice(at * size, (at + 1) * size) for at in range(pieces)]


def payload(streams: dict[str, Float64], names: list[str]) -> dict[str, object]:
    tensors: dict[str, object] = {
        name: ("float32", values.shape, values.astype(np.float32), None)
        for name, values in streams.items()
    }
    mask = np.ones((len(names), WIDTH), np.int64)
    tensors["response_mask"] = ("int64", mask.shape, mask, None)
    return {"schema": 1, "tensors": tensors, "strings": {"sample_ids": names}, "meta": {}}


@pytest.mark.parametrize("rollout", [True, False])
def test_the_rank_and_the_samples_that_differ_are_named(rollout: bool, live: Service) -> None:
    row = update(live, f"update-two-rows-{rollout}", {1: [6, 7]}, rollout=rollout)
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "actor 1", 1)
    assert row["for"][0] == (
        "step 2: in the first mini-batch current and old log-probs are equal in 14 of 16 samples"
    )
    assert row["for"][1].startswith("actor rank 1: 2 of 8 samples differ, by 0.01")
    assert row["for"][1].endswith(" nat on average: s2r1-6, s2r1-7")
    assert row["sure"] == 2 / 16
    first, *_ = json.loads(proved_by(live, row))["update_ratios"]
    assert any(abs(ratio - 1.0) > 1e-3 for ratio in first)


def test_old_log_probs_that_another_stage_recorded_are_compared_by_sample(live: Service) -> None:
    row = update(live, "update-apart", {1: [6, 7]}, apart=True, later=True)
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "actor 1", 1)
    assert row["for"][1].startswith("actor rank 1: 2 of 8 samples differ, by ")
    assert row["for"][1].endswith(": s2r1-6, s2r1-7")
    assert update(live, "update-apart-well", {}, apart=True)["verdict"] == "not found"
    noisy = update(live, "update-apart-noise", {1: [6]}, apart=True, noise=0.005, by=0.2)
    assert noisy["verdict"] == "not found"  # noise cancels in sums: nothing can be told


def test_current_ones_alone_are_compared_by_sample(live: Service) -> None:
    """The update records neither the old ones nor the rollout's."""
    row = update(live, "update-alone", {1: [6, 7]}, apart=True, rollout=False, by=0.5)
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "actor 1", 1)
    assert row["for"][1].endswith(": s2r1-6, s2r1-7")
    well = update(live, "update-alone-well", {}, apart=True, rollout=False)
    assert well["against"][0].endswith("are equal in 16 of 16 samples")


@pytest.mark.parametrize("by", [0.02, 0.5])
def test_each_rank_is_judged_by_its_own_samples(by: float, live: Service) -> None:
    """Half of all samples differ, and the others are equal."""
    row = update(live, f"update-rank-{by}", {1: [*range(ROWS)]}, by=by)
    assert (row["verdict"], row["where"], row["sure"]) == ("found", "actor 1", 0.5)
    assert len(row["for"]) == 2
    assert row["for"][1].startswith("actor rank 1: 8 of 8 samples differ, by ")


def test_each_micro_batch_is_judged_by_its_own_samples(live: Service) -> None:
    second = [*range(ROWS // 2, ROWS)]
    row = update(live, "update-micro", {0: second, 1: second}, pieces=2)
    assert (row["verdict"], row["where"], row["sure"]) == ("found", "actor 0-1", 0.5)


@pytest.mark.parametrize("rollout", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_current_ones_that_are_not_finite_are_counted_and_no_equal_ones(
    apart: bool, rollout: bool, live: Service
) -> None:
    run = f"update-nan-{apart}-{rollout}"
    row = update(live, run, {}, bad={1: [0, 1, 2, 3]}, apart=apart, rollout=rollout)
    kind = live.get("/findings", run=run, kind="nonfinite_log_probs")["rows"]
    assert {(each["stage"], each["role"], each["rank"]) for each in kind} == {
        ("actor_update", "actor", 1)
    }
    assert all(each["evidence"] == {"current_nan": 12} for each in kind)
    assert {each["step"] for each in kind} == {1, 2}
    assert rows_of(live, run)["non_finite_log_probs"]["verdict"] == "found"
    if apart and rollout:  # whose are not finite, the current ones or the rollout's, is not known
        assert "equal in 12 of 12 samples" in row["against"][0]
        return
    assert (row["verdict"], row["where"]) == ("found", "actor 1")
    assert "equal in 12 of 16 samples, and not finite in 4" in row["for"][0]
    assert "4 of 8 samples differ, 12 tokens not finite: s2r1-0" in row["for"][1]
    assert row["explained_by"] == ["non_finite_log_probs"]


def test_a_later_mini_batch_may_differ(live: Service) -> None:
    row = update(live, "update-later", {}, later=True)
    assert row["verdict"] == "not found"
    assert row["against"] == [
        "step 2: in the first mini-batch current and old log-probs are equal in 16 of 16 samples"
    ]


def test_noise_of_two_passes_is_no_difference_but_rows_far_beyond_it_are(live: Service) -> None:
    assert update(live, "update-noise", {}, noise=0.005)["verdict"] == "not found"
    row = update(live, "update-beyond", {0: [3]}, noise=0.005, by=0.2)
    assert (row["verdict"], row["where"]) == ("found", "actor 0")
    assert row["for"][1].endswith(": s2r0-3")


def test_values_of_a_narrow_dtype_that_round_otherwise_are_no_difference(live: Service) -> None:
    """Half of the samples are equal, and a token or two of the others are rounded otherwise."""
    row = update(live, "update-flips", {}, flips=0.015)
    assert row["verdict"] == "not found"
    assert "equal in 16" not in row["against"][0]
    row = update(live, "update-flips-off", {1: [6]}, flips=0.015)
    assert (row["verdict"], row["where"]) == ("found", "actor 1")
    assert row["for"][1].endswith(": s2r1-6")


def test_old_log_probs_of_another_policy_differ_everywhere(live: Service) -> None:
    row = update(live, "update-all", {}, noise=0.1)
    assert (row["verdict"], row["where"], row["sure"]) == ("found", "actor 0-1", 1.0)


def test_numbers_of_the_step_are_those_without_the_current_ones(live: Service) -> None:
    """The comparison is beside the mismatch, and adds no token to it."""
    update(live, "update-beside", {1: [6]})
    answer = live.get("/steps/2/metrics", run="update-beside")
    assert answer["stage"] == STAGE
    assert answer["metrics"]["counts/tokens"] == 2 * ROWS * WIDTH
    of_update = live.get("/steps/2/metrics", run="update-beside", stage="actor_update")
    assert of_update["metrics"]["counts/tokens"] == 2 * ROWS * WIDTH
    assert {row["kind"] for row in live.get("/findings?run=update-beside")["rows"]} <= set()


def test_without_both_streams_it_is_not_measured(live: Service) -> None:
    rank = Rank(live, run="update-none", world_size=1)
    rank.stage(STAGE, 1)
    rank.begin(STAGE, 2)
    row = rows_of(live, "update-none")["current_differs"]
    assert row["verdict"] == "not measured"
    assert "minibatch=0" in row["record"]
