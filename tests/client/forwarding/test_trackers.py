"""Runs of MLflow, W&B, Trackio and SwanLab, read back without a network."""

from __future__ import annotations

import importlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Service
from tests.support.runs.forwarded import K3, PAGE, RUN, Training, published
from tests.support.stores import eventually

from stagescope import Session
from stagescope.forwarding import PREFIX

# Clients of others: what they warn of is theirs.
pytestmark = pytest.mark.filterwarnings("default")


def test_mlflow_has_the_numbers_the_page_and_the_findings(
    live: Service, training: Training, asked: Session, mlflow_run: tuple[Any, str, str]
) -> None:
    client, run, target = mlflow_run
    training.do(1, 2)
    training.do_broken(3)
    asked.forward(RUN, target, page_url=PAGE)
    history = client.get_metric_history(run, f"{PREFIX}{K3}")
    assert [(each.step, each.value) for each in history[:2]] == [
        (step, published(live, step)) for step in (1, 2)
    ]
    assert history[2].step == 3
    assert math.isnan(history[2].value)
    closed = {row["step"]: row["closed_wall"] for row in live.get("/steps", run=RUN)["rows"]}
    assert [each.timestamp for each in history] == [round(1000 * closed[s]) for s in (1, 2, 3)]
    data = client.get_run(run).data
    assert data.metrics["loss"] == 1.0
    page = f"{PAGE}/#/runs/{RUN}"
    link = f"[stagescope: this run, step by step]({page})"
    assert data.tags["mlflow.note.content"] == f"my notes\n\n{link}"
    assert data.tags["stagescope.step"] == f"{page}/steps/3?attempt=1"
    assert [tag for tag in data.tags if tag.startswith("stagescope.finding.")]
    training.do(4, 4)
    asked.forward(RUN, target, page_url=PAGE)
    assert client.get_run(run).data.tags["mlflow.note.content"] == f"my notes\n\n{link}"


def test_a_deleted_run_is_said_and_loses_nothing(
    training: Training, asked: Session, mlflow_run: tuple[Any, str, str], said: list[str]
) -> None:
    client, run, target = mlflow_run
    training.do(1, 2)
    client.delete_run(run)
    outcome = asked.forward(RUN, target, report=said.append)
    assert outcome[0]["steps"] == 0
    (line,) = said
    assert line.startswith(f"{target}: MlflowException: ")
    assert "deleted" in line
    client.restore_run(run)
    assert asked.forward(RUN, target)[0]["steps"] == 2


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format with protobufs."""
    record: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):  # its process still writes
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record.FromString(whole)
            whole = b""


@pytest.fixture
def wandb_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """W&B offline; returns the records of all runs."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    def found() -> list[Any]:
        return [
            record
            for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
            for record in wandb_records(path)
        ]

    def ended() -> bool:  # W&B's own process writes the last block after `finish` returned
        return any(each.WhichOneof("record_type") == "exit" for each in found())

    def read() -> list[Any]:
        eventually(ended)
        return found()

    yield read
    wandb.teardown()


def test_wandb_has_an_axis_of_its_own_and_alerts(
    live: Service, training: Training, asked: Session, wandb_files: Callable[[], Any]
) -> None:
    training.do(1, 2)
    training.do_broken(3)
    asked.forward(RUN, "wandb:me/project/abc123", page_url=PAGE)
    found = wandb_files()
    (run,) = {
        (each.run.entity, each.run.project, each.run.run_id)
        for each in found
        if each.WhichOneof("record_type") == "run"
    }
    assert run == ("me", "project", "abc123")
    metrics = [each.metric for each in found if each.WhichOneof("record_type") == "metric"]
    defined = {(each.name, each.glob_name, each.step_metric) for each in metrics}
    assert ("", f"{PREFIX}*", f"{PREFIX}step") in defined
    assert {name for name, _, _ in defined if name} == {f"{PREFIX}step"}
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json)
         for item in each.history.item}
        for each in found if each.WhichOneof("record_type") == "history"
    ]  # fmt: skip
    assert [row[f"{PREFIX}step"] for row in rows] == [1, 2, 3]
    assert [row[f"{PREFIX}{K3}"] for row in rows[:2]] == [published(live, s) for s in (1, 2)]
    assert math.isnan(float(rows[2][f"{PREFIX}{K3}"]))
    alerts = [each.alert for each in found if each.WhichOneof("record_type") == "alert"]
    assert alerts
    assert all(len(each.title) < 64 and f"{PAGE}/#/runs/{RUN}" in each.text for each in alerts)
    assert {each.level for each in alerts} <= {"ERROR", "WARN"}
    text = "".join(str(each) for each in found)
    assert f"{PAGE}/#/runs/{RUN}/steps/3?attempt=1" in text  # in the summary
    assert asked.forward(RUN, "wandb:me/project/abc123", page_url=PAGE)[0]["steps"] == 0


def test_wandb_online_writes_beside_the_trainer(
    training: Training, asked: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the documented interface, recorded: nothing here reaches W&B's servers."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    calls: list[tuple[str, Any]] = []

    class Run:
        def __init__(self) -> None:
            self.config = self
            self.summary: dict[str, Any] = {}

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **named: calls.append((name, args or named))

    class Api:
        def __init__(self, **named: object) -> None:
            pass

        def run(self, path: str) -> None:
            calls.append(("exists", path))
            if path.endswith("deleted"):
                raise ValueError("Could not find run")

    def init(**named: object) -> Run:
        calls.append(("init", named))
        return Run()

    monkeypatch.setattr(wandb, "Api", Api)
    monkeypatch.setattr(wandb, "init", init)
    training.do(1, 1)
    asked.forward(RUN, "wandb:me/project/abc123")
    assert [name for name, _ in calls][:2] == ["exists", "init"]
    assert [name for name, _ in calls][-1] == "finish"
    named = calls[1][1]
    settings = named.pop("settings")
    assert named == {"entity": "me", "project": "project", "id": "abc123"}
    assert (settings.mode, settings.x_primary, settings.x_update_finish_state) == (
        "shared", False, False,
    )  # fmt: skip
    # Shared runs take no step argument.
    assert not any(name == "log" and "step" in args for name, args in calls)
    calls.clear()
    outcome = asked.forward(RUN, "wandb:me/project/deleted", report=lambda line: None)
    assert outcome[0]["problem"] == "ValueError: Could not find run"
    assert [name for name, _ in calls] == ["exists"]  # it would have been created


def test_trackio_has_the_numbers_and_keeps_the_trainers_configuration(
    live: Service, training: Training, asked: Session, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    sqlite_storage = importlib.import_module("trackio.sqlite_storage")

    for name in ("trackio", "trackio.sqlite_storage", "trackio.utils"):
        module = __import__(name, fromlist=["_"])
        if hasattr(module, "TRACKIO_DIR"):  # read once, where it was imported
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    trainer = trackio.init("project", name="run-1", config={"lr": 1e-6}, embed=False)
    trainer.log({"loss": 1.0}, step=1)
    trainer.finish()
    training.do(1, 2)
    training.do_broken(3)
    asked.forward(RUN, "trackio:project/run-1", page_url=PAGE)
    rows = sqlite_storage.SQLiteStorage.get_logs("project", "run-1")
    assert rows[0]["loss"] == 1.0
    own = [row for row in rows if f"{PREFIX}{K3}" in row]
    assert [row["step"] for row in own] == [1, 2, 3]
    assert [row[f"{PREFIX}{K3}"] for row in own[:2]] == [published(live, s) for s in (1, 2)]
    assert math.isnan(float(own[2][f"{PREFIX}{K3}"]))
    assert f"{PAGE}/#/runs/{RUN}/steps/3?attempt=1" in json.dumps(own[2][f"{PREFIX}page"])
    (run,) = trackio.Api().runs("project")
    assert run.config["lr"] == 1e-6
    assert run.config["stagescope_page"] == f"{PAGE}/#/runs/{RUN}"
    assert any(f"{PAGE}/#/runs/{RUN}" in each["text"] for each in run.alerts())
    missing = asked.forward(RUN, "trackio:project/run-2", report=lambda line: None)
    assert "does not exist" in missing[0]["problem"]


def test_swanlab_resumes_a_run(
    training: Training, asked: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "swanlab"))
    monkeypatch.chdir(tmp_path)
    training.do(1, 2)
    run_id = "abc123def456ghi789jkl"
    outcome = asked.forward(RUN, f"swanlab:me/project/{run_id}", page_url=PAGE)
    assert (outcome[0]["steps"], outcome[0]["problem"]) == (2, None)
    (found,) = tmp_path.rglob(f"*{run_id}*.swanlab")
    assert f"{PREFIX}{K3}".encode() in found.read_bytes()
    texts = [path.read_text() for path in found.parent.glob("media/**/*.txt")]
    assert f"{PAGE}/#/runs/{RUN}/steps/2?attempt=1" in texts
