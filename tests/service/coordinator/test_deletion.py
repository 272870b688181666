"""A deleted run leaves the catalogue, the disks and the memory of the coordinator."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.api import Rank, Service, service
from tests.support.ingestors import LocalIngestors
from tests.support.measure import payload
from tests.support.stores import eventually, rows_of

from stagescope.cli import main
from stagescope_service.ingest.kept_files import Keeper
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.store.ring import Ring
from stagescope_wire.schema import DUMP_MARKER

pytest.importorskip("ray")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        data = running.settings.data_path
        ring = Ring(data / "ring" / "here", 1 << 24, reserve_bytes=0)
        running.engine.read_with(PayloadReader(data, "here", ring, Keeper(data, "here", 0)))
        running.engine.keep("old_log_probs")
        yield running


def _train(live: Service, run: str, dump: Path, *, ends: bool = True) -> Rank:
    """Let a training of two steps report; the dump of its capture lies outside the service."""
    rank = Rank(live, run=run, world_size=1)
    for step in (1, 2):
        rank.stage("actor_compute_log_prob", step, payload(seed=step))
        rank.say("log", step=step, scalars={"reward": 0.5})
    dump.mkdir(parents=True)
    for name in (DUMP_MARKER, "dump.json"):
        (dump / name).write_text("{}")
    rank.say("dump", stage="actor_update", step=2, capture_id="c1", state="complete",
             path=str(dump), bytes=4, files=2)  # fmt: skip
    if ends:
        rank.say("finish")
    return rank


def _delete(live: Service, run: str, **params: bool) -> Any:
    response = live.operate.delete(f"/runs/{run}", params={"wait": 30, **params})
    assert response.status_code == 200, response.text
    return response.json()


def _files(directory: Path, *names: str) -> list[Path]:
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and any(name in str(path) for name in names)
    ]


def test_nothing_is_left_of_a_deleted_run(live: Service, tmp_path: Path) -> None:
    _train(live, "kept", tmp_path / "save/kept/step_2/a/rank0")
    _train(live, "gone", tmp_path / "save/gone/step_2/a/rank0")
    data = live.settings.data_path
    ring = {path.name.partition("~")[0] for path in _files(data, "/ring/")}
    assert ring == {"1", "2"}
    [attempt] = (data / "gone").iterdir()
    (attempt / "written by a capture.json").write_text("{}")  # the catalogue does not know it
    would = _delete(live, "gone", dry_run=True)
    assert (would["deleted"], would["attempts"], would["steps"]) == (False, 1, 2)
    assert would["catalogue_rows"] > 20
    assert would["files"] >= 6
    assert _files(data, "/gone/"), "a dry run deletes nothing"

    done = _delete(live, "gone")
    assert done["deleted"]
    assert done["catalogue_rows"] == would["catalogue_rows"]
    assert (done["files"], done["bytes"]) == (would["files"], would["bytes"])
    assert done["bytes"] > 1000
    assert done["left"] == []
    assert done["problem"] is None
    assert not _files(data, "/gone/", "/2~")
    assert not (data / "gone").exists()
    assert not (tmp_path / "save/gone/step_2").exists()
    assert (tmp_path / "save/gone").exists(), "the user's own directory stays"
    assert {path.name.partition("~")[0] for path in _files(data, "/ring/")} == {"1"}
    assert (tmp_path / "save/kept/step_2/a/rank0/dump.json").exists()
    live.problem(404, "/steps", run="gone")
    assert [row["run"] for row in live.get("/runs")["rows"]] == ["kept"]
    assert live.get("/steps/2/metrics", run="kept")["run"] == "kept"
    actions = [action for _, action in live.engine.audit]
    assert actions == ["delete_run", "run_deleted"]


@pytest.mark.parametrize("is_here", [True, False])
def test_a_node_that_was_started_again_leaves_nothing(
    live: Service, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    rank = Rank(live, world_size=1, greets=False)
    rank.sender = dataclasses.replace(rank.sender, node_id="before")
    rank.say("hello")
    rank.stage("actor_update", 1)
    rank.say("finish")
    monkeypatch.setattr(LocalIngestors, "node_of", lambda self, node_id: self.home)
    if is_here:
        (live.settings.data_path / "ring/before").mkdir()
    left = [] if is_here else ["node before is gone: files on its own disk stay there"]
    assert _delete(live, "r")["left"] == left


def test_a_live_run_is_refused_and_what_to_do_is_said(live: Service, tmp_path: Path) -> None:
    rank = _train(live, "r", tmp_path / "d", ends=False)
    refused = live.operate.delete("/runs/r")
    assert refused.status_code == 409
    assert "run r is live: 1 process" in refused.json()["wrong"]
    assert "end the training first" in refused.json()["advice"]
    assert live.read.delete("/runs/r").status_code == 403
    live.engine.fall_silent(rank)
    assert _delete(live, "r")["deleted"]
    assert live.operate.delete("/runs/r").status_code == 404


def test_a_run_of_the_same_name_begins_anew(live: Service, tmp_path: Path) -> None:
    rank = _train(live, "r", tmp_path / "d")
    _delete(live, "r")
    again = Rank(live, run="r", world_size=1, incarnation="another")
    again.stage("actor_compute_log_prob", 1, payload())
    (run,) = live.get("/runs")["rows"]
    assert (run["attempts"], run["attempt"], run["last_closed_step"]) == (1, 1, None)
    assert [row["attempt_id"] for row in rows_of(live.store, "attempts")] == [2]
    # A process that was suspended all the time comes into the new run.
    rank.stage("actor_compute_log_prob", 3, payload())
    assert live.get("/runs")["rows"][0]["attempts"] == 1


def test_a_deletion_that_was_cut_off_goes_on(
    live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(live, "r", tmp_path / "d")
    runs = live.engine.coordinator.parts.runs
    monkeypatch.setattr("stagescope_service.coordinator.deletion._ROWS", 5)
    removed = 0
    write = runs._commits.commit_all

    async def dies(rows: Any) -> None:
        nonlocal removed
        removed += type(rows[0]).__name__ == "RemoveRun"
        if removed > 3:
            raise asyncio.CancelledError  # as if the process had been killed here
        await write(rows)

    monkeypatch.setattr(runs._commits, "commit_all", dies)
    response = live.operate.delete("/runs/r", params={"wait": 0})
    assert response.json()["deleted"] is False
    eventually(lambda: removed > 3)
    (run,) = live.get("/runs")["rows"]
    assert run["deleting_wall"] is not None
    assert "is being deleted" in live.problem(404, "/steps", run="r")["wrong"]

    with_next = Service(live.settings.home, resumes=True, recorded=False)
    try:
        eventually(lambda: not with_next.get("/runs")["rows"])
        assert not _files(with_next.settings.data_path, "/r/", "1~")
        eventually(lambda: "run_deleted" in [action for _, action in with_next.engine.audit])
        # No later attempt gets a number of the deleted one: its files would be taken for its own.
        Rank(with_next, run="other", world_size=1).stage("actor_update", 1)
        assert [row["attempt_id"] for row in rows_of(with_next.store, "attempts")] == [2]
    finally:
        with_next.close()


def test_lists_show_a_run_under_another_name_or_not_at_all(live: Service) -> None:
    Rank(live, run="r", world_size=1).stage("actor_update", 1)

    def change(**body: object) -> Any:
        response = live.operate.patch("/runs/r", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    assert change(display_name="Qwen3, no KL")["display_name"] == "Qwen3, no KL"
    assert change(hidden=True)["display_name"] == "Qwen3, no KL"
    assert live.get("/runs")["rows"] == []
    assert live.get("/runs", hidden=True)["rows"][0]["hidden"] is True
    assert live.get("/steps", run="r")["rows"], "its address still works"
    assert change(hidden=False, display_name=None)["display_name"] == "r"
    assert len(live.get("/runs")["rows"]) == 1
    assert live.operate.patch("/runs/r", json={}).status_code == 422
    assert live.operate.patch("/runs/x", json={"hidden": True}).status_code == 404
    assert live.read.patch("/runs/r", json={"hidden": True}).status_code == 403
    assert live.engine.audit[-1][1] == "change_run"
    # By one name people mean one run.
    Rank(live, run="base", world_size=1).stage("actor_update", 1)
    change(display_name="Qwen3")
    for shown in ("r", "Qwen3"):
        refused = live.operate.patch("/runs/base", json={"display_name": shown})
        assert refused.status_code == 409
        assert refused.json()["wrong"] == f"run r has the name {shown!r} or is shown so"
    assert live.operate.patch("/runs/base", json={"display_name": "base"}).status_code == 200


def test_the_command_asks_twice_and_says_what_is_free(live: Service, tmp_path: Path) -> None:
    _train(live, "r", tmp_path / "d")

    def runs(*options: str, answers: str = "") -> Any:
        environment = live.environment("operate")
        return CliRunner().invoke(main, ["runs", *options], input=answers, env=environment)

    assert "run, renamed" in runs("--rename", "r", "no KL").output
    assert "no KL" in runs("--wide").output
    assert runs("--hide", "r").exit_code == 0
    assert "no KL" not in runs("--wide").output
    assert "no KL" in runs("--hidden", "--wide").output
    found = CliRunner().invoke(main, ["attempts"], env=live.environment("read"))
    assert found.exit_code == 0, "a hidden run is asked where there is no other"
    assert runs("--delete", "r", answers="n\n").exit_code == 1
    other = runs("--delete", "r", answers="y\nrr\n")
    assert other.exit_code == 2
    assert "nothing is deleted" in other.output
    done = runs("--delete", "r", answers="y\nr\n")
    assert done.exit_code == 0, done.output
    assert "run r has 1 attempt and 2 steps, and takes" in done.output
    assert "run r is deleted:" in done.output
    assert "the catalogue takes" in done.output
    assert runs("--delete", "r", "--yes").exit_code == 4
