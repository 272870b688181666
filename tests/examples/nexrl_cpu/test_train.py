"""NexRL's own trainer, dumper and actor on CPU: exact numbers, its dumps as without, a replay.

It needs NexRL 1.4 below STAGESCOPE_TRAINER_SOURCES, and of what NexRL imports: hydra-core, openai,
pylatexenc and pyzmq.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.support.api import Service, service
from tests.workers.integrations.test_launcher import LAUNCH

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.results import Verdict
from stagescope_service.dumps.discover import open_dump

NEXRL: Final = Path(os.environ.get("STAGESCOPE_TRAINER_SOURCES", "/nowhere")) / "NexRL"
NEEDED: Final = ("hydra", "openai", "pylatexenc", "zmq")
pytestmark = [
    pytest.mark.skipif(not NEXRL.is_dir(), reason="needs NexRL below STAGESCOPE_TRAINER_SOURCES"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(each) is None for each in NEEDED),
        reason=f"NexRL needs {', '.join(NEEDED)}",
    ),
]
ROOT: Final = Path(__file__).resolve().parents[3]
RECORDER: Final = """
import json, os
from examples.nexrl_cpu import service, train

# What the rollout had, its log-probs included: NexRL's files leave them out.
seen, install = [], service.install

def spy():
    install()
    from nexrl.rollout_worker import BaseRolloutWorker
    put = BaseRolloutWorker._put_trajectory

    def record(worker, each):
        fields = each.extra_fields
        seen.append({"key": [fields["task_id"], fields["group_id"], fields["run_id"]],
                     "mask": list(each.loss_mask), "q": list(fields.get("logprobs", ()))})
        return put(worker, each)

    BaseRolloutWorker._put_trajectory = record

service.install = spy
train.main()
with open(os.path.join(os.environ["EXPERIMENT_PATH"], "seen.json"), "w") as file:
    json.dump(seen, file)
"""
STEPS: Final = 2
ROWS: Final = 18
REPLAY: Final = (
    "~rollout_worker.custom_rollout_worker_module_path",
    "rollout_worker.type=mock",
    "+rollout_worker.trajectory_format=pt",
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        yield running


def train(directory: Path, live: Service | None, *overrides: str, run: str = "r") -> Any:
    """Train under `stagescope run` where there is a service, else as it is; the trajectories."""
    paths = [str(ROOT / "workers"), str(NEXRL), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *sys.path])}
    command = [sys.executable, "-c", RECORDER, "--directory", str(directory), *overrides]
    command.append(f"trainer.total_train_steps={STEPS}")
    if live is not None:
        assert live.tokens is not None
        environ |= {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.operate}
        command = [sys.executable, "-c", LAUNCH, "run", "--run", run, "--", *command]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((directory / "seen.json").read_text())


@pytest.fixture(scope="module")
def trained(live: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("with")
    return directory, train(directory, live)


def dumped(directory: Path) -> dict[str, Any]:
    root = directory / "debug_dump"
    return {
        str(path.relative_to(root)): torch.load(path, weights_only=True)
        for path in root.rglob("*.pt")
    }


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


def test_a_steps_numbers_are_those_of_plain_numpy(live: Service, trained: tuple[Path, Any]) -> None:
    directory, seen = trained
    files = dumped(directory)
    for step in range(STEPS):
        rows = sorted(seen[step * ROWS : (step + 1) * ROWS], key=lambda each: each["key"])
        old = files[f"old_log_probs/step_{step:06d}.pt"]["old_log_probs"].double().numpy()
        # NexRL copies two rows to fill its world size, and sorts them beside the first ones.
        chosen = [
            row for row, values in enumerate(old) if row == 0 or (values != old[row - 1]).any()
        ]
        assert (len(old), len(chosen)) == (20, ROWS)
        masks = [np.array(each["mask"])[1:] == 1 for each in rows]
        p = np.concatenate([
            old[row][: len(mask)][mask] for row, mask in zip(chosen, masks, strict=True)
        ])  # fmt: skip
        q = np.concatenate([
            np.array(each["q"])[1:][mask] for each, mask in zip(rows, masks, strict=True)
        ])  # fmt: skip
        answer = live.get(f"/steps/{step}/metrics", run="r")
        metrics = answer["metrics"]
        assert (answer["complete"], answer["stage"]) == ("complete", "actor_compute_log_prob")
        assert answer["coverage"]["tokens"] == len(p)
        assert answer["coverage"]["sequences"] == ROWS
        assert metrics["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-6)
        assert metrics["rollout_corr/k3_kl"] == pytest.approx(
            (np.expm1(p - q) - (p - q)).mean(), rel=1e-6
        )
        assert metrics["per_round/total_rounds"] >= 2
        parts = {
            row["part"]
            for row in live.get(f"/steps/{step}/stages", run="r")["rows"]
            if (row["stage"], row["role"]) == ("actor_update", "actor")
        }
        # 20 rows in mini-batches of 12 and 8, micro-batches of 4, two epochs.
        assert parts == {
            f"0.{epoch}.{mini}.{micro}"
            for epoch in range(2)
            for mini in range(2)
            for micro in range(3 - mini)
        }


def test_nexrls_own_dumps_are_as_without(trained: tuple[Path, Any], tmp_path: Path) -> None:
    directory, seen = trained
    assert train(tmp_path, None)[: STEPS * ROWS] == seen[: STEPS * ROWS]
    own, plain = dumped(directory), dumped(tmp_path)
    assert own.keys() == plain.keys()
    assert [name for name in own if not is_same(own[name], plain[name])] == []
    # use_orig_params=False: no parameter has the name that is looked for.
    assert {name.split("/")[0] for name in own} == {
        "trajectory", "old_log_probs", "forward_data", "loss"
    }  # fmt: skip
    found = compare([open_dump(directory / "debug_dump"), open_dump(tmp_path / "debug_dump")])
    assert found.verdict == Verdict.SAME


def test_the_replay_of_a_dump_trains_the_same_steps(
    live: Service, trained: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, _ = trained
    source = directory / "debug_dump" / "trajectory"
    train(tmp_path, live, *REPLAY, f"+rollout_worker.trajectory_load_path={source}", run="replayed")
    own, again = dumped(directory), dumped(tmp_path)
    assert [name for name in own if not is_same(own[name], again[name])] == []
    problem = live.problem(404, "/steps/0/metrics", run="replayed")
    assert "both streams" in problem["detail"]
