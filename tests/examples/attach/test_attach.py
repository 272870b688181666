"""The trainers of general use, attached by a few lines: steps, losses and ranks arrive."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.support.api import Service, service

pytest.importorskip("transformers")

ROOT: Final = Path(__file__).resolve().parents[3]
SCRIPTS: Final = ROOT / "workers/examples/attach"
PAGE: Final = ROOT / "docs/frameworks.md"
MARK: Final = "  # stagescope"


@pytest.mark.parametrize("name", ["plain_pytorch", "ray_train", "lightning_trainer", "hf_trainer"])
def test_the_page_shows_the_lines_that_attach_a_script(name: str) -> None:
    lines = (SCRIPTS / f"{name}.py").read_text("utf-8").splitlines()
    marked = [line.removesuffix(MARK) for line in lines if line.endswith(MARK)]
    assert "\n```py\n" + "\n".join(marked) + "\n```\n" in PAGE.read_text("utf-8")
    assert not any(
        word in line for line in lines if not line.endswith(MARK)
        for word in ("probe", "stagescope_workers", "StagescopeCallback")
    )  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        yield running


def trained(name: str, live: Service, *options: str, **environ: str) -> dict[tuple[int, int], Any]:
    """Run a script; the last loss that it printed of each step."""
    assert live.tokens is not None
    reported = {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.operate}
    path = os.pathsep.join([str(ROOT / "workers"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"examples.attach.{name}", *options],
        env={**os.environ, **reported, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"step (\d+) loss ([-+.e\d]+)", done.stdout)
    return {(int(step), 0): float(loss) for step, loss in found}


def reported(live: Service, run: str) -> dict[tuple[int, int], float]:
    """The loss that arrived of each step and rank: of its last micro-batch."""
    losses: dict[tuple[int, int], float] = {}
    deadline = time.monotonic() + 30.0
    while True:
        rows = live.get("/steps", run=run)["rows"]
        if all(row["complete"] == "complete" for row in rows) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for row in rows:
        assert (row["complete"], row["attempt"]) == ("complete", 1), row
        scalars = live.get(f"/steps/{row['step']}/scalars", run=run)["rows"]
        for each in scalars:
            if each["name"] == "loss":
                losses[row["step"], each["rank"]] = each["value"]
    return losses


def test_a_loop_of_plain_pytorch(live: Service) -> None:
    losses = trained("plain_pytorch", live)
    assert reported(live, "plain-pytorch") == pytest.approx(losses, rel=1e-6)
    assert sorted(losses) == [(step, 0) for step in range(1, 5)]
    answer = live.get("/steps/2/metrics", run="plain-pytorch")
    # A bfloat16 copy sampled the tokens.
    assert 1e-4 < answer["metrics"]["logprob_abs_diff/mean"] < 1e-1
    assert answer["coverage"]["tokens"] == 64


def test_lightning(live: Service) -> None:
    pytest.importorskip("lightning")
    losses = trained("lightning_trainer", live)
    assert reported(live, "lightning") == pytest.approx(losses, rel=1e-6)
    rows = live.get("/steps/3/scalars", run="lightning")["rows"]
    assert sorted(row["name"] for row in rows) == ["loss", "loss", "perplexity", "perplexity"]
    assert len({json.dumps(row["part"]) for row in rows}) == 2
    # The loss of a batch as the module computed it, which Lightning divides by their number.
    last = {row["name"]: row["value"] for row in sorted(rows, key=lambda row: row["wall"])}
    assert math.exp(last["loss"]) == pytest.approx(last["perplexity"], rel=1e-6)


def test_hugging_face_trainer(live: Service, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # of which the lowest versions here have none
    losses = trained("hf_trainer", live, "--directory", str(tmp_path))
    assert reported(live, "hf-trainer") == pytest.approx(losses)
    assert sorted(losses) == [(step, 0) for step in range(1, 5)]
    [attempt] = live.get("/runs/hf-trainer/attempts")["rows"]
    assert attempt["resumed_from_step"] is None
    stages = live.get("/steps/2/stages", run="hf-trainer")["rows"]
    assert {row["stage"] for row in stages} == {"actor_update"}


@pytest.mark.ray
def test_ray_train(live: Service, tmp_path: Path) -> None:
    trained("ray_train", live, "--directory", str(tmp_path), RAY_ADDRESS="local")
    losses = averaged(ranks=2)
    assert reported(live, "ray-train") == pytest.approx(losses, rel=1e-5)
    assert sorted(losses) == [(step, rank) for step in range(1, 5) for rank in (0, 1)]


def averaged(ranks: int) -> dict[tuple[int, int], float]:
    """The losses of a training whose ranks average their gradients, computed in this process."""
    task = importlib.import_module("examples.attach.task")
    model = task.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[tuple[int, int], float] = {}
    for step in range(1, 5):
        losses = [
            -task.log_probs_of(model, task.make_batch(step, rank)).mean() for rank in range(ranks)
        ]
        found |= {(step, rank): loss.item() for rank, loss in enumerate(losses)}
        optimizer.zero_grad()
        average: Any = torch.stack(losses).mean()
        average.backward()
        optimizer.step()
    return found
