"""Aligning a trainer's tokens with rollouts of other processes: arrays in, a batch out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.batches import bfloat16, from_bfloat16
from tests.support.parallel import Sample, Span, make_samples, payload_of, zigzag

from stagescope_service.ingest import rollout_join
from stagescope_service.ingest.recompute import producers_of
from stagescope_service.ingest.rollout_join import (
    Joined,
    RolloutRows,
    join,
    rollout_rows,
    stream_of,
)
from stagescope_service.statistics import TokenBatch, WireTensor, summarise
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.policy_versions import text_versions

TRAINED = ("old_log_probs", "response_mask", "responses", "positions")
GENERATED = ("rollout_log_probs", "response_mask", "responses", "positions", "versions")


def trainer(spans: Sequence[Span], *without: str, **extra: WireTensor) -> TokenBatch:
    names = [name for name in TRAINED if name not in without]
    payload = payload_of(spans, streams=names, version=9, **extra)
    return stream_of(payload["tensors"], payload["strings"], payload["meta"], "old")


def engine(
    spans: Sequence[Span],
    *without: str,
    age: int = 0,
    wanted: Sequence[str] = (),
    **more: WireTensor,
) -> RolloutRows | None:
    names = [name for name in GENERATED if name not in without]
    payload = payload_of(spans, streams=names, version=8)
    payload["tensors"].update(more)
    ids = wanted or payload["strings"]["sample_ids"]
    return rollout_rows(payload["tensors"], payload["strings"], payload["meta"], ids, (age, 0))


def rows(*found: RolloutRows | None) -> list[RolloutRows]:
    return [each for each in found if each is not None]


def whole(samples: Sequence[Sample]) -> list[Span]:
    return [Span(sample, np.arange(len(sample))) for sample in samples]


def assert_joined(joined: Joined, spans: Sequence[Span], left_out: Sequence[int] = ()) -> None:
    """q and versions are those of the same tokens wherever the mask is 1."""
    assert joined.batch.pair == ("old", "rollout")
    assert joined.left_out == tuple(left_out)
    for row, span in enumerate(spans):
        begin, end = joined.batch.row_offsets[row : row + 2]
        on = span.sample.mask[span.at] == 1
        if row in left_out:
            assert joined.skip[begin:end].all()
            continue
        assert not joined.skip[begin:end].any()
        q = joined.batch.q[begin:end][on]
        assert q.tolist() == span.sample.rollout[span.at][on].tolist()
        if joined.batch.versions is not None:
            versions = joined.batch.versions[begin:end][on]
            assert versions.tolist() == span.sample.versions[span.at][on].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.data())
def test_any_pieces_on_either_side_find_each_other(seed: int, data: st.DataObject) -> None:
    samples = make_samples(seed, 5, 9, "g")
    pieces: list[list[Span]] = [[] for _ in range(3)]
    for sample in samples:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(sample)), max_size=2)))
        for at in np.split(np.arange(len(sample)), cuts):
            if len(at):
                pieces[data.draw(st.integers(0, 2))].append(Span(sample, at))
    found = rows(*(engine(piece, age=age) for age, piece in enumerate(pieces) if piece))
    order = data.draw(st.permutations(found))
    cp = data.draw(st.sampled_from([None, 0, 1]))
    held = data.draw(st.permutations(samples))
    spans = [Span(s, np.arange(len(s)) if cp is None else zigzag(len(s), cp)) for s in held]
    without = data.draw(st.sampled_from([(), ("responses",)]))
    assert_joined(join(trainer(spans, *without), order, split=cp is not None), spans)


def test_without_positions_the_models_tokens_are_taken_in_order() -> None:
    samples = make_samples(1, 4, 9, "g")
    found = rows(engine(whole(samples), "positions", "responses"))
    # The trainer's rows begin with a prompt: nothing lies where the engine had it.
    spans = whole(samples)
    width = max(len(sample) for sample in samples) + 7

    def padded(name: str, dtype: str) -> WireTensor:
        table = np.zeros((len(samples), width), dtype)
        for row, sample in enumerate(samples):
            table[row, 7 : 7 + len(sample)] = getattr(sample, name)
        return table.dtype.name, table.shape, table, None

    tensors = {"old_log_probs": padded("old", "f4"), "response_mask": padded("mask", "i8")}
    strings = {"sample_ids": [sample.uid for sample in samples]}
    joined = join(stream_of(tensors, strings, {}, "old"), found)
    assert joined.left_out == ()
    for row, span in enumerate(spans):
        on = span.sample.mask == 1
        q = joined.batch.q.reshape(-1, width)[row, 7 : 7 + len(on)]
        assert q[on].tolist() == span.sample.rollout[on].tolist()


def test_a_row_that_cannot_be_aligned_is_left_out_with_the_reason() -> None:
    samples = make_samples(2, 4, 9, "g")
    cut = dataclasses.replace(samples[1])
    other = dataclasses.replace(samples[2], ids=samples[2].ids + 1)
    short = Span(cut, np.arange(max(len(cut) - 3, 1)))
    if cut.mask[short.at].sum() == cut.mask.sum():
        short = Span(cut, np.flatnonzero(cut.mask)[:1])
    found = rows(engine([Span(samples[0], np.arange(len(samples[0]))), short, *whole([other])]))
    spans = whole(samples)
    joined = join(trainer(spans), found)
    assert joined.why == {
        1: rollout_join.UNALIGNED,
        2: rollout_join.OTHER_TOKENS,
        3: rollout_join.MISSING,
    }
    assert_joined(joined, spans, left_out=[1, 2, 3])


def test_as_many_tokens_of_another_piece_are_not_the_same_tokens() -> None:
    sample = make_samples(3, 1, 9, "g")[0]
    sample = dataclasses.replace(sample, mask=np.ones_like(sample.mask))
    half = len(sample) // 2
    found = rows(engine([Span(sample, np.arange(half))], "responses"))
    spans = [Span(sample, np.arange(half, 2 * half))]
    joined = join(trainer(spans, "responses"), found, split=True)
    assert joined.why == {0: rollout_join.UNALIGNED}


def test_rows_without_positions_align_by_their_place_only_with_equal_ids() -> None:
    sample = make_samples(4, 1, 9, "g")[0]
    ends = Span(sample, np.arange(int(np.flatnonzero(sample.mask)[-1])))  # the trainer cut it off
    for without, why in (((), {}), (("responses",), {0: rollout_join.UNALIGNED})):
        found = rows(engine(whole([sample]), "positions", *without))
        joined = join(trainer([ends], "positions", *without), found)
        assert joined.why == why
        if not why:
            assert_joined(joined, [ends])


def test_of_a_position_that_is_there_twice_the_newest_counts() -> None:
    sample = make_samples(5, 1, 9, "g")[0]
    old = dataclasses.replace(sample, rollout=sample.rollout - 1)
    for first, second in ((0, 1), (1, 0)):
        both = [engine(whole([old]), age=0), engine(whole([sample]), age=1)]
        found = rows(both[first], both[second])
        assert_joined(join(trainer(whole([sample])), found), whole([sample]))


@pytest.mark.parametrize("without", [(), ("responses",)])
def test_rollouts_that_share_an_id_and_are_of_two_samples_are_left_out(
    without: tuple[str, ...],
) -> None:
    """Two engines number their samples from 0 each: what one lacks is not filled from the other."""
    one, short, *_ = sorted(make_samples(5, 6, 30, "g"), key=len, reverse=True)
    held = dataclasses.replace(short, uid=one.uid)
    pieces = [engine(whole([each]), *without) for each in (one, held)]
    found = [
        dataclasses.replace(each, age=(4, number)) for number, each in enumerate(rows(*pieces))
    ]
    for each in (one, held):
        joined = join(trainer(whole([each]), *without), found)
        assert joined.why == {0: rollout_join.CONTRADICTING}
        assert joined.tokens_left_out == {rollout_join.CONTRADICTING: each.mask.sum()}
    again = [dataclasses.replace(found[0], age=(4, number)) for number in range(3)]
    assert_joined(join(trainer(whole([one]), *without), again), whole([one]))


@pytest.mark.parametrize("mixed", [False, True])
def test_dtypes_are_kept_or_widened_exactly(mixed: bool) -> None:
    samples = make_samples(6, 2, 9, "g")
    spans = whole(samples)
    bits = [bfloat16(sample.rollout) for sample in samples]
    found: list[RolloutRows] = []
    for row, span in enumerate(spans):
        tag = "float32" if mixed and row else "bfloat16"
        values = samples[row].rollout if tag == "float32" else bits[row]
        offsets = np.array([0, len(values)], np.int64)
        tensor = (tag, values.shape, values, offsets)
        found += rows(engine([span], rollout_log_probs=tensor))
    joined = join(trainer(spans), found)
    assert joined.batch.q_dtype == ("float64" if mixed else "bfloat16")
    first = samples[0].mask == 1
    q = joined.batch.q[: len(first)][first]
    expected = from_bfloat16(bits[0])[first] if mixed else bits[0][first]
    assert q.tolist() == expected.tolist()


def test_versions_come_from_the_rollout_only_where_the_trainer_has_none() -> None:
    samples = make_samples(7, 3, 9, "g")
    spans = whole(samples)
    own = ("int64", (3,), np.full(3, 4), None)
    kept = join(trainer(spans, versions=own), rows(engine(spans)))
    assert kept.batch.versions is not None
    assert kept.batch.versions.tolist() == [4, 4, 4]
    by_payload = join(trainer(spans), rows(engine(spans, "versions")))
    assert by_payload.batch.versions is not None
    model = by_payload.batch.mask == by_payload.batch.mask_one
    assert set(by_payload.batch.versions[model].tolist()) == {8}


def test_the_engine_of_a_row_is_the_one_that_its_payload_names_or_its_process() -> None:
    spans = whole(make_samples(7, 3, 9, "g"))
    found = [
        dataclasses.replace(rows(engine([span]))[0], incarnation=f"e{at}", engines=engines)
        for at, (span, engines) in enumerate(zip(spans, (("replica 4",), None, None), strict=True))
    ]
    again = dataclasses.replace(found[2], incarnation="e7", age=(9, 9))
    assert join(trainer(spans), [*found, again]).batch.engines == (
        "replica 4", "process e1", "process e2, process e7",
    )  # fmt: skip


def test_only_wanted_samples_are_read_and_other_nodes_may_have_none() -> None:
    samples = make_samples(8, 4, 9, "g")
    found = engine(whole(samples), wanted=["g/2", "h/0"])
    assert found is not None
    assert found.samples == ("g/2",)
    assert len(found.q) == samples[2].mask.sum()
    assert engine(whole(samples), wanted=["h/0"]) is None
    joined = join(trainer(whole(samples)), [])
    assert set(joined.why.values()) == {rollout_join.MISSING}
    assert joined.left_out == (0, 1, 2, 3)


def test_ragged_rollouts_need_no_mask_and_padded_ones_do() -> None:
    sample = make_samples(9, 1, 9, "g")[0]
    sample = dataclasses.replace(sample, mask=np.ones_like(sample.mask))
    found = rows(engine(whole([sample]), "response_mask"))
    assert_joined(join(trainer(whole([sample])), found), whole([sample]))
    table: Mapping[str, WireTensor] = {
        "rollout_log_probs": ("float32", (1, 3), np.zeros((1, 3), np.float32), None)
    }
    with pytest.raises(InvalidTensor, match="response_mask"):
        rollout_rows(table, {"sample_ids": ["g/0"]}, {}, ["g/0"])


def told(*names: str | None) -> list[RolloutRows]:
    empty = engine(whole(make_samples(0, 1, 8, "s")))
    assert empty is not None
    return [
        dataclasses.replace(empty, producer=name, incarnation=f"engine-{at}")
        for at, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("trainer_said", "engines_said", "expected"),
    [
        (None, [None], ("process actor-0", "process engine-0")),
        ("fsdp", ["vllm", "sglang"], ("fsdp", "sglang, vllm")),
        ("vllm", ["vllm", "sglang"], ("vllm", "vllm")),
        ("fsdp", [None], (None, None)),
        (None, ["vllm"], (None, None)),
        ("fsdp", ["vllm", None], (None, None)),
        (None, [], (None, None)),
    ],
)
def test_joined_streams_are_of_two_producers_unless_something_is_said(
    trainer_said: str | None,
    engines_said: list[str | None],
    expected: tuple[str | None, str | None],
) -> None:
    assert producers_of("actor-0", trainer_said, told(*engines_said)) == expected
    itself = [dataclasses.replace(each, incarnation="actor-0") for each in told(None)]
    assert producers_of("actor-0", None, itself) == (None, None)


@pytest.mark.parametrize("said", [("default", "b7c2"), ("step-3", "iter-3")])
def test_texts_of_versions_come_with_them_from_several_payloads(said: tuple[str, str]) -> None:
    samples = make_samples(1, 4, 9, "g")
    spans, found = whole(samples), []
    for age, text in enumerate(said):
        own = [span for row, span in enumerate(spans) if row % 2 == age]
        (tensor, names) = text_versions([text] * len(own)) or pytest.fail("no text")
        rows_of = engine(own, "versions", age=age, versions=tensor)
        assert rows_of is not None
        codes = {int(code): name for code, name in names.items()}
        found.append(dataclasses.replace(rows_of, version_names=codes))
    batch = join(trainer(spans), found).batch
    assert {*said} <= {*batch.version_names.values()}
    summary = summarise(dataclasses.replace(batch, policy_version=4))
    assert summary.version_labels == (said if said[0] == "default" else said[:1])
    assert not summary.staleness.keys.size
