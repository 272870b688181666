"""A step distributed in any way comes back as it was, and what it lacks is said."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.batches import wire
from tests.support.memory_dumps import MemoryDump
from tests.support.mutated import mutated
from tests.support.step_dumps import WholeStep, ragged, record

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.results import Verdict
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.own_file import PayloadFile, open_payloads
from stagescope_service.dumps.joining.join import Selection, join
from stagescope_service.dumps.records import DumpContents
from stagescope_service.store.tensorfile import write_tensors
from stagescope_wire.batch import Batch, Tensor
from stagescope_wire.errors import NotFound, StagescopeError
from stagescope_wire.schema import Part

STAGE = "actor_compute_log_prob"
LATER = ("response_mask", "old_log_probs")


def joined(*records: DumpContents) -> Batch:
    return join(MemoryDump([*records]), 5)


def bits(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.values.shape, tensor.values.tobytes()


def distributed(data: st.DataObject, rows: int) -> list[list[list[int]]]:
    """Rows by rank and part, each at least one."""
    order = data.draw(st.permutations(range(rows)))
    ranks = data.draw(st.integers(1, rows))
    of_ranks = [list(piece) for piece in np.array_split(order, ranks)]
    return [
        [
            [int(row) for row in part]
            for part in np.array_split(of, data.draw(st.integers(1, len(of))))
        ]
        for of in of_ranks
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_any_split_over_ranks_and_parts_comes_back_exactly(
    lengths: list[int], data: st.DataObject
) -> None:
    whole = WholeStep(lengths)
    rows = range(len(lengths))
    records = [
        record(whole.piece(rows), stage="rollout_generate", role="rollout", **whole.ids(rows))
    ]
    for rank, parts in enumerate(distributed(data, len(lengths))):
        for index, piece in enumerate(parts):
            records.append(
                record(
                    whole.piece(piece, LATER), rank=rank, part=Part(minibatch=index),
                    stage="actor_update", samples=whole.ids(piece)["samples"],
                )
            )  # fmt: skip
    batch = joined(*data.draw(st.permutations(records)))
    assert batch.gaps == ()
    assert batch.sample_ids == tuple(whole.samples)
    assert batch.strings["group_ids"] == tuple(whole.groups)
    for name, (tag, shape, values, _) in whole.tensors.items():
        assert bits(batch.tensor(name)) == (tag, shape, values.tobytes()), name
    for part, micro in zip(batch.parts_of(), batch.microbatches(), strict=True):
        (seen,) = [r for r in records if (r.entry.location.rank, r.entry.location.part) ==
                   (part.rank, part.part) and r.entry.location.stage == part.stage]  # fmt: skip
        assert micro.sample_ids == seen.samples
        for name, (tag, shape, values, _) in seen.tensors.items():
            assert bits(micro.tensor(name)) == (tag, shape, values.tobytes()), name


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
def test_rows_of_several_ranks_are_joined_without_a_stage_that_has_all(
    lengths: list[int], data: st.DataObject
) -> None:
    whole = WholeStep(lengths)
    records = []
    order: list[int] = []
    for rank, parts in enumerate(distributed(data, len(lengths))):
        for index, piece in enumerate(parts):
            order += piece
            part = Part(microbatch=index)
            records.append(record(whole.piece(piece), rank=rank, part=part, **whole.ids(piece)))
    batch = joined(*records)
    assert batch.sample_ids == tuple(whole.samples[row] for row in order)
    for name, (_, _, values, _) in whole.tensors.items():
        valid = whole.there[order] if values.ndim > 1 else np.ones(len(order), bool)
        assert (batch[name][valid] == values[order][valid]).all(), name
        assert batch[name].shape == values.shape
    for name, padding in batch.padding.items():
        assert padding.side == "right", name


@pytest.mark.parametrize("again", [Part(occurrence=1), Part(minibatch=1), Part(microbatch=1)])
def test_of_rows_that_a_rank_recorded_again_the_newest_count(again: Part) -> None:
    whole = WholeStep([9, 2, 4, 3])
    records = []
    for part, rows, by in ((Part(), [0, 1, 2], 0), (again, [1, 2, 3], 1)):
        piece = whole.piece(rows)
        tag, shape, values, offsets = piece["old_log_probs"]
        piece["old_log_probs"] = (tag, shape, values + by, offsets)
        records.append(record(piece, part=part, **whole.ids(rows)))
    batch = joined(*records)
    moved = batch["old_log_probs"].view(np.int16) - whole.tensors["old_log_probs"][2].view(np.int16)
    assert [set(row[on].tolist()) for row, on in zip(moved, whole.there, strict=True)] == [
        {0}, {1}, {1}, {1},
    ]  # fmt: skip
    (gap,) = batch.gaps
    assert gap.kind == "disagrees"
    assert str(gap).count(str(again)) == 1


def test_padding_is_what_the_recorded_rows_end_with() -> None:
    whole = WholeStep([9, 2, 4, 3])
    records = [record(whole.piece([0, 1]), rank=0, **whole.ids([0, 1])),
               record(whole.piece([2, 3]), rank=1, **whole.ids([2, 3]))]  # fmt: skip
    batch = joined(*records)
    assert {name: padding.fill for name, padding in batch.padding.items()} == {
        "responses": 7, "response_mask": 0, "rollout_log_probs": 0.0, "old_log_probs": 0.0,
    }  # fmt: skip
    assert (batch["responses"] == whole.tensors["responses"][2]).all()


def test_left_padding_stays_on_the_left() -> None:
    mask = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    narrow = np.array([[0, 1, 1], [1, 1, 1]])
    records = [
        record({"response_mask": wire(each), "responses": wire(each + 4)}, rank=rank, samples=ids)
        for rank, (each, ids) in enumerate([(mask, "ab"), (narrow, "cd")])
    ]
    batch = joined(*records)
    assert batch["responses"][2:].tolist() == [[4, 4, 5, 5], [4, 5, 5, 5]]
    assert batch.padding["responses"] == ("left", 4)
    micro = list(batch.microbatches())[1]
    assert micro["responses"].tolist() == (narrow + 4).tolist()


def test_ragged_and_packed_rows_keep_their_lengths() -> None:
    rows = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]
    ones = [np.ones_like(row) for row in rows]
    packed = {
        "responses": wire(np.concatenate(rows)),
        "response_mask": wire(np.concatenate(ones)),
        "rewards": wire(np.array([0.1, 0.2, 0.3])),
        "cu_seqlens": wire(np.array([0, 3, 4, 6])),
    }
    for tensors in (
        packed,
        {"responses": ragged(rows), "response_mask": ragged(ones), "rewards": packed["rewards"]},
    ):
        batch = joined(record(tensors, samples=["a", "b", "c"]))
        assert batch["responses"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
        assert batch.lengths["responses"].tolist() == [3, 1, 2]
        assert batch["rewards"].tolist() == [0.1, 0.2, 0.3]
        assert "cu_seqlens" not in batch


def test_tensors_of_more_dimensions_are_padded_in_their_tokens() -> None:
    top = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)
    records = [
        record({"response_mask": wire(np.ones(values.shape[:2], np.int64)),
                "top_log_probs": wire(values)}, rank=rank, samples="ab"[rank])
        for rank, values in enumerate((top[:1], top[1:, :2]))
    ]  # fmt: skip
    batch = joined(*records)
    assert (batch["top_log_probs"][0] == top[0]).all()
    assert (batch["top_log_probs"][1, :2] == top[1, :2]).all()
    assert not batch["top_log_probs"][1, 2:].any()
    shapes = [micro["top_log_probs"].shape for micro in batch.microbatches()]
    assert shapes == [(1, 4, 3), (1, 2, 3)]


def test_every_pass_over_the_rows_is_there() -> None:
    whole = WholeStep([4, 4])
    parts = [Part(epoch=epoch) for epoch in range(2)]
    passes = [np.full((2, 4), epoch, np.float32) for epoch in range(2)]
    mask = whole.piece([0, 1], ["response_mask"])
    records = [
        record({**mask, "log_probs": wire(values)}, stage="actor_update", part=part,
               samples=whole.samples, numbers={"loss": part.epoch + 0.5})
        for part, values in zip(parts, passes, strict=True)
    ]  # fmt: skip
    batch = joined(*records)
    assert batch.gaps == ()
    assert batch["log_probs"].tolist() == passes[0].tolist()
    micro = list(batch.microbatches())
    assert [each["log_probs"].tolist() for each in micro] == [each.tolist() for each in passes]
    assert [each.numbers["loss"] for each in micro] == [0.5, 1.5]


def test_a_tensor_without_rows_belongs_to_its_part() -> None:
    whole = WholeStep([4, 4])
    loss = np.float32(0.25).reshape(())
    tensors = {**whole.piece([0, 1]), "loss": wire(np.asarray(loss))}
    batch = joined(record(tensors, stage="actor_update", **whole.ids([0, 1])))
    assert "loss" not in batch
    (micro,) = batch.microbatches()
    assert micro["loss"] == 0.25
    assert set(micro.others) == {"loss"}


# --- what is missing or disagrees is said -------------------------------------------------------
def two(whole: WholeStep, **second: Any) -> list[DumpContents]:
    ids = whole.ids([0, 1])
    return [record(whole.piece([0, 1]), rank=0, **ids),
            record({**whole.piece([0, 1]), **second}, rank=1, **ids)]  # fmt: skip


def test_replicas_count_once_and_are_compared() -> None:
    whole = WholeStep([4, 4])
    assert joined(*two(whole)).gaps == ()
    changed = whole.tensors["rollout_log_probs"][2].copy()
    changed[1, 2] += 0.5
    batch = joined(*two(whole, rollout_log_probs=wire(changed)))
    assert batch.rows == 2
    ((kind, message),) = batch.gaps
    assert kind == "disagrees"
    assert "rollout_log_probs of actor_compute_log_prob actor 1" in message
    assert "1 of 8 values differ, max |d| 0.5" in message
    assert (batch["rollout_log_probs"] == whole.tensors["rollout_log_probs"][2]).all()
    assert (list(batch.microbatches())[1]["rollout_log_probs"] == changed).all()
    wider = whole.tensors["rollout_log_probs"][2].astype(np.float64)
    (gap,) = joined(*two(whole, rollout_log_probs=wire(wider))).gaps
    assert "is float64 [4], but actor_compute_log_prob actor 0 has float32 [4]" in gap.message


def test_a_stream_that_the_service_joined_to_a_payload_is_no_second_opinion() -> None:
    whole = WholeStep([4, 4])
    changed = whole.tensors["rollout_log_probs"][2].copy()
    changed[1, 2] = 0.0  # masked there
    first, second = two(whole, rollout_log_probs=wire(changed))
    about = {**second.about, "joined_tensors": ["rollout_log_probs"]}
    batch = joined(first, dataclasses.replace(second, about=about))
    assert batch.gaps == ()
    assert (batch["rollout_log_probs"] == whole.tensors["rollout_log_probs"][2]).all()


def test_missing_rows_are_named_and_not_zero() -> None:
    whole = WholeStep([4, 4, 4])
    first = record(whole.piece([0, 1, 2], ["response_mask"]), stage="rollout_generate",
                   role="rollout", **whole.ids([0, 1, 2]))  # fmt: skip
    later = record(whole.piece([0, 2], LATER), **whole.ids([0, 2]))
    batch = joined(first, later)
    assert batch.gaps == (("rows", "old_log_probs is missing for 1 of 3 rows (g0_1)"),)
    assert (batch["old_log_probs"][1] == 0x7FC0).all()


def test_a_rank_without_a_stage_is_named() -> None:
    whole = WholeStep([4, 4])
    records = [record(whole.piece([rank]), rank=rank, **whole.ids([rank])) for rank in (0, 1)]
    update = record(whole.piece([0], LATER), stage="actor_update", samples=whole.samples[:1])
    batch = joined(*records, update)
    assert ("rank", "actor_update has nothing of actor 1") in batch.gaps


def test_rows_without_ids_are_joined_by_position_or_not_at_all() -> None:
    whole = WholeStep([4, 4, 4])
    of_rank = {0: [0, 1], 1: [2]}
    records = [record(whole.piece(rows), rank=rank) for rank, rows in of_rank.items()]
    same = [record(whole.piece(rows, LATER), rank=rank, stage="actor_update")
            for rank, rows in of_rank.items()]  # fmt: skip
    batch = joined(*records, *same)
    assert batch.rows == 3
    assert batch.gaps == ()
    assert batch.sample_ids is None
    other = [record(whole.piece([0], LATER), rank=0, stage="actor_update")]
    batch = joined(*records, *other)
    assert [gap.kind for gap in batch.gaps] == ["joined", "rank"]
    assert batch.rows == 3


def test_ids_of_another_row_count_are_ignored() -> None:
    whole = WholeStep([4, 4])
    batch = joined(record(whole.piece([0, 1]), samples=["only"]))
    assert batch.rows == 2
    assert batch.sample_ids is None
    ((kind, message),) = batch.gaps
    assert kind == "joined"
    assert "1 sample ids for 2 rows: its rows are joined by position" in message
    alone = {"loss": wire(np.asarray(np.float32(0.5)))}
    assert joined(record(alone, samples=["a", "b"])).rows == 2


def context_parallel(
    whole: WholeStep, ranks: int, *, say: str = "positions", names: tuple[str, ...] = ()
) -> list[DumpContents]:
    """Every rank's fragments of every sample: zigzag chunks i and 2n - 1 - i, or one stretch."""
    width, rows = whole.there.shape[1], len(whole.lengths)
    names = names or tuple(whole.tensors)
    chunks = np.array_split(np.arange(width), 2 * ranks if say == "positions" else ranks)
    records = []
    for rank in range(ranks):
        at = chunks[rank]
        if say == "positions":
            at = np.concatenate([at, chunks[2 * ranks - 1 - rank]])
        tensors = {}
        for name in names:
            values = whole.tensors[name][2]
            tensors[name] = wire(values if values.ndim == 1 else values[:, at].copy())
        inside = at[None, :] < whole.lengths[:, None]
        if say == "positions":
            tensors["positions"] = wire(np.where(inside, at, 0))
        elif say == "token_offset":
            tensors["token_offset"] = wire(np.full(rows, at[0]))
        layout = {"cp_rank": rank, "cp_size": ranks}
        about = {"wall": 0.0, "job": {"layout": layout}}
        records.append(record(tensors, rank=rank, about=about, **whole.ids(range(rows))))
    return records


def padded_alike(whole: WholeStep, batch: Batch) -> None:
    """Every token of the step is in the batch, bit by bit, at its place."""
    for name, (tag, _, values, _) in whole.tensors.items():
        found = batch.tensor(name)
        assert found.dtype == tag
        if values.ndim == 1:
            assert (found.values == values).all(), name
        else:
            width = found.values.shape[1]
            inside = whole.there[:, :width]
            assert (found.values[inside] == values[:, :width][inside]).all(), name
            assert whole.there.sum() == inside.sum()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(2, 13), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_context_parallel_fragments_are_assembled(
    lengths: list[int], ranks: int, data: st.DataObject
) -> None:
    whole = WholeStep(lengths)
    records = context_parallel(whole, ranks)
    batch = joined(*data.draw(st.permutations(records)))
    assert batch.gaps == ()
    assert (batch.rows, batch.sample_ids) == (len(lengths), tuple(whole.samples))
    padded_alike(whole, batch)
    # What each rank saw is there, too, as it recorded it.
    for part, micro in zip(batch.parts_of(), batch.microbatches(), strict=True):
        (seen,) = [each for each in records if each.entry.location.rank == part.rank]
        for name, (_, _, values, _) in seen.tensors.items():
            assert (micro[name] == values).all(), name


def test_fragments_with_a_token_offset_are_assembled() -> None:
    whole = WholeStep([8, 8, 8])
    ones = np.ones((3, 8), np.int64)
    whole.tensors["response_mask"] = wire(ones)
    batch = joined(*context_parallel(whole, 2, say="token_offset"))
    assert batch.gaps == ()
    padded_alike(whole, batch)
    split = ragged([np.arange(5), np.arange(5, 8), np.arange(3)])
    tensors = {"responses": split, "response_mask": ragged([np.ones(5), np.zeros(3), np.ones(3)]),
               "token_offset": wire(np.array([0, 5, 0]))}  # fmt: skip
    batch = joined(record(tensors, samples=["a", "a", "b"]))
    assert batch.gaps == ()
    assert batch["responses"].tolist() == [[*range(8)], [0, 1, 2, 0, 0, 0, 0, 0]]


def test_fragments_join_the_rows_of_other_stages_and_are_compared() -> None:
    whole = WholeStep([9, 5, 12, 3])
    rollout = record(whole.piece(range(4)), stage="rollout_generate", role="rollout",
                     **whole.ids(range(4)))  # fmt: skip
    fragments = context_parallel(whole, 2, names=("response_mask", "responses", "old_log_probs"))
    assert joined(rollout, *fragments).gaps == ()
    values = fragments[1].tensors["responses"][2]
    values[2, 0] += 1
    (gap,) = joined(rollout, *fragments).gaps
    assert gap.kind == "disagrees"
    assert gap.message.startswith("responses of actor_compute_log_prob differs from rollout_gen")


def test_a_saved_batch_of_fragments_is_the_same_as_they_are(tmp_path: Path) -> None:
    names = ("response_mask", "old_log_probs")
    records = context_parallel(WholeStep([9, 5, 12, 3]), 2, names=names)
    kept = [dataclasses.replace(each.entry, section="old_log_probs") for each in records]
    dump = MemoryDump([
        dataclasses.replace(each, entry=entry) for each, entry in zip(records, kept, strict=True)
    ])  # fmt: skip
    batch = join(dump, 5)
    result = compare([open_dump(batch.save(tmp_path / "b.safetensors")), dump])
    assert result.verdict is Verdict.SAME, result.reason
    assert all(tensor.samples["compared"] == 4 for tensor in result.pairs[0].tensors)
    whole = open_dump(dataclasses.replace(batch, parts=()).save(tmp_path / "w.safetensors"))
    assert {entry.location.rank for entry in whole.entries} == {None}


def test_fragments_with_holes_and_without_positions_are_no_rows() -> None:
    whole = WholeStep([12, 12])
    whole.tensors["response_mask"] = wire(np.ones((2, 12), np.int64))
    records = context_parallel(whole, 3)
    batch = joined(records[0], records[2])
    holes = [gap for gap in batch.gaps if "have holes" in gap.message]
    assert "old_log_probs in actor_compute_log_prob have holes: 2 of 2 rows (g0_0, g0_1)" in str(
        holes
    )
    assert (batch["old_log_probs"] == 0x7FC0).all()
    first = context_parallel(whole, 2, say="token_offset")[:1]
    (gap,) = joined(*first).gaps  # without its last piece a sample has no hole
    assert gap.message.startswith("actor_compute_log_prob lacks context-parallel ranks of 2 rows")
    batch = joined(*context_parallel(whole, 3, say="nothing"))
    assert [gap.kind for gap in batch.gaps] == ["joined"]
    assert "3 parts hold pieces of samples (actor_compute_log_prob actor 0, ...) without the" in (
        batch.gaps[0].message
    )
    assert "responses" not in batch
    assert [micro["responses"].shape for micro in batch.microbatches()] == [(2, 4)] * 3


def test_complete_rows_of_context_parallel_ranks_are_replicas() -> None:
    whole = WholeStep([9, 5])
    job = {"layout": {"cp_rank": 0, "cp_size": 2}}
    records = [record(whole.piece([0, 1]), rank=rank, about={"wall": 0.0, "job": job},
                      **whole.ids([0, 1])) for rank in (0, 1)]  # fmt: skip
    batch = joined(*records)
    assert batch.gaps == ()
    padded_alike(whole, batch)


def test_a_missing_step_or_tensor_lists_what_there_is() -> None:
    whole = WholeStep([4])
    dump = MemoryDump([record(whole.piece([0]), **whole.ids([0]))])
    with pytest.raises(NotFound, match="nothing of step 6; expected step 5"):
        join(dump, 6)
    with pytest.raises(NotFound, match="in these stages; expected one of actor_compute_log_prob"):
        join(dump, 5, Selection(stages=["actor_update"]))
    with pytest.raises(NotFound, match="no tensor entropy of step 5; expected some of old_log"):
        join(dump, 5, Selection(["entropy"]))
    assert set(join(dump, 5, Selection(["rewards"]))) == {"rewards", "response_mask"}


SAID = {  # of a kept file
    "strings": {"sample_ids": ["a", "b"], "group_ids": ["g", "g"]},
    "meta": {"temperature": 0.7, "policy_version": 4},
    "settings": {"clip": 0.2},
    "scalars": {"loss": 0.5, "kl": "nan"},
    "job": {
        "run": "r",
        "attempt_key": "k",
        "stage": STAGE,
        "role": "actor",
        "rank": 0,
        "step": 5,
        "incarnation": "i",
        "seq": 1,
        "data_rank": None,
    },
}


@settings(deadline=None, max_examples=150)
@given(mutated(SAID))
def test_a_file_with_any_metadata_is_read_or_refused(said: Mapping[str, object]) -> None:
    whole = WholeStep([3, 2])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "actor_rank0_0123456789ab_1.safetensors"
        write_tensors(path, whole.piece([0, 1]), said, durable=False)
        try:
            batch = join(open_payloads([PayloadFile(path)], "file"), 5)
        except StagescopeError:
            return
        assert batch.rows in (1, 2)  # rows of one sample id are pieces of one sample
        assert len(repr(batch)) > 0


def test_every_entry_is_read_twice_and_no_more() -> None:
    whole = WholeStep([4, 4])
    dump = MemoryDump(two(whole))
    join(dump, 5)
    assert sorted(entry.key for entry in dump.reads) == sorted(2 * [e.key for e in dump.entries])
