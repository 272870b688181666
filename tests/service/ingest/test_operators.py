"""From a dump on the disk to the rows of its operator table, on dumps that msprobe made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.support.dumps import capture
from tests.support.small_decoder import small_decoder

from stagescope_service.core.instructions import AnnouncedDump
from stagescope_service.dumps.msprobe.operator_query import read_operators
from stagescope_service.ingest.operator_tables import TABLE, build_operator_table
from stagescope_service.store.artifacts import file_checksum
from stagescope_service.store.contract import Put
from stagescope_wire.schema import DUMP_MARKER


def job(path: Path, **said: object) -> AnnouncedDump:
    place = {"step": 1, "policy_version": None, "stage": "actor_update", "role": "actor", "rank": 1}
    part = dict.fromkeys(("occurrence", "epoch", "minibatch", "microbatch"), 0)
    made = {
        "incarnation": "i", "work_key": "1||actor_update|0.0.0.0", "capture_id": "c",
        "attempt_id": 1, "run": "r", **place, **part, "node_id": "here", "dump_path": str(path),
        "announced_wall": 5.0, "mark": 7, "truncated": False, **said,
    }  # fmt: skip
    return cast("AnnouncedDump", made)


def digested(path: Path, root: Path, **said: object) -> tuple[dict[str, Any], list[Put]]:
    """Return the row of the table, and the findings."""
    rows = build_operator_table(job(path, **said), [root], "here")
    assert [put.table for put in rows] == ["operators", *["findings"] * (len(rows) - 1)]
    return dict(rows[0].row), rows[1:]


def test_a_whole_dump_gets_its_table_beside_it(tmp_path: Path) -> None:
    files = capture(tmp_path)
    row, findings = digested(files, tmp_path)
    assert findings == []
    table = files / TABLE
    assert row["state"] == "digested"
    assert row["digested_mark"] == 7
    assert (row["path"], row["bytes"]) == (str(table), table.stat().st_size)
    assert row["checksum"] == file_checksum(table)
    assert len(read_operators(table, limit=10_000).columns["name"]) == row["rows"]
    assert (row["task"], row["level"]) == ("statistics", "mix")
    assert (row["done"], row["truncated"], row["truncated_at"]) == (True, False, None)
    assert row["first_non_finite"] is None
    before = table.read_bytes()
    assert digested(files, tmp_path) == (row, [])
    assert table.read_bytes() == before


def test_a_planted_nan_is_a_finding_that_names_the_layer(tmp_path: Path) -> None:
    model = small_decoder()
    with torch.no_grad():
        model.get_parameter("blocks.1.down.weight")[3, 5] = float("nan")
    row, (found,) = digested(capture(tmp_path, model, level="L0"), tmp_path)
    assert row["certain"] is True
    said = found.row
    assert said["kind"] == "non_finite_operator"
    assert (said["run"], said["step"], said["stage"], said["rank"]) == ("r", 1, "actor_update", 1)
    evidence = said["evidence"]
    assert evidence["operator"] == "blocks.1.down"
    assert (evidence["direction"], evidence["section"]) == ("forward", "output")
    assert "small_decoder.py" in evidence["source"]
    assert [bad["section"] for bad in evidence["bad_inputs"]] == ["parameters"]
    assert "blocks.1.down" in said["message"]
    assert said["first_wall"] == 5.0


def test_a_dump_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    files = capture(tmp_path)
    whole, _ = digested(files, tmp_path)
    text = (files / "dump.json").read_bytes()
    (files / "dump.json").write_bytes(text[: len(text) // 2])
    (files / "DONE.json").unlink()
    row, findings = digested(files, tmp_path)
    assert findings == []
    assert row["truncated"] is True
    assert row["truncated_at"] == len(text) // 2
    assert row["done"] is None
    assert 0 < row["rows"] < whole["rows"]


def test_a_rank_that_died_leaves_what_ends_well_and_is_marked_truncated(tmp_path: Path) -> None:
    files = capture(tmp_path)
    (files / "dump.json").write_text('{"task": "statistics", "level": "L1", "data": {}}')
    (files / "DONE.json").unlink()
    row, _ = digested(files, tmp_path, truncated=True)
    assert (row["truncated"], row["truncated_at"], row["rows"]) == (True, None, 0)


def test_a_capture_without_a_call_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text('{"task": "statistics", "data": {}}')
    row, (found,) = digested(tmp_path, tmp_path)
    assert (row["state"], row["calls"]) == ("digested", 0)
    assert found.row["kind"] == "empty_dump"
    assert found.row["message"] == "msprobe recorded no call of actor_update on rank 1 in step 1"
    # An import says so itself, a crash is a loss, and task structure records none by design.
    assert digested(tmp_path, tmp_path, capture_id="imported")[1] == []
    assert digested(tmp_path, tmp_path, truncated=True)[1] == []
    (tmp_path / "dump.json").write_text('{"task": "structure", "data": {}}')
    assert digested(tmp_path, tmp_path)[1] == []


@pytest.mark.parametrize("text", ["[1, 2]", '{"data": {"x": 3}}', '{"data": {"x.0.forward": {}'])
def test_what_is_no_dump_is_a_finding(tmp_path: Path, text: str) -> None:
    (tmp_path / "dump.json").write_text(text)
    row, findings = digested(tmp_path, tmp_path)
    if row["state"] == "digested":
        assert row["truncated"] is True
        return
    assert row["state"] == "refused"
    assert row["reason"]
    (found,) = findings
    assert found.row["kind"] == "unreadable_dump"
    assert not (tmp_path / TABLE).exists()


def test_nothing_outside_the_roots_is_read(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    root.mkdir()
    files = capture(elsewhere)
    (files / DUMP_MARKER).unlink()  # somebody else's dump
    (root / "link").symlink_to(files)
    for path in (files, root / ".." / "elsewhere", root / "link"):
        row, (found,) = digested(path, root)
        assert row["state"] == "refused"
        assert "allowed_roots" in found.row["advice"]
    assert not (files / TABLE).exists()


def test_what_a_capture_wrote_outside_the_roots_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    files = capture(tmp_path / "verl_s_save_path")
    row, _ = digested(files, tmp_path / "data")
    assert row["state"] == "digested", row
    assert (files / TABLE).exists()


@pytest.mark.parametrize("name", ["dump.json", "stack.json", "construct.json", "DONE.json"])
def test_a_file_of_a_dump_may_not_lead_out_of_its_directory(tmp_path: Path, name: str) -> None:
    files = capture(tmp_path / "data")
    secret = tmp_path / "data" / "secret"
    secret.write_text(json.dumps({"data": {}}))
    (files / name).unlink()
    (files / name).symlink_to(secret)
    row, (found,) = digested(files, tmp_path / "data")
    assert row["state"] == "refused"
    assert found.row["kind"] == "unreadable_dump"


def test_a_table_that_is_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    files = capture(tmp_path / "data")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (files / TABLE).symlink_to(precious)
    row, _ = digested(files, tmp_path / "data")
    assert row["state"] == "digested"
    assert precious.read_text() == "mine"
    assert not (files / TABLE).is_symlink()


def test_a_lost_node_takes_its_dumps_with_it(tmp_path: Path) -> None:
    row, findings = digested(tmp_path / "gone", tmp_path, node_id="another")
    assert (row["state"], findings) == ("unreachable", [])
    assert "another" in row["reason"]
