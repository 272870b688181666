from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.batches import from_bfloat16
from tests.support.dump_files import GROUP, all_problems, make_batch, nexrl_directory, rows_in

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.nexrl import MICRO_TYPES, place_of_file
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, Location, mapping
from stagescope_wire.errors import InvalidInput, InvalidTensor, NotFound
from stagescope_wire.schema import Part

PARAMETER = "model.layers.0.self_attn.q_proj.weight"


def one(dump: Dump, key: str, rank: int | None = None, micro: int = 0) -> DumpContents:
    place = (key, rank, Part(microbatch=micro))
    (found,) = [e for e in dump.entries if (e.key, e.location.rank, e.location.part) == place]
    return dump.read(found)


Edit = Callable[[str, str, dict[str, Any]], None]


def changing(kind: str, **changes: object) -> Edit:
    """Change what the files of a kind hold."""
    return lambda of, name, data: data.update(changes) if of == kind else None


@pytest.mark.parametrize("suffix", ["pt", "jsonl"])
def test_a_self_hosted_directory(tmp_path: Path, suffix: str) -> None:
    nexrl_directory(tmp_path, steps=(0, 3), suffix=suffix, tokens=32)
    dump = open_dump(tmp_path, step=3)
    assert (dump.kind, dump.problems) == ("nexrl", [])
    assert {entry.location.step for entry in dump.entries} == {3}
    counts = {key: sum(e.key == key for e in dump.entries) for key in {e.key for e in dump.entries}}
    assert counts == {"trajectory": 1, "old_log_probs": 1, "forward_data": 4, "loss": 4,
                      "gradient": 2, "param": 2}  # fmt: skip
    batch = make_batch(16, 32, step=3)

    record = one(dump, "trajectory")
    assert record.samples == tuple(batch.samples)
    assert record.groups == tuple(batch.groups)
    assert record.row_texts["run_id"] == tuple(map(str, batch.runs))
    assert record.row_texts["task_id"] == tuple(str(row // GROUP) for row in range(16))
    assert record.tensors["tokens"][0] == "int64"
    assert rows_in(record, "tokens") == [batch.tokens(row) for row in range(16)]
    assert record.mask == "loss_mask"
    np.testing.assert_array_equal(record.tensors["rewards"][2], batch.rewards)

    record = one(dump, "forward_data", 1, 1)
    assert record.mask == "response_mask"
    chosen = slice(12, 16)
    for name in ("log_probs", "entropy", "response_mask"):
        np.testing.assert_array_equal(record.tensors[name][2], getattr(batch, name)[chosen])
    assert record.tensors["log_probs"][0] == ("float32" if suffix == "pt" else "float64")

    record = one(dump, "old_log_probs")
    assert list(record.tensors) == ["old_log_probs"]
    np.testing.assert_array_equal(record.tensors["old_log_probs"][2], batch.old_log_probs)
    assert mapping(record.about, "batch_info")["batch_size"] == 16


def test_numbers_and_parameters(tmp_path: Path) -> None:
    metrics = {"actor/clip": 0.25, "more": {"kl": torch.tensor(0.5)}}
    edit = changing("loss", pg_loss=float("nan"), metrics=metrics)
    dump = open_dump(nexrl_directory(tmp_path, edit=edit))
    loss = one(dump, "loss", 0, 1)
    assert not loss.tensors
    assert np.isnan(loss.numbers["pg_loss"])
    assert loss.numbers["metrics/actor/clip"] == 0.25
    assert loss.numbers["metrics/more/kl"] == 0.5
    assert loss.about["extra_info"] == {"epoch": 0, "batch_idx": 1}
    gradient = one(dump, "gradient", 1)
    tag, shape, bits, _ = gradient.tensors[PARAMETER]
    assert (tag, shape, bits.dtype) == ("bfloat16", (8, 8), np.uint16)
    assert np.linalg.norm(from_bfloat16(bits)) == pytest.approx(gradient.about["norm"], rel=1e-6)


def test_a_remote_directory(tmp_path: Path) -> None:
    dump = open_dump(nexrl_directory(tmp_path, mode="remote_api"))
    batch = make_batch(16, 16)
    prepared = one(dump, "prepared_trajectories")
    assert prepared.samples == tuple(batch.samples)
    offsets = prepared.tensors["advantages"][3]
    assert offsets is not None
    np.testing.assert_array_equal(np.diff(offsets), batch.lengths)
    datums = one(dump, "datums")
    assert datums.mask == "loss_fn_inputs/loss_mask"
    first = datums.tensors["loss_fn_inputs/target_tokens"]
    assert first[2][: len(batch.tokens(0)) - 1].tolist() == batch.tokens(0)[1:]
    metrics = one(dump, "training_metrics")
    assert metrics.numbers == {"loss:sum": 0.25, "grad_norm": 1.5, "tokens": 128}
    assert metrics.about["status"] == "ok"
    empty = changing("prepared_trajectories", advantages=[[] for _ in range(16)])
    dump = open_dump(nexrl_directory(tmp_path, mode="remote_api", edit=empty))
    assert "advantages" not in one(dump, "prepared_trajectories").tensors


def test_a_weaver_directory(tmp_path: Path) -> None:
    dump = open_dump(nexrl_directory(tmp_path, mode="weaver"))
    record = one(dump, "is_loss_debug", 1, 0)
    assert record.mask == "effective_valid"
    assert {"prob_ratio", "elementwise_loss", "advantages", "old_log_probs"} < {*record.tensors}
    assert isinstance(record.numbers["loss"], float)
    assert one(dump, "batch_inputs", 0, 0).tensors["input_ids"][1][0] == 4


def test_entries_are_in_the_order_of_the_data(tmp_path: Path) -> None:
    dump = open_dump(nexrl_directory(tmp_path, steps=(0, -1)))
    order = [(e.location.step, e.section, e.location.rank, e.location.part) for e in dump.entries]
    assert [step for step, *_ in order] == [-1] * 14 + [0] * 14
    assert [section for _, section, *_ in order[:14]] == [
        "trajectories", "old_log_probs", *["forward_data"] * 4, *["loss"] * 4,
        *["gradients"] * 2, *["parameters"] * 2,
    ]  # fmt: skip


def test_a_directory_above_it_one_type_and_one_file(tmp_path: Path) -> None:
    root = nexrl_directory(tmp_path / "a/debug_dump", steps=(0, 3))
    (tmp_path / "a/train.log").write_text("x")
    dump = pickle.loads(pickle.dumps(open_dump(tmp_path)))
    assert (len(dump.entries), dump.problems) == (28, [])
    assert len(open_dump(root / "loss").entries) == 8
    dump = open_dump(root / "forward_data/step_000000_rank1_micro0.pt")
    assert dump.problems == []
    assert one(dump, "forward_data", 1, 0).tensors["log_probs"][1] == (4, 16)
    with pytest.raises(NotFound, match="step 1; expected one of its steps: 0, 3"):
        open_dump(tmp_path, step=1)
    nexrl_directory(tmp_path / "b/debug_dump")
    with pytest.raises(InvalidInput, match="2 dumps"):
        open_dump(tmp_path)


@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("loss/step_-00001_rank10_micro3.pt", Location(-1, rank=10, part=Part(microbatch=3))),
        ("param/step_1234567_rank0.jsonl", Location(1234567, rank=0)),
        ("trajectory/step_000000.pt", Location(0)),
        ("loss/step_0_rank0_micro0.pt", None),
        ("other/step_000000.pt", None),
        ("loss/step_000000_rank0_micro0.pt.tmp", None),
        ("step_000000.pt", None),
    ],
)
def test_names(name: str, location: Location | None) -> None:
    found = place_of_file(name)
    assert (None if found is None else found[1]) == location


def test_files_that_are_missing_are_problems(tmp_path: Path) -> None:
    nexrl_directory(tmp_path, mode="weaver", ranks=3)
    (tmp_path / "forward_data/step_000000_rank1_micro1.pt").unlink()
    (tmp_path / "loss/step_000000_rank0_micro0.pt").unlink()
    for micro in (0, 1):
        (tmp_path / f"is_loss_debug/step_000000_rank2_micro{micro}.pt").unlink()
    (tmp_path / "gradient/step_000000_rank1.pt").unlink()
    problems = open_dump(tmp_path).problems
    assert {problem.kind for problem in problems} == {"missing"}
    assert sorted(str(problem.path.relative_to(tmp_path)) for problem in problems) == [
        "forward_data/step_000000_rank1_micro1.pt",
        "gradient/step_000000_rank1.pt",
        "is_loss_debug/step_000000_rank2_micro0.pt",
        "is_loss_debug/step_000000_rank2_micro1.pt",
        "loss/step_000000_rank0_micro0.pt",
    ]
    assert all(problem.entry is not None for problem in problems)


def test_a_rank_may_have_fewer_microbatches_but_not_none(tmp_path: Path) -> None:
    nexrl_directory(tmp_path, mode="weaver", ranks=3, micros=3)
    for kind in MICRO_TYPES:
        for rank in (0, 1):
            (tmp_path / kind / f"step_000000_rank{rank}_micro2.pt").unlink()
    assert open_dump(tmp_path).problems == []
    for file in tmp_path.glob("*/*rank1*"):
        file.unlink()
    kinds = [problem.path.parent.name for problem in open_dump(tmp_path).problems]
    assert sorted(kinds) == sorted([*MICRO_TYPES, *MICRO_TYPES, "gradient", "param"])


def test_foreign_files_are_problems(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(NotFound, match="forward_data/step_000000_rank0_micro0"):
        open_dump(tmp_path)
    with pytest.raises(NotFound, match="there is no"):
        open_dump(tmp_path / "nothing")
    nexrl_directory(tmp_path)
    (tmp_path / "loss/step_000000_rank0_micro0.jsonl").write_text("{}")
    (tmp_path / "loss/.hidden").write_text("x")
    kinds = {problem.path.name: problem.kind for problem in open_dump(tmp_path).problems}
    assert kinds == {"notes.txt": "unknown", "step_000000_rank0_micro0.jsonl": "superseded"}


@pytest.mark.parametrize("text", ["[1]", "{", "", "{}\n{}", '"text"', "[" * 100_000])
def test_json_that_is_none_of_nexrl(tmp_path: Path, text: str) -> None:
    nexrl_directory(tmp_path, suffix="jsonl")
    (tmp_path / "loss/step_000000_rank0_micro0.jsonl").write_text(text)
    with pytest.raises(InvalidTensor):
        one(open_dump(tmp_path), "loss", 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"trajectories": 5},
        {"trajectories": [1, 2]},
        {"trajectories": [{"tokens": [1 << 80], "loss_mask": [0]}]},
        {"trajectories": [{"tokens": ["a"], "loss_mask": [{}]}]},
        {"trajectories": [{"tokens": [[1]], "extra_fields": 3}, {"tokens": [1]}]},
        {"trajectories": []},
    ],
)
def test_trajectories_of_other_forms(tmp_path: Path, change: Mapping[str, object]) -> None:
    nexrl_directory(tmp_path, edit=lambda kind, name, data: data.update(change))
    dump = open_dump(tmp_path)
    try:
        record = one(dump, "trajectory")
    except InvalidTensor:
        rows = change["trajectories"]
        assert not isinstance(rows, list) or len(rows) == 1 or 1 in rows
    else:
        rows = change["trajectories"]
        names = {*record.tensors, *record.row_texts, *mapping(record.about, "left_out")}
        assert ("tokens" in names) == bool(rows)


def trajectory(number: int, **change: object) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "reward": 1.0}
    logprobs = change.pop("logprobs", [0.0, 0.0, -1.0, -number])
    extra = {"group_id": "g", "run_id": number, "logprobs": logprobs}
    return {**row, **change, "is_val": False, "extra_fields": extra}


def read_trajectories(path: Path, rows: list[object], *, suffix: str = "jsonl") -> DumpContents:
    edit = changing("trajectory", trajectories=rows)
    return one(open_dump(nexrl_directory(path, suffix=suffix, edit=edit)), "trajectory")


@pytest.mark.parametrize("lacking", [None, []])
def test_log_probs_that_a_trajectory_lacks_are_nan(tmp_path: Path, lacking: object) -> None:
    record = read_trajectories(tmp_path, [trajectory(0), trajectory(1, logprobs=lacking)])
    assert record.problems == []
    values = record.tensors["rollout_log_probs"][2]
    np.testing.assert_array_equal(values, [0, 0, -1, 0, *[np.nan] * 4])


@pytest.mark.parametrize(
    ("reward", "words"), [("x", "a text"), ([1], "a list"), (10**400, "an integer beyond")]
)
def test_a_reward_that_is_no_number_costs_nothing_else(
    tmp_path: Path, reward: object, words: str
) -> None:
    record = read_trajectories(tmp_path, [trajectory(0), trajectory(1, reward=reward)])
    np.testing.assert_array_equal(record.tensors["rewards"][2], [1, np.nan])
    assert f"row 1: reward is no number: {words}" in all_problems(record)


@pytest.mark.parametrize("suffix", ["jsonl", "pt"])
@pytest.mark.parametrize(
    "odd",
    [
        None,
        "x",
        {"tokens": "x"},
        {"tokens": [1, 2, "x", 4]},
        {"tokens": [1, 2, 1 << 80, 4]},
        {"tokens": [1, 2, None, 4]},
        {"tokens": None},
        {"loss_mask": [0, 0, 1]},
        {"loss_mask": [0, 0, 1, "x"]},
        {"loss_mask": None},
        {"logprobs": "x"},
        {"logprobs": [0.0, 0.0, -1.0]},
    ],
)
def test_a_trajectory_that_does_not_fit_is_named_and_the_others_are_read(
    tmp_path: Path, odd: object, suffix: str
) -> None:
    rows: list[object] = [trajectory(number) for number in range(4)]
    rows[1] = trajectory(1, **odd) if isinstance(odd, dict) else odd
    record = read_trajectories(tmp_path, rows, suffix=suffix)
    assert record.samples == ("g_0", "g_2", "g_3")
    tokens = record.tensors["tokens"]
    assert (tokens[0], tokens[2].tolist()) == ("int64", [1, 2, 3, 4] * 3)
    assert record.tensors["rollout_log_probs"][2].tolist()[3::4] == [0.0, -2.0, -3.0]
    (problem,) = record.problems
    assert "row 1: " in problem.message
    assert problem.message.endswith("3 of the 4 rows were read")


def test_repeated_ids_are_not_used_for_pairing(tmp_path: Path) -> None:
    record = read_trajectories(tmp_path, [trajectory(0), trajectory(0)])
    assert record.samples is None
    assert record.groups == ("g", "g")
    assert "2 rows are named g_0" in str(record.about["samples"])


def test_trajectories_in_several_lines(tmp_path: Path) -> None:
    nexrl_directory(tmp_path, suffix="jsonl")
    file = tmp_path / "trajectory/step_000000.jsonl"
    data = json.loads(file.read_text())
    halves = [{**data, "trajectories": data["trajectories"][at::2]} for at in (0, 1)]
    file.write_text("".join(json.dumps(half) + "\n" for half in halves))
    record = one(open_dump(tmp_path), "trajectory")
    assert sorted(record.samples or ()) == sorted(make_batch(16, 16).samples)


def test_reading_a_missing_file_is_not_found(tmp_path: Path) -> None:
    dump = open_dump(nexrl_directory(tmp_path))
    entry: DumpEntry = dump.entries[0]
    entry.path.unlink()
    with pytest.raises(NotFound, match="trajectory"):
        dump.read(entry)
