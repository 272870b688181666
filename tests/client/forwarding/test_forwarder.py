"""What is common to all targets: following, the cursor, the command, what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Service
from tests.support.command_line import invoke
from tests.support.runs.forwarded import K3, PAGE, RUN, Board, Collector, Training, following
from tests.support.stores import eventually

from stagescope import Session
from stagescope.forwarding import PREFIX, forwarder, records
from stagescope_wire.errors import (
    Conflict,
    InvalidInput,
    MissingExtra,
    StagescopeError,
    Unauthorized,
    Unreachable,
)
from stagescope_wire.versions import install_command

# Clients of others: what they warn of is theirs.
pytestmark = pytest.mark.filterwarnings("default")


def test_it_follows_and_waits_for_a_tracker(
    live: Service, training: Training, asked: Session, mlflow_run: tuple[Any, str, str],
    said: list[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    client, run, target = mlflow_run
    monkeypatch.setattr(forwarder, "_FIRST_BACKOFF", 0.1)
    training.do(1, 1)
    with following(asked, target, said) as outcome:
        eventually(lambda: f"{target}: step 1" in said)
        client.delete_run(run)
        training.do(2, 3)
        eventually(lambda: any("MlflowException" in line for line in said))
        client.restore_run(run)
        eventually(lambda: f"{target}: step 3" in said)
        eventually(lambda: f"{target}: writes again" in said)
        training.do(4, 4)
        eventually(lambda: f"{target}: step 4" in said)
    assert sum("MlflowException" in line for line in said) == 1
    assert outcome[0][0]["steps"] == 4
    history = client.get_metric_history(run, f"{PREFIX}{K3}")
    assert [each.step for each in history] == [1, 2, 3, 4]


def test_a_service_that_is_away_is_waited_for_but_no_refused_token(
    training: Training, asked: Session, board: Board, said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real = records.RunRecords.steps
    problems: list[StagescopeError] = [Unreachable("the service is gone")] * 2

    def steps(self: records.RunRecords, limit: int = 5) -> list[records.ClosedStep]:
        if problems:
            raise problems.pop()
        return real(self, limit)

    training.do(1, 2)
    monkeypatch.setattr(records.RunRecords, "steps", steps)
    with following(asked, board.target, said):
        eventually(lambda: f"{board.target}: step 2" in said)
    assert said[0] == "the service is gone"
    assert said.count("the service is gone") == 1
    problems.append(Unreachable("the service is gone"))
    with pytest.raises(Unreachable):
        asked.forward(RUN, board.target)
    problems.append(Unauthorized("the token is another one"))
    with pytest.raises(Unauthorized):
        forwarder.forward(asked, RUN, [board.target], every=0.05)


def test_following_ends_with_a_signal(live: Service, training: Training, board: Board) -> None:
    assert live.tokens is not None
    training.do(1, 1)
    words = ["forward", RUN, "--to", board.target, "--follow", "--every", "0.2", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stagescope", *words],
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
            "STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.read,
        },
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        assert process.stderr.readline() == f"{board.target}: step 1\n"
        training.do(2, 2)
        assert process.stderr.readline() == f"{board.target}: step 2\n"
        process.terminate()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["rows"][0]["steps"] == 2
    assert [step for step, _ in board.scalars(K3)] == [1, 2]


def test_what_retention_removes_is_no_change() -> None:
    step = records.StepRecord("r", 1, 1, 5.0, {"a": math.nan}, "comparable", "complete", "", "p")
    assert dataclasses.replace(step, gap="rows were removed").checksum == step.checksum
    assert dataclasses.replace(step, values={"a": 1.0}).checksum != step.checksum
    assert dataclasses.replace(step, verdict="suspect").checksum != step.checksum


def cursor_file(target: str, prefix: str = PREFIX) -> Path:
    connection: Any = None
    found = records.RunRecords(connection, RUN, PAGE)
    return forwarder.Delivery(target, found, prefix, 0).path


def test_the_command(
    live: Service, training: Training, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live.tokens is not None
    training.do(1, 2)
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.read)
    done = invoke("forward", RUN, "--to", board.target, "--from", "2", "--prefix", "x/", "--json")
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["steps"], row["target"]) == (1, board.target)
    assert f"x/{K3}" in board.tags()["scalars"]
    (board.path / "file").touch()
    refused = invoke("forward", RUN, "--to", f"{board.target}/file")
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"{board.target}/file: FileExistsError: ")
    unknown = invoke("forward", "no-such-run", "--to", board.target)
    assert unknown.exit_code == 4


def test_the_cursor_is_private_and_has_no_password(
    training: Training, asked: Session, collector: Collector
) -> None:
    training.do(1, 1)
    target = collector.target.replace("//", "//user:secret@")
    asked.forward(RUN, target)
    path = cursor_file(target)
    assert path.parent == Path(os.environ["STAGESCOPE_HOME"]) / "forward"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert "secret" not in path.read_text() + path.name
    assert list(json.loads(path.read_text())["steps"]) == ["1:1"]


def test_a_problem_has_no_password(asked: Session, training: Training, said: list[str]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    training.do(1, 1)
    asked.forward(RUN, "otlp:http://user:secret@127.0.0.1:9", report=said.append)
    assert said
    assert "secret" not in "".join(said)


def test_one_process_a_target(asked: Session, training: Training, board: Board) -> None:
    training.do(1, 1)
    with following(asked, board.target, []):
        eventually(lambda: board.files)
        with pytest.raises(Conflict, match="another process forwards"):
            asked.forward(RUN, board.target)
    asked.forward(RUN, board.target)


def test_a_damaged_cursor_is_named(asked: Session, training: Training, board: Board) -> None:
    training.do(1, 1)
    asked.forward(RUN, board.target)
    cursor_file(board.target).write_text("{")
    with pytest.raises(InvalidInput, match="remove it to forward everything again"):
        asked.forward(RUN, board.target)
    asked.forward(RUN, board.target, anew=True)
    assert asked.forward(RUN, board.target)[0]["steps"] == 0


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("somewhere", "tensorboard:"), ("mlflow:", "mlflow:RUN_ID"),
        ("wandb:project/run", "wandb:ENTITY/PROJECT/RUN_ID"),
        ("swanlab:run", "swanlab:WORKSPACE/PROJECT/RUN_ID"),
        ("trackio:project", "trackio:PROJECT/RUN"),
        ("otlp:localhost:4318", "otlp:http://HOST:4318"), ("tensorboard:", "tensorboard:DIR"),
    ],
)  # fmt: skip
def test_a_wrong_target_is_named(asked: Session, target: str, expected: str) -> None:
    with pytest.raises(InvalidInput, match=r"forward|target") as raised:
        asked.forward(RUN, target)
    assert expected in raised.value.expected


@pytest.mark.parametrize(
    ("target", "module", "extra"),
    [
        ("tensorboard:d", "tensorboard.compat.proto", "trackers"),
        ("mlflow:r", "mlflow", "trackers"),
        ("otlp:http://h:4318", "opentelemetry.sdk.resources", "trackers"),
        ("wandb:e/p/r", "wandb", "wandb"),
        ("swanlab:w/p/r", "swanlab", "swanlab"),
        ("trackio:p/r", "trackio", "trackio"),
    ],
)
def test_a_client_that_is_not_installed_is_named(
    asked: Session, monkeypatch: pytest.MonkeyPatch, target: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra) as raised:
        asked.forward(RUN, target)
    assert raised.value.advice == install_command(extra)


def test_a_followed_step_is_written_once_its_numbers_are_there(
    live: Service, training: Training, asked: Session, board: Board, said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A step whose payloads are still read has no numbers yet: it waits, and is not lost."""
    step = records.ClosedStep(1, 1, 1.0, "complete", "no numbers yet: they are being aggregated",
                              False, False, "m")  # fmt: skip
    assert step.is_pending
    training.do(1, 1)
    real = records.RunRecords.steps
    pending = [True]

    def steps(self: records.RunRecords, limit: int = 5) -> list[records.ClosedStep]:
        return [step] if pending[0] else real(self, limit)

    monkeypatch.setattr(records.RunRecords, "steps", steps)
    outcome = asked.forward(RUN, board.target, report=said.append)
    assert (outcome[0]["steps"], outcome[0]["waiting"]) == (0, "step 1")
    with following(asked, board.target, said):
        pending[0] = False
        eventually(lambda: f"{board.target}: step 1" in said)
    assert [at for at, _ in board.scalars(K3)] == [1]
