"""What is kept of a step, as the API, the client and the command line show it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.api import Rank, Service, service
from tests.support.measure import ingest_job, payload

from stagescope.cli import main
from stagescope.session import Session
from stagescope_service.core.instructions import PayloadKey, Put
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.store.contract import RemoveRows
from stagescope_service.store.ring import Ring
from stagescope_service.views.reading.completeness import ROWS_REMOVED
from stagescope_wire.errors import Forbidden

STEP = 5


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as made:
        rank = Rank(made, world_size=1)
        rank.stage("actor_update", STEP, payload(), scalars={"loss": 1.0})
        yield made


def keep(running: Service, seq: int, **job: Any) -> Path:
    """Have a payload of step 5 kept; return its file."""
    data_dir = running.settings.data_path
    node_id = job.pop("node_id", "here")
    made = {
        "attempt_key": "a1", "step": STEP, "stage": "actor_update", "policy_version": 4,
        "keep": ["old_log_probs", "loss"], "scalars": {"loss": 1.0}, **job,
    }  # fmt: skip
    intake = PayloadReader(data_dir, node_id, Ring(data_dir / "ring", 0))
    outcome = intake.read(PayloadKey("i", seq), ingest_job(**made), payload())
    (row,) = [put.row for put in outcome.rows if put.table == "artifacts"]
    running.store.submit([Put("artifacts", row)]).result(30)
    return Path(row["path"])


def test_answers_of_rows_say_that_retention_removed_them(running: Service) -> None:
    rank = Rank(running, rank=1)
    tensors = [("w", 1, "bfloat16", (4, 8), None)]
    rank.say("weights", policy_version=4, step=STEP, side="trainer", kind="held", tensors=tensors)
    rank.say("end_step", step=STEP)
    answers = {
        noun: running.get(f"/steps/{STEP}/{noun}") for noun in ("scalars", "kept", "weights")
    }
    assert {noun: answer["gap"] for noun, answer in answers.items()} == dict.fromkeys(answers)
    assert [row["value"] for row in answers["scalars"]["rows"]] == [1.0]
    removed = {"attempt_id": 1, "step": STEP, "rows_removed": True}
    running.store.submit([RemoveRows(1, STEP, 1000), Put("steps", removed)]).result(30)
    for noun in ("scalars", "kept"):
        answer = running.get(f"/steps/{STEP}/{noun}")
        assert (answer["rows"], answer["gap"]) == ([], ROWS_REMOVED), noun
    assert ROWS_REMOVED in running.get(f"/steps/{STEP}/stages")["gap"]
    for path in (f"/steps/{STEP}/weights", "/weights/4", f"/steps/{STEP}/batch"):
        assert ROWS_REMOVED in running.problem(404, path)["wrong"], path
    with running.session() as session:
        text = " ".join(repr(session.step(STEP).scalars()).split())
    assert "were removed by retention" in text


def test_files_are_listed_with_what_they_hold_and_whether_they_can_be_read(
    running: Service, tmp_path: Path
) -> None:
    first = keep(running, 1, minibatch=1)
    second = keep(running, 2, rank=1)
    missing = keep(running, 3, rank=2, node_id="there")
    gone = keep(running, 4, rank=3, node_id="lost")
    elsewhere = keep(running, 5, rank=4, node_id="there")
    deleted = {"artifact_id": "kept/i/2", "deleted_wall": 7.0}
    running.store.submit([Put("artifacts", deleted)]).result(30)
    there = tmp_path / "there"
    running.engine.nodes["there"] = there
    copy = there / str(elsewhere).lstrip("/")
    copy.parent.mkdir(parents=True)
    elsewhere.rename(copy)
    missing.unlink()
    gone.unlink()
    kept_files = running.get(f"/steps/{STEP}/kept")
    assert (kept_files["run"], kept_files["attempt"], kept_files["step"], kept_files["pinned"]) == (
        "r",
        1,
        STEP,
        False,
    )
    rows = kept_files["rows"]
    assert [(row["rank"], row["part"], row["state"]) for row in rows] == [
        (0, "0.0.1.0", "kept"), (1, "0.0.0.0", "deleted"), (2, "0.0.0.0", "missing"),
        (3, "0.0.0.0", "unreachable"), (4, "0.0.0.0", "kept"),
    ]  # fmt: skip
    row = rows[0]
    assert row["sections"] == ["old_log_probs", "loss"]
    assert row["tensors"]["old_log_probs"] == ["float32", [4, 12], None]
    assert (row["path"], row["bytes"]) == (str(first), first.stat().st_size)
    assert row["checksum"].startswith("sha256:")
    assert (row["policy_version"], row["node_id"]) == (4, "here")
    assert kept_files["files"] == 4
    assert kept_files["bytes"] == sum(row["bytes"] for row in rows if row["state"] != "deleted")
    assert second.exists()


def test_filters_and_pages(running: Service) -> None:
    for rank in range(3):
        keep(running, rank, rank=rank, minibatch=rank)
    kept_files = running.get(f"/steps/{STEP}/kept", rank=1)
    assert [row["rank"] for row in kept_files["rows"]] == [1]
    assert running.get(f"/steps/{STEP}/kept", section="is_loss")["rows"] == []
    assert len(running.get(f"/steps/{STEP}/kept", section="loss")["rows"]) == 3
    page = running.get(f"/steps/{STEP}/kept", limit=2)
    rest = running.get(f"/steps/{STEP}/kept", limit=2, cursor=page["next"])
    assert [row["rank"] for row in page["rows"] + rest["rows"]] == [0, 1, 2]
    problem = running.problem(404, f"/steps/{STEP}/kept", rank=9)
    assert "one of 0, 1, 2" in problem["expected"]
    problem = running.problem(422, f"/steps/{STEP}/kept", section="losses")
    assert "'losses'" in problem["wrong"]
    assert running.get(f"/steps/{STEP}/kept", rank=1)["files"] == 1


def attached(running: Service) -> Session:
    return running.session("operate")


def test_the_client_shows_and_pins(running: Service) -> None:
    keep(running, 1)
    with attached(running) as session:
        step = session.step(STEP)
        table = step.kept(section="loss")
        assert table.to_dicts()[0]["sections"] == ["old_log_probs", "loss"]
        assert step.pin()["pinned"] is True
        assert step.kept().about["pinned"] is True
        assert step.unpin()["unpinned"] is True
        assert step.kept().about["pinned"] is False
    with running.session() as session, pytest.raises(Forbidden):
        session.step(STEP).pin()


def test_a_pinned_step_lists_what_its_pin_holds(running: Service) -> None:
    ring = {
        "artifact_id": "ring/i/9", "attempt_id": 1, "step": STEP, "stage": "actor_update",
        "role": "actor", "rank": 0, "kind": "ring", "path": "/ring/9", "bytes": 7, "node_id": "n",
    }  # fmt: skip
    running.store.submit([Put("artifacts", ring)]).result(30)
    with attached(running) as session:
        step = session.step(STEP)
        refused = step.unpin()
        assert (refused["unpinned"], refused["reason"]) == (False, "it was not pinned")
        assert len(step.kept()) == 0
        step.pin()
        (row,) = step.kept().to_dicts()
        assert (row["state"], row["path"], row["bytes"]) == ("pinned", "/ring/9", 7)
        assert step.unpin()["unpinned"] is True
        assert len(step.kept()) == 0


def test_the_command_line_shows_and_pins(running: Service, tmp_path: Path) -> None:
    keep(running, 1)
    token = tmp_path / "token"
    token.write_text(running.tokens.operate)
    where = ["--url", running.server.url, "--token-file", str(token)]
    shown = CliRunner().invoke(main, ["kept", str(STEP), *where])
    assert shown.exit_code == 0, shown.output
    assert "old_log_probs, loss" in shown.output
    # A path is never broken: one that is longer stands on a line of its own.
    assert max(len(line) for line in shown.output.splitlines() if " " in line.strip()) <= 80
    for command, word in (("pin", "pinned"), ("unpin", "unpinned")):
        done = CliRunner().invoke(main, [command, str(STEP), *where])
        assert done.exit_code == 0, done.output
        assert word in done.output
