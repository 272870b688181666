"""Ids that several ranks use for other samples, and copies that are the same sample after all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.statistics.test_step_summary import record
from tests.service.statistics.test_summary import assert_same
from tests.support.batches import batch_of, bfloat16, wire

from stagescope_service.coordinator.aggregation import assembly
from stagescope_service.coordinator.aggregation.disagreements import differing_copies
from stagescope_service.core.findings import FindingLocation
from stagescope_service.statistics import (
    Field,
    PartRecord,
    StepSummary,
    TokenBatch,
    assemble,
    skip_of,
    summarise,
)
from stagescope_service.statistics.codec import summary_from_bytes, summary_to_bytes
from stagescope_service.store.contract import Put
from stagescope_wire.schema import Part
from stagescope_wire.tensorfile import Array


@dataclasses.dataclass(frozen=True)
class Sample:
    """One trajectory: p, q, mask and token ids of its tokens."""

    p: Array
    q: Array
    mask: Array
    ids: Array


def sample(rng: np.random.Generator, tokens: int, *, rounds: bool = True) -> Sample:
    q = -rng.exponential(1.0, tokens).astype(np.float32)
    mask = np.ones(tokens, np.int64)
    if rounds and tokens > 3:
        first, last = sorted(rng.integers(1, tokens, 2))
        mask[first:last] = 0
        mask[-1] = 1
    noise = rng.normal(0.0, 0.05, tokens).astype(np.float32)
    return Sample(np.minimum(q + noise, 0), q, mask, rng.integers(0, 32000, tokens))


def ragged(
    samples: Sequence[Sample], names: Sequence[str], *, token_ids: bool = False, place: bool = False
) -> TokenBatch:
    offsets = np.cumsum([0, *(len(one.q) for one in samples)]).tolist()
    tensors = {
        name: wire(np.concatenate([getattr(one, field) for one in samples]), offsets)
        for name, field in (("old_log_probs", "p"), ("rollout_log_probs", "q"),
                            ("response_mask", "mask"), ("responses", "ids"))
    }  # fmt: skip
    if not token_ids:
        del tensors["responses"]
    if place:
        positions = np.concatenate([np.arange(len(one.q)) + 7 for one in samples])
        tensors["positions"] = wire(positions, offsets)
    return TokenBatch.from_tensors(tensors, {"sample_ids": names})


def aggregated(records: list[PartRecord], batches: dict[str, TokenBatch]) -> StepSummary:
    """Assemble with restatements, as the coordinator does."""

    def again(part: PartRecord) -> PartRecord:
        if part.key not in skips:
            return part
        batch, skipped = batches[part.key], skips[part.key]
        summary, handed = summarise(batch, skip=skip_of(batch, skipped)), part.handed
        return dataclasses.replace(
            part, summary=summary, handed=handed or part.summary, skipped=skipped
        )

    for _ in range(len(records) + 1):
        step_summary = assemble(records)
        if not step_summary.to_recompute:
            assert step_summary.unaccounted == 0
            return StepSummary.from_bytes(step_summary.to_bytes())
        skips = {item.key: item.skips for item in step_summary.to_recompute}
        records = [again(part) for part in records]
    raise AssertionError("a part is to be taken again for ever")


def reference(samples: list[Sample]) -> tuple[int, float, list[float]]:
    """Tokens, sum of |d|, and each sample's mean of |d|, ascending."""
    d = [np.abs(one.p.astype(float) - one.q.astype(float))[one.mask == 1] for one in samples]
    every = np.concatenate(d)
    return len(every), float(every.sum()), sorted(float(each.mean()) for each in d)


def assert_counts(step_summary: StepSummary, samples: list[Sample]) -> None:
    tokens, total, means = reference(samples)
    assert step_summary.total.tokens == tokens
    assert step_summary.total[Field.D_ABS_SUM] == pytest.approx(total, rel=1e-9)
    keys, values = step_summary.summary.sequences.by_sample()
    assert len(keys) == len(samples)
    assert sorted((values[:, 4] / values[:, 0]).tolist()) == pytest.approx(means, rel=1e-9)
    assert step_summary.sent is not None
    assert step_summary.sent == step_summary.total.masked + sum(
        step_summary.tokens_left_out.values()
    )


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("place", [False, True])
@pytest.mark.parametrize(("ranks", "counts"), [(8, [16] * 8), (2, [4, 5])])
def test_ranks_that_number_their_rows_from_0_lose_nothing(
    ranks: int, counts: list[int], token_ids: bool, place: bool
) -> None:
    rng = np.random.default_rng(ranks)
    held = [[sample(rng, int(rng.integers(1, 200))) for _ in range(n)] for n in counts]
    records = [
        record(str(rank), ragged(own, [str(i) for i in range(len(own))],
                                 token_ids=token_ids, place=place), rank)
        for rank, own in enumerate(held)
    ]  # fmt: skip
    step_summary = aggregated(records, {})
    assert_counts(step_summary, [one for own in held for one in own])
    assert not step_summary.left_out
    by_id = {found.sample: found.holders for found in step_summary.contradictions}
    assert by_id["0"] == tuple(("actor", rank) for rank in range(ranks))
    assert step_summary.summary.sequences.samples.count("0") == 0
    assert "0 [actor 1]" in step_summary.summary.sequences.samples
    found = findings(step_summary)["sample_ids_contradict"]
    assert found["severity"] == "error"
    assert found["message"].startswith(f"{min(counts)} sample_ids name different samples ('0'")
    assert found["evidence"]["samples"]["0"] == [f"actor {rank}" for rank in range(ranks)]


def test_empty_ids_lose_nothing_and_are_named() -> None:
    rng = np.random.default_rng(5)
    ids = ["", "", "0", "1", "2"]
    held = [[sample(rng, int(rng.integers(5, 60))) for _ in ids] for _ in range(3)]
    records = [record(str(rank), ragged(own, ids), rank) for rank, own in enumerate(held)]
    step_summary = aggregated(records, {})
    assert_counts(step_summary, [one for own in held for one in own])
    assert {found.sample for found in step_summary.contradictions} == {"(empty)", "0", "1", "2"}


def findings(step_summary: StepSummary) -> dict[str, Any]:
    """The findings about a step summary's tokens, by kind."""
    place: FindingLocation = {
        "run": "r", "attempt_id": 1, "step": 5, "stage": step_summary.stage, "wall": 0.0
    }  # fmt: skip
    rows = [put.row for put in assembly.findings(step_summary, place) if isinstance(put, Put)]
    return {row["kind"]: row for row in rows}


def silent(key: str, samples: Sequence[Sample], rank: int = 0, **fields: object) -> PartRecord:
    """Return a rank's part whose rows name no sample."""
    batch = dataclasses.replace(ragged(samples, ["x"] * len(samples)), sample_ids=None)
    return record(key, batch, rank, **fields)


def test_the_same_rows_of_ranks_that_say_nothing_are_named_and_count_each() -> None:
    rng = np.random.default_rng(4)
    own, others = ([sample(rng, int(rng.integers(20, 60))) for _ in range(4)] for _ in range(2))
    # A replica that computed its own log-probs holds the same rows, too.
    recomputed = [dataclasses.replace(one, p=one.p + np.float32(1e-3)) for one in own]
    records = [
        silent("a", own, 0), silent("b", own, 1), silent("c", others, 2), silent("d", recomputed, 3)
    ]  # fmt: skip
    step_summary = aggregated(records, {})
    assert step_summary.total.tokens == sum(record.summary.total.tokens for record in records)
    assert not step_summary.left_out
    assert step_summary.same_rows == ((("actor", 0), ("actor", 1), ("actor", 3)),)
    found = findings(step_summary)["rows_counted_twice"]
    again = 2 * records[0].summary.total.tokens
    assert found["message"].startswith(
        "actor ranks 0-1, 3: these ranks hold the same rows, bit for bit"
    )
    assert f"{again} of {step_summary.total.tokens} tokens count again" in found["message"]
    assert found["severity"] == "warning"
    assert "data_rank" in found["advice"]
    assert "sample_ids" in found["advice"]
    assert found["evidence"]["groups"] == [[["actor", 0], ["actor", 1], ["actor", 3]]]


def test_several_parts_are_the_same_rows_if_all_of_them_are() -> None:
    rng = np.random.default_rng(4)
    first, second, other = ([sample(rng, 40) for _ in range(2)] for _ in range(3))
    later = Part(microbatch=1)

    def of_ranks(last: list[Sample]) -> StepSummary:
        return aggregated([
            silent("a", first, 0), silent("b", second, 0, part=later),
            silent("c", first, 1), silent("d", last, 1, part=later),
        ], {})  # fmt: skip

    assert of_ranks(second).same_rows == ((("actor", 0), ("actor", 1)),)
    assert of_ranks(other).same_rows == ()


def test_what_tells_rows_apart_or_together_is_no_silence() -> None:
    own = [sample(np.random.default_rng(4), 40) for _ in range(3)]
    names = ["x", "y", "z"]
    together: list[list[PartRecord]] = [
        [silent("a", own, 0, data_rank=0), silent("b", own, 1, data_rank=0)],
        [silent("a", own, 0, data_rank=0), silent("b", own, 1, data_rank=1)],
        [silent("a", own, 0, layout={"dp_rank": 0}), silent("b", own, 1, layout={"dp_rank": 1})],
        [record("a", ragged(own, names), 0), record("b", ragged(own, names), 1)],
        [record("a", ragged(own, names), 0), record("b", ragged(own, ["u", "v", "w"]), 1)],
    ]
    for records in together:
        step_summary = aggregated(records, {})
        assert step_summary.same_rows == ()
        assert "rows_counted_twice" not in findings(step_summary)
    # One that names its samples, and one that does not: which it holds is not known.
    half = aggregated([record("a", ragged(own, names), 0), silent("b", own, 1)], {})
    assert half.same_rows == ((("actor", 0), ("actor", 1)),)


def test_streams_that_were_never_filled_in_are_no_evidence_of_equal_rows() -> None:
    rng = np.random.default_rng(4)
    held = [[sample(rng, 40) for _ in range(2)] for _ in range(2)]
    for own in held:
        own[:] = [
            dataclasses.replace(one, q=np.full_like(one.q, -1.0), mask=np.ones_like(one.mask))
            for one in own
        ]
    assert aggregated([silent(str(at), own, at) for at, own in enumerate(held)], {}).same_rows == ()
    few = [sample(rng, 6)]
    assert aggregated([silent("a", few, 0), silent("b", few, 1)], {}).same_rows == ()


def test_tokens_that_are_nowhere_are_an_error() -> None:
    own = [sample(np.random.default_rng(1), 20) for _ in range(3)]
    step_summary = aggregated([record("a", ragged(own, list("012")))], {})
    assert not findings(step_summary)
    assert step_summary.sent is not None
    lost = dataclasses.replace(
        step_summary, sent=step_summary.sent + 4, tokens_left_out={"replica": 1}
    )
    assert findings(lost)["tokens_unaccounted"]["message"].startswith("3 tokens are missing")


def test_microbatches_that_number_their_rows_from_0_lose_nothing() -> None:
    rng = np.random.default_rng(3)
    held = [[sample(rng, int(rng.integers(5, 60))) for _ in range(4)] for _ in range(3)]
    records = [
        record(str(number), ragged(own, list("0123")), part=Part(microbatch=number))
        for number, own in enumerate(held)
    ]
    step_summary = aggregated(records, {})
    assert_counts(step_summary, [one for own in held for one in own])
    assert "2 [actor 0, microbatch 1]" in step_summary.summary.sequences.samples
    assert {found.sample for found in step_summary.contradictions} == set("0123")


def test_local_ids_with_replicas_pieces_epochs_and_a_driver_count_each_sample_once() -> None:
    rng = np.random.default_rng(4)
    held = [
        [sample(rng, int(rng.integers(8, 90)), rounds=False) for _ in range(5)] for _ in range(3)
    ]
    records, batches = [], {}

    def add(key: str, batch: TokenBatch, rank: int, **fields: object) -> None:
        batches[key] = batch
        records.append(record(key, batch, rank, **fields))

    names = [str(i) for i in range(5)]
    for data_rank, own in enumerate(held):
        for tp_rank in range(2):
            rank = 2 * data_rank + tp_rank
            add(f"{rank}", ragged(own, names), rank)  # nobody says that they are replicas
            add(f"{rank} again", ragged(own[::-1], names[::-1]), rank, part=Part(epoch=1))
    flat = [one for own in held for one in own]
    add("driver", ragged(flat, [f"uid-{i}" for i in range(len(flat))]), 0, role="driver")
    step_summary = aggregated(records, batches)
    assert_counts(step_summary, flat)
    assert set(step_summary.left_out.values()) == {"repeated", "other role"}
    assert not step_summary.differing


def test_context_parallel_pieces_of_local_ids_stay_together() -> None:
    rng = np.random.default_rng(5)
    held = [[sample(rng, 40, rounds=False) for _ in range(3)] for _ in range(2)]
    records = []
    for data_rank, own in enumerate(held):
        for cp_rank in range(2):
            part = slice(20 * cp_rank, 20 * cp_rank + 20)
            p, q, mask = (
                np.stack([getattr(one, f)[part] for one in own]) for f in ("p", "q", "mask")
            )
            batch = batch_of(p, q, mask, samples=list("012"), token_offset=np.full(3, part.start))
            records.append(
                record(f"{data_rank}.{cp_rank}", batch, 2 * data_rank + cp_rank,
                       data_rank=data_rank, layout={"cp_rank": cp_rank, "cp_size": 2})
            )  # fmt: skip
    step_summary = aggregated(records, {})
    assert_counts(step_summary, [one for own in held for one in own])


@pytest.mark.parametrize("names", [None, 0])
def test_left_padded_copies_of_different_width_are_one_sample(names: int | None) -> None:
    rng = np.random.default_rng(6)
    own = [sample(rng, int(rng.integers(2, 30))) for _ in range(6)]

    def padded(width: int) -> TokenBatch:
        table = {f: np.zeros((6, width), getattr(own[0], f).dtype) for f in ("p", "q", "mask")}
        for row, one in enumerate(own):
            for field, values in table.items():
                values[row, width - len(one.q) :] = getattr(one, field)
        return batch_of(*table.values(), samples=[f"s{i}" for i in range(6)])

    fields: dict[str, object] = {} if names is None else {"data_rank": names}
    records = [record(str(k), padded(30 + 11 * k), k, **fields) for k in range(3)]
    records.append(record("driver", padded(99), 0, role="driver"))
    records.append(record("epoch", padded(77), 0, part=Part(epoch=1), **fields))
    step_summary = aggregated(records, {r.key: padded(30) for r in records})
    assert_counts(step_summary, own)
    assert step_summary.counted == ("0",)
    assert not step_summary.contradictions
    assert not step_summary.differing
    assert [row.cell.tokens for row in step_summary.ranks] == [step_summary.total.tokens] * 4


def test_a_copy_in_another_dtype_and_replicas_with_other_p_are_the_same_sample() -> None:
    rng = np.random.default_rng(7)
    own = [sample(rng, int(rng.integers(1, 50))) for _ in range(8)]
    coarse = [dataclasses.replace(one, q=bfloat16(one.q)) for one in own]
    moved = [dataclasses.replace(one, p=one.p - np.float32(0.2)) for one in own]
    broken = dataclasses.replace(own[0], p=np.where(np.arange(len(own[0].p)), own[0].p, np.nan))
    names = [str(i) for i in range(8)]
    records = [
        record("a", ragged(own, names), 0),
        record("b", ragged(moved, names), 1),
        record("c", ragged([broken, *own[1:]], names), 2),
        record("driver", ragged(coarse, names), 0, role="driver"),
    ]
    step_summary = aggregated(records, {})
    assert_counts(step_summary, own)
    assert not step_summary.contradictions
    assert {key for key, _ in step_summary.differing} == {"b", "c"}


def test_a_declared_replica_with_another_mask_does_not_count() -> None:
    rng = np.random.default_rng(8)
    own = [sample(rng, 30) for _ in range(3)]
    other = dataclasses.replace(own[1], mask=np.ones_like(own[1].mask), q=own[1].q[::-1].copy())
    batches = {"a": ragged(own, list("012")), "b": ragged([own[0], other, own[2]], list("012"))}
    records = [record(key, batches[key], rank, data_rank=0) for rank, key in enumerate("ab")]
    step_summary = aggregated(records, batches)
    assert_counts(step_summary, own)
    assert step_summary.left_out == {"b": "replica"}
    assert step_summary.differing == (("b", "a"),)


@pytest.mark.parametrize("token_ids", [False, True])
def test_the_same_id_and_log_probs_with_another_mask_or_length_are_the_same_sample(
    token_ids: bool,
) -> None:
    """Whoever hands it over without a data_rank: one rank counts, and a finding names the other."""
    rng = np.random.default_rng(9)
    one = sample(rng, 40, rounds=False)
    shorter = Sample(one.p[:30], one.q[:30], one.mask[:30], one.ids[:30])
    without_first, with_tool = (np.ones(40, np.int64) for _ in range(2))
    without_first[:5] = 0
    with_tool[10:20] = 0
    others = [dataclasses.replace(one, mask=mask) for mask in (without_first, with_tool)]
    alone = sample(rng, 9)
    for other in (shorter, *others):
        records = [
            record("a", ragged([one, alone], ["x", "y"], token_ids=token_ids), 0),
            record("b", ragged([other], ["x"], token_ids=token_ids), 1),
        ]
        step_summary = aggregated(records, {})
        assert_counts(step_summary, [one, alone])
        assert not step_summary.contradictions
        assert step_summary.left_out == {"b": "repeated"}
        assert step_summary.differing == (("b", "a"),)
        put = differing_copies(step_summary, records, {"run": "r", "attempt_id": 1, "wall": 0.0})
        assert "the tokens of one count (actor 0 counts, not actor 1)" in put.row["message"]


def with_other_q(one: Sample, by: float = 0.1) -> Sample:
    """The same sample with other log-probs of the rollout."""
    return dataclasses.replace(one, q=(one.q - np.float32(by)).astype(np.float32))


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_ids_and_tokens_with_other_log_probs_of_the_rollout_are_the_same_samples(
    tokens: int, ranks: int
) -> None:
    """Of one rank the newest counts, of two the first; either is a finding."""
    rng = np.random.default_rng(31)
    own = [sample(rng, tokens, rounds=False) for _ in range(5)]
    others = [with_other_q(one) for one in own]
    batches = {"a": ragged(own, list("01234"), token_ids=True),
               "b": ragged(others[:4], list("0123"), token_ids=True)}  # fmt: skip
    later = Part(occurrence=1) if ranks == 1 else Part()
    records = [record("a", batches["a"]), record("b", batches["b"], ranks - 1, part=later)]
    step_summary = aggregated(records, batches)
    assert_counts(step_summary, [*others[:4], own[4]] if ranks == 1 else own)
    assert not step_summary.contradictions
    assert step_summary.differing == ((("a", "b"),) if ranks == 1 else (("b", "a"),))


def test_other_log_probs_of_the_rollout_alone_contradict_without_token_ids() -> None:
    """Nothing then shows that these are copies: each counts, and the finding says what to give."""
    rng = np.random.default_rng(32)
    own = [sample(rng, 40, rounds=False) for _ in range(3)]
    others = [with_other_q(one) for one in own]
    records = [
        record("a", ragged(own, list("012"))),
        record("b", ragged(others, list("012")), part=Part(occurrence=1)),
    ]
    step_summary = aggregated(records, {})
    assert_counts(step_summary, [*own, *others])
    found = findings(step_summary)["sample_ids_contradict"]
    assert "If they are copies of one sample, its tokens count more than once" in found["message"]
    assert "Record responses" in found["advice"]


def test_ids_of_which_some_name_other_tokens_are_not_those_of_copies() -> None:
    """Equal answers to several prompts are several samples, where ids are row numbers."""
    rng = np.random.default_rng(33)
    own = [sample(rng, 30, rounds=False) for _ in range(6)]
    others = [with_other_q(one) for one in own[:5]] + [sample(rng, 30, rounds=False)]
    records = [
        record(str(rank), ragged(rows, list("012345"), token_ids=True), rank)
        for rank, rows in enumerate((own, others))
    ]
    step_summary = aggregated(records, {})
    assert_counts(step_summary, [*own, *others])
    assert len(step_summary.contradictions) == 6


def test_tokens_of_a_part_that_cannot_be_taken_again_count_from_others() -> None:
    rng = np.random.default_rng(10)
    own = [sample(rng, 12) for _ in range(4)]
    batches = {
        "a": ragged(own[:2], ["0", "1"]),
        "b": ragged(own[1:], ["1", "2", "3"]),
        "c": ragged(own[2:3], ["2"]),
    }
    records = [record(key, batches[key], rank) for rank, key in enumerate("abc")]
    step_summary = assemble(records, unavailable={"b"})
    assert step_summary.counted == ("a", "c")
    assert step_summary.tokens_left_out["restate"] == own[3].mask.sum()
    assert findings(step_summary)["tokens_missing"]["evidence"]["tokens"] == own[3].mask.sum()
    assert step_summary.unaccounted == 0


def test_a_part_of_which_only_masked_positions_are_new_is_no_gap() -> None:
    """Pieces hold every model token of a row: what is left of the row is the environment's."""
    one = sample(np.random.default_rng(11), 7)
    one = dataclasses.replace(one, mask=np.array([1, 1, 1, 0, 0, 1, 1]))

    def piece(first: int, last: int) -> TokenBatch:
        part = slice(first, last)
        rows = (getattr(one, f)[None, part] for f in ("p", "q", "mask"))
        return batch_of(*rows, samples=["x"], token_offset=np.array([first]))

    records = [
        record("a", piece(0, 3), 0),
        record("b", piece(5, 7), 1),
        record("c", piece(0, 7), 2),
    ]
    step_summary = assemble(records)
    assert step_summary.total.tokens == 5
    assert step_summary.left_out == {"c": "repeated"}
    assert not step_summary.to_recompute


def empty(tokens: int = 5) -> Sample:
    return Sample(-np.ones(tokens), -np.ones(tokens), np.zeros(tokens, np.int64), np.zeros(tokens))


def test_rows_without_a_token_count_also_where_their_part_does_not() -> None:
    """A resampling pass repeats the rows that have tokens, and adds one that has none."""
    one = sample(np.random.default_rng(13), 20)
    records = [
        record("a", ragged([one, empty(), empty(), empty()], list("0123"))),
        record("b", ragged([one, empty(), empty()], list("034")), part=Part(occurrence=1)),
    ]
    step_summary = aggregated(records, {})
    assert step_summary.left_out == {"a": "repeated"}
    assert step_summary.summary.empty_rows == 4


def test_rows_without_a_token_count_by_rank_where_ids_are_a_ranks_own() -> None:
    rng = np.random.default_rng(14)
    held = [[sample(rng, 20), sample(rng, 9)] for _ in range(3)]
    records = [
        record("a", ragged([*held[0], empty(), empty()], list("0123")), 0),
        record("b", ragged([held[1][0], empty(), held[1][1], empty()], list("0123")), 1),
        record("c", ragged([*held[2], empty()], list("012")), 2),
        record("c again", ragged([*held[2], empty()], list("012")), 3),
    ]
    step_summary = aggregated(records, {})
    assert_counts(step_summary, [one for own in held for one in own])
    assert step_summary.summary.empty_rows == 5


def test_streams_that_only_some_ranks_have_are_left_out_with_the_reason() -> None:
    rng = np.random.default_rng(12)
    own = [sample(rng, 20) for _ in range(2)]
    other = summarise(dataclasses.replace(ragged(own[1:], ["1"]), pair=("current", "rollout")))
    late = dataclasses.replace(record("b", ragged(own[1:], ["1"]), 1), summary=other)
    step_summary = assemble([record("a", ragged(own[:1], ["0"]), 0), late])
    assert step_summary.left_out == {"b": "other streams"}
    assert step_summary.tokens_left_out == {"other streams": own[1].mask.sum()}
    assert step_summary.unaccounted == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_any_split_any_ids_and_any_repetition_count_every_token_once(
    seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    ranks = data.draw(st.integers(1, 4))
    local = data.draw(st.sampled_from(["global", "by rank", "by microbatch"]))
    place, token_ids = data.draw(st.booleans()), data.draw(st.booleans())
    tp_size = data.draw(st.integers(1, 2))
    declared = data.draw(st.booleans())
    held: list[Sample] = []
    records: list[PartRecord] = []
    batches: dict[str, TokenBatch] = {}
    for data_rank in range(ranks):
        number = 0
        for microbatch in range(data.draw(st.integers(1, 3))):
            own = [sample(rng, int(n)) for n in rng.integers(4, 40, data.draw(st.integers(1, 4)))]
            first = {"global": len(held), "by rank": number, "by microbatch": 0}[local]
            names = [f"id-{first + i}" for i in range(len(own))]
            number += len(own)
            held += own
            for copy in range(tp_size):
                for epoch in range(data.draw(st.integers(1, 2))):
                    key = f"{data_rank}.{microbatch}.{copy}.{epoch}"
                    order = rng.permutation(len(own)) if epoch else np.arange(len(own))
                    batches[key] = ragged(
                        [own[i] for i in order], [names[i] for i in order],
                        place=place, token_ids=token_ids,
                    )  # fmt: skip
                    fields = {"data_rank": data_rank} if declared else {}
                    part = Part(epoch=epoch, microbatch=microbatch)
                    rank = data_rank * tp_size + copy
                    records.append(record(key, batches[key], rank, part=part, **fields))
    step_summary = aggregated(data.draw(st.permutations(records)), batches)
    assert_counts(step_summary, held)
    assert not step_summary.differing
    if local == "global":
        assert not step_summary.contradictions
        assert not step_summary.to_recompute
        names = [f"id-{i}" for i in range(len(held))]
        assert_same(step_summary.summary, summarise(ragged(held, names, place=place)))
    again = summary_from_bytes(summary_to_bytes(step_summary.summary))
    assert summary_to_bytes(again) == summary_to_bytes(step_summary.summary)


def moved(one: Sample, by: float) -> Sample:
    """The same sample with other log-probs of the trainer."""
    return dataclasses.replace(one, p=(one.p - np.float32(by)).astype(np.float32))


def remasked(rng: np.random.Generator, one: Sample) -> Sample:
    """The same sample with another mask that has tokens in common with its first one."""
    mask = np.where(rng.random(len(one.mask)) < 0.5, one.mask, 1 - one.mask)
    mask[[0, -1]] = one.mask[[0, -1]]
    return dataclasses.replace(one, mask=mask)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_of_what_a_rank_hands_over_again_the_newest_counts(seed: int, data: st.DataObject) -> None:
    """Whatever repeats, in whatever parts, with replicas, and in whatever order it arrives."""
    rng = np.random.default_rng(seed)
    ranks, replicas = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    by = data.draw(st.sampled_from(["occurrence", "minibatch", "microbatch"]))
    token_ids = data.draw(st.booleans())
    other_masks = data.draw(st.booleans())
    # Without token ids nothing shows that rows with other log-probs of the rollout are copies.
    other_q = token_ids and not other_masks and data.draw(st.booleans())
    newest: dict[str, Sample] = {}
    is_repeated = False
    batches: dict[str, TokenBatch] = {}
    records: list[PartRecord] = []
    for data_rank in range(ranks):
        names = [f"{data_rank}-{i}" for i in range(data.draw(st.integers(1, 5)))]
        held = {name: sample(rng, int(rng.integers(8, 40)), rounds=not other_q) for name in names}
        number, passes = 0, data.draw(st.integers(1, 3))
        is_repeated |= passes > 1
        for again in range(passes):
            chosen = data.draw(st.permutations(names))
            chosen = chosen[: data.draw(st.integers(1, len(names)))] if again else chosen
            for name in chosen if again else ():
                held[name] = moved(held[name], float(rng.uniform(0.1, 0.5)))
                held[name] = remasked(rng, held[name]) if other_masks else held[name]
                held[name] = with_other_q(held[name]) if other_q else held[name]
            while chosen:
                cut = data.draw(st.integers(1, len(chosen)))
                own, chosen = chosen[:cut], chosen[cut:]
                batch = ragged([held[name] for name in own], own, token_ids=token_ids)
                for copy in range(replicas):
                    key = f"{data_rank}.{number}.{copy}"
                    batches[key] = batch
                    rank, part = data_rank * replicas + copy, Part(**{by: number})
                    records.append(record(key, batch, rank, part=part, data_rank=data_rank))
                number += 1
        newest |= held
    step_summary = aggregated(data.draw(st.permutations(records)), batches)
    assert_counts(step_summary, list(newest.values()))
    whole = summarise(ragged(list(newest.values()), list(newest)))
    assert step_summary.summary.rounds.keys.tolist() == whole.rounds.keys.tolist()
    for (_, cell), (_, expected) in zip(
        step_summary.summary.rounds.items(), whole.rounds.items(), strict=True
    ):
        assert cell[Field.D_ABS_SUM] == pytest.approx(expected[Field.D_ABS_SUM], rel=1e-9)
    for field in ("position", "round", "p", "q"):
        found = getattr(step_summary.summary.worst, field)
        assert found.tolist() == getattr(whole.worst, field).tolist()
    assert not step_summary.contradictions
    assert bool(step_summary.differing) is is_repeated
    of_counted = [each for each in step_summary.differing if each[1] in step_summary.counted]
    assert bool(of_counted) is is_repeated


def unnamed(one: Sample, *, token_ids: bool = True) -> TokenBatch:
    """A payload of one row without a sample id."""
    tensors = {
        name: wire(getattr(one, field)[None])
        for name, field in (("old_log_probs", "p"), ("rollout_log_probs", "q"),
                            ("response_mask", "mask"), ("responses", "ids"))
    }  # fmt: skip
    if not token_ids:
        del tensors["responses"]
    return TokenBatch.from_tensors(tensors, {})


@pytest.mark.parametrize("by", ["occurrence", "minibatch", "microbatch"])
@pytest.mark.parametrize("other_q", [False, True])
def test_the_same_tokens_without_ids_in_a_later_part_are_the_same_rows(
    by: str, other_q: bool
) -> None:
    rng = np.random.default_rng(21)
    one, alone = sample(rng, 60, rounds=False), sample(rng, 50, rounds=False)
    newest = moved(one, 0.2)
    newest = dataclasses.replace(newest, q=newest.q - np.float32(0.1)) if other_q else newest
    records = [
        record("a", unnamed(one)),
        record("b", unnamed(alone), part=Part(**{by: 1})),
        record("c", unnamed(newest), part=Part(**{by: 2})),
    ]
    step_summary = aggregated(records, {})
    assert_counts(step_summary, [newest, alone])
    assert step_summary.left_out == {"a": "repeated"}
    assert step_summary.differing == (("a", "c"),)
    (rank,) = step_summary.ranks
    assert rank.cell.tokens == step_summary.total.tokens
    put = differing_copies(step_summary, records, {"run": "r", "attempt_id": 1, "wall": 0.0})
    assert (
        f"the newest parts count (actor 0: {by} 2 counts, not occurrence 0)" in put.row["message"]
    )
    assert "without sample_ids hold the same token ids and masks" in put.row["message"]


def test_a_further_part_without_ids_is_other_work_unless_its_tokens_say_otherwise() -> None:
    """Other token ids, another mask, few tokens, or no token ids at all: each part counts."""
    rng = np.random.default_rng(22)
    one = sample(rng, 60, rounds=False)
    few = sample(rng, 31, rounds=False)
    masked = np.arange(60) % 7 > 0
    for first, later, token_ids in (
        (one, dataclasses.replace(moved(one, 0.2), ids=np.append(one.ids[:-1], 7)), True),
        (one, dataclasses.replace(moved(one, 0.2), mask=masked.astype(np.int64)), True),
        (few, moved(few, 0.2), True),
        (one, moved(one, 0.2), False),
    ):
        records = [
            record("a", unnamed(first, token_ids=token_ids)),
            record("b", unnamed(later, token_ids=token_ids), part=Part(occurrence=1)),
        ]
        step_summary = aggregated(records, {})
        assert_counts(step_summary, [first, later])
        assert not step_summary.differing
