"""From events to verdicts in the catalogue: late, twice, in any order, and after a restart."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support.scales import Scales, check_any_order, check_restart, opened
from tests.support.stores import evidence_of
from tests.support.trainings import Delivery, Rank

from stagescope_service.coordinator import retries
from stagescope_service.coordinator.weights import NOT_COMPARED, WeightComparer, judge
from stagescope_service.core.instructions import CompareWeights, Put
from stagescope_service.store.contract import Write
from stagescope_wire.errors import CatalogueUnavailable, InvalidEvent, StoreError

GOOD = {"a": 1, "b": 2}

# Shrinking whole trainings takes minutes; the differing rows say what is wrong.
usual = settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture
def scales() -> Iterator[Scales]:
    with opened() as made:
        yield made


def trainer(rank: int = 0, *, size: int | None = 1, key: str = "job-1", **layout: object) -> Rank:
    made = Rank(rank, key=key, started=1000.0 + rank)
    layout = {"dp_rank": rank, "host": f"host-{rank}", "device_kind": "npu", **layout}
    made.hello(layout=layout, **({} if size is None else {"world_size": size}))
    return made


def rollout(rank: int = 0) -> Rank:
    made = Rank(rank, "rollout", started=1100.0 + rank)
    made.hello(layout={"dp_rank": rank}, world_size=1)
    return made


def weights(
    rank: Rank,
    values: Mapping[str, int],
    version: int = 4,
    step: int | None = 5,
    device: Mapping[str, object] | None = None,
    **fields: object,
) -> Delivery:
    side = "rollout" if rank.sender.role == "rollout" else "trainer"
    tensors = [(name, value, "float32", (2, 3), None) for name, value in values.items()]
    said = {"side": side, "kind": "exchanged", "tensors": tensors, "device": device or {}}
    return rank.say("weights", policy_version=version, step=step, **{**said, **fields})


def test_a_version_that_arrived_whole_is_no_finding(scales: Scales) -> None:
    sender, engine = trainer(), rollout()
    scales.give(*sender.said, weights(sender, GOOD), *engine.said, weights(engine, GOOD))
    verdict = scales.verdict()
    assert (verdict["agree"], verdict["differ"], verdict["missing"]) == (2, 0, 0)
    assert (verdict["complete"], verdict["records"], verdict["step"]) == (True, 2, 5)
    assert verdict["ranks"] == {"rollout": {"rollout": [0]}, "trainer": {"actor": [0]}}
    assert scales.findings() == {}


def test_a_tensor_that_was_not_synced_is_found_by_name(scales: Scales) -> None:
    sender, engine = trainer(), rollout()
    scales.give(*sender.said, weights(sender, GOOD), *engine.said)
    assert scales.findings() == {}
    scales.give(weights(engine, {"a": 1, "b": 7}))
    [found] = scales.catalogue.findings()
    assert found["kind"] == "weights_differ"
    assert (found["step"], found["role"], found["rank"]) == (5, "rollout", 0)
    assert "version 4, trainer against rollout: 1 of 2 weights differ (b)" in found["message"]
    assert evidence_of(found)["differ"] == ["b"]


def test_what_is_missing_is_said_once_everybody_has_recorded(scales: Scales) -> None:
    first, second, engine = trainer(0, size=2), trainer(1, size=2), rollout()
    scales.give(*first.said, *second.said, *engine.said)
    scales.give(weights(first, {"a": 1}), weights(engine, GOOD))
    assert scales.findings() == {}  # the other rank may yet say b
    scales.give(weights(second, {"a": 1}))
    assert "1 of 2 are missing on one side (b)" in scales.findings()["weights_differ"]


def test_or_once_a_later_version_was_recorded(scales: Scales) -> None:
    sender, engine = trainer(size=None), rollout()
    scales.give(*sender.said, *engine.said)
    scales.give(weights(sender, {"a": 1}), weights(engine, GOOD))
    assert scales.findings() == {}
    scales.give(weights(sender, GOOD, version=5, step=6))
    assert "version 4" in scales.findings()["weights_differ"]
    # Whoever was late after all takes it back.
    late = Rank(1, started=1001.0)
    scales.give(weights(late, {"b": 2}))
    assert scales.findings() == {}
    assert scales.verdict()["missing"] == 0


def test_names_without_any_in_common_ask_for_a_mapping(scales: Scales) -> None:
    sender, engine = trainer(), rollout()
    scales.give(*sender.said, *engine.said)
    scales.give(weights(sender, {"model.a": 1}), weights(engine, {"a": 1}))
    [found] = scales.catalogue.findings()
    assert "STAGESCOPE_WEIGHT_NAMES" in found["advice"]
    rules = [(r"^model\.", "")]
    scales.write(judge(scales.catalogue, CompareWeights(1, 4), rules))
    assert scales.findings() == {}


def test_the_odd_replica_is_named_with_its_device(scales: Scales) -> None:
    ranks = [trainer(rank, size=3) for rank in range(3)]
    scales.give(*(each for rank in ranks for each in rank.said))
    serial = {"device_kind": "npu", "device_index": 1, "device_serial": "SN-77"}
    scales.give(weights(ranks[0], GOOD), weights(ranks[1], {**GOOD, "b": 9}, device=serial))
    assert "without a majority" in scales.findings()["replica_weights_differ"]
    assert len(scales.catalogue.odd_replicas()) == 2
    scales.give(weights(ranks[2], GOOD))
    [odd] = scales.catalogue.odd_replicas()
    assert (odd["rank"], odd["device"], odd["names"]) == (1, "SN-77", ["b"])
    assert (odd["is_outvoted"], odd["replicas"], odd["host"]) == (True, 3, "host-1")
    [found] = scales.catalogue.findings()
    assert found["kind"] == "replica_weights_differ"
    assert (found["role"], found["rank"]) == ("actor", 1)
    assert "trainer actor rank 1 on SN-77 holds other weights" in found["message"]


def test_a_device_without_a_serial_is_its_host_and_index(scales: Scales) -> None:
    ranks = [trainer(rank, device_index=rank) for rank in range(2)]
    scales.give(*(each for rank in ranks for each in rank.said))
    scales.give(weights(ranks[0], GOOD), weights(ranks[1], {**GOOD, "b": 9}))
    assert {row["device"] for row in scales.catalogue.odd_replicas()} == {
        "host-0/npu0", "host-1/npu1",
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"policy_version": None},
        {"side": "engine"},
        {"kind": "sent"},
        {"tensors": None},
        {"tensors": [("a", -1, "float32", (2,), None)]},
        {"tensors": [("a", 1 << 64, "float32", (2,), None)]},
        {"tensors": [("a", 1, "float32", (-2,), None)]},
        {"tensors": [("a", 1, "float32", (2,), "somewhere")]},
        {"tensors": [("a", 1, "float32", (2,), (1, 2))]},
        {"tensors": [(None, 1, "float32", (2,), None)]},
        {"tensors": [("a", 1)]},
        {"tensors": [7]},
    ],
)
def test_what_cannot_be_read_is_refused_alone(scales: Scales, fields: Mapping[str, object]) -> None:
    sender = trainer()
    said = weights(sender, GOOD)
    wrong = {**said.event.fields, **fields}
    with pytest.raises(InvalidEvent):
        scales.give(sender.say("weights", **wrong))
    assert scales.catalogue.runs() == []
    scales.give(said)
    assert scales.verdict()["records"] == 1


def test_names_dtypes_and_shapes_are_stored_once(scales: Scales) -> None:
    sender = trainer()
    names = {f"layers.{number}.weight": number for number in range(1000)}
    for version in range(3):
        scales.give(weights(sender, names, version))
    rows = [row for version in range(3) for row in scales.catalogue.weights(1, version)]
    assert len({row["manifest"] for row in rows}) == 1
    assert {len(row["checksums"]) for row in rows} == {8000}
    [manifest] = scales.catalogue.weight_manifests([rows[0]["manifest"]]).values()
    assert len(manifest) < 8000


def said_by(chance: random.Random) -> list[Delivery]:
    """Three versions on three trainer ranks and two rollouts, something wrong here and there."""
    ranks = [trainer(rank, size=3) for rank in range(3)] + [rollout(rank) for rank in range(2)]
    said = [each for rank in ranks for each in rank.said]
    for version, rank in itertools.product(range(3), ranks):
        values = {**GOOD, "c": version}
        if chance.random() < 0.3:
            values[chance.choice("abc")] = 99
        if chance.random() < 0.2:
            del values[chance.choice("abc")]
        said.append(weights(rank, values, version, step=version + 1))
    return said


@usual
@given(st.randoms(use_true_random=False))
def test_the_verdicts_are_the_same_for_any_order_and_repetition(chance: random.Random) -> None:
    check_any_order(said_by(chance), 5, chance)


@usual
@given(st.randoms(use_true_random=False), st.integers(0, 40))
def test_a_coordinator_that_died_before_it_compared_is_caught_up_with(
    chance: random.Random, where: int
) -> None:
    check_restart(
        said_by(chance),
        where,
        lambda catalogue, write: WeightComparer(catalogue, write).catch_up(),
        lambda catalogue: catalogue.uncompared() == [],
    )


def test_while_a_comparison_is_under_way_orders_wait_for_one_more(scales: Scales) -> None:
    sender = trainer()
    scales.give(*sender.said, weights(sender, GOOD), compare=False)
    order, written = CompareWeights(1, 4), 0
    assert scales.orders == [order]

    async def several() -> None:
        async def write(rows: Sequence[Write]) -> None:
            nonlocal written
            written += 1
            if written == 1:
                assert not comparer.takes(order)
                assert not comparer.takes(order)

        comparer = WeightComparer(scales.catalogue, write)
        assert comparer.takes(order)
        await comparer.carry_out(order)
        assert comparer.takes(order)

    asyncio.run(several())
    assert written == 2


@pytest.mark.parametrize("error", [StoreError("once"), CatalogueUnavailable("for a while")])
def test_a_comparison_that_could_not_be_written_is_tried_again(
    scales: Scales, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(retries, "PAUSES", (0.0, 0.0))
    sender = trainer()
    scales.give(*sender.said, weights(sender, GOOD), compare=False)
    errors = [error, error]

    async def write(rows: Sequence[Write]) -> None:
        if errors:
            raise errors.pop()
        scales.write(rows)

    asyncio.run(WeightComparer(scales.catalogue, write).catch_up())
    assert scales.catalogue.uncompared() == []
    assert scales.findings() == {}


def test_weights_that_cannot_be_compared_are_said_until_they_can(
    scales: Scales, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "PAUSES", (0.0, 0.0))
    caplog.set_level(logging.CRITICAL)
    sender = trainer()
    scales.give(*sender.said, weights(sender, GOOD), compare=False)
    ((name, manifest),) = scales.catalogue.weight_manifests(
        [row["manifest"] for row in scales.catalogue.weights(1, 4)]
    ).items()

    async def write(rows: Sequence[Write]) -> None:
        scales.write(rows)

    def compare_with(content: bytes) -> None:
        scales.write([Put("weight_manifests", {"manifest": name, "tensors": content})])
        asyncio.run(WeightComparer(scales.catalogue, write).catch_up())

    compare_with(b"junk")
    (found,) = scales.catalogue.findings()
    assert (found["kind"], found["severity"], found["run"]) == (NOT_COMPARED, "error", "r")
    assert "version 4 could not be compared (3 tries): " in found["message"]
    assert evidence_of(found)["error"] in found["message"]
    assert scales.catalogue.weight_verdicts(1) == []
    compare_with(manifest)
    assert scales.catalogue.findings() == []
    assert scales.verdict()["records"] == 1
