from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.dump_files import GROUP, all_problems, make_batch, read_first, verl_directory

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.records import mapping


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


def written(path: Path, *rows: object) -> Path:
    (path / "1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_last_line_that_was_cut_off_costs_its_own_row_alone(tmp_path: Path) -> None:
    path = verl_directory(tmp_path, make_batch(4, 8)) / "1.jsonl"
    names = read_first(path).samples
    assert names is not None
    text = path.read_text().rstrip("\n")
    for cut in (text[:-20].encode(), text[:-20].encode() + "答".encode()[:2]):  # inside a character
        path.write_bytes(cut)
        record = read_first(path)
        assert record.samples == names[:-1]
        assert len(record.tensors["rewards"][2]) == 3
        (problem,) = record.problems
        assert (problem.kind, problem.path) == ("damaged", path)
        assert f"{path}: line 4 is no JSON" in problem.message
        assert problem.message.endswith("cut off while it was written; the other 3 were read")


def test_rows_after_a_damaged_line_have_no_names(tmp_path: Path) -> None:
    # A sample is named by how many answers of its prompt came before: one of them is not known.
    path = verl_directory(tmp_path, make_batch(8, 8)) / "1.jsonl"
    lines = path.read_text().split("\n")
    lines[2], lines[5] = "\0" * 40, "[1]"
    path.write_text("\n".join(lines))
    record = read_first(path)
    assert record.samples is None
    assert "not named" in str(record.about["samples"])
    assert len(record.row_texts["output"]) == 6
    assert "line 3 is no JSON" in all_problems(record)
    assert "line 6 holds a list, not an object" in all_problems(record)


@pytest.mark.parametrize("odd", [b'{"input": "cut', b"null", b"\0\0\0", b'{"input": "\xff"}'])
def test_a_first_line_that_is_damaged_costs_its_own_row_alone(tmp_path: Path, odd: bytes) -> None:
    path = verl_directory(tmp_path, make_batch(4, 8)) / "1.jsonl"
    path.write_bytes(odd + b"\n" + path.read_bytes())
    record = read_first(tmp_path)
    assert len(record.tensors["rewards"][2]) == 4
    assert "line 1 " in all_problems(record)


def test_a_file_without_a_row_is_damaged(tmp_path: Path) -> None:
    written(tmp_path, {"input": "a", "output": "b"})
    for content in (b"", b"\n\n", b'{"input": "cut'):
        (tmp_path / "2.jsonl").write_bytes(content)
        (problem,) = open_dump(tmp_path).problems
        assert (problem.kind, problem.path.name) == ("damaged", "2.jsonl")
        assert open_dump(tmp_path, step=1).problems == []


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_newline_alone_ends_a_line(tmp_path: Path, character: str, end: str) -> None:
    # A JSON text holds control characters below a space escaped, and the others as they are.
    rows = [{"input": "a", "output": f"one{character}two {row}", "score": row} for row in range(3)]
    text = "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)
    (tmp_path / "1.jsonl").write_bytes(b"\n" + text.encode())
    record = read_first(tmp_path)
    assert record.problems == []
    assert record.row_texts["output"] == tuple(row["output"] for row in rows)


def test_other_files_and_lines(tmp_path: Path) -> None:
    verl_directory(tmp_path, make_batch(4, 8))
    (tmp_path / "7.jsonl").write_text("[1]\n")
    (tmp_path / "x.jsonl").write_text(json.dumps({"input": "", "output": ""}))
    dump = open_dump(tmp_path)
    assert [entry.location.step for entry in dump.entries] == [1]
    assert {p.path.name for p in dump.problems} == {"7.jsonl", "x.jsonl"}


def test_numbers_that_are_texts_are_read_or_named(tmp_path: Path) -> None:
    # `json.dumps(default=str)` makes texts of numpy's numbers.
    rows: list[dict[str, object]] = [
        {"input": "7", "output": "1", "gts": "1", "score": score, "acc": acc, "pred": pred}
        for score, acc, pred in (
            ("0.5", "1", 7), (1, "0", 8), ("nan", None, 9), (None, "1", 10), ("True", "1", "none"),
        )
    ]  # fmt: skip
    record = read_first(written(tmp_path, *rows))
    np.testing.assert_array_equal(record.tensors["rewards"][2], [0.5, 1, np.nan, np.nan, 1])
    assert record.about["numbers_from_texts"] == ["rewards"]
    assert record.row_texts["acc"] == ("1", "0", "", "1", "1")
    assert record.row_texts["pred"] == ("7", "8", "9", "10", "none")
    assert record.about["left_out"] == {
        "acc": "its numbers are texts in the file, and are kept as texts",
        "pred": "1 of its 5 values are no numbers: it is kept as texts",
    }
    assert record.about["missing"] == {"rewards": 1, "acc": 1}
    assert record.problems == []
    record = read_first(written(tmp_path, *({**row, "score": "good"} for row in rows)))
    assert "rewards" not in record.tensors
    assert record.row_texts["rewards"][0] == "good"
    assert "no numbers" in str(mapping(record.about, "left_out")["rewards"])


@pytest.mark.parametrize("odd", ["x", "", [1], {"a": 1}, 10**400])
def test_a_score_that_is_no_number_costs_no_other_value(tmp_path: Path, odd: object) -> None:
    rows = ({"input": "a", "output": "b", "score": score} for score in (0.5, odd, 1))
    record = read_first(written(tmp_path, *rows))
    np.testing.assert_array_equal(record.tensors["rewards"][2], [0.5, np.nan, 1])
    assert record.row_texts["output"] == ("b", "b", "b")
    (problem,) = record.problems
    assert (problem.kind, problem.path) == ("damaged", tmp_path / "1.jsonl")
    assert "line 2: score is no number" in problem.message


def test_scores_that_are_missing_are_nan_and_counted(tmp_path: Path) -> None:
    rows = [{"input": "a", "output": "b", "score": 1.0}, {"input": "a", "output": "c"},
            {"input": "a", "output": "d", "score": float("nan")}]  # fmt: skip
    record = read_first(written(tmp_path, *rows))
    assert np.isnan(record.tensors["rewards"][2]).tolist() == [False, True, True]
    assert record.about["missing"] == {"rewards": 1}


def test_two_files_of_one_step_are_never_mixed(tmp_path: Path) -> None:
    for name, rows in (("1", 8), ("01", 4), ("val/1", 2)):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"input": "a", "output": "b", "score": 1}\n' * rows)
    dump = open_dump(tmp_path)
    assert [len(dump.read(each).tensors["rewards"][2]) for each in dump.entries] == [8, 2]
    (problem,) = dump.problems
    assert (problem.kind, problem.path.name) == ("refused", "01.jsonl")
    assert f"{tmp_path / '1.jsonl'} are both of" in problem.message
