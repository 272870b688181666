"""A simulated tp2 · pp2 · cp2 (zigzag) · dp2 training: every token counts once, however it came."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.support.api import Service, service
from tests.support.local import LocalCoordinator
from tests.support.parallel import CP, DP, PP, TP, Reported, Training, whole_batch
from tests.support.stores import evidence_of

from stagescope_service.statistics import Field, StepSummary, Summary, publish, summarise
from stagescope_service.statistics import cell as cells
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.store.tables.measurements import SummaryRow

RUN = "moe"
LAGS = range(Field.NEXT_N, Field.D_MIN)
"""Pairs of neighbours: those that a cut separates are not there."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        yield running


class Trained(NamedTuple):
    """Two steps of a training, and the service that it reported to."""

    live: Service
    training: Training
    local: LocalCoordinator


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool, str], Trained]]:
    """Trains once with each pair of: whether the trainer has the rollout, the rollout's key."""
    with contextlib.ExitStack() as services:

        @functools.cache
        def made(trainer_has_rollout: bool, rollout_key: str) -> Trained:
            live = services.enter_context(service(tmp_path_factory.mktemp("trained") / "home"))
            training = Training(trainer_has_rollout=trainer_has_rollout, rollout_key=rollout_key)
            return Trained(live, training, train(live, training))

        yield made


def train(
    live: Service,
    training: Training,
    *,
    steps: int = 2,
    ring_bytes: int = 1 << 30,
    late_rollouts: bool = False,
) -> LocalCoordinator:
    """Run a training to its end."""
    data_dir = live.settings.data_path
    local = LocalCoordinator(live.store, data_dir, ring_bytes)
    asyncio.run(_train(local, training, steps, late_rollouts))
    return local


async def _train(local: LocalCoordinator, training: Training, steps: int, late: bool) -> None:
    await local.record(training.greetings())
    held: list[Reported] = []
    for step in range(1, steps + 1):
        generated = list(training.generate(step))
        if late:
            held += generated
        else:
            await local.record(generated)
        await local.record(mixed(training.log_probs(step), step))
        await local.record(mixed(training.update(step), step))
    await local.record(process.leave() for process in training.ranks)
    await local.record(held)
    await local.record(process.leave() for process in training.rollouts)


def mixed(reported: Iterable[Reported], seed: int) -> list[Reported]:
    """Let senders arrive in any order; each one's own events stay in theirs."""
    queues: dict[str, list[Reported]] = {}
    for each in reported:
        queues.setdefault(each.sender.incarnation, []).append(each)
    rng = np.random.default_rng(seed)
    order = rng.permutation([name for name, own in queues.items() for _ in own])
    return [queues[name].pop(0) for name in order]


def step_summary_of(live: Service, step: int) -> StepSummary:
    row = live.catalogue.step(attempt_of(live, step), step)
    assert row is not None
    assert row["closed_wall"] is not None
    assert row["completeness"] == "complete", row["missing"]
    assert row["step_summary"] is not None
    return StepSummary.from_bytes(row["step_summary"])


def assert_summary(step_summary: Summary, expected: Summary) -> None:
    """Counts, extremes, histograms and worst tokens exactly; sums and moments to 1e-9."""
    for name in ("rounds", "turns", "staleness"):
        found, wanted = getattr(step_summary, name), getattr(expected, name)
        assert found.keys.tolist() == wanted.keys.tolist(), name
        for (key, a), (_, b) in zip(found.items(), wanted.items(), strict=True):
            assert_cell(a.vector, b.vector, f"{name} {key}")
    assert_cell(step_summary.total.vector, expected.total.vector, "total")
    for name in ("rounds", "buckets", "counts"):
        assert np.array_equal(
            getattr(step_summary.histogram, name), getattr(expected.histogram, name)
        )
    assert tokens_of(step_summary) == tokens_of(expected)
    keys, values = step_summary.sequences.by_sample()
    wanted_keys, wanted_values = expected.sequences.by_sample()
    assert keys == wanted_keys
    alone = ROW.index("lag1_n")  # the columns after it are of neighbours
    own, wanted_own = values[:, :alone], wanted_values[:, :alone]
    np.testing.assert_allclose(own, wanted_own, rtol=1e-9, atol=1e-12)
    found_numbers, wanted_numbers = publish(step_summary), publish(expected)
    assert found_numbers.keys() == wanted_numbers.keys()
    for name, value in wanted_numbers.items():
        same = math.isclose(found_numbers[name], value, rel_tol=1e-9, abs_tol=1e-12)
        assert same or (math.isnan(value) and math.isnan(found_numbers[name])), name
    assert step_summary.versions == expected.versions
    assert step_summary.empty_rows == expected.empty_rows


def assert_cell(found: Any, expected: Any, where: str) -> None:
    counts = [field for field in Field if field < Field.D_SUM]
    extremes = range(Field.D_MIN, Field.D_M2)
    for field in (*counts, *extremes):
        assert found[field] == expected[field], (where, Field(field))
    sums = set(range(Field.D_SUM, cells.WIDTH)) - set(extremes) - set(LAGS)
    sums -= set(range(Field.NEXT_P_M2, cells.WIDTH))
    for field in sums:
        close = math.isclose(found[field], expected[field], rel_tol=1e-9, abs_tol=1e-9)
        assert close, (where, Field(field))


def tokens_of(summary: Summary) -> list[object]:
    worst = summary.worst
    samples = [summary.sequences.samples[index] for index in worst.sequence]
    columns = (worst.position, worst.round, worst.turn, worst.token_id, worst.p, worst.q)
    return [samples, *(column.tolist() for column in columns)]


@pytest.mark.parametrize("rollout_key", ["job-1", "rollout-job"])
@pytest.mark.parametrize("trainer_has_rollout", [True, False], ids=["both", "joined"])
def test_every_token_counts_once(
    trained: Callable[[bool, str], Trained], trainer_has_rollout: bool, rollout_key: str
) -> None:
    live, training, local = trained(trainer_has_rollout, rollout_key)
    assert bool(local.ingestors.joined) is not trainer_has_rollout
    assert local.ingestors.recomputed, (
        "the resampling pass repeats some samples of a part, and not all"
    )
    for step in (1, 2):
        step_summary, expected = step_summary_of(live, step), summarise(training.unsplit(step))
        assert len(expected.versions) == len(expected.staleness.keys) == 3
        assert step_summary.stage == "actor_compute_log_prob"
        assert not step_summary.to_recompute
        assert not step_summary.differing
        assert step_summary.fragmented == 0
        assert_summary(step_summary.summary, expected)
        # A part of every (dp, cp) counts once; what tp, pp and the second pass repeat does not.
        assert len(step_summary.counted) + len(step_summary.left_out) == len(parts_of(live, step))
        assert set(step_summary.left_out.values()) <= {"replica", "repeated"}
    kinds = {row["kind"] for row in live.catalogue.findings(run=RUN)}
    assert kinds == {"streams_versions"}


@pytest.mark.parametrize("trainer_has_rollout", [True, False], ids=["both", "joined"])
def test_ranks_have_their_own_numbers(
    trained: Callable[[bool, str], Trained], trainer_has_rollout: bool
) -> None:
    live, training, _ = trained(trainer_has_rollout, "job-1")
    step_summary = step_summary_of(live, 1)
    assert [(row.role, row.rank) for row in step_summary.ranks] == [("actor", r) for r in range(16)]
    assert len(step_summary.ranks) == TP * PP * CP * DP
    for row in step_summary.ranks:
        expected = summarise(training.of_rank(1, row.rank)).total
        assert_cell(row.cell.vector, expected.vector, f"rank {row.rank}")
        last, first = training.ranks[row.rank].layout["pp_rank"] == PP - 1, row.rank % TP == 0
        assert (row.counted_parts > 0) is (last and first), row.rank
    # What cp and dp ranks hold adds up to the whole and what the second pass had again.
    cells_of = {row.rank: row.cell for row in step_summary.ranks if row.counted_parts}
    assert len(cells_of) == CP * DP
    assert sum(cell.tokens for cell in cells_of.values()) >= step_summary.total.tokens


def test_a_perturbed_replica_is_reported(live: Service) -> None:
    replica = 5  # dp 0, pp 1, cp 0, tp 1
    training = Training(trainer_has_rollout=False, perturbed=replica)
    assert training.ranks[replica].layout["tp_rank"] == 1
    train(live, training, steps=1)
    step_summary = step_summary_of(live, 1)
    assert_summary(step_summary.summary, summarise(training.unsplit(1)))
    (found,) = live.catalogue.findings(run=RUN, kind="replicas_differ")
    pairs = evidence_of(found)["pairs"]
    assert {pair["rank"] for pair in pairs} == {replica}
    assert {pair["counted_rank"] for pair in pairs} == {4}
    own = next(row for row in step_summary.ranks if row.rank == replica)
    assert_cell(own.cell.vector, summarise(training.of_rank(1, replica)).total.vector, "replica")


def test_evicted_parts_are_missing_and_said_so(live: Service) -> None:
    training = Training()
    local = train(live, training, steps=1, ring_bytes=20_000)
    assert local.ingestors.recomputed
    step_summary = step_summary_of(live, 1)
    assert step_summary.to_recompute
    expected = summarise(training.unsplit(1)).total
    assert step_summary.total.tokens < expected.tokens
    (found,) = live.catalogue.findings(run=RUN, kind="tokens_missing")
    assert found["severity"] == "error"
    answer = live.get("/steps/1/metrics", run=RUN)
    assert answer["coverage"]["parts_to_restate"] == len(step_summary.to_recompute)
    assert answer["metrics"]["counts/tokens"] == step_summary.total.tokens


def test_rollouts_that_come_late_are_joined_then(live: Service) -> None:
    training = Training(trainer_has_rollout=False)
    local = train(live, training, late_rollouts=True)
    assert local.ingestors.joined
    for step in (1, 2):
        assert_summary(step_summary_of(live, step).summary, summarise(training.unsplit(step)))
    assert not live.catalogue.findings(run=RUN, kind="rollout_not_joined")


@pytest.mark.parametrize("rollout_key", ["job-1", "rollout-job"])
def test_rollouts_learn_which_step_consumed_them(
    trained: Callable[[bool, str], Trained], rollout_key: str
) -> None:
    live, training, _ = trained(False, rollout_key)
    attempts = [row["attempt_id"] for row in live.catalogue.attempts(RUN)]
    payloads = live.catalogue.payloads(attempts, stage="rollout_generate")
    assert payloads
    assert all(row["step"] is None for row in payloads)
    assert {(row["policy_version"], row["consumed_step"]) for row in payloads} == {
        (10 * step - age, step) for step, age in itertools.product((1, 2), range(3))
    }
    samples = [row for a in attempts for row in live.catalogue.samples(a)]
    stepless = [row for row in samples if row["clock"].startswith("v")]
    assert {row["sample_uid"] for row in stepless} == {
        sample.uid for step in (1, 2) for sample in training.samples(step)
    }
    for row in stepless:
        step = int(row["sample_uid"].split("/")[0].removeprefix("s").split("-")[0])
        assert (row["step"], row["consumed_step"]) == (step, step)


def test_samples_without_a_rollout_are_said(live: Service) -> None:
    training = Training(trainer_has_rollout=False)
    local = LocalCoordinator(live.store, live.settings.data_path)

    async def run() -> None:
        await local.record(training.greetings())
        # The second rollout worker's payloads never arrive.
        told = [each for each in training.generate(1) if each.sender.rank == 0]
        await local.record(told)
        await local.record(training.log_probs(1))
        await local.record(training.farewells())

    asyncio.run(run())
    there = training.samples(1)[::2]
    step_summary = step_summary_of(live, 1)
    assert_summary(step_summary.summary, summarise(whole_batch(there, training.version(1))))
    (found,) = live.catalogue.findings(run=RUN, kind="rollout_not_joined")
    lost = {s.uid for s in training.samples(1)[1::2]}
    assert set(evidence_of(found)["samples"]["no rollout of the sample"]) == lost
    named = ", ".join(map(repr, sorted(lost)[:5]))
    assert f"; such as {named} on actor rank" in found["message"]


def test_the_api_adds_up(trained: Callable[[bool, str], Trained]) -> None:
    live, training, _ = trained(False, "job-1")
    expected = summarise(training.unsplit(2))
    metrics = live.get("/steps/2/metrics", run=RUN)
    assert metrics["complete"] == "complete"
    assert metrics["metrics"]["counts/tokens"] == expected.total.tokens
    assert metrics["coverage"]["parts_to_restate"] == 0
    for by, wanted in (("round", expected.rounds), ("staleness", expected.staleness)):
        answer = live.get("/steps/2/rounds", run=RUN, by=by, limit=1000)
        rows = answer["rows"]
        assert {row[by]: row["tokens"] for row in rows} == {k: c.tokens for k, c in wanted.items()}
        for name in ("tokens", "abs_diff_sum", "diff_sum"):
            total = math.fsum(row[name] for row in rows)
            assert math.isclose(total, answer["whole"][name], rel_tol=1e-9, abs_tol=1e-9)
        assert answer["whole"]["tokens"] == expected.total.tokens
    ranks = live.get("/steps/2/ranks", run=RUN, limit=1000)["rows"]
    own = {row["rank"]: row["tokens"] for row in ranks}
    for rank in range(16):
        assert own[rank] == summarise(training.of_rank(2, rank)).total.tokens
    update = live.get("/steps/2/metrics", run=RUN, stage="actor_compute_log_prob")
    assert update["metrics"] == metrics["metrics"]
    worst = live.get("/steps/2/tokens", run=RUN, kind="worst", limit=1000)["rows"]
    assert [row["position"] for row in worst] == expected.worst.position.tolist()


def test_the_update_counts_one_epoch(trained: Callable[[bool, str], Trained]) -> None:
    live, training, _ = trained(True, "job-1")
    answer = live.get("/steps/1/metrics", run=RUN, stage="actor_update")
    assert answer["metrics"]["counts/tokens"] == summarise(training.unsplit(1)).total.tokens
    assert answer["coverage"]["parts_to_restate"] == 0


def attempt_of(live: Service, step: int) -> int:
    attempt = live.catalogue.attempt_of_step(RUN, step)
    assert attempt is not None
    return int(attempt["attempt_id"])


def parts_of(live: Service, step: int) -> list[SummaryRow]:
    return live.catalogue.summaries(
        attempt_of(live, step), step, stage="actor_compute_log_prob", pair="old/rollout"
    )
