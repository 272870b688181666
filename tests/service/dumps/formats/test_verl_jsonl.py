from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.dump_files import GROUP, make_batch, verl_directory

from stagescope.wire.errors import InvalidTensor
from stagescope_service.dumps.discover import open_dump


def test_generations(tmp_path: Path) -> None:
    batch = make_batch(8, 8)
    dump = open_dump(verl_directory(tmp_path, batch, steps=(10, 2)))
    assert (dump.kind, dump.problems) == ("verl", [])
    assert [entry.location.step for entry in dump.entries] == [2, 10]
    record = dump.read(dump.entries[0])
    np.testing.assert_array_equal(record.tensors["rewards"][2], batch.rewards)
    assert record.tensors["acc"][0] == "bool"
    assert record.row_texts["output"][5] == "answer 5"
    assert record.row_texts["gts"] == ("42",) * 8
    assert "step" not in record.tensors
    assert record.groups is not None
    assert record.samples is not None
    assert [record.groups.index(group) for group in record.groups] == [0] * 4 + [4] * 4
    assert record.samples[5] == f"{record.groups[4]}_{5 % GROUP}"
    again = dump.read(dump.entries[1])
    assert again.samples == record.samples


def test_a_damaged_line_is_reported(tmp_path: Path) -> None:
    path = verl_directory(tmp_path, make_batch(4, 8)) / "1.jsonl"
    path.write_text(path.read_text()[:-20])
    dump = open_dump(path)
    with pytest.raises(InvalidTensor, match="cut off"):
        dump.read(dump.entries[0])


def test_other_files_and_lines(tmp_path: Path) -> None:
    verl_directory(tmp_path, make_batch(4, 8))
    (tmp_path / "7.jsonl").write_text("[1]\n")
    (tmp_path / "x.jsonl").write_text(json.dumps({"input": "", "output": ""}))
    dump = open_dump(tmp_path)
    assert [entry.location.step for entry in dump.entries] == [1]
    assert {p.path.name for p in dump.problems} == {"7.jsonl", "x.jsonl"}


def test_scores_that_are_missing_are_nan_and_counted(tmp_path: Path) -> None:
    rows = [{"input": "a", "output": "b", "score": 1.0}, {"input": "a", "output": "c"},
            {"input": "a", "output": "d", "score": float("nan")}]  # fmt: skip
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dump = open_dump(tmp_path)
    record = dump.read(dump.entries[0])
    assert np.isnan(record.tensors["rewards"][2]).tolist() == [False, True, True]
    assert record.about["missing"] == {"rewards": 1}
