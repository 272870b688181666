from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.dump_files import hostile_torch_file, nexrl_directory, own_directory
from tests.support.memory_dumps import (
    MemoryDump,
    Sample,
    batch,
    record,
    shifted,
    single,
    split,
    tensor_of,
)

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report.as_json import as_json
from stagescope_service.compare.report.html import as_html
from stagescope_service.compare.results import Verdict
from stagescope_service.compare.task_runner import thread_mapper
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.records import DumpContents, DumpEntry, DumpProblem
from stagescope_wire.comparison_texts import as_lines, findings_of
from stagescope_wire.errors import ComparisonFailed, InvalidInput

T = TypeVar("T")
R = TypeVar("R")
Array = npt.NDArray[np.generic]


SHARES = st.permutations(range(6)).flatmap(
    lambda order: st.lists(st.integers(0, 6), max_size=3).map(
        lambda cuts: [
            list(order[start:stop])
            for start, stop in zip(sorted([0, *cuts]), sorted([*cuts, 6]), strict=True)
        ]
    )
)
Layout = tuple[list[list[int]], int, bool, bool]
"""Samples of each shard, width, whether padding is on the left, whether rows are ragged."""
LAYOUT = st.tuples(SHARES, st.integers(9, 14), st.booleans(), st.booleans())


def laid(samples: Sequence[Sample], layout: Layout) -> MemoryDump:
    shares, width, left, ragged = layout
    return split(samples, shares, width=width, left=left, ragged=ragged)


@settings(max_examples=60, deadline=None)
@given(LAYOUT, LAYOUT)
def test_any_split_and_padding_of_a_batch_is_the_same(one: Layout, other: Layout) -> None:
    samples = batch()
    result = compare([laid(samples, one), laid(samples, other)], mapper=thread_mapper(1))
    assert result.verdict is Verdict.SAME, result.reason
    assert result.exit_status == 0
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    assert tensor_of(result, "old_log_probs").found.pairs == tokens
    assert tensor_of(result, "rewards").found.pairs == len(samples)


@settings(max_examples=60, deadline=None)
@given(LAYOUT, LAYOUT, st.data())
def test_one_changed_value_is_found_with_its_sample_and_location(
    one: Layout, other: Layout, data: st.DataObject
) -> None:
    samples = batch()
    at = data.draw(st.integers(0, 5))
    inside = np.flatnonzero(samples[at].mask)
    token = data.draw(st.integers(0, len(inside) - 1))
    values = samples[at].values["entropy"].copy()
    values[inside[token]] += np.float32(0.25)
    changed = [*samples]
    changed[at] = samples[at].with_values(entropy=values)
    a, b = laid(samples, one), laid(changed, other)
    result = compare([a, b], mapper=thread_mapper(1))
    assert result.verdict is Verdict.DIFFERENT
    assert result.exit_status == 1
    assert result.first is not None
    assert (result.first.section, result.first.name) == ("forward_data", "entropy")
    found = result.first.location
    assert found is not None
    assert (found.sample, found.position) == (samples[at].sample, token)
    one_value, other_value = found.values
    assert one_value is not None
    assert other_value == pytest.approx(one_value + 0.25)
    for dump, location, coordinate, value in zip(
        (a, b), found.locations, found.coordinates, found.values, strict=True
    ):
        kept = next(
            each for each in dump.records
            if each.entry.section == "forward_data" and each.entry.location == location
        )  # fmt: skip
        _, _, array, offsets = kept.tensors["entropy"]
        flat = coordinate if offsets is None else (int(offsets[coordinate[0]]) + coordinate[1],)
        assert array[flat] == value


def test_tokens_that_differ_come_first_and_their_log_probs_are_not_compared() -> None:
    samples = batch()
    response = samples[2].response.copy()
    response[0] += 1
    values = {name: each + 9 for name, each in samples[2].values.items()}
    changed = [*samples]
    changed[2] = dataclasses.replace(samples[2], response=response, values=values)
    result = compare([split(samples), split(changed, [[5, 2, 0], [1, 3, 4]])])
    assert result.first is not None
    assert (result.first.station, result.first.name) == ("tokens", "responses")
    assert result.first.location is not None
    assert result.first.location.sample == samples[2].sample
    for name in ("old_log_probs", "entropy", "rollout_log_probs"):
        found = tensor_of(result, name)
        assert found.verdict is Verdict.NOT_COMPARABLE or found.found.unequal_count == 0
        assert found.samples["tokens differ"] == 1
        assert found.samples["compared"] == 5
        assert "the tokens differ in 1 of 6 samples" in found.reason
    assert result.reason.startswith(
        "values of 5 of 6 samples were compared; the rest was not, because their tokens or lengths "
    )
    assert "were compared" not in compare([split(samples), split(samples)]).reason


def test_runs_that_sampled_differently_are_recognised_without_ids() -> None:
    samples = batch()
    other = [dataclasses.replace(sample, response=sample.response + 1) for sample in samples]
    a, b = split(samples, ids=False), split(other, ids=False)
    result = compare([a, b])
    assert result.first is not None
    assert result.first.name == "responses"
    assert result.pairs[0].keys["trajectories"] == ("prompt and place among its trajectories",)
    for found in result.pairs[0].tensors:
        if found.section == "forward_data" and found.name != "response_mask":
            assert found.verdict is Verdict.NOT_COMPARABLE
            assert found.reason == "the tokens differ in 6 of 6 samples"


def test_samples_on_one_side_only_are_listed_and_are_a_difference() -> None:
    samples = batch()
    result = compare([split(samples), split(samples[:4])])
    assert result.verdict is Verdict.DIFFERENT
    [(text, items, _), *_] = findings_of(as_json(result)["pairs"][0])
    assert text.startswith("A: 2 samples of trajectories")
    assert items == ["2_0", "2_1"]
    only = next(each for each in result.pairs[0].findings if each.kind == "only")
    assert (only.side, only.section, only.items) == (0, "trajectories", ("2_0", "2_1"))
    assert result.first is not None
    assert (result.first.name, result.first.station) == ("samples", "tokens")


@pytest.mark.parametrize("own", ["of the others", "new"])
def test_samples_of_ranks_whose_files_were_not_kept_are_no_difference(own: str) -> None:
    rows = np.ones((4, 2), np.float32)

    def rank(number: int, *names: str) -> DumpContents:
        values = {"rollout_log_probs": rows[: len(names)]}
        return record("trajectories", values, rank=number, samples=names)

    both = MemoryDump([rank(0, "a", "b"), rank(1, "c", "d")])
    names = ("a", "b") if own == "of the others" else ("a", "x")
    result = compare([both, MemoryDump([rank(0, *names)])])
    # A sample that the smaller side has alone was sampled differently, whatever was kept.
    is_kept = own == "of the others"
    assert result.verdict is (Verdict.NOT_COMPARABLE if is_kept else Verdict.DIFFERENT)
    assert (result.first is None) == is_kept


def test_values_outside_the_mask_do_not_count() -> None:
    samples = [sample for sample in batch(12) if not sample.mask.all()]
    changed = [
        s.with_values(old_log_probs=np.where(s.mask, s.values["old_log_probs"], np.float32(9)))
        for s in samples
    ]
    assert compare([split(samples), split(changed)]).verdict is Verdict.SAME


def test_a_mask_that_differs_is_named_and_no_shape_is_called_different() -> None:
    samples = batch()
    mask = samples[1].mask.copy()
    mask[-1] = 0 if mask.sum() > 1 else 1
    changed = [*samples]
    changed[1] = dataclasses.replace(samples[1], mask=mask)
    result = compare([split(samples), split(changed, width=15)])
    assert result.first is not None
    assert result.first.name in ("responses", "response_mask")
    assert tensor_of(result, "entropy").samples["tokens differ"] == 1


def test_replicas_count_once() -> None:
    samples = batch()
    every = list(range(6))
    twice = split(samples, [every, every])
    for other in (split(samples), twice, split(samples, [[0, 1, 2], [3, 4, 5]])):
        for sides in ([twice, other], [other, twice]):
            result = compare(sides)
            assert result.verdict is Verdict.SAME, result.reason
            assert tensor_of(result, "rewards").found.pairs == 6


def test_fragments_of_a_sample_join_by_position() -> None:
    mask, values = np.ones((2, 8), np.int64), np.arange(16.0).reshape(2, 8)
    positions = np.tile(np.arange(8), (2, 1))

    def fragment(rank: int, at: Sequence[int]) -> DumpContents:
        tensors = {"response_mask": mask, "entropy": values, "positions": positions}
        of_rank = {name: each[:, [*at]] for name, each in tensors.items()}
        return record("forward_data", of_rank, rank=rank, samples=("a", "b"), mask="response_mask")

    whole = MemoryDump([fragment(0, range(8))])
    for parts in (([0, 1, 6, 7], [2, 3, 4, 5]), ([0], [1, 2, 3, 4, 5, 6, 7])):
        zigzag = MemoryDump([fragment(rank, at) for rank, at in enumerate(parts)])
        result = compare([whole, zigzag])
        assert result.verdict is Verdict.SAME, result.reason
        assert tensor_of(result, "entropy").found.pairs == 16
    result = compare([whole, MemoryDump(zigzag.records[:1])])
    assert result.verdict is Verdict.DIFFERENT
    assert "coverage" in [f.kind for f in result.pairs[0].findings]


def test_fragments_with_an_offset_join_over_tokens_of_the_environment() -> None:
    mask, values = np.array([[1, 1, 0, 1, 1, 1, 0, 1]]), np.arange(8.0)[None]

    def split_at(*edges: int) -> MemoryDump:
        return MemoryDump([
            record(
                "forward_data",
                {"response_mask": mask[:, start:stop], "entropy": values[:, start:stop],
                 "token_offset": np.array([start])},
                rank=rank, samples=("a",), mask="response_mask",
            )
            for rank, (start, stop) in enumerate(itertools.pairwise([0, *edges, 8]))
        ])  # fmt: skip

    for one, other in itertools.product(((), (3,), (4,), (2, 5)), repeat=2):
        result = compare([split_at(*one), split_at(*other)])
        assert result.verdict is Verdict.SAME, (one, other, result.reason)


def test_fragments_whose_padding_repeats_a_position_are_named_and_not_compared() -> None:
    values, positions = np.arange(12.0).reshape(2, 6), np.tile(np.arange(6), (2, 1))

    def fragment(rank: int, at: list[int], padding: int) -> DumpContents:
        tensors = {"entropy": values[:, at], "positions": positions[:, at]}
        padded = {name: np.pad(each, ((0, 0), (0, padding))) for name, each in tensors.items()}
        return record("forward_data", padded, rank=rank, samples=("a", "b"))

    whole = MemoryDump([fragment(0, [0, 1, 2, 3, 4, 5], 0)])
    result = compare([whole, MemoryDump([fragment(0, [0, 1, 5], 2), fragment(1, [2, 3, 4], 2)])])
    assert result.verdict is Verdict.NOT_COMPARABLE
    assert "positions repeat" in result.reason


def test_a_trajectory_counts_once_however_often_it_was_compared() -> None:
    mask = np.ones((2, 4), np.int64)
    positions = np.tile(np.arange(4), (2, 1))

    def side(change: float = 0.0, token: int = 0) -> MemoryDump:
        values = np.arange(8.0).reshape(2, 4)
        later = values.copy()
        later[1, 0] += change
        responses = np.array([[1, 2, 3, 4], [5, 6, 7, 8 + token]])
        passes = [("actor_compute_log_prob", values), ("actor_update", later)]
        stages = [
            record("forward_data", {"response_mask": mask, "responses": responses,
                                    "entropy": each}, stage=stage, samples=("a", "b"),
                   mask="response_mask")
            for stage, each in passes
        ]  # fmt: skip
        fragments = [
            record("old_log_probs", {"old_log_probs": values[:, at], "response_mask": mask[:, at],
                                     "positions": positions[:, at]}, stage="actor_update",
                   rank=rank, samples=("a", "b"), mask="response_mask")
            for rank, at in enumerate(([0, 3], [1, 2]))
        ]  # fmt: skip
        return MemoryDump([*stages, *fragments])

    result = compare([side(), side()])
    for name, pairs in (("entropy", 16), ("old_log_probs", 8)):
        found = tensor_of(result, name)
        assert (found.samples["compared"], found.found.pairs) == (2, pairs)
    assert tensor_of(compare([side(), side(1.0)]), "entropy").samples["unequal"] == 1
    assert "16 values of 2 samples" in "\n".join(line.text for line in as_lines(as_json(result)))
    found = tensor_of(compare([side(), side(token=1)]), "entropy")
    assert "the tokens differ in 1 of 2 samples" in found.reason


@pytest.mark.parametrize(("ids", "key"), [(True, "sample id"), (False, "group_id and run_id")])
def test_rows_are_paired_by_id_not_by_position(ids: bool, key: str) -> None:
    samples = batch()

    def by_run(original: DumpContents) -> DumpContents:
        names = original.samples or ()
        groups, runs = (tuple(text.split("_")[at] for text in names) for at in range(2))
        row_texts, chosen = {"run_id": runs}, names if ids else None
        return dataclasses.replace(original, samples=chosen, groups=groups, row_texts=row_texts)

    a, b = (split(samples, [order], edit=by_run) for order in (range(6), [5, 4, 3, 2, 1, 0]))
    result = compare([a, b])
    assert result.verdict is Verdict.SAME
    assert set(result.pairs[0].keys.values()) == {(key,)}


def test_the_same_nan_on_both_sides_is_equal_and_reported() -> None:
    values = np.array([1.0, math.nan, math.inf])
    other = np.array([1.0, math.nan, -math.inf])
    a, b, c = (single("other", {"x": each}) for each in (values, values.copy(), other))
    same = compare([a, b])
    assert same.verdict is Verdict.SAME
    assert "2 are the same NaN or infinity on both sides" in tensor_of(same, "x").reason
    different = compare([a, c])
    assert different.verdict is Verdict.DIFFERENT
    assert different.first is not None
    assert different.first.location is not None
    assert different.first.location.coordinates == ((2,), (2,))


def test_values_that_are_nan_on_one_side_are_counted_beside_the_distances() -> None:
    def side(*values: float) -> MemoryDump:
        records = [
            record("other", {"x": np.array([value, 1.0])}, rank=rank)
            for rank, value in enumerate(values)
        ]
        return MemoryDump(records)

    report = as_json(compare([side(1.0, 2.0), side(math.nan, 2.0)]))
    for text in (
        "\n".join(line.text for line in as_lines(report, width=200)),
        as_html(report),
    ):
        assert "1 disagree in being NaN or infinite, and distances are those of the finite" in text
        assert "0.000000e+00 of the finite pairs, 1 disagree in being NaN or infinite" in text


def test_the_reason_names_each_message_once_with_its_sides() -> None:
    def side(*sections: str) -> MemoryDump:
        records = [record("loss", numbers={"loss": 1.0})]
        for each in sections:
            alone = record(each, numbers={"x": 1.0})
            entry = dataclasses.replace(alone.entry, path=Path("ring-0.safetensors"))
            records.append(dataclasses.replace(alone, entry=entry))
        return MemoryDump(records, problems=[DumpProblem(Path("x"), "damaged", "it is cut short")])

    report = as_json(compare([side(), side("metrics", "other")]))
    assert report["reason"].count("it is cut short") == 1
    assert "A and B: it is cut short" in report["reason"]
    assert "B: metrics appeared on only one side" in report["reason"]
    lines = [line.text for line in as_lines(report)]
    assert sum("ring-0.safetensors" in line for line in lines) == 1
    assert any(", 1 rank, 1 entry," in line for line in lines)
    assert any(", 1 rank, 3 entries," in line for line in lines)


def test_both_locations_are_named_if_sides_split_a_microbatch_differently() -> None:
    values = np.arange(4.0).reshape(4, 1)
    names = tuple("abcd")
    a = MemoryDump([record("forward_data", {"entropy": values}, samples=names)])
    b = MemoryDump([
        record("forward_data", {"entropy": values[at : at + 2] + 1}, samples=names[at : at + 2],
               microbatch=at // 2)
        for at in (0, 2)
    ])  # fmt: skip
    report = as_json(compare([a, b]))
    text, page = "\n".join(line.text for line in as_lines(report)), as_html(report)
    for shown in (text, page):
        assert "rank 0, microbatch 0: max" in shown
        assert "rank 0, microbatch 0 against rank 0, microbatch 1: max" in shown


def test_numbers_of_each_shard_are_compared_by_the_loss_tolerance() -> None:
    def side(loss: float) -> MemoryDump:
        places = itertools.product(range(2), range(2))
        return MemoryDump([
            record("loss", numbers={"loss": loss}, rank=rank, microbatch=m) for rank, m in places
        ])  # fmt: skip

    one, other = side(1.0), side(1.0 + 5e-5)
    assert compare([one, side(1.0 + 5e-6)]).verdict is Verdict.WITHIN_NOISE
    shards = tensor_of(compare([one, other]), "loss").shards
    assert [each.verdict for each in shards] == [Verdict.DIFFERENT] * 4
    one_metric, other_metric = (single("metrics", numbers={"x": x}) for x in (1.0, 1.0 + 1e-5))
    assert compare([one_metric, other_metric]).verdict is Verdict.WITHIN_NOISE
    given = Tolerances.parse(["loss=1e-3"])
    assert compare([one, other], tolerances=given).verdict is Verdict.WITHIN_NOISE


def test_files_that_cannot_be_read_are_findings() -> None:
    samples = batch()
    a, b = split(samples, [[0, 1, 2], [3, 4, 5]]), split(samples, [[0, 1, 2], [3, 4, 5]], name="b")
    b.broken = frozenset({Path("b/forward_data/rank1_micro0")})
    result = compare([a, b])
    assert result.verdict is Verdict.NOT_COMPARABLE
    assert result.exit_status == 2
    damaged = next(each for each in result.pairs[0].findings if each.kind == "damaged")
    assert damaged.items == ("b/forward_data/rank1_micro0",)
    assert "truncated" in damaged.message
    assert tensor_of(result, "rewards").verdict is Verdict.SAME
    missing = b.without(*b.broken)
    assert compare([a, missing]).exit_status == 2
    listed = MemoryDump(a.records, problems=[DumpProblem(Path("x"), "missing", "x is gone")])
    assert compare([a, listed]).exit_status == 2
    unknown = MemoryDump(a.records, problems=[DumpProblem(Path("x"), "unknown", "x is strange")])
    assert compare([a, unknown]).exit_status == 0


def test_nothing_in_common_is_not_comparable_and_an_empty_tensor_is_the_same() -> None:
    loss, other = single("loss", numbers={"loss": 1.0}), single("other", {"x": np.ones((0, 4))})
    result = compare([loss, other])
    assert result.exit_status == 2
    assert "nothing in common" in result.reason
    assert compare([MemoryDump([]), MemoryDump([])]).exit_status == 2
    assert compare([other, other]).verdict is Verdict.SAME


@pytest.mark.parametrize(("kind", "status"), [("own", 2), ("nexrl", 0)])
def test_a_section_on_one_side_only_is_named(kind: str, status: int) -> None:
    loss = record("loss", numbers={"loss": 1.0})
    more = MemoryDump([loss, record("gradients", {"w": np.ones(2)})], kind=kind)
    result = compare([MemoryDump([loss], kind=kind), more])
    assert result.exit_status == status  # the one run did not do it, or did not keep it
    [alone] = [each for each in result.pairs[0].findings if each.kind == "section"]
    assert (alone.section, alone.side) == ("gradients", 1)
    report, title = as_json(result), {0: "SAME IN WHAT BOTH SIDES HAVE", 2: "NOT COMPARABLE"}
    assert as_lines(report)[0].text.endswith(f" {title[status]}")
    assert title[status].lower() in as_html(report)


def test_loss_intermediates_find_their_counterparts_in_other_sections() -> None:
    log_probs = np.full((2, 4), -1.0, np.float32)
    ones = np.ones((2, 4), np.int64)
    own = MemoryDump([
        record("forward_data", {"log_probs": log_probs, "response_mask": ones},
               samples=("a", "b"), mask="response_mask"),
        record("old_log_probs", {"old_log_probs": log_probs}, rank=None, samples=("a", "b")),
        record("loss", numbers={"loss": 0.5}),
    ])  # fmt: skip
    weaver = MemoryDump([
        record(
            "is_loss",
            {"log_probs": log_probs, "old_log_probs": log_probs + np.float32(0.5),
             "effective_valid": ones, "prob_ratio": log_probs},
            samples=("a", "b"), mask="effective_valid", numbers={"loss": 0.5},
        )
    ])  # fmt: skip
    result = compare([own, weaver])
    assert tensor_of(result, "log_probs", "is_loss").verdict is Verdict.SAME
    assert tensor_of(result, "loss", "is_loss").verdict is Verdict.SAME
    assert tensor_of(result, "old_log_probs", "is_loss").verdict is Verdict.DIFFERENT
    names = {each.name for each in result.pairs[0].tensors if each.section == "is_loss"}
    assert names == {"log_probs", "old_log_probs", "loss"}
    looked = next(each for each in result.pairs[0].findings if each.section == "is_loss")
    assert looked.message.endswith("the other side's forward_data, old_log_probs, loss")


def test_named_tensors_are_joined_from_shards() -> None:
    weight = np.arange(24, dtype=np.float32).reshape(4, 6)

    def sharded(cuts: list[slice], dim: int) -> MemoryDump:
        records = []
        for rank, cut in enumerate(cuts):
            part = weight[cut] if dim == 0 else weight[:, cut]
            offset = [cut.start, 0] if dim == 0 else [0, cut.start]
            about = {"shards": {"w": {"global_shape": [4, 6], "offset": offset}}}
            records.append(record("parameters", {"w": part}, rank=rank, about=about))
        return MemoryDump(records)

    whole = MemoryDump([record("parameters", {"w": weight})])
    rows, columns = [slice(0, 1), slice(1, 4)], [slice(0, 2), slice(2, 4), slice(4, 6)]
    for one, other in (
        (whole, sharded(rows, 0)), (sharded(rows, 0), sharded(columns, 1)),
        (sharded(columns, 1), whole),
    ):  # fmt: skip
        result = compare([one, other])
        assert result.verdict is Verdict.SAME, result.reason
        assert tensor_of(result, "w").found.pairs == 24
    weight = weight.copy()
    weight[2, 3] = -1
    result = compare([sharded(rows, 0), whole])
    assert result.first is not None
    assert result.first.location is not None
    assert result.first.location.coordinates == ((1, 3), (2, 3))
    other_shape = MemoryDump([record("parameters", {"w": weight[:2]})])
    assert compare([whole, other_shape]).verdict is Verdict.DIFFERENT


def test_gradients_count_by_their_relative_error() -> None:
    random = np.random.default_rng(0)
    gradient = random.standard_normal(1000).astype(np.float32)
    noise = gradient * (1 + np.float32(1e-6) * random.standard_normal(1000).astype(np.float32))
    noise[0] = gradient[0] + np.float32(1e-5)
    scaled = gradient * np.float32(1.001)
    a, b, c = (single("gradients", {"w": each}) for each in (gradient, noise, scaled))
    assert compare([a, b]).verdict is Verdict.WITHIN_NOISE
    assert compare([a, c]).verdict is Verdict.DIFFERENT


def test_the_noise_floor_of_the_run_is_noise() -> None:
    samples = batch()

    def with_floor(original: DumpContents) -> DumpContents:
        tensors = dict(original.tensors)
        if "old_log_probs" in tensors:
            tag, shape, values, offsets = tensors["old_log_probs"]
            tensors["recomputed_log_probs"] = (tag, shape, values + np.float32(2e-3), offsets)
        return dataclasses.replace(original, tensors=tensors)

    moved = shifted(samples, "old_log_probs", 3e-3)
    assert compare([split(samples), split(moved)]).verdict is Verdict.DIFFERENT
    result = compare([split(samples, edit=with_floor), split(moved)])
    assert result.verdict is Verdict.WITHIN_NOISE
    assert result.pairs[0].noise_floor is not None
    assert result.pairs[0].noise_floor.mean == pytest.approx(2e-3, rel=1e-3)
    declared = split(samples)
    declared.about = {"noise_floor": {"mean": 2e-3, "max": 2e-3}}
    assert compare([declared, split(moved)]).verdict is Verdict.WITHIN_NOISE


def test_a_file_is_read_once_for_all_its_sections(tmp_path: Path) -> None:
    def without_trajectories(kind: str, name: str, data: dict[str, Any]) -> None:
        for tensor in ("responses", "rewards", "rollout_log_probs"):
            del data["tensors"][tensor]

    def changed(kind: str, name: str, data: dict[str, Any]) -> None:
        without_trajectories(kind, name, data)
        if "rank1" in name:
            mask = data["tensors"]["response_mask"].copy()
            mask[3, 1] ^= 1
            data["tensors"]["response_mask"] = mask

    a, b, other = (
        open_dump(own_directory(tmp_path / name, ranks=3, micros=1, edit=edit))
        for name, edit in (("a", without_trajectories), ("b", without_trajectories), ("c", changed))
    )
    task_counts: list[int] = []

    def mapper(function: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        task_counts.append(len(tasks))
        return map(function, tasks)

    result = compare([a, b], mapper=mapper)
    assert result.verdict is Verdict.SAME, result.reason
    assert [count for count in task_counts if count] == [3]
    assert result.bytes == sum(side.bytes for side in result.sides)
    for section in ("forward_data", "is_loss"):
        assert tensor_of(result, "response_mask", section).found.pairs == 3 * 4 * 16
        differs = tensor_of(compare([a, other]), "response_mask", section)
        assert differs.found.unequal_count == 1
        assert [str(each.verdict) for each in differs.shards] == ["same", "different", "same"]


def test_three_sides_are_compared_in_pairs() -> None:
    samples = batch()
    moved = shifted(samples, "entropy", 1)
    result = compare([split(samples), split(samples), split(moved)])
    assert [pair.sides for pair in result.pairs] == [(0, 1), (0, 2), (1, 2)]
    verdicts = [pair.verdict for pair in result.pairs]
    assert verdicts == [Verdict.SAME, Verdict.DIFFERENT, Verdict.DIFFERENT]
    assert result.verdict is Verdict.DIFFERENT
    with pytest.raises(InvalidInput, match="two or three"):
        compare([split(samples)])


def test_bfloat16_is_compared_by_its_own_rounding() -> None:
    def side(bits: list[int]) -> MemoryDump:
        values, dtypes = np.array([bits], np.uint16), {"old_log_probs": "bfloat16"}
        return single("old_log_probs", {"old_log_probs": values}, samples=("a",), dtypes=dtypes)

    one = side([0xBF80, 0xC000, 0xC0A0])
    assert compare([one, side([0xBF80, 0xC001, 0xC0A0])]).verdict is Verdict.WITHIN_NOISE
    assert compare([one, side([0xBF80, 0xC020, 0xC0A0])]).verdict is Verdict.DIFFERENT


def test_steps_pair_by_number_where_there_are_several() -> None:
    def side(*steps: int) -> MemoryDump:
        return MemoryDump([record("loss", numbers={"loss": 1.0 * s}, step=s) for s in steps])

    assert compare([side(0, 1), side(0, 1)]).verdict is Verdict.SAME
    assert compare([side(0, 1), side(0)]).exit_status == 2
    assert compare([side(0), side(0)]).verdict is Verdict.SAME


def test_tasks_and_answers_can_be_pickled() -> None:
    samples = batch()

    def run(function: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        for task in tasks:
            yield pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(task)))))

    calls: list[tuple[int, int]] = []
    result = compare(
        [split(samples), split(samples, [[1, 0], [2, 3, 4, 5]])],
        mapper=run, progress=lambda done, planned: calls.append((done, planned)),
    )  # fmt: skip
    assert result.verdict is Verdict.SAME
    assert calls[-1][0] == calls[-1][1] == len(calls)


def test_a_stage_on_one_side_only_is_named_and_the_shared_one_compared() -> None:
    def side(*stages: str, kind: str = "nexrl") -> MemoryDump:
        records = [
            record("forward_data", {"entropy": np.ones((1, 2))}, stage=stage, samples=("a",),
                   rank=rank)
            for rank, stage in enumerate(stages)
        ]  # fmt: skip
        return MemoryDump(records, kind=kind)

    result = compare([side("x", "y"), side("x", "y", "y")])
    assert result.exit_status == 0, result.reason
    runs = [side("x", "y", kind="own"), side("x", kind="own")]
    assert compare(runs).exit_status == 2  # the one run did not do it, or did not keep it
    result = compare([side("x", "y"), side("x")])
    assert result.exit_status == 0
    only = next(each for each in result.pairs[0].findings if each.kind == "only")
    assert only.message == "forward_data of y appeared on only one side"


def test_a_file_with_invalid_row_offsets_is_a_finding() -> None:
    samples = batch()

    def overlap(original: DumpContents) -> DumpContents:
        tag, shape, values, offsets = original.tensors["response_mask"]
        assert offsets is not None
        wrong = (tag, shape, values, offsets[::-1].copy())
        return dataclasses.replace(original, tensors={**original.tensors, "response_mask": wrong})

    result = compare([split(samples, ragged=True), split(samples, ragged=True, edit=overlap)])
    assert result.exit_status == 2
    damaged = [each for each in result.pairs[0].findings if each.kind == "damaged"]
    assert len(damaged) == 2
    assert "the rows of response_mask do not follow each other" in damaged[0].message


@pytest.mark.parametrize("error", [OSError("the disk is gone"), MemoryError("no room")])
def test_only_errors_of_files_are_findings(error: Exception) -> None:
    class Raising(MemoryDump):
        def read(self, entry: DumpEntry) -> DumpContents:
            raise error

    good = split(batch())
    bad = Raising(good.records)
    if isinstance(error, OSError):
        findings = compare([good, bad]).pairs[0].findings
        damaged = [finding.message for finding in findings if finding.kind == "damaged"]
        assert damaged == ["the disk is gone"] * len(bad.records)
    else:
        with pytest.raises(ComparisonFailed, match="could not be compared: MemoryError: no room"):
            compare([good, bad])


class Counting(MemoryDump):
    """Counts the records that are in memory: each reading makes new ones."""

    alive = 0
    most = 0
    lock = threading.Lock()

    def read(self, entry: DumpEntry) -> DumpContents:
        original = copy.copy(super().read(entry))
        with Counting.lock:
            Counting.alive += 1
            Counting.most = max(Counting.most, Counting.alive)
        weakref.finalize(original, self._gone)
        return original

    @staticmethod
    def _gone() -> None:
        with Counting.lock:
            Counting.alive -= 1


@pytest.mark.parametrize("workers", [1, 3])
def test_two_shards_for_each_worker_are_in_memory_at_a_time(workers: int) -> None:
    samples = batch(24)
    shares = [list(range(at, at + 2)) for at in range(0, 24, 2)]
    a, b = (
        split(samples, shares),
        split(samples, [[*reversed(range(24))][at::5] for at in range(5)]),
    )
    Counting.most = 0
    result = compare(
        [Counting(a.records), Counting(b.records, name="b")], mapper=thread_mapper(workers)
    )
    assert result.verdict is Verdict.SAME, result.reason
    assert 2 <= Counting.most <= 2 * workers
    assert Counting.alive == 0


@pytest.mark.parametrize("harm", ["cut off", "empty", "lost", "hostile"])
def test_trajectories_that_cannot_be_read_prove_no_difference(tmp_path: Path, harm: str) -> None:
    a, b = (nexrl_directory(tmp_path / name, steps=(0, 1)) for name in "ab")
    file = b / "trajectory/step_000001.pt"
    if harm == "lost":
        file.unlink()
    elif harm == "hostile":
        hostile_torch_file(file, tmp_path / "ran")
    else:
        file.write_bytes(file.read_bytes()[: 2000 if harm == "cut off" else 0])
    for sides in ((a, b), (b, a)):
        result = compare([open_dump(side) for side in sides])
        assert result.verdict is Verdict.NOT_COMPARABLE, result.reason
        assert result.first is None
        kind = {"lost": "only", "hostile": "refused"}.get(harm, "damaged")
        assert kind in [f.kind for f in result.pairs[0].findings]
        assert not [cause for cause in result.pairs[0].causes if "sampled" in cause.title]
    assert not (tmp_path / "ran").exists()
