"""A service with a run of two ranks, and places to forward it to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.api import Service, service
from tests.support.runs.forwarded import Board, Collector, Training

from stagescope import Session, attach


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "service") as running:
        yield running


@pytest.fixture
def training(live: Service) -> Training:
    return Training(live)


@pytest.fixture
def asked(live: Service, training: Training) -> Iterator[Session]:
    assert live.tokens is not None
    with attach(live.server.url, token=live.tokens.read) as session:
        yield session


@pytest.fixture
def said() -> list[str]:
    """The lines that were reported."""
    return []


@pytest.fixture
def board(tmp_path: Path) -> Board:
    pytest.importorskip("tensorboard")
    return Board(tmp_path / "board")


@pytest.fixture
def mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, str, str]:
    """A client, a run and its target; its trainer logged a loss and wrote a description."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    run = client.create_run(client.create_experiment("training")).info.run_id
    client.log_metric(run, "loss", 1.0, step=1)
    client.set_tag(run, "mlflow.note.content", "my notes")
    return client, run, f"mlflow:{run}@{uri}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    running = Collector()
    yield running
    running.close()
