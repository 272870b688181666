from __future__ import annotations

import dataclasses
import random
import zlib
from typing import Any

import numpy as np
import pytest
from tests.service.statistics.test_summary import assert_same
from tests.support.batches import Array, batch_of, random_streams

from stagescope_service.statistics import (
    NOISE_PAIR,
    PartRecord,
    StatisticsSettings,
    StepSummary,
    Summary,
    TokenBatch,
    assemble,
    publish,
    skip_of,
    summarise,
)
from stagescope_service.statistics.codec import summary_from_bytes, summary_to_bytes
from stagescope_wire.errors import InvalidInput
from stagescope_wire.schema import Part

Streams = tuple[Array, Array, Array]
"""p, q and the mask."""
ROWS, WIDTH = 8, 120
SAMPLES = [f"s{i}" for i in range(ROWS)]


def make(seed: int = 0) -> Streams:
    return random_streams(np.random.default_rng(seed), ROWS, WIDTH, 0.1)


def record(key: str, batch: TokenBatch, rank: int = 0, **fields: object) -> PartRecord:
    values: dict[str, Any] = {"stage": "actor_compute_log_prob", "role": "actor"} | fields
    return PartRecord(key=key, summary=summarise(batch), rank=rank, **values)


def rows_of(
    streams: Streams, rows: list[int], *, samples: bool = True, **others: Any
) -> TokenBatch:
    p, q, mask = streams
    names = [SAMPLES[row] for row in rows] if samples else None
    return batch_of(p[rows], q[rows], mask[rows], samples=names, **others)


def plain(streams: Streams) -> Summary:
    return summarise(batch_of(*streams, samples=SAMPLES))


def test_ranks_replicas_epochs_and_the_driver_count_once() -> None:
    streams = make()
    parts = [
        record("r0", rows_of(streams, [0, 1, 2, 3]), 0, data_rank=0),
        record("r1", rows_of(streams, [0, 1, 2, 3]), 1, data_rank=0),
        record("r2-a", rows_of(streams, [4, 5]), 2, part=Part(minibatch=0)),
        record("r2-b", rows_of(streams, [6, 7]), 2, part=Part(minibatch=1)),
        record("r2-again", rows_of(streams, [7, 6]), 2, part=Part(epoch=1)),
        record("driver", rows_of(streams, list(range(8))), 0, role="driver"),
        record("other", rows_of(make(9), [0, 1]), 0, stage="actor_update"),
    ]
    step_summary = assemble(parts)
    assert_same(step_summary.summary, plain(streams))
    assert step_summary.stage == "actor_compute_log_prob"
    assert step_summary.counted == ("r0", "r2-a", "r2-b")
    assert step_summary.left_out == {"r1": "replica", "r2-again": "repeated", "driver": "repeated"}
    assert not step_summary.differing
    assert not step_summary.to_recompute
    masked = streams[2].sum(axis=1)
    assert step_summary.duplicates == masked[:4].sum() + masked[6:].sum() + masked.sum()
    by_rank = {(row.role, row.rank): row for row in step_summary.ranks}
    assert by_rank["actor", 1].cell.tokens == masked[:4].sum()
    assert by_rank["actor", 2].cell.tokens == masked[4:].sum()
    assert by_rank["actor", 2].counted_parts == 2
    for _ in range(5):
        random.Random(1).shuffle(parts)
        again = assemble(parts)
        assert again.to_bytes() == step_summary.to_bytes()


@pytest.mark.parametrize("kept", ["fewer", "none", "more"])
def test_a_replica_with_another_mask_is_named(kept: str) -> None:
    """Of a rank with the same data_rank: tokens that one of the two does not train on."""
    p, q, _ = make()
    mask, other = np.ones(p.shape, np.int64), np.ones(p.shape, np.int64)
    changed = mask if kept == "more" else other
    changed[1, {"fewer": slice(-3, None), "none": slice(None), "more": slice(-3, None)}[kept]] = 0
    parts = [
        record("r0", rows_of((p, q, mask), [0, 1]), 0, data_rank=0),
        record("r1", rows_of((p, q, other), [0, 1]), 1, data_rank=0),
        record("r2", rows_of((p, q, mask), [0, 1]), 2, data_rank=0),
    ]
    step_summary = assemble(parts)
    assert step_summary.differing == (("r1", "r0"),)
    assert step_summary.left_out["r1"] == "replica"
    assert_same(step_summary.summary, summarise(rows_of((p, q, mask), [0, 1])))
    alone = [dataclasses.replace(part, data_rank=part.rank) for part in parts]
    assert not assemble(alone[::2]).differing
    only = [record(f"o{rank}", rows_of((p, q, each), [1]), rank, data_rank=0)
            for rank, each in enumerate((mask, other))]  # fmt: skip
    assert assemble(only).differing == (("o1", "o0"),)


def test_other_values_of_another_epoch_or_other_samples_are_no_difference() -> None:
    streams = make()
    moved = (streams[0] - np.float32(0.1), *streams[1:])
    first = record("first", rows_of(streams, [0, 1, 2]))
    for later, rows, part in (
        (streams, [1, 2, 3], Part(microbatch=1)),
        (moved, [3, 4], Part(microbatch=1)),
        (moved, [0, 1, 2], Part(epoch=1)),  # with other weights
    ):
        again = record("again", rows_of(later, rows), part=part)
        assert not assemble([first, again]).differing


def test_a_piece_beside_a_copy_of_the_whole_sample_does_not_differ_from_it() -> None:
    p, q, mask = make(3)
    mask[:] = 1

    def piece(key: str, rank: int, first: int, last: int, moved: float = 0.0) -> PartRecord:
        columns = slice(first, last)
        batch = batch_of(
            p[:, columns] + moved, q[:, columns], mask[:, columns], samples=SAMPLES,
            positions=np.tile(np.arange(first, last), (ROWS, 1)),
            round_ids=np.zeros((ROWS, last - first), np.int64),
        )  # fmt: skip
        return record(key, batch, rank)

    pieces = [piece("left", 0, 0, 70), piece("right", 1, 70, WIDTH)]
    step_summary = assemble([*pieces, piece("all", 2, 0, WIDTH)])
    assert step_summary.total.tokens == mask.sum()
    assert step_summary.left_out == {"all": "repeated"}
    assert not step_summary.differing
    # Of the same tokens it is said.
    again = assemble([*pieces, piece("again", 2, 0, 70, -1e-3)])
    assert again.differing == (("again", "left"),)


def test_without_sample_ids_the_layout_decides() -> None:
    streams = make()

    def part(key: str, rank: int, rows: list[int], **fields: object) -> PartRecord:
        return record(key, rows_of(streams, rows, samples=False), rank, **fields)

    parts = [
        part("dp0-tp1", 0, [0, 1, 2], layout={"dp_rank": 0, "tp_rank": 1, "tp_size": 2}),
        part("dp0-tp0", 1, [0, 1, 2], layout={"dp_rank": 0, "tp_rank": 0, "tp_size": 2}),
        part("dp1-tp0", 2, [3, 4], layout={"dp_rank": 1, "tp_rank": 0}),
        part("dp1-later", 2, [3, 4], layout={"dp_rank": 1, "tp_rank": 0}, part=Part(epoch=1)),
        part("dp1-resampled", 2, [5, 6, 7], layout={"dp_rank": 1}, part=Part(occurrence=1)),
        part("dp1-same-again", 2, [3, 4], layout={"dp_rank": 1}, part=Part(occurrence=2)),
        part("driver", 0, list(range(8)), role="driver"),
    ]
    step_summary = assemble(parts)
    assert step_summary.counted == ("dp0-tp0", "dp1-resampled", "dp1-same-again")
    assert step_summary.left_out == {
        "dp0-tp1": "replica",
        "dp1-later": "later epoch",
        "dp1-tp0": "repeated",
        "driver": "other role",
    }
    summary_cell, plain_cell = step_summary.total, plain(streams).total
    assert summary_cell.tokens == plain_cell.tokens


def test_a_partly_repeated_part_is_taken_again_without_what_counted() -> None:
    streams = make()
    batches = {
        "a": rows_of(streams, [0, 1, 2, 3, 4]),
        "b": rows_of(streams, [3, 4, 5, 6, 7]),
        "c": rows_of(streams, [7, 0]),
    }
    parts = [
        record("a", batches["a"], 0),
        record("b", batches["b"], 1),
        record("c", batches["c"], 2),
    ]
    first = assemble(parts)
    assert [(r.key, {row for row, _, _ in r.skips}) for r in first.to_recompute] == [("b", {0, 1})]
    assert first.left_out == {"b": "restate", "c": "repeated"}
    skips = first.to_recompute[0].skips
    again = summarise(batches["b"], skip=skip_of(batches["b"], skips))
    step_summary = assemble([parts[0], dataclasses.replace(parts[1], summary=again), parts[2]])
    assert not step_summary.to_recompute
    assert_same(step_summary.summary, plain(streams))


def test_tokens_that_overlap_inside_a_row_count_once() -> None:
    p, q, mask = make(3)
    mask[:, 40:80] = 1

    def piece(first: int, last: int) -> TokenBatch:
        part = slice(first, last)
        before = np.array([_runs_before(row, first) for row in mask])
        return batch_of(
            p[:, part], q[:, part], mask[:, part], samples=SAMPLES,
            token_offset=np.full(ROWS, first), round_offset=before,
        )  # fmt: skip

    left, right = piece(0, 70), piece(50, WIDTH)
    parts = [record("left", left, 0), record("right", right, 1)]
    first = assemble(parts)
    (to_recompute,) = first.to_recompute
    assert {(a, b) for _, a, b in to_recompute.skips} == {(50, 70)}
    again = summarise(right, skip=skip_of(right, to_recompute.skips))
    step_summary = assemble([parts[0], dataclasses.replace(parts[1], summary=again)])
    assert not step_summary.to_recompute
    assert not step_summary.fragmented
    found, expected = publish(step_summary.summary), publish(plain((p, q, mask)))
    counts = [k for k in expected if k.endswith(("_count", "_max", "_min")) or "counts/" in k]
    for name in counts:
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name
    assert found["rollout_corr/training_ppl"] == pytest.approx(
        expected["rollout_corr/training_ppl"], rel=1e-12
    )


def _runs_before(row: Any, column: int) -> int:
    """The round that a run beginning at `column` has, or that goes on there."""
    before = np.concatenate([[0], row[:column]])
    begins = int((np.diff(before) == 1).sum())
    goes_on = before[-1] == 1 and row[column] == 1
    return begins - int(goes_on)


def test_zigzag_context_parallel_parts_make_the_step_summary() -> None:
    p, q, mask = make(4)
    rounds = np.cumsum(np.diff(mask, axis=1, prepend=0) == 1, axis=1) - 1
    rounds = np.maximum(rounds, 0)
    chunk = WIDTH // 4
    parts = []
    for cp_rank, chunks in enumerate([(0, 3), (1, 2)]):
        columns = np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in chunks])
        batch = batch_of(
            p[:, columns], q[:, columns], mask[:, columns], samples=SAMPLES,
            positions=np.tile(columns, (ROWS, 1)), round_ids=rounds[:, columns],
        )  # fmt: skip
        layout = {"cp_rank": cp_rank, "cp_size": 2}
        parts.append(record(f"cp{cp_rank}", batch, cp_rank, layout=layout, data_rank=0))
    step_summary = assemble(parts)
    expected = plain((p, q, mask))
    assert step_summary.counted == ("cp0", "cp1")
    assert not step_summary.fragmented
    assert step_summary.summary.worst.position.tolist() == expected.worst.position.tolist()
    found, wanted = publish(step_summary.summary), publish(expected)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_context_parallel_parts_without_positions_add_up_but_are_fragmented() -> None:
    p, q, mask = make(5)
    half = WIDTH // 2
    parts = [
        record(
            f"cp{k}",
            batch_of(p[:, s], q[:, s], mask[:, s], samples=SAMPLES),
            k,
            layout={"cp_rank": k, "cp_size": 2},
            data_rank=0,
        )
        for k, s in enumerate((slice(0, half), slice(half, WIDTH)))
    ]
    step_summary = assemble(parts)
    assert step_summary.total.tokens == mask.sum()
    assert step_summary.fragmented > 0


def test_the_stage_is_the_first_that_has_both_streams() -> None:
    streams = make()
    batch = rows_of(streams, [0, 1])
    noise = batch_of(*(s[:2] for s in streams), samples=SAMPLES[:2], pair=NOISE_PAIR)
    parts = [
        record("u", batch, stage="actor_update"),
        record("own", batch, stage="a_stage_of_my_own"),
        record("n", noise, stage="actor_compute_log_prob"),
    ]
    assert assemble(parts).stage == "actor_update"
    assert assemble(parts, stage="a_stage_of_my_own").counted == ("own",)
    assert assemble(parts, pairs=[NOISE_PAIR]).stage == "actor_compute_log_prob"
    with pytest.raises(InvalidInput, match="rollout_generate"):
        assemble(parts, stage="rollout_generate")
    with pytest.raises(InvalidInput, match="both streams"):
        assemble([])


def test_rows_without_a_model_token_are_counted_once() -> None:
    p, q, mask = make(6)
    mask[:] = 0
    parts = [
        record("a", batch_of(p, q, mask, samples=SAMPLES), 0, data_rank=0),
        record("b", batch_of(p, q, mask, samples=SAMPLES), 1, data_rank=0),
    ]
    assert publish(assemble(parts).summary)["counts/empty_rows"] == ROWS


def test_a_step_summary_survives_its_bytes_and_nothing_else_does() -> None:
    parts = [record("a", rows_of(make(), [0, 1, 2]), 3), record("b", rows_of(make(), [2, 3]), 4)]
    step_summary = assemble(parts)
    data = step_summary.to_bytes()
    again = StepSummary.from_bytes(data)
    assert again.to_bytes() == data
    assert again.to_recompute == step_summary.to_recompute
    for bad in (
        b"",
        data[:-9],
        summary_to_bytes(parts[0].summary),
        zlib.compress(zlib.decompress(data).replace(b'"step summary"', b'"step summarY"')),
    ):
        with pytest.raises(InvalidInput, match="not a step summary"):
            StepSummary.from_bytes(bad)
    with pytest.raises(InvalidInput, match="not a summary"):
        summary_from_bytes(data)


def test_a_rank_s_row_without_a_model_token_is_a_row_of_its_own_whatever_its_id() -> None:
    """Each rank numbers its rows from 0, and has one; that of rank 1 was left out of training."""
    p, q, _ = make()
    on, off = np.ones((1, WIDTH), np.int64), np.zeros((1, WIDTH), np.int64)

    def of_rank(rank: int, mask: Array, **fields: object) -> PartRecord:
        batch = batch_of(p[[rank]], q[[rank]], mask, samples=["0"])
        return record(f"r{rank}", batch, rank, **fields)

    found = assemble([of_rank(0, on), of_rank(1, off)]).summary
    assert (found.empty_rows, len(found.sequences)) == (1, 1)
    assert found.empty_samples == ("0 [actor 1]",)
    # Beside ranks whose ids contradict each other, too.
    three = assemble([of_rank(0, on), of_rank(1, off), of_rank(2, on)]).summary
    assert (three.empty_rows, len(three.sequences)) == (1, 2)
    # A piece of a sample that is split by context is no row of its own, nor is a replica's.
    split = [{"layout": {"cp_rank": rank, "cp_size": 2, "dp_rank": 0}} for rank in (0, 1)]
    assert (
        assemble([of_rank(0, on, **split[0]), of_rank(1, off, **split[1])]).summary.empty_rows == 0
    )
    copies = assemble([of_rank(0, on, data_rank=0), of_rank(1, off, data_rank=0)])
    assert copies.summary.empty_rows == 0
    assert copies.differing == (("r1", "r0"),)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ranks_with_different_settings_are_measured_with_the_raw_weights(level: str) -> None:
    p, q, mask = make()
    mask[7] = 0  # a part without a model token has its settings, too
    rows = [[0, 1, 2], [3, 4], [5, 6], [7]]
    batches = [rows_of((p - np.float32(0.5), q, mask), each) for each in rows]
    settings_of = [
        StatisticsSettings(level, 1.05), StatisticsSettings(level, 2.0, True),
        StatisticsSettings(), StatisticsSettings("token", "0.5_1.5"),
    ]  # fmt: skip
    records = [record(f"r{rank}", batch, rank) for rank, batch in enumerate(batches)]
    differing = [
        dataclasses.replace(each, summary=summarise(batch, own))
        for each, batch, own in zip(records, batches, settings_of, strict=True)
    ]
    found, expected = publish(assemble(differing).summary), publish(assemble(records).summary)
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert found["rollout_corr/rollout_is_truncated"] == 0
    again = assemble([dataclasses.replace(differing[0], ranked=differing[0].summary), differing[1]])
    assert again.summary.settings == StatisticsSettings()
