"""Sides that split their samples in another order, or into parts of another size."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.batches import wire
from tests.support.dump_files import Batch, Edit, make_batch, nexrl_directory
from tests.support.memory_dumps import single, tensor_of

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.flow import is_structural
from stagescope_service.compare.pairing.shard_comparison import Doubt
from stagescope_service.compare.results import ComparisonFinding, DumpComparison, Verdict
from stagescope_service.dumps.discover import open_dump
from stagescope_service.store.artifacts import kept_path, step_directory
from stagescope_service.store.kept import Kept, write_kept
from stagescope_wire.keep import sections_of
from stagescope_wire.schema import Part

Content = dict[str, Any]
"""Content of a torch file."""
MICRO_TYPES = ("forward_data", "loss", "is_loss_debug", "batch_inputs")


def rotated(directory: Path) -> Path:
    """Give each microbatch's files to the next rank and microbatch."""
    for kind in MICRO_TYPES:
        files = sorted((directory / kind).glob("*.pt"))
        contents = [torch.load(file, weights_only=True) for file in files]
        for file, data in zip([*files[1:], *files[:1]], contents, strict=True):
            torch.save(data, file)
    return directory


def notes(result: DumpComparison) -> dict[str | None, ComparisonFinding]:
    return {f.section: f for f in result.pairs[0].findings if f.kind == "note"}


def names(result: DumpComparison, section: str) -> set[str]:
    return {each.name for each in result.pairs[0].tensors if each.section == section}


def values(result: DumpComparison) -> dict[tuple[str, str], int]:
    """How many values were compared; of tokens and masks padding counts where all is equal."""
    return {
        (each.section, each.name): each.found.pairs
        for each in result.pairs[0].tensors
        if not is_structural(each.name)
    }


# --- NexRL: files without ids ---------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["self_hosted", "weaver"])
def test_microbatches_in_another_order_are_the_same(tmp_path: Path, mode: str) -> None:
    a = nexrl_directory(tmp_path / "a", mode=mode)
    b = rotated(nexrl_directory(tmp_path / "b", mode=mode))
    plain = compare([open_dump(a), open_dump(a)])
    for sides in ((a, b), (b, a)):
        result = compare([open_dump(side) for side in sides])
        assert result.verdict is Verdict.SAME, result.reason
        assert names(result, "loss") == {"loss", "pg_loss", "entropy_loss"}
        assert names(result, "is_loss") == names(plain, "is_loss")
        assert values(result) == values(plain)
        if mode == "weaver":
            assert result.pairs[0].keys["is_loss"] == ("response tokens",)
            assert notes(result) == {}


@pytest.mark.parametrize("mode", ["self_hosted", "weaver"])
def test_a_batch_in_another_order_is_the_same(tmp_path: Path, mode: str) -> None:
    order = np.random.default_rng(1).permutation(16).tolist()
    a = nexrl_directory(tmp_path / "a", mode=mode)
    b = nexrl_directory(tmp_path / "b", mode=mode, order=order)
    result = compare([open_dump(a), open_dump(b)])
    assert result.verdict is Verdict.SAME, result.reason
    found = {t.section: t for t in result.pairs[0].tensors if t.name == "old_log_probs"}
    section = "old_log_probs" if mode == "self_hosted" else "is_loss"
    assert found[section].samples["compared"] == 16
    assert result.pairs[0].keys[section] == ("response tokens",)
    # The microbatches are of other samples: what is of a whole one has no counterpart.
    assert "numbers of 4 and 4 parts are not compared" in notes(result)["loss"].message
    assert len(notes(result)["loss"].items) == 4


def test_one_changed_value_is_found_in_another_order(tmp_path: Path) -> None:
    def edit(kind: str, name: str, data: Content) -> None:
        if kind == "is_loss_debug" and name.endswith("rank1_micro0"):
            data["prob_ratio"] = data["prob_ratio"].clone()
            data["prob_ratio"][2, 0] += 0.5

    a = nexrl_directory(tmp_path / "a", mode="weaver")
    b = rotated(nexrl_directory(tmp_path / "b", mode="weaver", edit=edit))
    result = compare([open_dump(a), open_dump(b)])
    assert result.first is not None
    assert (result.first.section, result.first.name) == ("is_loss", "prob_ratio")
    assert result.first.location is not None
    assert result.first.location.coordinates == ((2, 0), (2, 0))
    ranks = [(each.rank, each.part.microbatch) for each in result.first.location.locations]
    assert ranks == [(1, 0), (1, 1)]


def test_unidentified_rows_are_paired_by_location_and_prove_no_difference(tmp_path: Path) -> None:
    def flipped(kind: str, name: str, data: Content) -> None:
        for key, value in data.items():
            if kind == "is_loss_debug" and isinstance(value, torch.Tensor) and value.ndim == 2:
                data[key] = value.flip(0)

    a, b = (nexrl_directory(tmp_path / name, mode="weaver") for name in "ab")
    c = nexrl_directory(tmp_path / "c", mode="weaver", edit=flipped)
    assert notes(compare([open_dump(a), open_dump(b)])) == {}
    for side, kind in itertools.product((a, b, c), ("forward_data", "batch_inputs")):
        shutil.rmtree(side / kind)
    result = compare([open_dump(a), open_dump(b)])
    assert result.verdict is Verdict.SAME
    assert "is_loss: 16 rows are paired by location only" in notes(result)["is_loss"].message
    result = compare([open_dump(a), open_dump(c)])
    assert result.verdict is Verdict.NOT_COMPARABLE, result.reason
    assert "the same lengths in another order" in result.pairs[0].causes[0].evidence
    assert result.pairs[0].causes[0].title == "the rows are in another order"


def test_rows_of_a_whole_step_in_another_order_are_paired_by_location(tmp_path: Path) -> None:
    result = compare([
        open_dump(nexrl_directory(tmp_path / "a")),
        open_dump(rotated(nexrl_directory(tmp_path / "b"))),
    ])  # fmt: skip
    # The whole batch's order is not that of the microbatches any more.
    assert "old_log_probs: 16 rows are paired by location" in notes(result)["old_log_probs"].message


def test_other_samples_are_not_reported_as_split_differently(tmp_path: Path) -> None:
    sides = [nexrl_directory(tmp_path / str(seed), seed=seed, mode="weaver") for seed in (0, 1)]
    result = compare([open_dump(side) for side in sides])
    assert result.verdict is Verdict.DIFFERENT
    assert "loss" not in notes(result)
    assert names(result, "loss") == {"loss", "pg_loss", "entropy_loss"}


# --- parts of unlike size -------------------------------------------------------------------------
Shares = Sequence[Sequence[Sequence[Sequence[int]]]]
"""By rank, mini-batch and microbatch: which rows."""


def dynamic(path: Path, shares: Shares, *, rollout: bool = False, rows: int = 16) -> Path:
    """Kept files whose microbatches are balanced by tokens: each has rows and a width of its own.

    `rollout`: the rollout's file is there, too.
    """
    batch = make_batch(rows, 12)
    if rollout:
        write(path, batch, range(rows), ("responses", "rewards"), "rollout_generate", 0, Part(), 1)
    for rank, minis in enumerate(shares):
        parts = [
            (Part(minibatch=mini, microbatch=micro), of)
            for mini, micros in enumerate(minis)
            for micro, of in enumerate(micros)
        ]
        for seq, (part, of) in enumerate(parts, 1):
            kept = ("old_log_probs", "log_probs", "entropy", "advantages")
            write(path, batch, of, kept, "actor_update", rank, part, seq)
    return path / "run" / "first"


def write(
    path: Path, batch: Batch, rows: Sequence[int], kept: Sequence[str], stage: str, rank: int,
    part: Part, seq: int,
) -> None:  # fmt: skip
    index = list(rows)
    width = int(batch.lengths[index].max())
    values = {name: getattr(batch, name)[index] for name in ("response_mask", *kept)}
    tensors = {n: wire(v[:, :width].copy() if v.ndim == 2 else v) for n, v in values.items()}
    scalars = {"loss": math.fsum(batch.log_probs[index].ravel())} if stage == "actor_update" else {}
    role = "actor" if stage == "actor_update" else "rollout"
    job = {"run": "run", "attempt_key": "first", "step": 0, "stage": stage, "role": role,
           "rank": rank, **part._asdict()}  # fmt: skip
    file = kept_path(
        step_directory(path, "run", "first", 0, stage, part), role, rank, f"incarnation{rank}", seq
    )
    strings = {"sample_ids": [batch.samples[row] for row in index]}
    write_kept(file, Kept(tensors, sections_of(stage, tensors, scalars), scalars, strings, {}, job))


UNLIKE: dict[str, Shares] = {
    "by mini-batch": [
        [[[0, 1], [2], [3]], [[4, 5], [6, 7]]], [[[8, 9], [10, 11]], [[12], [13], [14, 15]]],
    ],
    "by rank": [
        [[[0, 1], [2], [3]]], [[[4], [5], [6, 7]]], [[[8, 9], [10], [11]]], [[[12, 13], [14, 15]]],
    ],
    "even": [[[[0, 1, 2, 3], [4, 5, 6, 7]]], [[[8, 9, 10, 11], [12, 13, 14, 15]]]],
    "mixed": [[[[15, 0], [3], [12, 7, 1]], [[4]]], [[[8, 9, 2, 5]], [[6, 14, 13], [11, 10]]]],
}  # fmt: skip


@pytest.mark.parametrize("rollout", [False, True])
@pytest.mark.parametrize("one", UNLIKE)
@pytest.mark.parametrize("other", UNLIKE)
def test_parts_of_unlike_size_are_the_same(
    tmp_path: Path, one: str, other: str, rollout: bool
) -> None:
    a = dynamic(tmp_path / "a", UNLIKE[one], rollout=rollout)
    b = dynamic(tmp_path / "b", UNLIKE[other], rollout=rollout)
    result = compare([open_dump(a), open_dump(b)])
    if one == other == "by rank" and not rollout:
        # Nothing tells how many samples there were: the part that three of four ranks have may be
        # lost on both sides.
        assert {f.kind for f in result.pairs[0].findings} == {"missing"}
        return
    assert result.verdict is Verdict.SAME, result.reason
    assert {f.kind for f in result.pairs[0].findings} <= {"note"}
    entropy = next(t for t in result.pairs[0].tensors if t.name == "entropy")
    assert entropy.samples["compared"] == 16
    parts = [
        {frozenset(of) for minis in UNLIKE[name] for micros in minis for of in micros}
        for name in (one, other)
    ]
    compared = [t.found.pairs for t in result.pairs[0].tensors if t.name == "loss"]
    assert sum(compared) == len(parts[0] & parts[1])
    assert ("loss" in notes(result)) == (parts[0] != parts[1])


def test_a_loss_is_compared_at_its_own_location_if_ranks_are_replicas(
    tmp_path: Path,
) -> None:
    every: Shares = [[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]]
    sides = [
        dynamic(tmp_path / name, shares, rows=4, rollout=True)
        for name, shares in (("a", every), ("b", every[:1]), ("c", [[[[2, 3], [0, 1]]]]))
    ]
    for other in sides[1:]:
        result = compare([open_dump(sides[0]), open_dump(other)])
        assert result.verdict is Verdict.SAME, result.reason
        loss = next(t for t in result.pairs[0].tensors if t.name == "loss")
        assert loss.found.pairs == 2
        assert {shard.comparison.locations[0].rank for shard in loss.shards} == {0}
        assert "numbers of 2 and 0 parts are not compared" in notes(result)["loss"].message


def test_masked_and_non_finite_log_probs_identify_no_order(tmp_path: Path) -> None:
    def edit(kind: str, name: str, data: Content) -> None:
        if kind == "forward_data" and name.endswith("rank0_micro0"):
            data["response_mask"] = torch.zeros_like(data["response_mask"])
        if kind == "forward_data" and name.endswith("rank1_micro1"):
            data["log_probs"] = torch.full_like(data["log_probs"], float("nan"))

    a = nexrl_directory(tmp_path / "a", edit=edit)
    b = rotated(nexrl_directory(tmp_path / "b", edit=edit))
    result = compare([open_dump(a), open_dump(b)])
    assert "paired by location" in notes(result)["old_log_probs"].message


Split = list[list[int]]
"""Samples of each part."""
SPLITS = st.permutations(range(8)).flatmap(
    lambda order: st.lists(st.integers(1, 7), unique=True, max_size=5).map(
        lambda cuts: [
            list(order[start:stop])
            for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 8], strict=True)
        ]
    )
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(SPLITS, SPLITS, st.integers(1, 3))
def test_any_two_splits_of_samples_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, one: Split, other: Split, ranks: int
) -> None:
    path = tmp_path_factory.mktemp("split")
    sides = [
        dynamic(path / str(at), [[of[rank::ranks]] for rank in range(ranks) if of[rank::ranks]],
                rollout=True, rows=8)
        for at, of in enumerate((one, other))
    ]  # fmt: skip
    result = compare([open_dump(side) for side in sides])
    assert result.verdict is Verdict.SAME, result.reason


@pytest.mark.parametrize("harm", ["lost", "empty"])
def test_a_lost_file_is_missing_however_samples_are_split(tmp_path: Path, harm: str) -> None:
    a = dynamic(tmp_path / "a", UNLIKE["by mini-batch"], rollout=True)
    b = dynamic(tmp_path / "b", UNLIKE["mixed"], rollout=True)
    file = next(a.rglob("actor_rank1_*_4.safetensors"))
    if harm == "lost":
        file.unlink()
    else:
        file.write_bytes(b"")
    result = compare([open_dump(a), open_dump(b)])
    assert result.exit_status == 2
    kinds = {f.kind for f in result.pairs[0].findings}
    assert kinds >= {"only", "damaged" if harm == "empty" else "missing"}
    # Both sides lack it: the rollout has its samples.
    assert compare([open_dump(a), open_dump(a)]).exit_status == 2


# --- pairing by location proves nothing if the sides have other layouts ---------------------------
LAYOUT: dict[str, Any] = {"ranks": 2, "micros": 2, "rows": 2}
SHUFFLED = (3, 6, 1, 0, 7, 2, 5, 4)


def untouched(kind: str, name: str, data: Content) -> None:
    """Leave a file as it is."""


def padded(kind: str, name: str, data: Content) -> None:
    for name, values in data.items():
        if isinstance(values, torch.Tensor) and values.dim() == 2 and kind == "forward_data":
            data[name] = torch.nn.functional.pad(values, (0, 5))


def without_tokens(
    path: Path, order: Sequence[int] = range(8), edit: Edit = untouched, **layout: Any
) -> Path:
    """A dump of NexRL's whose microbatches say neither ids nor tokens."""

    def edited(kind: str, name: str, data: Content) -> None:
        data.pop("input_ids", None)
        edit(kind, name, data)

    return nexrl_directory(path, tokens=12, order=order, edit=edited, **layout)


@pytest.mark.parametrize("edit", [untouched, padded])
@pytest.mark.parametrize("other", [(4, 1, 2), (1, 4, 2), (1, 1, 8), (2, 1, 4)])
def test_pairs_by_location_in_other_parts_prove_no_difference(
    tmp_path: Path, other: tuple[int, int, int], edit: Edit
) -> None:
    a = without_tokens(tmp_path / "a", **LAYOUT)
    ranks, micros, rows = other
    b = without_tokens(tmp_path / "b", ranks=ranks, micros=micros, rows=rows, edit=edit)
    for sides in ((a, b), (b, a)):
        result = compare([open_dump(side) for side in sides])
        different = [t for t in result.pairs[0].tensors if t.verdict is Verdict.DIFFERENT]
        assert {t.section for t in different} <= {"gradients", "parameters"}, result.reason
        assert result.verdict is Verdict.NOT_COMPARABLE, result.reason
        loss = next(t for t in result.pairs[0].tensors if t.name == "loss")
        if other == (1, 4, 2):  # what lies at shared places are the same samples by chance
            assert loss.verdict is Verdict.SAME
        else:
            assert loss.verdict is Verdict.NOT_COMPARABLE
            assert "the sides have other ranks, parts or numbers of rows" in loss.reason


def test_pairs_by_location_in_another_order_prove_no_difference(tmp_path: Path) -> None:
    a = without_tokens(tmp_path / "a", **LAYOUT)
    b = without_tokens(tmp_path / "b", SHUFFLED, **LAYOUT)
    result = compare([open_dump(a), open_dump(b)])
    assert result.verdict is Verdict.NOT_COMPARABLE, result.reason
    log_probs = next(t for t in result.pairs[0].tensors if t.section == "forward_data")
    assert "the trajectories are others or in another order" in log_probs.reason

    # In the same order and the same parts a value that differs is different.
    def edit(kind: str, name: str, data: Content) -> None:
        if kind == "forward_data" and name.endswith("rank1_micro0"):
            data["log_probs"] = data["log_probs"] + 0.5

    c = without_tokens(tmp_path / "c", **LAYOUT, edit=edit)
    result = compare([open_dump(a), open_dump(c)])
    assert result.verdict is Verdict.DIFFERENT
    assert result.first is not None
    assert result.first.name == "log_probs"


def test_lengths_in_another_order_over_all_shards_prove_no_difference(tmp_path: Path) -> None:
    def lengthened(kind: str, name: str, data: Content) -> None:
        if kind == "forward_data" and name.endswith("rank0_micro0"):
            data["response_mask"][0] = 1

    # Only one side has tokens, and only one has trajectories.
    a = nexrl_directory(tmp_path / "a", tokens=12, **LAYOUT)
    b = without_tokens(tmp_path / "b", SHUFFLED, mode="weaver", **LAYOUT)
    for sides in ((a, b), (b, a)):
        result = compare([open_dump(side) for side in sides])
        different = [t for t in result.pairs[0].tensors if t.verdict is Verdict.DIFFERENT]
        assert {t.section for t in different} <= {"gradients", "parameters"}, result.reason
        assert result.verdict is Verdict.NOT_COMPARABLE, result.reason
        assert result.pairs[0].causes[0].title == "the rows are in another order"
    # Other lengths are a difference.
    c = without_tokens(tmp_path / "c", SHUFFLED, lengthened, mode="weaver", **LAYOUT)
    result = compare([open_dump(side) for side in (a, c)])
    assert result.verdict is Verdict.DIFFERENT
    assert result.first is not None
    assert result.first.name == "response_mask"


def test_a_number_beside_another_number_of_rows_is_not_comparable() -> None:
    sides = [
        single("is_loss", {"log_probs": np.ones((rows, 2))}, numbers={"loss": loss})
        for rows, loss in ((3, 0.5), (4, 0.6))
    ]
    found = tensor_of(compare(sides), "loss")
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert found.shards[0].comparison.doubt is Doubt.OTHER_LAYOUT


def test_a_file_of_losses_is_no_other_number_of_rows(tmp_path: Path) -> None:
    def rounded(kind: str, name: str, data: Content) -> None:
        if kind in ("loss", "is_loss_debug"):
            data["loss"] = data["loss"] + 1e-7

    a = without_tokens(tmp_path / "a", **LAYOUT)
    b = without_tokens(tmp_path / "b", **LAYOUT, mode="weaver", edit=rounded)
    for sides in ((a, b), (b, a)):
        result = compare([open_dump(side) for side in sides])
        assert result.verdict is Verdict.WITHIN_NOISE, result.reason
        assert "loss" in names(result, "is_loss")


# --- a file of a whole step has no mask, those of its ranks have ---------------------------------
def aligned(order: Sequence[int], width: int, *, left: bool) -> Edit:
    """Pad tensors by row to a width, and move each row's values to the side that is not padded."""
    lengths = torch.from_numpy(make_batch(8, 12).lengths[[*order]])

    def edit(kind: str, name: str, data: Content) -> None:
        for tensor, values in data.items():
            is_by_row = isinstance(values, torch.Tensor) and values.dim() == 2
            if not is_by_row or kind in ("param", "gradient"):
                continue
            padded = torch.nn.functional.pad(values, (0, width))
            first = 0 if kind == "old_log_probs" else MICRO_FILES.index(name) * len(values)
            if left:
                shifts = (12 + width - lengths[first:]).tolist()
                rows = zip(padded, shifts, strict=False)
                padded = torch.stack([torch.roll(row, shift) for row, shift in rows])
            data[tensor] = padded

    return edit


MICRO_FILES = [f"step_000000_rank{rank}_micro{micro}" for rank in range(2) for micro in range(2)]


@pytest.mark.parametrize("mode", ["self_hosted", "weaver"])
@pytest.mark.parametrize("order", [range(8), SHUFFLED])
@pytest.mark.parametrize("left", [False, True])
def test_another_order_and_another_padding_are_the_same(
    tmp_path: Path, mode: str, order: Sequence[int], left: bool
) -> None:
    layout = {**LAYOUT, "tokens": 12}
    a = nexrl_directory(tmp_path / "a", **layout)
    edit = aligned(order, 9, left=left)
    b = nexrl_directory(tmp_path / "b", order=order, edit=edit, mode=mode, **layout)
    for sides in ((a, b), (b, a)):
        result = compare([open_dump(side) for side in sides])
        assert result.verdict in (Verdict.SAME, Verdict.WITHIN_NOISE), result.reason
        found = values(result)
        section = "is_loss" if mode == "weaver" else "old_log_probs"
        if mode == "self_hosted" or order is SHUFFLED:  # else `is_loss` has no such counterpart
            assert found[section, "old_log_probs"] >= found["forward_data", "log_probs"]


# --- ids that are known ---------------------------------------------------------------------------
def kept_step(path: Path, prefix: str, seed: int = 0, *, rollout: bool = True) -> Path:
    """Kept files of a step whose samples are named; only the rollout's says their tokens."""
    batch = make_batch(8, 12, seed=seed)
    batch = dataclasses.replace(batch, groups=[f"{prefix}{group}" for group in batch.groups])
    every = range(8)
    if rollout:
        write(path, batch, every, ("responses", "rewards"), "rollout_generate", 0, Part(), 1)
    for rank in range(2):
        kept, of = ("old_log_probs",), every[4 * rank : 4 * rank + 4]
        write(path, batch, of, kept, "actor_compute_log_prob", rank, Part(), 1)
    return path / "run" / "first"


@pytest.mark.parametrize("rollout", [False, True])
def test_samples_with_other_ids_are_never_paired_by_location(tmp_path: Path, rollout: bool) -> None:
    a = kept_step(tmp_path / "a", "s5", rollout=rollout)
    b = kept_step(tmp_path / "b", "s6", seed=1, rollout=rollout)
    result = compare([open_dump(a), open_dump(b)])
    assert result.exit_status == (1 if rollout else 2)
    assert names(result, "old_log_probs") == set()
    assert notes(result) == {}
    section = "trajectories" if rollout else "old_log_probs"  # each is named once
    alone = {f.message for f in result.pairs[0].findings if f.kind == "only"}
    assert alone == {f"8 samples of {section} appeared on only one side"}


def test_the_same_samples_under_other_ids_pair_by_what_they_hold(tmp_path: Path) -> None:
    a, b = (kept_step(tmp_path / name, name) for name in "ab")
    result = compare([open_dump(a), open_dump(b)])
    assert result.verdict is Verdict.SAME, result.reason
    assert result.pairs[0].keys["old_log_probs"] == ("response tokens",)
    log_probs = next(t for t in result.pairs[0].tensors if t.name == "old_log_probs")
    assert log_probs.samples["compared"] == 8
