"""Weights held against each other: what agrees, what differs, what checksums cannot tell."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.coordinator.weights import renaming
from stagescope_service.core.weights.verdicts import (
    AGREES,
    COPY,
    DIFFERS,
    MISSING,
    NOT_COMPARABLE,
    NOT_COMPARED,
    TP_COPY,
    DivergingRank,
    Shard,
    WeightRecord,
    WeightTensor,
    compare,
    newest,
    odd_replicas,
)

Weights = Mapping[str, int | None]


def record(
    weights: Weights,
    side: str = "trainer",
    rank: int = 0,
    *,
    role: str | None = None,
    kind: str = "exchanged",
    dtype: str = "bfloat16",
    shape: tuple[int, ...] = (4, 8),
    shard: Any = None,
    at: float = 0.0,
    **layout: int,
) -> WeightRecord:
    """What a rank recorded; a layout without words is of plain data parallelism."""
    return WeightRecord(
        role=role or {"trainer": "actor", "rollout": "rollout"}[side],
        rank=rank,
        side=side,
        kind=kind,
        version=1,
        step=2,
        order=(at, f"{side}-{rank}", 1),
        tensors=tuple(WeightTensor(name, dtype, shape, shard) for name in weights),
        checksums=list(weights.values()),
        layout=layout or {"dp_rank": rank},
    )


def verdicts(*records: WeightRecord, **rules: str) -> dict[str, str]:
    rename = renaming([*rules.items()])
    return {each.name: each.verdict for each in compare(newest(records), rename)}


# --- trainer against rollout ------------------------------------------------------------------


def test_what_is_bit_for_bit_the_same_agrees_and_what_is_not_differs() -> None:
    found = compare(
        [record({"a": 1, "b": 2, "c": 3}), record({"a": 1, "b": 9, "c": 3}, "rollout", 5)]
    )
    assert [(each.name, each.verdict) for each in found] == [
        ("b", DIFFERS), ("a", AGREES), ("c", AGREES),
    ]  # fmt: skip
    assert (found[0].trainer_checksum, found[0].rollout_checksum, found[0].ranks) == (2, 9, (5,))


def test_two_tensors_in_each_others_place_differ() -> None:
    found = verdicts(record({"q": 1, "k": 2}), record({"q": 2, "k": 1}, "rollout"))
    assert found == {"q": DIFFERS, "k": DIFFERS}


def test_what_is_on_one_side_alone_is_missing() -> None:
    found = compare([record({"a": 1, "sent": 2}), record({"a": 1, "got": 2}, "rollout")])
    assert {each.name: each.reason for each in found if each.verdict == MISSING} == {
        "sent": "not in the rollout",
        "got": "not in the trainer",
    }


def test_one_engine_of_two_that_missed_a_tensor_is_named() -> None:
    sent, stale = record({"a": 1}), record({"a": 7}, "rollout", 1)
    [found] = compare([sent, record({"a": 1}, "rollout", 0), stale])
    assert (found.verdict, found.ranks, found.rollout_checksum) == (DIFFERS, (1,), 7)


def test_a_side_alone_is_not_compared() -> None:
    assert verdicts(record({"a": 1})) == {"a": NOT_COMPARED}
    assert verdicts(record({"a": 1}, "rollout")) == {"a": NOT_COMPARED}


def test_names_are_mapped_by_rules() -> None:
    records = (record({"model.layers.0.q": 1}), record({"layers.0.q": 1}, "rollout"))
    assert set(verdicts(*records).values()) == {MISSING}
    assert verdicts(*records, **{r"^model\.": ""}) == {"layers.0.q": AGREES}


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        ({"dtype": "int8"}, "bfloat16[4, 8] was sent, int8[4, 8] received"),
        ({"shape": (8, 4)}, "bfloat16[4, 8] was sent, bfloat16[8, 4] received"),
        ({"shard": Shard((8, 8), (4, 0), "tp: Shard(dim=0) 1 of 2", ("tp",))}, "cut up otherwise"),
        ({"kind": "held"}, "what it holds"),
    ],
)
def test_what_checksums_cannot_tell_is_not_comparable(
    received: dict[str, Any], reason: str
) -> None:
    # The same checksum, too: bytes of another form are other numbers.
    [found] = compare([record({"a": 1}), record({"a": 1}, "rollout", **received)])
    assert found.verdict == NOT_COMPARABLE
    assert reason in found.reason


def test_what_an_engine_fused_is_not_comparable() -> None:
    rules = {r"\b[qkv]_proj": "qkv_proj"}
    found = verdicts(
        record({"q_proj": 1, "k_proj": 2}), record({"qkv_proj": 1}, "rollout"), **rules
    )
    assert found == {"qkv_proj": NOT_COMPARABLE}


def test_without_a_checksum_nothing_agrees() -> None:
    assert verdicts(record({"a": None}), record({"a": None}, "rollout")) == {"a": NOT_COMPARABLE}


def test_parts_of_tensor_parallel_ranks_are_not_the_whole() -> None:
    parts = [record({"a": rank}, rank=rank, tp_rank=rank, dp_rank=0) for rank in (0, 1)]
    assert verdicts(*parts, record({"a": 1}, "rollout")) == {"a": NOT_COMPARABLE}


@pytest.mark.parametrize(("received", "verdict"), [(3, AGREES), (4, DIFFERS)])
def test_the_same_shards_are_compared(received: int, verdict: str) -> None:
    shards = [Shard((8, 8), (4 * at, 0), f"fsdp: {at}", ("fsdp",)) for at in (0, 1)]
    sent = [record({"a": 2 + at}, rank=at, shard=shards[at]) for at in (0, 1)]
    got = record({"a": received}, "rollout", shard=shards[1]._replace(placement="tp: 1 of 2"))
    assert verdicts(*sent, got) == {"a": verdict}


def test_a_dtensor_that_is_whole_is_compared_with_a_plain_tensor() -> None:
    whole = Shard((4, 8), (0, 0), "fsdp: Replicate()", ("fsdp",))
    assert verdicts(record({"a": 1}, shard=whole), record({"a": 1}, "rollout")) == {"a": AGREES}


def test_a_critic_is_not_what_the_rollout_samples_from() -> None:
    found = verdicts(
        record({"layers.0": 1}), record({"layers.0": 5, "head": 6}, role="critic"),
        record({"layers.0": 1}, "rollout"),
    )  # fmt: skip
    assert found == {"layers.0": AGREES}


def test_what_is_held_is_compared_with_what_is_held() -> None:
    found = compare([
        record({"a": 1}), record({"a": 1}, kind="held"),
        record({"a": 2}, "rollout", kind="held"),
    ])  # fmt: skip
    assert [(each.kind, each.verdict) for each in found] == [("held", DIFFERS)]


# --- replicas ---------------------------------------------------------------------------------


def odd(*records: WeightRecord) -> list[tuple[int, bool, tuple[str, ...]]]:
    return [(each.rank, each.is_outvoted, each.names) for each in odd_replicas(newest(records))]


def test_the_odd_one_out_is_found_by_majority() -> None:
    ranks = [record({"a": 1, "b": 2 if rank != 2 else 9}, rank=rank) for rank in range(4)]
    assert odd_replicas(ranks) == [DivergingRank("trainer", "actor", 2, True, 4, ("b",))]


def test_of_two_that_differ_both_are_named() -> None:
    assert odd(record({"a": 1}, rank=0), record({"a": 2}, rank=1)) == [
        (0, False, ("a",)), (1, False, ("a",)),
    ]  # fmt: skip


def test_of_two_pairs_all_are_named() -> None:
    ranks = [record({"a": rank // 2}, rank=rank) for rank in range(4)]
    assert odd(*ranks) == [(rank, False, ("a",)) for rank in range(4)]


@pytest.mark.parametrize(
    ("layouts", "shard", "are_replicas"),
    [
        ([{"dp_rank": 0}, {"dp_rank": 1}], None, True),
        # Nothing is known of where these ranks stand: each may hold its own part.
        ([{"x": 0}, {"x": 1}], None, False),
        ([{"dp_rank": 0, "tp_rank": 0}, {"dp_rank": 0, "tp_rank": 1}], None, False),
        ([{"dp_rank": 0, "tp_rank": 0}, {"dp_rank": 0, "tp_rank": 1}], TP_COPY, True),
        ([{"dp_rank": 0, "pp_rank": 0}, {"dp_rank": 0, "pp_rank": 1}], TP_COPY, False),
        ([{"x": 0}, {"x": 1}], COPY, True),
        ([{"x": 0}, {"x": 1}], Shard((4, 8), (0, 0), "dp: Replicate()", ("dp",)), True),
        ([{"tp_rank": 0}, {"tp_rank": 1}], Shard((4, 8), (0, 0), "tp: Replicate()", ("tp",)), True),
        ([{"tp_rank": 0}, {"tp_rank": 1}], Shard((8, 8), (0, 0), "dp: 0 of 2", ("dp",)), False),
    ],
)
def test_which_ranks_hold_copies(
    layouts: list[dict[str, Any]], shard: object, are_replicas: bool
) -> None:
    ranks = [
        record({"a": rank}, rank=rank, shard=shard, **layout) for rank, layout in enumerate(layouts)
    ]
    assert bool(odd(*ranks)) == are_replicas


def test_other_shards_are_no_replicas() -> None:
    shards = [Shard((8, 8), (4 * at, 0), f"fsdp: {at} of 2", ("fsdp",)) for at in (0, 1)]
    ranks = [record({"a": rank}, rank=rank, shard=shards[rank % 2]) for rank in range(4)]
    assert odd(*ranks) == [(rank, False, ("a",)) for rank in range(4)]
    same = [record({"a": rank % 2}, rank=rank, shard=shards[rank % 2]) for rank in range(4)]
    assert odd(*same) == []


def test_roles_and_sides_are_apart() -> None:
    records = [record({"a": 1}), record({"a": 2}, role="critic"), record({"a": 3}, "rollout")]
    assert odd(*records) == []


def test_the_later_record_of_a_rank_answers() -> None:
    again = dataclasses.replace(record({"a": 1}, rank=1, at=5.0))
    records = [again, record({"a": 2}, rank=1, at=4.0), record({"a": 1})]
    assert odd(*records) == []
    assert odd(*reversed(records)) == []


weights = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2) | st.none(), min_size=1)
records = st.lists(
    st.builds(
        record,
        weights,
        st.sampled_from(["trainer", "rollout"]),
        st.integers(0, 3),
        kind=st.sampled_from(["exchanged", "held"]),
        dtype=st.sampled_from(["bfloat16", "int8"]),
        shard=st.sampled_from([None, COPY, TP_COPY]),
        at=st.floats(0, 9),
    ),
    max_size=8,
)


@given(records, st.randoms(use_true_random=False))
def test_neither_order_nor_repetition_matter(
    said: list[WeightRecord], chance: random.Random
) -> None:
    # Of two of one order the later one of the list counts.
    said = [dataclasses.replace(each, order=(*each.order[:2], at)) for at, each in enumerate(said)]
    again = [*said, *said[:3]]
    chance.shuffle(again)
    assert compare(newest(again)) == compare(newest(said))
    assert odd_replicas(newest(again)) == odd_replicas(newest(said))


@given(records)
def test_nothing_agrees_but_the_same_bytes_of_the_same_form(said: list[WeightRecord]) -> None:
    answering = newest(said)
    for found in compare(answering):
        held = {
            (record.side, tensor[1:3], checksum)
            for record in answering
            for tensor, checksum in zip(record.tensors, record.checksums, strict=True)
            if tensor.name == found.name and record.kind == found.kind
        }
        forms = {side: {each[1:] for each in held if each[0] == side} for side, *_ in held}
        if found.verdict == AGREES:
            assert forms["rollout"] <= forms["trainer"]
            assert all(checksum is not None for _, _, checksum in held)
        elif found.verdict == DIFFERS:
            assert forms["rollout"] != forms["trainer"]


@given(records)
def test_only_a_majority_outvotes(said: list[WeightRecord]) -> None:
    found = odd_replicas(newest(said))
    assert all(each.replicas > 2 for each in found if each.is_outvoted)
    assert all(each.names for each in found)
