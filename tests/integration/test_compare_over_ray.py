"""What a user does with kept steps: real trainings, another engine, other people's dumps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ctranslate2")
from tests.support.cluster import Service  # noqa: E402
from tests.support.command_line import invoke  # noqa: E402
from tests.support.dump_files import nexrl_directory  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

STEPS = 2


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home: Path = tmp_path_factory.mktemp("comparing")
    running = Service.start(home, address, lease_seconds=20.0)
    yield running
    running.stop()


def train(service: Service, checkpoints: Path, *words: str) -> str:
    """Run the example to its end; its exit status must be 0."""
    command = [
        sys.executable, "-m", "examples.countdown.train", "--address", service.address,
        "--checkpoint-dir", str(checkpoints), "--keep", "all", *words,
    ]  # fmt: skip
    paths = ("workers", "client", "service")
    root = Path(__file__).resolve().parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(root / path) for path in paths),
        "STAGESCOPE_URL": service.info.url,
        "STAGESCOPE_TOKEN": service.token,
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A run of the float32 engine, its last step scored again by int8, and a run with int8."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    short = ("--steps", str(STEPS), "--warmup-steps", "8")
    train(service, checkpoints, "--run", "exact", "--engine", "float32", *short)
    again = train(service, checkpoints, "--replay", f"exact:{STEPS}", "--rescore", "int8")
    assert "is the stored one, bit by bit" in again
    train(service, checkpoints, "--run", "sampled", "--engine", "int8", *short)
    return service


def compare(service: Service, *words: str) -> tuple[int, dict[str, Any]]:
    env = {"STAGESCOPE_URL": service.info.url, "STAGESCOPE_TOKEN": service.token}
    result = invoke("compare", *words, "--json", env=env)
    assert result.stdout, result.output
    return result.exit_code, json.loads(result.stdout)


def first(said: dict[str, Any]) -> dict[str, object]:
    found: dict[str, Any] = said["pairs"][0]["first"]
    return found


def test_another_engine_differs_first_at_the_rollout_log_probs(
    trained: Service, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    code, said = compare(trained, f"exact:{STEPS}", f"exact.int8:{STEPS}", "--html", str(page))
    assert (code, said["verdict"]) == (1, "different")
    assert first(said)["name"] == "rollout_log_probs"
    verdicts = {
        tensor["name"]: tensor["verdict"]
        for section in said["pairs"][0]["sections"]
        for tensor in section["tensors"]
    }
    same = {"responses", "response_mask", "rewards", "old_log_probs", "advantages", "loss"}
    assert {verdicts[name] for name in same} == {"same"}
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert "rollout_log_probs" in text


def test_runs_that_sampled_differently_differ_first_at_the_tokens(trained: Service) -> None:
    code, said = compare(trained, f"exact:{STEPS}", f"sampled:{STEPS}")
    assert (code, said["verdict"]) == (1, "different")
    assert first(said)["station"] == "tokens"
    changed = {row["name"] for row in said["changes"]["rows"] if row["weight"] == "numbers"}
    assert "rollout/0.engine" in changed
    driver = next(row for row in said["changes"]["rows"] if row["name"] == "entrypoint")
    assert "--engine float32" in driver["a"]
    assert "--engine int8" in driver["b"]


def test_an_imported_directory_is_the_directory(trained: Service, tmp_path: Path) -> None:
    directory = nexrl_directory(tmp_path / "dumps", mode="weaver")
    env = {"STAGESCOPE_URL": trained.info.url, "STAGESCOPE_TOKEN": trained.token}
    result = invoke("import", str(directory), "--run", "imported", env=env)
    assert result.exit_code == 0, result.output
    data = trained.settings.data_path
    copy = nexrl_directory(data / "nexrl", mode="weaver")
    code, said = compare(trained, "imported:0", str(copy))
    assert code == 0, said["reason"]
    unlike = {
        (tensor["name"], tensor["verdict"])
        for section in said["pairs"][0]["sections"]
        for tensor in section["tensors"]
        if tensor["verdict"] != "same"
    }
    # Weaver writes the loss twice, as a tensor and as a number: a stage has one of a name.
    assert unlike <= {("loss", "within noise")}


def test_a_step_comes_back_to_a_notebook(trained: Service) -> None:
    import numpy as np

    with trained.session() as session:
        stored = session.step(STEPS, run="exact").batch()
        again = session.step(STEPS, run="exact.int8").batch()
    rows = [stored.sample_ids.index(uid) for uid in again.sample_ids or ()]  # type: ignore[union-attr]
    assert np.array_equal(stored["responses"][rows], again["responses"])
    assert not np.array_equal(stored["rollout_log_probs"][rows], again["rollout_log_probs"])
